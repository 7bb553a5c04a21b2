"""The seconds of a call: the forwards of a dry run, and for each a roofline of its bytes, FLOP, copies and launches."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from tiered.core.canvas import Canvas
from tiered.core.features import Feature, Tier
from tiered.core.rates import CODED_PRODUCTS, Rates
from tiered.forward.forward_bytes import part_rows
from tiered.forward.forward_work import ForwardWork, forward_work
from tiered.forward.sizes import CallShape
from tiered.forward.weight_bytes import WeightBytes
from tiered.models.weight_form import read_bytes
from tiered.planning.call_bytes import CallBytes
from tiered.planning.workload import answer_of, prompt_of
from tiered.policies.base import Pass, Policy, Step, StepKind
from tiered.policies.dllm_cache.program import BranchStep
from tiered.policies.polestar.policy import Drifting, Polestar
from tiered.policies.polestar.update import Update

TOKENS_PER_FORWARD = (1, 2, 4, 8)
# Launches of a layer of LLaDA without a program, of a layer with one (the middle of 18 to 194), and outside of all
# layers, most of these to propose and commit tokens. tests/test_launches.py has the counts by policy and forward.
PLAIN_LAUNCHES, PROGRAM_LAUNCHES, OUTSIDE_LAUNCHES = 11, 45, 54
MOST_BLOCKS = 32  # of an answer in a dry run; later blocks are like them
_MASK = 1  # a token id that is in no prompt


class DryForward(NamedTuple):
    """One forward of a call without its model.

    Attributes:
        block: number of its block.
        kind: purpose of the forward.
        rows: rows of a sequence, on average over layers; an expectation if the model decides.
        fetched: bytes fetched beside streamed layers.
        launches: launches of a layer.
    """

    block: int
    kind: StepKind
    rows: float
    fetched: float = 0.0
    launches: float = PLAIN_LAUNCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """The average forward of one kind.

    Attributes:
        rows: rows of a sequence, on average over layers.
        count: forwards of this kind in the call.
        seconds: seconds of one forward.
        bound: the slowest part: reading "weights", or "keys and values"; "products"; the "link"; or "launches".
    """

    rows: float
    count: int
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """A call that commits `tokens_per_forward` tokens of a sequence in each forward.

    Attributes:
        answer: tokens of a sequence.
        blocks: blocks of the answer.
        sequences: sequences of the batch.
        kinds: the forwards by kind.
    """

    tokens_per_forward: int
    answer: int
    blocks: int
    sequences: int
    kinds: Mapping[StepKind, ForwardTime]

    @property
    def seconds(self) -> float:
        return sum(kind.count * kind.seconds for kind in self.kinds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * self.answer / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "block_seconds": self.seconds / self.blocks,
            "tokens_per_second": self.tokens_per_second,
            "kinds": {kind.value: asdict(time) for kind, time in self.kinds.items()},
        }


def call_time(
    policy: Policy, sizes: CallShape, needed: CallBytes, rates: Rates, *, tokens_per_forward: int
) -> CallTime:
    """The seconds of a call of `sizes` with the bytes `needed`. Every forward moves all streamed layers, and the
    experts that it lacks."""
    streamed = 0 if needed.streams is None else needed.streams.moved
    kinds = {}
    for count, forward in _kinds(policy, sizes, tokens_per_forward):
        moved = streamed + forward.fetched + weights_moved(sizes, needed.weights, forward.rows)
        seconds, bound = forward_seconds(policy, sizes, forward.rows, moved, rates, launches=forward.launches)
        kinds[forward.kind] = ForwardTime(rows=forward.rows, count=count, seconds=seconds, bound=bound)
    answer = answer_of(sizes)
    return CallTime(
        tokens_per_forward=tokens_per_forward,
        answer=answer,
        blocks=answer // sizes.block_length,
        sequences=sizes.batch,
        kinds=kinds,
    )


def weights_moved(sizes: CallShape, weights: WeightBytes | None, rows: float) -> int:
    """Bytes of weights that a forward over `rows` of each sequence moves to the device."""
    if weights is None:
        return 0
    experts = sizes.shape.experts
    return weights.moved(None if experts is None else experts.reached(rows * sizes.sequences))


def _kinds(policy: Policy, sizes: CallShape, tokens_per_forward: int) -> tuple[tuple[int, DryForward], ...]:
    forwards = list(dry_run(policy, sizes, tokens_per_forward=tokens_per_forward))
    blocks, later = answer_of(sizes) // sizes.block_length, forwards[-1].block
    kinds = []
    for kind in StepKind:
        own = [forward for forward in forwards if forward.kind is kind]
        if own:
            first = sum(forward.block == 0 for forward in own)
            count = first + round((len(own) - first) * (blocks - 1) / max(later, 1))
            means = (sum(values) / len(own) for values in zip(*(forward[2:] for forward in own), strict=True))
            kinds.append((count, DryForward(0, kind, *means)))
    return tuple(kinds)


def forward_seconds(
    policy: Policy, sizes: CallShape, rows: float, moved: float, rates: Rates, *, launches: float = PLAIN_LAUNCHES
) -> tuple[float, str]:
    """The seconds of a forward over `rows` of each sequence that fetches `moved` bytes, and its slowest part. Copies,
    reads and arithmetic overlap. `launches`: launches of a layer."""
    work = work_of(policy, sizes, rows)
    # Rows go through a layer in parts, and each part reads the whole layer.
    parts = max(1.0, rows / part_rows(sizes.sequences))
    reached = 1.0 if sizes.weights.code is None or not rates.multiprocessors else CODED_PRODUCTS[sizes.weights.code]
    products = (work.flops - work.attention_flops) / (reached * rates.flops_per_second)
    attention = work.attention_flops / rates.attention_flops_per_second
    at_once = min(rows, part_rows(sizes.sequences)) * sizes.sequences
    reading = {
        "weights": parts * work.weight_bytes / rates.bytes_per_second,
        "keys and values": parts * work.kv_bytes / rates.bytes_per_second,
    }
    # An estimate from a datasheet is too rough to add work outside of layers.
    outside = OUTSIDE_LAUNCHES if rates.measured else 0
    launching = (sizes.shape.layers * launches + outside) / PLAIN_LAUNCHES * rates.layer_seconds
    paces = {
        max(reading, key=lambda name: reading[name]): sum(reading.values()),
        "products": products * (1 + rates.half_rows / at_once) + attention * (1 + rates.attention_half_rows / at_once),
        "link": moved / rates.link_bytes_per_second,
        "launches": launching,
    }
    bound = max(paces, key=lambda name: paces[name])
    # A CPU does not launch and compute at the same time.
    alone = 0.0 if rates.multiprocessors or bound == "launches" else launching
    return paces[bound] + alone, bound


def work_of(policy: Policy, sizes: CallShape, rows: float) -> ForwardWork:
    """The work of a forward that recomputes `rows` of each sequence. A policy that keeps keys and values of one layer
    reads none, because the forward has just computed them."""
    shape = sizes.shape
    work = forward_work(
        shape,
        batch=sizes.sequences,
        context=sizes.context,
        rows=min(rows, sizes.context),
        dtype=sizes.dtype,
        output_rows=min(policy.needs(sizes).logit_rows or sizes.block_length, int(rows)),
    )
    kept = policy.features(shape)[Feature.KEY] == shape.layers
    stored = sizes.row_bytes(Feature.VALUE) / (shape.kv_width * sizes.element)
    return replace(
        work,
        weight_bytes=read_bytes(shape, sizes.dtype, sizes.weights, float(min(rows, sizes.context) * sizes.sequences)),
        kv_bytes=round(work.kv_bytes * stored) if kept else 0,
    )


def dry_run(policy: Policy, sizes: CallShape, *, tokens_per_forward: int) -> Iterator[DryForward]:
    """The forwards of a call of `sizes` with one sequence, in the order of the decoding loop. Each commits the first
    `tokens_per_forward` pending tokens of its block."""
    shape, block, prompt = sizes.shape, sizes.block_length, prompt_of(sizes)
    canvas = Canvas(
        # If blocks count from a prompt's first token, its last tokens are in the answer's first block.
        torch.zeros(1, prompt // block * block if shape.block_causal else prompt, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        max_new_tokens=answer_of(sizes),
        block_length=block,
        mask_token_id=_MASK,
    )
    state, forwards = policy.start(), 0
    if isinstance(state, Drifting):
        policy = state.policy
        state = Drifting(policy, dry=True)
    for number in range(min(canvas.blocks, MOST_BLOCKS)):
        more = {"active": (True,), "guidance": sizes.guidance, "rewrites": shape.noise != "mask"}
        step = Step.first(canvas, number, shape, begun=forwards > 0, **more)
        for asked in state.before_block(step):
            yield DryForward(number, asked.kind, asked.rows.count)
            forwards += 1
        while (pending := canvas.pending(step.start, step.stop)).any():
            chosen = pending & (pending.cumsum(1) <= tokens_per_forward)
            ranks = (pending.cumsum(1) * chosen) if policy.needs_order() else None
            step = replace(step, forwards=(forwards,), next_commits=ranks)
            yield _dry_forward(policy, sizes, number, state.rows(step))
            zeros = torch.zeros_like(chosen, dtype=torch.int64)
            canvas.commit(step.start, chosen, zeros, torch.tensor([forwards]))
            state.observe(step, chosen)
            step, forwards = replace(step, number=step.number + 1, remasked=False), forwards + 1


def _dry_forward(policy: Policy, sizes: CallShape, block: int, asked: Pass) -> DryForward:
    count, layers = asked.rows.count, sizes.shape.layers
    if asked.program is None:
        return DryForward(block, asked.kind, count)
    rows, fetched = float(count), 0.0
    if isinstance(asked.program, BranchStep):
        rows = asked.program.expected_rows(count)
    elif isinstance(asked.program, Update) and isinstance(policy, Polestar):
        kept = policy.cluster_sizes(sizes)
        # If each layer adds clusters, a layer has half of them on average.
        chosen = kept.chosen * (1 + kept.layers / 2 if kept.beside else 1)
        renewed = min(kept.kept, chosen * kept.kept / max(kept.clusters, 1))
        # The chosen rows of a group go up to the next one, and through all layers but the last.
        rows += renewed * (layers - 1) / layers
        if policy.hidden_tier == Tier.HOST and kept.slots < kept.records:  # otherwise all stay in their slots
            # An upper bound: rows from the group below are not fetched, and the model decides on those.
            fetched = sizes.sequences * kept.layers * kept.stored(math.ceil(renewed))
    return DryForward(block, asked.kind, rows, fetched, PROGRAM_LAUNCHES)
