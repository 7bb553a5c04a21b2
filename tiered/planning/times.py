"""How long a call takes: the work of its forwards, as they are rehearsed, over the rates of a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tiered.core.features import Feature
from tiered.core.rates import CODED_PRODUCTS, Rates
from tiered.forward.forward_bytes import part_rows
from tiered.forward.forward_work import ForwardWork, forward_work
from tiered.forward.sizes import CallSizes
from tiered.models.weight_form import read_bytes
from tiered.planning.call_bytes import CallBytes
from tiered.planning.rehearsal import answer_of, rehearse
from tiered.policies.base import PLAIN_LAUNCHES, Policy, StepKind

TOKENS_PER_FORWARD = (1, 2, 4, 8)
# Of a CPU: one layer of one feature that is streamed takes as long, beside its bytes, as so many layers with next to no
# work: 2.3 ms (docs/benchmarks.md, regimes at budget 0.5 and 1 over those without).
STREAMED_LAYER = 11
# A row that is compared and left takes so much of the time of one that is recomputed: its value is projected, and what
# branches made of it is read and added (docs/benchmarks.md, regimes: dLLM-Cache with 16 blocks beside 4).
COMPARED_ROW = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """Of one kind of forward, on average.

    Attributes:
        rows: of a sequence, on average over layers.
        count: of a call.
        seconds: of one.
        bound: what sets its pace: reading "weights", or "keys and values"; "products"; the "link"; or "launches".
    """

    rows: float
    count: int
    seconds: float
    bound: str

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {"rows": self.rows, "count": self.count, "seconds": self.seconds, "bound": self.bound}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """Of a call that commits `tokens_per_forward` tokens of a sequence in each.

    Attributes:
        answer: tokens of a sequence.
        blocks: of the answer.
        sequences: answered together.
        kinds: forwards by kind.
    """

    tokens_per_forward: int
    answer: int
    blocks: int
    sequences: int
    kinds: Mapping[StepKind, ForwardTime]

    @property
    def seconds(self) -> float:
        """Of the call."""
        return sum(kind.count * kind.seconds for kind in self.kinds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.sequences * self.answer / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "block_seconds": self.seconds / self.blocks,
            "tokens_per_second": self.tokens_per_second,
            "kinds": {kind.value: time.as_dict() for kind, time in self.kinds.items()},
        }


def call_time(
    policy: Policy, sizes: CallSizes, needed: CallBytes, rates: Rates, *, tokens_per_forward: int
) -> CallTime:
    """How long a call of `sizes` takes that holds what is `needed`, of which every forward moves what is streamed."""
    streams = () if needed.streams is None else needed.streams.streams
    streamed = sum(len(stream.layers) for stream in streams)
    of_weights = 0 if needed.weights is None else needed.weights.moved
    kinds = {}
    for kind, count, rows, compared, fetched in _kinds(policy, sizes, tokens_per_forward):
        moved = fetched + of_weights + sum(stream.records for stream in streams)
        like = rows + COMPARED_ROW * compared
        seconds, bound = forward_seconds(policy, sizes, like, moved, rates, kind=kind, streamed=streamed)
        kinds[kind] = ForwardTime(rows=rows, count=count, seconds=seconds, bound=bound)
    answer = answer_of(sizes)
    return CallTime(
        tokens_per_forward=tokens_per_forward, answer=answer, blocks=answer // sizes.block_length,
        sequences=sizes.batch, kinds=kinds,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _kinds(
    policy: Policy, sizes: CallSizes, tokens_per_forward: int
) -> tuple[tuple[StepKind, int, float, float, float], ...]:
    """Of each kind of forward: how many a call has; on average, its rows, those that it compares, and bytes that it
    fetches."""
    forwards = list(rehearse(policy, sizes, tokens_per_forward=tokens_per_forward))
    blocks, later = answer_of(sizes) // sizes.block_length, forwards[-1].block
    kinds = []
    for kind in StepKind:
        own = [forward for forward in forwards if forward.kind is kind]
        if own:
            first = sum(forward.block == 0 for forward in own)
            count = first + round((len(own) - first) * (blocks - 1) / max(later, 1))
            figures = ((one.rows, one.compared, one.fetched) for one in own)
            rows, compared, fetched = (sum(values) / len(own) for values in zip(*figures, strict=True))
            kinds.append((kind, count, rows, compared, fetched))
    return tuple(kinds)


def forward_seconds(
    policy: Policy,
    sizes: CallSizes,
    rows: float,
    moved: float,
    rates: Rates,
    *,
    kind: StepKind = StepKind.STEP,
    streamed: int = 0,
) -> tuple[float, str]:
    """Of a forward over `rows` of each sequence while `moved` bytes come to the device, and what sets its pace. Copies
    go on beside the rest, and so does reading beside arithmetic.

    Args:
        kind: of the forward.
        streamed: layers that are streamed, of each feature.
    """
    work = work_of(policy, sizes, rows)
    # A layer goes over its rows in parts, each of which reads all of it.
    parts = max(1.0, rows / part_rows(sizes.sequences))
    reached = 1.0 if sizes.weights.code is None or not rates.multiprocessors else CODED_PRODUCTS[sizes.weights.code]
    products = (work.flops - work.attention_flops) / (reached * rates.flops_per_second)
    attention = work.attention_flops / rates.attention_flops_per_second
    at_once = min(rows, part_rows(sizes.sequences)) * sizes.sequences
    reading = {
        "weights": parts * work.weight_bytes / rates.bytes_per_second,
        "keys and values": parts * work.kv_bytes / rates.bytes_per_second,
    }
    # Nominal rates were fitted to whole calls: in a layer's share they have what is outside layers.
    outside = policy.launches_outside(kind) if rates.measured else 0
    launched = (sizes.shape.layers * policy.launches(kind) + outside) / PLAIN_LAUNCHES
    paces = {
        max(reading, key=lambda name: reading[name]): sum(reading.values()),
        "products": products * (1 + rates.half_rows / at_once) + attention * (1 + rates.attention_half_rows / at_once),
        "link": moved / rates.link_bytes_per_second,
        "launches": launched * rates.layer_seconds,
    }
    bound = max(paces, key=lambda name: paces[name])
    if rates.multiprocessors:
        return paces[bound], bound
    # A CPU that launches is the one that computes, and the one that copies.
    alone = (launched * (bound != "launches") + STREAMED_LAYER * streamed) * rates.layer_seconds
    return paces[bound] + alone, bound


def work_of(policy: Policy, sizes: CallSizes, rows: float) -> ForwardWork:
    """Of a forward that recomputes `rows` of each sequence. A policy that keeps one layer's keys and values has just
    made what it reads."""
    shape = sizes.shape
    work = forward_work(
        shape,
        batch=sizes.sequences,
        context=sizes.context,
        rows=min(rows, sizes.context),
        dtype_bytes=sizes.element,
        output_rows=min(policy.logit_rows(sizes.block_length, sizes.context), int(rows)),
    )
    kept = policy.features(shape)[Feature.KEY] == shape.layers
    stored = sizes.row_bytes(Feature.KEY) / (shape.kv_width * sizes.element)
    return replace(
        work,
        weight_bytes=read_bytes(shape, sizes.dtype, sizes.weights),
        kv_bytes=round(work.kv_bytes * stored) if kept else 0,
    )
