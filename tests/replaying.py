"""Recorded samplers: canvases that change, and tokens as they were drawn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.decoding import sampling
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock


def changes(states: list[Tensor]) -> Tensor:
    """The states without repetitions: a forward that commits nothing leaves the canvas as it was."""
    pairs = zip(states, [None, *states], strict=False)
    return torch.stack([state for state, before in pairs if before is None or not torch.equal(state, before)])


class Replayed:
    """Tokens as they were drawn, in place of random numbers; notes the probability that they are proposed with."""

    def __init__(self, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens, self.probabilities = iter(tokens.long()), []
        propose = sampling.propose

        def draw(streams: object, sequence: int, rows: Tensor, logits: Tensor, temperature: float) -> Tensor:
            return next(self.tokens)[rows]

        def noted(block: OpenBlock) -> Any:
            found = propose(block)
            self.probabilities.append((found.pending[0], found.confidence[0]))
            return found

        monkeypatch.setattr(Generators, "draw", draw)
        for module in ("token_sampler", "rules.editing"):
            monkeypatch.setattr(f"tiered.decoding.{module}.propose", noted)

    def check(self, recorded: Tensor) -> None:
        """Assert that the probabilities are those recorded."""
        for (pending, found), expected in zip(self.probabilities, recorded, strict=True):
            torch.testing.assert_close(found[pending].float(), expected[pending], atol=1e-4, rtol=0)
