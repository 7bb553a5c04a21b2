"""How long a call takes: the work of its forwards, as they are rehearsed, over the rates of a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiered.core.features import Feature
from tiered.core.rates import Rates
from tiered.forward.forward_bytes import part_rows
from tiered.forward.forward_work import ForwardWork, forward_work
from tiered.forward.sizes import CallSizes
from tiered.planning.call_bytes import CallBytes
from tiered.planning.rehearsal import answer_of, rehearse
from tiered.policies.base import Policy, StepKind

TOKENS_PER_FORWARD = (1, 2, 4, 8)


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
    forwards = list(rehearse(policy, sizes, tokens_per_forward=tokens_per_forward))
    moved = 0 if needed.streams is None else needed.streams.moved
    answer = answer_of(sizes)
    blocks, gone_through = answer // sizes.block_length, 1 + forwards[-1].block
    kinds = {}
    for kind in StepKind:
        own = [forward.rows for forward in forwards if forward.kind is kind]
        if own:
            rows = sum(own) / len(own)
            count = round(len(own) * blocks / gone_through)
            seconds, bound = forward_seconds(policy, sizes, rows, moved, rates)
            kinds[kind] = ForwardTime(rows=rows, count=count, seconds=seconds, bound=bound)
    return CallTime(
        tokens_per_forward=tokens_per_forward, answer=answer, blocks=blocks, sequences=sizes.batch, kinds=kinds
    )


def forward_seconds(policy: Policy, sizes: CallSizes, rows: float, moved: int, rates: Rates) -> tuple[float, str]:
    """Of a forward over `rows` of each sequence while `moved` bytes come to the device, and what sets its pace. Copies
    go on beside the rest, and so does reading beside arithmetic."""
    work = work_of(policy, sizes, rows)
    # A layer goes over its rows in parts, each of which reads all of it.
    parts = max(1.0, rows / part_rows(sizes.sequences))
    products = (work.flops - work.attention_flops) / rates.flops_per_second
    attention = work.attention_flops / rates.attention_flops_per_second
    at_once = min(rows, part_rows(sizes.sequences)) * sizes.sequences
    reading = {
        "weights": parts * work.weight_bytes / rates.bytes_per_second,
        "keys and values": parts * work.kv_bytes / rates.bytes_per_second,
    }
    paces = {
        max(reading, key=lambda name: reading[name]): sum(reading.values()),
        "products": products * (1 + rates.half_rows / at_once) + attention * (1 + rates.attention_half_rows / at_once),
        "link": moved / rates.link_bytes_per_second,
        "launches": sizes.shape.layers * rates.layer_seconds,
    }
    bound = max(paces, key=lambda name: paces[name])
    # A CPU that launches is the one that computes.
    alone = 0.0 if rates.multiprocessors or bound == "launches" else paces["launches"]
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
    return work if kept else replace(work, kv_bytes=0)
