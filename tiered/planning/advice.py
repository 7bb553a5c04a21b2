"""What to lower or raise when a call does not fit its tiers, each with a number that does fit; and what to change where
one would be faster."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes
from tiered.core.features import Tier
from tiered.models.weight_form import CODES, WeightForm
from tiered.planning.times import CallTime
from tiered.planning.workload import Workload
from tiered.policies.polestar.policy import Polestar
from tiered.policies.polestar.record_bytes import hidden_record_bytes
from tiered.policies.registry import make_policy

# Policies that keep less, and what one does without; the one that loses least first.
PLAINER: Mapping[str, str] = {
    "fast_dllm_dual": "keeps no hidden states and renews nothing between refreshes",
    "none": "keeps no layer's keys and values and recomputes every row in every step",
}
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to make a plan fit, or one that fits faster.

    Attributes:
        text: what to do, for people.
        change: the same as arguments of `plan`; the plan made with them fits. With another policy, the options of the
            present one go.
    """

    text: str
    change: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        change = {name: asdict(value) if is_dataclass(value) else value for name, value in self.change.items()}  # pyright: ignore[reportArgumentType]
        return {"text": self.text, "change": change}


def advise(workload: Workload, budget: MemoryBudget) -> list[Advice]:
    """The changes that bring `workload` within `budget`, cheapest in quality and speed first; empty where it fits
    already."""
    return list(_changes(workload, budget)) if workload.over(budget) else []


def too_slow(time: CallTime | None) -> str:
    """The warning of a call that fits and is of no use; "": it is fast enough, or there is no estimate."""
    if time is None or time.tokens_per_second >= 1:
        return ""
    return (
        f"{time.tokens_per_second:.2g} tokens a second by this estimate, {time.tokens_per_forward} a forward: a call "
        "of these sizes is too slow to be of use"
    )


def _changes(workload: Workload, budget: MemoryBudget) -> Iterator[Advice]:
    sizes, block = workload.sizes, workload.sizes.block_length
    yield from _hidden_changes(workload, budget)
    batch = workload.largest("batch", budget)
    if 0 < batch < sizes.batch:
        yield Advice(f"lower the batch to {batch}", {"batch": batch})
    elif sizes.batch > 1 and (context := workload.resized(batch=1).largest("context", budget, multiple=block)):
        yield Advice(f"lower the batch to 1 and the context to {context}", {"batch": 1, "context": context})
    if context := workload.largest("context", budget, multiple=block):
        yield Advice(f"lower the context to {context}", {"context": context})
    alternatives: list[tuple[Workload, str, dict[str, Any]]] = [
        (workload.resized(guidance=False), "do without guidance, which doubles the sequences", {"cfg": False}),
        (workload.resized(dtype="bfloat16"), "use dtype bfloat16", {"dtype": "bfloat16"}),
        *(
            (workload.resized(weights=form), f"keep weights {form}, which changes answers", {"weights": str(form)})
            for form in (() if sizes.weights.fixed else map(WeightForm, CODES))
        ),
        *(
            (Workload(make_policy(name), sizes), f"use policy {name}, which {what}", {"policy": name})
            for name, what in PLAINER.items()
        ),
    ]
    records = workload.needed().records is not None
    for alternative, text, change in alternatives:
        fewer_records = records and alternative.needed().records is None
        smaller = alternative.total() < workload.total() or fewer_records
        if smaller and not alternative.over(budget):
            yield Advice(f"{text}: {format_bytes(alternative.total())}", change)
    yield from _stream_from_host(workload, budget)
    yield _more_memory(workload, budget)


def _hidden_changes(workload: Workload, budget: MemoryBudget) -> Iterator[Advice]:
    """Changes to what the policy keeps of hidden states."""
    policy, sizes = workload.policy, workload.sizes
    if not isinstance(policy, Polestar) or not policy.top_m:
        return
    records = hidden_record_bytes(policy, sizes)

    def fits(**change: Any) -> bool:
        return not Workload(replace(policy, **change), sizes).over(budget)

    if records.tier is Tier.DEVICE and fits(hidden_tier=Tier.HOST):
        yield Advice("keep hidden states in host memory: hidden_tier host", {"hidden_tier": "host"})
    clusters = records.clusters - policy.appended_blocks
    fewer = bisect_left(range(1, clusters), True, key=lambda count: not fits(clusters=count))
    if fewer:
        yield Advice(f"make fewer clusters: clusters {fewer}", {"clusters": fewer})
    blocks = sizes.context // sizes.block_length
    if policy.window_blocks is not None:
        blocks = min(blocks, sum(policy.window_blocks))
    # One block behind the current one, and as many before it as fit.
    before = bisect_left(range(1, blocks - 1), True, key=lambda count: not fits(window_blocks=(count, 1)))
    if before:
        window = (before, 1)
        yield Advice(f"keep the hidden states of a window alone: window_blocks {window}", {"window_blocks": window})


def _stream_from_host(workload: Workload, budget: MemoryBudget) -> Iterator[Advice]:
    """More of the host, where it is what keeps features from being streamed."""
    free = replace(budget, host=None)
    if budget.cap(Tier.HOST) is None or workload.needed(free).streams is None or workload.over(free):
        return
    size = f"{-(-workload.total(Tier.HOST, free) // _MIB)}MiB"
    if not workload.over(raised := replace(budget, host=size)):
        yield Advice(f"raise the host memory to {size} and stream features from there", {"memory": raised})


def _more_memory(workload: Workload, budget: MemoryBudget) -> Advice:
    """Caps of what is needed, rounded up to what can be typed, so that none is a byte short."""
    needed = {tier: f"{-(-size // _MIB)}MiB" for tier, size in workload.over(budget).items()}
    text = " and ".join(f"the {tier} memory to {size}" for tier, size in needed.items())
    caps = {tier.value: budget.cap(tier) for tier in Tier if tier is not Tier.DEVICE}
    if any(cap is not None for cap in caps.values()):
        raised = {tier.value: size for tier, size in needed.items()}
        return Advice(f"raise {text}", {"memory": replace(budget, **raised)})
    return Advice(f"raise {text}", {"memory": needed[Tier.DEVICE]})
