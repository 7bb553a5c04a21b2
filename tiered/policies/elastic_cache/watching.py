"""What a layer's attention tells: whether that of its tracked tokens has moved, and which tokens to track next."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.policies.elastic_cache.attention import attention_received, similarity
from tiered.policies.elastic_cache.costs import WindowChunk
from tiered.policies.elastic_cache.queries import LayerQueries, readable, weights_of
from tiered.policies.elastic_cache.step_rows import StepRows
from tiered.policies.elastic_cache.tracked import NONE, Tracked
from tiered.policies.elastic_cache.widening import Widening


@dataclass(frozen=True, slots=True)
class Seen:
    """What a layer was found to be.

    Attributes:
        moved: sequences that widen from the next layer on; None: none does.
        others: rows that join each of them at most, where they are not there yet.
    """

    moved: Bool[Tensor, " batch"] | None = None
    others: int = 0


@spanned(Op.WATCH)
def watch(
    asked: LayerQueries,
    tracked: Tracked,
    step: StepRows,
    widening: Widening,
    past: Float[Tensor, "batch heads tracked length"] | None,
    threshold: float,
    chunk: WindowChunk,
) -> Seen:
    """Compare the attention of the layer's tracked tokens, mark sequences where it has moved as full, and track those
    tokens that the window attends to most. Reads from the device once, unless `past` is None.

    Args:
        asked: queries in the layer, its keys written.
        tracked: as the last pass left it.
        past: the attention of the tracked tokens as it was; None where all sequences recompute every row anyway.
        threshold: cosine similarity below which attention has moved.
        chunk: what of the window is summed up at a time.
    """
    forward, layer = asked.forward, asked.layer
    columns = tracked.columns(layer)
    moved = torch.zeros_like(widening.full)
    if past is not None:
        known = columns != NONE
        alike = similarity(past, weights_of(forward, layer, asked.at(columns), columns)).where(known, 0.0)
        # Where nothing is tracked the mean is NaN, which is below no threshold.
        moved = step.active & ~widening.full & (alike.sum(dim=1) / known.sum(dim=1) < threshold)
    keys = forward.keys(layer)[: len(columns)]
    # The window is masked, so nothing is hidden from it.
    mass = attention_received(
        asked.at(step.window),
        step.in_window,
        keys,
        readable(forward, len(columns)),
        chunk,
        soft_cap=forward.model.shape.soft_cap,
        sink_keys=forward.model.sink_keys(layer),
    )
    most, chosen = mass.masked_fill_(~step.committed, -1.0).topk(columns.shape[1], dim=1)
    chosen = chosen.where(most >= 0, NONE)
    found = asked.at(chosen)
    seen = Seen()
    if past is not None:
        absent = (chosen != NONE) & (widening.place.gather(1, chosen.clamp_min(0)) < 0) & step.active[:, None]
        widening.full |= moved
        settled = (widening.full | ~step.active).all()
        read = torch.stack([moved.any(), absent.any(), settled, widening.others()]).tolist()
        seen, widening.settled = Seen(moved if read[0] else None, read[3]), bool(read[2])
        if read[1]:
            found = found.where(~absent[:, None, :, None], asked.stored(chosen))
    tracked.put(layer, chosen, found, step.active)
    return seen
