"""Logits in tiles: proposals are those from whole logits, for every size of tiles."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.sampling import propose
from tiered.decoding.sampling_options import Sampling
from tiered.models.logit_tiles import LogitTiles, with_guidance

VOCAB, MASK, ENDS, CPU = 40, 4, (0, 17), torch.device("cpu")
# Confidence near 1 is measured by its distance from 1, which has float32's relative precision.
PLAIN: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-12}
SAMPLINGS = {
    "likeliest": Sampling(),
    "margin": Sampling(confidence="margin"),
    "entropy": Sampling(confidence="entropy"),
    "drawn": Sampling(temperature=0.7),
    "cut": Sampling(temperature=0.7, top_p=0.8, top_k=6),
    "cut, tempered": Sampling(temperature=0.7, top_p=0.8, top_k=6, tempered_confidence=True, top_k_first=True),
}


class Given:
    """A model whose hidden states are its logits."""

    shape = SimpleNamespace(vocab_size=VOCAB)

    def logits(self, hidden: Tensor, tokens: slice = slice(None)) -> Tensor:
        return hidden[..., tokens].clone()


def open_block(logits: Tensor, sampling: Sampling, scale: float | None, *, tiled: bool) -> OpenBlock:
    draws = torch.Generator().manual_seed(1)
    batch, rows = len(logits) if scale is None else len(logits) // 2, logits.shape[1]
    pending = torch.rand(batch, rows, generator=draws) < 0.7
    model: Any = Given()
    whole = logits.clone() if scale is None else with_guidance(logits.clone().chunk(2), scale)
    return OpenBlock(
        logits=LogitTiles(model, logits.clone(), scale) if tiled else whole,
        tokens=torch.full((batch, rows), MASK), pending=pending, remaining=pending.sum(dim=1).tolist(),
        mask_token_id=MASK, sampling=sampling, streams=Generators(3, batch, CPU),
        ends=ENDS, early=(torch.arange(rows) < 2).expand(batch, rows),
    )  # fmt: skip


def of_size(monkeypatch: pytest.MonkeyPatch, whole: int, tokens: int) -> None:
    for name, size in (("WHOLE_LOGITS", whole), ("TILE_LOGITS", tokens), ("VOCABULARY_TILE", tokens)):
        monkeypatch.setattr(f"tiered.models.shape.{name}", size)


@pytest.mark.parametrize("scale", [None, 0.6])
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize(("whole", "tokens"), [(1, 1), (100, 7), (10_000, 40)])
def test_proposals_are_those_from_whole_logits(
    monkeypatch: pytest.MonkeyPatch, kind: str, whole: int, tokens: int, scale: float | None
):
    of_size(monkeypatch, whole, tokens)
    logits = 4 * torch.randn(6, 9, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[0, :5, MASK] = 30.0  # the mask is likeliest
    logits[1, :5, 20] = 30.0  # all but certain
    logits[2, 3:6, 0] = 30.0  # an end, where it may come and where it may not
    of_whole, of_tiles = (propose(open_block(logits, SAMPLINGS[kind], scale, tiled=tiled)) for tiled in (False, True))
    at = of_whole.pending
    assert at.any() and not at.all()
    assert torch.equal(of_tiles.tokens[at], of_whole.tokens[at])
    assert torch.equal(of_tiles.ranks()[at], of_whole.ranks()[at])
    torch.testing.assert_close(of_tiles.confidence, of_whole.confidence, **PLAIN)
    torch.testing.assert_close(1 - of_tiles.confidence[at], 1 - of_whole.confidence[at], **PLAIN)
    assert of_tiles.broken is not None and not of_tiles.broken.any()


@given(st.integers(0, 2**32), st.integers(1, VOCAB), st.sampled_from([0.1, 3.0, 60.0]))
def test_likeliest_tokens_and_their_probability(seed: int, tokens: int, scale: float):
    logits = scale * torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        of_size(monkeypatch, 1, tokens)
        block = open_block(logits, Sampling(), None, tiled=True)
        found = propose(replace(block, pending=torch.ones_like(block.pending), early=None))
    others = logits.clone()
    others[..., MASK] = -torch.inf
    assert torch.equal(found.tokens, others.argmax(dim=-1))
    exact = logits.double().softmax(dim=-1).gather(-1, found.tokens[..., None])[..., 0]
    # A CPU may round a probability below the least normal number of float32 to 0.
    torch.testing.assert_close(found.confidence, exact, rtol=1e-5, atol=torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_sequence_whose_logits_are_not_finite_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, value: float):
    of_size(monkeypatch, 100, 7)
    logits = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(4))
    block = open_block(logits, SAMPLINGS[kind], None, tiled=True)
    for sequence, token in ((0, 0), (1, 39)):
        row = int(block.pending[sequence].nonzero()[-1])
        logits[sequence, row, token] = value
        assert isinstance(block.logits, LogitTiles)
        block.logits.hidden[sequence, row, token] = value
    logits[2, ~block.pending[2]] = value
    found = propose(block)
    assert found.broken is not None and found.broken.tolist() == [True, True, False]
