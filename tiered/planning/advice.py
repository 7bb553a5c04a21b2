"""Changes that make a call fit its tiers, each with a number that fits; and bytes that codes would save a call."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes
from tiered.core.features import KEY_VALUE, Tier
from tiered.kernels.row_code import RowCode
from tiered.models.weight_form import CODES, WeightForm, drop_of
from tiered.planning.times import weights_moved
from tiered.planning.workload import Workload
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy

# Policies that keep less, and what each does without; the one that loses least first.
PLAINER: Mapping[str, str] = {
    "fast_dllm_dual": "keeps no hidden states and renews nothing between refreshes",
    "none": "keeps no layer's keys and values and recomputes every row in every step",
}
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to make a plan fit.

    Attributes:
        text: the change in words.
        change: the same as arguments of `plan`; the plan made with them fits. A change of the policy drops the options
            of the present one.
    """

    text: str
    change: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        change = {name: asdict(value) if is_dataclass(value) else value for name, value in self.change.items()}  # pyright: ignore[reportArgumentType]
        return {"text": self.text, "change": change}


def advise(workload: Workload, budget: MemoryBudget) -> list[Advice]:
    """The changes that bring `workload` within `budget`, cheapest in quality and speed first; empty if it fits."""
    return list(_changes(workload, budget)) if workload.over(budget) else []


def code_savings(workload: Workload, budget: MemoryBudget) -> str:
    """Savings by codes for a call that fits and streams raw weights, or raw keys and values; "" for other calls."""
    sizes, (weights, kv), ways = workload.sizes, _streamed(workload, budget), []

    def left(**change: Any) -> int:
        return sum(_streamed(workload.resized(**change), budget))

    if weights and not sizes.weights.code:
        moved = {code: left(weights=WeightForm(code)) for code in CODES}
        code = min(moved, key=moved.__getitem__)
        brought = f"would bring {format_bytes(moved[code])}, and changes answers ({drop_of(code)})"
        ways.append(f"weights = {code.value!r} {brought}")
    if kv and not sizes.kv:
        ways.append(f"kv = 'fp8' would bring {format_bytes(left(kv=RowCode.FP8))}, and changes answers")
    if not ways or workload.over(budget):
        return ""
    return "; ".join([f"{format_bytes(weights + kv)} come to the device in every step", *ways])


def _streamed(workload: Workload, budget: MemoryBudget) -> tuple[int, int]:
    needed = workload.needed(budget)
    streams = () if needed.streams is None else needed.streams.streams
    weights = weights_moved(workload.sizes, needed.weights, float(workload.sizes.block_length))
    return weights, sum(stream.records for stream in streams if stream.feature in KEY_VALUE)


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
    policy, sizes = workload.policy, workload.sizes
    if not isinstance(policy, Polestar) or not policy.top_m:
        return

    def fits(**change: Any) -> bool:
        return not Workload(replace(policy, **change), sizes).over(budget)

    clusters = policy.cluster_sizes(sizes).made
    fewer = bisect_left(range(1, clusters), True, key=lambda count: not fits(clusters=count))
    if fewer:
        yield Advice(f"make fewer clusters: clusters {fewer}", {"clusters": fewer})


def _stream_from_host(workload: Workload, budget: MemoryBudget) -> Iterator[Advice]:
    """More host memory, if only its cap keeps features from being streamed."""
    free = replace(budget, host=None)
    if budget.cap(Tier.HOST) is None or workload.needed(free).streams is None or workload.over(free):
        return
    size = f"{-(-workload.total(Tier.HOST, free) // _MIB)}MiB"
    if not workload.over(raised := replace(budget, host=size)):
        yield Advice(f"raise the host memory to {size} and stream features from there", {"memory": raised})


def _more_memory(workload: Workload, budget: MemoryBudget) -> Advice:
    """The caps needed, rounded up to numbers that can be typed, so that none is a byte short."""
    needed = {tier: f"{-(-size // _MIB)}MiB" for tier, size in workload.over(budget).items()}
    text = " and ".join(f"the {tier} memory to {size}" for tier, size in needed.items())
    caps = {tier.value: budget.cap(tier) for tier in Tier if tier is not Tier.DEVICE}
    if any(cap is not None for cap in caps.values()):
        raised = {tier.value: size for tier, size in needed.items()}
        return Advice(f"raise {text}", {"memory": replace(budget, **raised)})
    return Advice(f"raise {text}", {"memory": needed[Tier.DEVICE]})
