"""The figures of a plan, as plain types and as a card."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tiered.core.buffers import Buffer
from tiered.core.byte_size import format_bytes, format_count
from tiered.core.features import Account, Tier
from tiered.core.rates import Rates
from tiered.forward.forward_bytes import kv_bytes_per_token
from tiered.forward.sizes import RAW, CallShape, Gpu
from tiered.forward.stream_bytes import StreamBytes
from tiered.forward.weight_bytes import WeightBytes
from tiered.models.shape import ModelShape
from tiered.planning.advice import Advice
from tiered.planning.times import CallTime
from tiered.planning.workload import HiddenBytes
from tiered.policies.base import StepKind

COLUMNS = 100
_OF_SHAPE = ("parameters", "layers", "width", "heads", "kv_heads", "head_dim", "vocab_size", "max_context", "noise")
_LABEL, _SIZE, _EXACT = 20, 12, 20
_ANOTHER = 'To plan for a card: --device rtx4090, or device="rtx4090"'
_BESIDE = (
    "  the CUDA context and a display come on top, in no account: leave them about 1.5 GiB (an estimate,",
    "  not measured), so a card of 24 GiB gets --memory 22.5GiB",
)
_NOTES: Mapping[Account, str] = {
    Account.STAGING: "slots that copies land in",
    Account.SPARE: "sizes that are rounded up",
    Account.LIBRARIES: "workspaces of products and attention",
}
_KINDS: Mapping[StepKind, str] = {
    StepKind.REFRESH: "every row",
    StepKind.UPDATE: "also rows that the policy renews",
    StepKind.STEP: "the block's rows",
    StepKind.PREFILL: "a part of the prompt",
    StepKind.COMMIT: "also a finished block",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Bytes of one tier by account, and its cap; None for no cap."""

    accounts: Mapping[Account, int]
    cap: int | None

    @property
    def total(self) -> int:
        return sum(self.accounts.values())

    @property
    def fits(self) -> bool:
        return self.cap is None or self.total <= self.cap


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes of one call in each tier. Prints as a card.

    Attributes:
        model: name of the model, as it was given.
        machine: the machine of the plan, in words.
        family: name of the model family.
        sizes: sizes of the model and the call.
        policy, policy_options: the policy's name and its options.
        why: the reason for the policy if something was "auto", else "".
        tiers: bytes and cap of every tier, as the runtime books them. If the policy keeps hidden states they are an
            upper bound, because the sizes of clusters are not known yet.
        largest_context: positions that fit every cap with all else equal, in whole blocks, up to the model's longest
            context. 0 if not even one block fits, None if no cap limits them.
        stretch: how the model's rotation reaches past the positions that it was trained on; "" if it does not.
        streams: features with layers that are streamed so that the device's cap holds; None if there are none.
        weights: the streamed layers of the weights.
        hidden: bytes that hidden states would take, not counted in any tier; None for a policy that keeps them.
        buffers: the call's buffers on the device.
        advice: changes that make it fit; empty if it does.
        rates: rates of the machine, for `times`; None for a machine without a name.
        tokens_per_forward: tokens that each forward is expected to commit.
        times: calls with increasing tokens a forward.
        warnings: allowed but noteworthy properties of the call.
    """

    model: str
    family: str
    sizes: CallShape
    policy: str
    policy_options: Mapping[str, Any]
    tiers: Mapping[Tier, TierPlan]
    largest_context: int | None
    streams: StreamBytes | None
    weights: WeightBytes | None
    hidden: HiddenBytes | None
    buffers: tuple[Buffer, ...]
    advice: tuple[Advice, ...]
    machine: str = ""
    stretch: str = ""
    why: str = ""
    rates: Rates | None = None
    tokens_per_forward: int = 1
    times: tuple[CallTime, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return self.sizes.shape

    @property
    def fits(self) -> bool:
        return all(tier.fits for tier in self.tiers.values())

    @property
    def shown_time(self) -> CallTime | None:
        """The entry of `times` for `tokens_per_forward`; None for a machine without a name."""
        return next((time for time in self.times if time.tokens_per_forward == self.tokens_per_forward), None)

    @property
    def reached(self) -> float | None:
        """Experts of a layer that a block's rows go to (`Experts.reached`); None for a dense model."""
        experts = self.shape.experts
        return None if experts is None else experts.reached(float(self.sizes.block_length * self.sizes.sequences))

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.shape, self.sizes.dtype, self.sizes.kv)

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON. Sizes are bytes, contexts positions."""
        shape, sizes, streamed = self.shape, self.sizes, self.weights if self.weights and self.weights.layers else None
        return {
            **{name: getattr(self, name) for name in ("model", "machine", "family")},
            **{name: getattr(shape, name) for name in _OF_SHAPE},
            **{name: getattr(sizes, name) for name in ("context", "batch", "sampled", "block_length", "dtype")},
            **{"cfg": sizes.guidance, "max_new_tokens": sizes.answer},
            **{"weights": str(sizes.weights), "kv": sizes.kv or RAW},
            **{"policy": self.policy, "policy_options": dict(self.policy_options), "why": self.why},
            **{name: getattr(self, name) for name in ("tokens_per_forward", "fits", "kv_bytes_per_token")},
            "tiers": {
                name.value: {
                    "accounts": {account.value: size for account, size in tier.accounts.items()},
                    **{"total": tier.total, "cap": tier.cap, "fits": tier.fits},
                }
                for name, tier in self.tiers.items()
            },
            **{"largest_context": self.largest_context, "trained_context": shape.trained_context},
            "buffers": [buffer.as_dict() for buffer in self.buffers],
            "stretch": self.stretch,
            "streamed": None if self.streams is None else self.streams.as_dict(),
            "streamed_weights": None if streamed is None else streamed.as_dict(self.reached),
            "if_hidden_states_were_kept": None if self.hidden is None else self.hidden.as_dict(),
            "rates": None if self.rates is None else self.rates.as_dict(),
            "times": [time.as_dict() for time in self.times],
            "warnings": list(self.warnings),
            "advice": [advice.as_dict() for advice in self.advice],
        }

    def __str__(self) -> str:
        return plan_card(self)


def machine_of(device: object, gpu: Gpu | None, rates: Rates | None) -> str:
    """The machine of `device` in words; `gpu` and `rates` as in the plan."""
    if rates is not None:
        return f"{device} ({rates.source})"
    if gpu is not None:
        return f"this machine: {gpu.name}" if gpu.name else f"a CUDA card of any kind. {_ANOTHER}"
    return f"this machine: a CPU, no GPU. {_ANOTHER}" if str(device) == "auto" else "a CPU"


def plan_card(plan: Plan) -> str:
    """`plan` as plain text, at most 100 columns wide."""
    tiers = map(list, _tiers(plan))
    sections = (
        *(_header(plan), *tiers, _streamed(plan), _contexts(plan), _hidden(plan)),
        *(_times(plan), _remarks(plan)),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _header(plan: Plan) -> Iterator[str]:
    shape, sizes = plan.shape, plan.sizes
    yield from textwrap.wrap(f"for {plan.machine}", COLUMNS, subsequent_indent="  ")
    yield from textwrap.wrap(plan.model, COLUMNS)
    yield (
        f"{plan.family}, {format_count(shape.parameters)} parameters, {shape.layers} layers, width {shape.width}, "
        f"{shape.heads} heads ({shape.kv_heads} key/value)"
    )
    options = "".join(f", {name}={value}" for name, value in plan.policy_options.items() if value is not None)
    guidance = " x 2 (guidance)" if sizes.guidance else ""
    sampled = ", sampled" if sizes.sampled else ""
    coded = f", weights {sizes.weights}" if sizes.weights.code else ""
    coded += f", keys and values {sizes.kv}" if sizes.kv else ""
    call = f"context {sizes.context}, batch {sizes.batch}{guidance}, block {sizes.block_length}"
    yield f"{call}{sampled}, {sizes.dtype}{coded}"
    yield from textwrap.wrap(f"policy {plan.policy}{options}", COLUMNS)
    if plan.why:
        yield from textwrap.wrap(f"  chosen: {plan.why}", COLUMNS, subsequent_indent="  ")


def _tiers(plan: Plan) -> Iterator[Iterator[str]]:
    for tier, tier_plan in plan.tiers.items():
        if tier is Tier.DEVICE or tier_plan.accounts or tier_plan.cap is not None:
            yield chain(_tier(tier, tier_plan), _BESIDE if tier is Tier.DEVICE and plan.sizes.gpu is not None else ())


def _tier(tier: Tier, plan: TierPlan) -> Iterator[str]:
    yield f"{tier} memory"
    for account, size in plan.accounts.items():
        if size:
            yield _row(account.value, size, _NOTES.get(account, ""))
    yield _row("total", plan.total)
    if plan.cap is not None:
        left = plan.cap - plan.total
        verdict = f"{format_bytes(left)} free" if plan.fits else f"DOES NOT FIT, {format_bytes(-left)} over"
        yield _row("cap", plan.cap, verdict)


def _contexts(plan: Plan) -> Iterator[str]:
    yield f"{'KV per token':{_LABEL}}{format_bytes(plan.kv_bytes_per_token):>{_SIZE}}"
    if plan.largest_context is not None:
        largest = f"{plan.largest_context} tokens" if plan.largest_context else "none: not even one block fits"
        shape, last = plan.shape, plan.largest_context + plan.sizes.block_length > plan.shape.max_context
        note = "   all that the model was trained on" if last else ""
        if plan.largest_context > shape.trained_context:
            note = f"   {shape.trained_context} trained, stretched by {plan.stretch}"
        yield f"{'largest context':{_LABEL}}{largest:>{_SIZE}}{note}"


def _streamed(plan: Plan) -> Iterator[str]:
    streams, weights = () if plan.streams is None else plan.streams.streams, plan.weights
    rows = [(each.feature.value, each.records, f"{len(each.layers)} of {each.of_layers} layers") for each in streams]
    experts, told = None, ""
    if weights is not None and weights.layers:
        experts, source = weights.experts, f"come from {'the files' if weights.in_files else 'disk'}"
        if experts:
            note, told = f"{weights.slots} of {weights.of_records} experts stay", _picked(plan, weights)
            told += f" {weights.below} experts {source}." if weights.below else ""
        else:
            note = f"{len(weights.layers)} of {len(weights.recorded)} layers"
            note += f", {weights.below} {source}" if weights.below else ""
        rows.insert(0, (Account.WEIGHTS.value, weights.moved(plan.reached), note))
    if not rows:
        return
    yield f"moved to the device in {_moving(plan)}: the {'experts' if experts else 'layers'} that it has no room for"
    for name, size, note in rows:
        yield _row(name, size, note)
    yield from textwrap.wrap(told, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    yield _row("total", sum(size for _, size, *_ in rows))


def _picked(plan: Plan, weights: WeightBytes) -> str:
    rows, missing = plan.sizes.block_length * plan.sizes.sequences, weights.count / weights.of_records
    return (
        f"If routers pick at random, {rows} rows pick {plan.reached:.0f} of {weights.experts} experts in a layer, "
        f"{missing:.0%} of which do not stay. Rows of one text agree more and repeat their picks, so fewer move."
    )


def _moving(plan: Plan) -> str:
    """The forwards that move all streamed bytes. A refresh recomputes keys and values, and only fetches weights."""
    shown = plan.shown_time
    if plan.streams is None or plan.shape.block_causal:
        return "every forward"
    if shown is None:
        return "every forward but a refresh"
    forwards = sum(time.count for time in shown.kinds.values())
    refreshes = shown.kinds[StepKind.REFRESH].count if StepKind.REFRESH in shown.kinds else 0
    return f"{forwards - refreshes} of {forwards} forwards, all but refreshes"


def _hidden(plan: Plan) -> Iterator[str]:
    hidden, tokens = plan.hidden, plan.sizes.context * plan.sizes.sequences
    if hidden is None:
        return
    yield "if hidden states were kept, as policy polestar does to renew keys and values (not in the totals)"
    for codec, size in hidden.codecs.items():
        yield _row(codec.value, size, f"{format_bytes(size // tokens)} per token")
    yield _row("centroids", hidden.centroids, f"{hidden.clusters} clusters a layer and sequence")
    yield _row("slots", hidden.staging, f"{hidden.slots} for rows of nvfp4_delta")


def _times(plan: Plan) -> Iterator[str]:
    rates, times, shown = plan.rates, plan.times, plan.shown_time
    if rates is None or shown is None:
        return
    kind = "measured rates" if rates.measured else "ESTIMATE, from datasheet rates"
    yield f"time of {shown.answer} tokens, {shown.tokens_per_forward} a forward: {kind} ({rates.source})"
    for forward, time in shown.kinds.items():
        seconds = f"{1e3 * time.seconds:,.1f} ms"
        rows = f"{time.count:>6} x {time.rows:,.0f} rows"
        yield f"  {forward.value:{_LABEL - 2}}{seconds:>{_SIZE}}{rows}, set by {time.bound}"
    meanings = "; ".join(f"{forward.value}: {_KINDS[forward]}" for forward in shown.kinds)
    yield from textwrap.wrap(f"  {meanings}", COLUMNS, subsequent_indent="  ")
    yield f"  {'a block':{_LABEL - 2}}{1e3 * shown.seconds / shown.blocks:>{_SIZE - 3},.1f} ms"
    paces = ", ".join(f"{time.tokens_per_second:.3g} at {time.tokens_per_forward}" for time in times)
    yield f"  tokens/s by tokens a forward: {paces}"


def _remarks(plan: Plan) -> Iterator[str]:
    for warning in plan.warnings:
        yield from textwrap.wrap(f"warning: {warning}", COLUMNS, subsequent_indent="  ")
    if plan.advice:
        yield "any one of these makes it fit:"
        for advice in plan.advice:
            yield from textwrap.wrap(f"  - {advice.text}", COLUMNS, subsequent_indent="    ")


def _row(label: str, size: int, note: str = "") -> str:
    exact = f"{size:,} B"
    return f"  {label:{_LABEL - 2}}{format_bytes(size):>{_SIZE}}{exact:>{_EXACT + 2}}   {note}".rstrip()
