"""Parts that rows read beside the canvas: rows of another stack, keys in chunks, and a kept output. And rows that are
written again in place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from block_models import NEMOTRON, SDAR
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.parts import CanvasLimits
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.kernels.row_code import RowCode
from tiered.models.attention import Limits, PartOutput
from tiered.models.base import DiffusionModel

PROMPT, BLOCK = 12, 4
LLADA = {
    "model_type": "llada",
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "mlp_hidden_size": 48,
    "vocab_size": 160,
    "max_sequence_length": 64,
    "mask_token_id": 159,
    "eos_token_id": 158,
    "pad_token_id": 158,
}
GIDD = {
    "model_type": "gidd",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "attention_bias": True,
}


@dataclass
class Stored:
    """Rows of another stack, up to column `stop`."""

    of: Forward
    stop: int

    def attend(self, model: DiffusionModel, layer: int, rows: Rows, queries: Tensor) -> Iterator[PartOutput]:
        keys, values = (self.of.store.stored(feature, layer) for feature in (Feature.KEY, Feature.VALUE))
        stop = torch.full((len(queries), rows.count), self.stop)
        yield model.attend_part(layer, queries, keys, values, Limits(stop=stop))


@dataclass
class Chunks(Stored):
    """The same a few columns at a time."""

    def attend(self, model: DiffusionModel, layer: int, rows: Rows, queries: Tensor) -> Iterator[PartOutput]:
        keys, values = (self.of.store.stored(feature, layer) for feature in (Feature.KEY, Feature.VALUE))
        for start in range(0, self.stop, 5):
            some = slice(start, min(start + 5, self.stop))
            yield model.attend_part(layer, queries, keys[:, :, some], values[:, :, some], Limits())


class Kept:
    """Outputs of a part, by layer, without its keys."""

    def __init__(self) -> None:
        self.of_layer: dict[int, list[PartOutput]] = {}

    def watch(self, part: Stored) -> Any:
        kept = self

        class Watched:
            def attend(self, model: DiffusionModel, layer: int, rows: Rows, queries: Tensor) -> list[PartOutput]:
                return kept.of_layer.setdefault(layer, list(part.attend(model, layer, rows, queries)))

        return Watched()

    def attend(self, model: DiffusionModel, layer: int, rows: Rows, queries: Tensor) -> list[PartOutput]:
        return self.of_layer[layer]


def stack(model: DiffusionModel, start: int, stop: int, kv: RowCode | None = None) -> Forward:
    """Layers over columns `start` to `stop` of the text."""
    shape, length = model.shape, stop - start
    kept: dict[Feature, int] = {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}
    sizes = CallShape(shape=shape, batch=2, context=length, block_length=BLOCK, dtype="float32", kv=kv)
    store = FeatureStore(sizes, kept, torch.device("cpu"))
    limits = CanvasLimits(shape, length, BLOCK if shape.block_causal else 0)
    return Forward(model, store, torch.arange(start, stop)[None], limits)


def ids(length: int = PROMPT + BLOCK) -> Tensor:
    return torch.randint(0, 120, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("config", "kv"), [(SDAR, None), (NEMOTRON, None), (SDAR, RowCode.FP8)], ids=["blocks", "context", "fp8"]
)
def test_a_block_reads_what_another_stack_has_written(
    random_model: Callable[..., DiffusionModel], config: dict[str, Any], kv: RowCode | None
):
    """An encoder over the prompt, then a decoder over the block alone: as one stack over both."""
    model, text = random_model(config), ids()
    whole, encoder, decoder = (stack(model, *span, kv=kv) for span in ((0, 16), (0, PROMPT), (PROMPT, 16)))
    with torch.inference_mode():
        expected = whole.logits(Pass(text, whole.rows, slice(PROMPT, 16), final=PROMPT))
        written = encoder.logits(Pass(text[:, :PROMPT], encoder.rows, slice(0, 0), final=PROMPT))
        assert written.shape[1] == 0
        asked, kept = Pass(text[:, PROMPT:], decoder.rows, slice(0, BLOCK)), Kept()
        for part in (Stored(encoder, PROMPT), Chunks(encoder, PROMPT), kept.watch(Stored(encoder, PROMPT)), kept):
            torch.testing.assert_close(decoder.logits(replace(asked, reads=(part,))), expected, atol=1e-4, rtol=1e-4)
        assert kept.of_layer.keys() == set(range(model.shape.layers))
        alone = decoder.logits(asked)
    assert not torch.allclose(alone, expected, atol=1e-2)


def test_sinks_count_once_and_rows_keep_their_own_limits(random_model: Callable[..., DiffusionModel]):
    """Final rows read final rows alone, of both parts; the other stack's are all final."""
    model, text, border = random_model(GIDD), ids(), PROMPT + 2
    whole, front, behind = (stack(model, *span) for span in ((0, 16), (0, PROMPT), (PROMPT, 16)))
    with torch.inference_mode():
        expected = whole.logits(Pass(text, whole.rows, slice(PROMPT, 16), final=border))
        # Final rows of the front read those behind it too, which the other stack lacks: its rows are taken as they are.
        for layer in range(model.shape.layers):
            for feature in (Feature.KEY, Feature.VALUE):
                front.store.write(feature, layer, front.rows, whole.store.view(feature, layer)[:, :, :PROMPT])
        order = torch.stack([torch.tensor([2, 0, 3, 1]), torch.tensor([1, 3, 0, 2])])
        for rows in (behind.rows, Rows.at(order)):
            asked = Pass(text[:, PROMPT:], rows, slice(0, BLOCK), final=border - PROMPT)
            found = behind.logits(replace(asked, reads=(Chunks(front, PROMPT),)))
            of_rows = expected.gather(1, rows.index.expand(2, -1)[..., None].expand_as(expected))
            torch.testing.assert_close(found, of_rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [LLADA, GIDD, SDAR, NEMOTRON, {**NEMOTRON, "sliding_window": 7}],
    ids=["canvas", "noise", "blocks", "context", "window"],
)
def test_one_index_serves_every_block(random_model: Callable[..., DiffusionModel], config: dict[str, Any]):
    """Rows and border are tensors that a captured step could read: written anew for each block, they do as its span."""
    model, text = random_model(config), ids()
    forward, index, final = stack(model, 0, 16), torch.zeros(2, BLOCK, dtype=torch.int64), torch.zeros(2).long()
    of_any = Pass(text, Rows.at(index), slice(0, BLOCK), final=final)
    with torch.inference_mode():
        for start in range(0, 16, BLOCK):
            forward.logits(Pass(text, forward.rows, slice(0, 1), final=start))
            span = forward.rows[start : start + BLOCK]
            expected = forward.logits(Pass(text, span, slice(0, BLOCK), final=start))
            index.copy_(span.index)
            final.fill_(start)
            torch.testing.assert_close(forward.logits(of_any), expected, atol=1e-4, rtol=1e-4)
