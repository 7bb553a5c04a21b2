"""A plan as plain text, at most 100 columns wide."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiered.core.byte_size import format_bytes
from tiered.core.features import Tier

if TYPE_CHECKING:
    from tiered.planning.plan import Plan, TierPlan

COLUMNS = 100
_LABEL, _SIZE, _EXACT = 20, 12, 20


def plan_card(plan: "Plan") -> str:
    """The card of `plan`."""
    tiers = map(list, _tiers(plan))
    sections = (_header(plan), *tiers, _streamed(plan), _contexts(plan), _hidden(plan), _remarks(plan))
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _header(plan: "Plan") -> Iterator[str]:
    shape, workload = plan.shape, plan.workload
    yield from textwrap.wrap(plan.model, COLUMNS)
    yield (
        f"{plan.family}, {format_count(shape.parameters)} parameters, {shape.layers} layers, width {shape.width}, "
        f"{shape.heads} heads ({shape.kv_heads} key/value)"
    )
    options = "".join(f", {name}={value}" for name, value in plan.policy_options.items() if value is not None)
    guidance = " x 2 (guidance)" if workload.guidance else ""
    sampled = ", sampled" if workload.sampled else ""
    yield (
        f"context {workload.context}, batch {workload.batch}{guidance}, block {workload.block_length}{sampled}, "
        f"{workload.dtype}"
    )
    yield from textwrap.wrap(f"policy {plan.policy}{options}", COLUMNS)


def _tiers(plan: "Plan") -> Iterator[Iterator[str]]:
    for tier, tier_plan in plan.tiers.items():
        if tier is Tier.DEVICE or tier_plan.accounts or tier_plan.cap is not None:
            yield _tier(tier, tier_plan)


def _tier(tier: Tier, plan: "TierPlan") -> Iterator[str]:
    yield f"{tier} memory"
    for account, size in plan.accounts.items():
        if size:
            yield _row(account.value, size)
    yield _row("total", plan.total)
    if plan.cap is not None:
        left = plan.cap - plan.total
        verdict = f"{format_bytes(left)} free" if plan.fits else f"DOES NOT FIT, {format_bytes(-left)} over"
        yield _row("cap", plan.cap, verdict)


def _contexts(plan: "Plan") -> Iterator[str]:
    yield f"{'KV per token':{_LABEL}}{format_bytes(plan.kv_bytes_per_token):>{_SIZE}}"
    if plan.largest_context is not None:
        largest = f"{plan.largest_context} tokens" if plan.largest_context else "none: not even one block fits"
        last = plan.largest_context + plan.workload.block_length > plan.shape.max_context
        note = f"   all of the {plan.shape.max_context} that the model was made for" if last else ""
        yield f"{'largest context':{_LABEL}}{largest:>{_SIZE}}{note}"


def _streamed(plan: "Plan") -> Iterator[str]:
    if plan.streams is None:
        return
    yield "moved to the device in each forward that reads everything: the layers that it has no room for"
    for stream in plan.streams.streams:
        yield _row(stream.feature.value, stream.records, f"{len(stream.layers)} of {stream.of_layers} layers")
    yield _row("total", plan.streams.moved)


def _hidden(plan: "Plan") -> Iterator[str]:
    hidden, tokens = plan.hidden, plan.workload.context * plan.workload.sequences
    if hidden is None:
        return
    yield "if hidden states were kept, as policy polestar does (no part of the totals above)"
    for codec, size in hidden.codecs.items():
        yield _row(codec.value, size, f"{format_bytes(size // tokens)} per token")
    yield _row("centroids", hidden.centroids, f"{hidden.clusters} clusters a layer and sequence")
    yield _row("staging rings", hidden.staging, f"{hidden.slots} slots of nvfp4_delta records")


def _remarks(plan: "Plan") -> Iterator[str]:
    for warning in plan.warnings:
        yield from textwrap.wrap(f"warning: {warning}", COLUMNS, subsequent_indent="  ")
    if plan.advice:
        yield "any one of these makes it fit:"
        for advice in plan.advice:
            yield from textwrap.wrap(f"  - {advice.text}", COLUMNS, subsequent_indent="    ")


def format_count(number: int) -> str:
    """`number` as parameters are counted, in billions, millions or thousands: 8015581184 is "8.02B"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _row(label: str, size: int, note: str = "") -> str:
    exact = f"{size:,} B"
    return f"  {label:{_LABEL - 2}}{format_bytes(size):>{_SIZE}}{exact:>{_EXACT + 2}}   {note}".rstrip()
