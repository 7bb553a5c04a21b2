"""The time that no forward can beat: its bytes at the measured bandwidth, or its arithmetic at the measured rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median

import torch
from cost_card import CostCard, Rates, cost_card

from gpu_parts.bandwidth import copy_bandwidth
from gpu_parts.policy_calls import BLOCK
from gpu_parts.setting import Setting
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.offload.device_timer import device_times
from tiered.output import GenerationOutput
from tiered.policies.base import StepKind
from tiered.policies.polestar.update_log import LayerUpdate

_SIDE, _TINY_SIDE = 8192, 128
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Of one kind of forward.

    Attributes:
        rows: of the sequence that it recomputes, on average.
        renewed_rows: those of `rows` that an update adds to a plain step's, in a layer on average.
        nbytes: that it has to read: the weights once, without the embedding's table, every key and value, and of an
            update the records that it fetches.
        flops: of its matrix products, attention among them.
    """

    rows: float
    renewed_rows: float
    nbytes: int
    flops: float

    def figures(self, rates: Rates) -> dict[str, float]:
        """Milliseconds of either, and the larger one, which is the floor."""
        bytes_ms = 1000 * self.nbytes / rates.bytes_per_second
        flops_ms = 1000 * self.flops / rates.flops_per_second
        return {
            "rows": self.rows,
            "renewed_rows": self.renewed_rows,
            "read_bytes": self.nbytes,
            "gflop": self.flops / 1e9,
            "bytes_floor_ms": bytes_ms,
            "flops_floor_ms": flops_ms,
            "floor_ms": max(bytes_ms, flops_ms),
        }


@cache
def measured_rates(setting: Setting) -> Rates:
    """What the device reaches in the model's dtype: a product of random matrices, and a copy in its memory, of which
    bytes read and written both count. Measured once in a process."""
    side, dtype = (_TINY_SIDE, torch.float32) if setting.tiny else (_SIDE, torch.bfloat16)
    draws = torch.Generator(setting.on).manual_seed(setting.seed)
    left, right = (torch.randn(side, side, dtype=dtype, device=setting.on, generator=draws) for _ in range(2))
    product = torch.empty_like(left)
    seconds = device_times(
        lambda: torch.matmul(left, right, out=product), setting.on, rounds=_ROUNDS, warm_up=3, hold=True
    )
    return Rates(flops_per_second=2 * side**3 / min(seconds), bytes_per_second=copy_bandwidth(setting.on, setting.tiny))


def floors(
    shape: ModelShape, positions: int, out: GenerationOutput, kinds: Sequence[StepKind]
) -> dict[StepKind, Floor]:
    """The floor of each kind of forward of a call of one sequence, as many rows as its forwards recomputed at the
    median. An update's: everything that a plain step reads, the records it fetches, and the arithmetic of both the
    block's rows and those that it renews; each weight serves both, as an update may well do."""
    renewed = renewed_rows(out.updates)
    found = {}
    for kind in dict.fromkeys(kinds):
        rows = median(count for count, of in zip(out.rows_per_forward, kinds, strict=True) if of is kind)
        if kind is StepKind.UPDATE and renewed:
            found[kind] = _update_floor(shape, positions, out, mean(renewed.values()), len(renewed))
        else:
            card = _card(shape, positions, round(rows))
            found[kind] = Floor(rows=rows, renewed_rows=0.0, nbytes=card.read_bytes, flops=card.flops)
    return found


def renewed_rows(updates: Sequence[LayerUpdate]) -> Mapping[int, float]:
    """By forward that updates: rows that a layer renews, on average over those that renew any."""
    by_forward: dict[int, list[int]] = {}
    for update in updates:
        by_forward.setdefault(update.forward, []).append(sum(update.rows))
    return {forward: mean(rows) for forward, rows in by_forward.items()}


def _update_floor(shape: ModelShape, positions: int, out: GenerationOutput, renewed: float, updates: int) -> Floor:
    plain = _card(shape, positions, BLOCK)
    # What one more row takes: keys and values in all layers, the rest in all but the last. But the rows that a layer
    # renews have their keys and values from the layer below: so not in the first.
    row = _card(shape, positions, BLOCK + 1).flops - plain.flops - 4 * shape.width * shape.kv_width
    fetched = sum(update.fetched_bytes for update in out.updates) // updates
    return Floor(
        rows=BLOCK + renewed,
        renewed_rows=renewed,
        nbytes=plain.read_bytes + fetched,
        flops=plain.flops + renewed * row,
    )


def _card(shape: ModelShape, positions: int, rows: int) -> CostCard:
    return cost_card(
        shape, batch=1, context=positions, rows=rows, dtype_bytes=BYTES_PER_ELEMENT[shape.dtype], output_rows=BLOCK
    )
