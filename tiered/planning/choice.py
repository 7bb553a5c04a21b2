"""Which policy a call runs under, and which code its keys and values are in, where that is left open: decided before it
begins, and the same every time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes
from tiered.core.features import KEY_VALUE
from tiered.core.rates import Rates, nominal_rates
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH, RAW, CallSizes, Gpu
from tiered.kernels.row_code import RowCode
from tiered.models.shape import ModelShape
from tiered.models.weight_form import CODES, RAW_WEIGHTS, WeightForm, told_drop
from tiered.planning.checks import check_policy
from tiered.planning.rehearsal import prompt_of
from tiered.planning.times import CallTime, call_time
from tiered.planning.workload import Workload
from tiered.policies.base import Policy
from tiered.policies.block_causal import BlockCausal
from tiered.policies.row_schedule import LEAST_STALE_PROMPT

# Candidates whose times are so close are equal: a rehearsal is no closer to a call.
TIE = 1.1
# A step that streams raw keys and values may take so many times as long as one over a code before the code is chosen.
PATIENCE = 1.25
# The one that may be chosen, which rounds least; `bench/measure.py drops` counts the answers that it costs. Others are
# for who names them.
CHOSEN_CODE = RowCode.FP8


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """What a call runs under.

    Attributes:
        policy: it leaves nothing open.
        why: where something was; "": it was asked for as it is.
        kv: code of keys and values; None: they are raw.
        kv_why: where that was open, and raw ones do not fit the device.
    """

    policy: Policy
    why: str = ""
    kv: RowCode | None = None
    kv_why: str = ""

    def __str__(self) -> str:
        parts = [f"{self.policy}: {self.why}" if self.why else str(self.policy)]
        return "; ".join([*parts, self.kv_why] if self.kv_why else parts)

    def __repr__(self) -> str:
        return f"<Choice {self}>"

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        policy = {"policy": self.policy.name, "policy_options": self.policy.options, "why": self.why}
        return policy | {"kv": self.kv or RAW, "kv_why": self.kv_why}


def choose(
    policy: Policy,
    sizes: CallSizes,
    budget: MemoryBudget,
    *,
    tokens_per_forward: int,
    kv_open: bool = False,
    rewrites: bool = False,
    prompt: int | None = None,
    rates: Rates | None = None,
) -> Choice:
    """The policy that a call of `sizes` runs under: `policy` itself, unless it leaves something open; then the fastest
    of its candidates (`Policy.candidates`) that fits the `budget`, or where several are within a tenth of it, the
    plainest of them. Where none fits, the plainest: what it lacks is then said.

    Args:
        tokens_per_forward: that are committed in each, of a sequence.
        kv_open: the code of keys and values is not that of `sizes`: they are raw, unless a step would be slowed down by
            streaming them, or they do not fit at all; then in `CHOSEN_CODE`, if that fits.
        rewrites: whether any token of a block may change in a step.
        prompt: tokens of the shortest prompt; None: all are as long as the canvas has room for.
        rates: of the machine; None: nominal ones, by its name.
    """
    longest = prompt_of(sizes)
    prompt = longest if prompt is None else prompt
    candidates = policy.candidates(sizes, prompt)
    if candidates == (policy,) and not kv_open:
        return Choice(policy, kv=sizes.kv)
    rates = nominal_rates(None if sizes.gpu is None else sizes.gpu.name) if rates is None else rates

    def time(of: Workload) -> CallTime:
        # Prompts of about one length have one rehearsal.
        about = replace(of.sizes, context=of.sizes.context + -longest % of.sizes.block_length)
        return call_time(of.policy, about, of.needed(budget), rates, tokens_per_forward=tokens_per_forward)

    def chosen(of: Workload, why: str) -> Choice:
        return Choice(of.policy, why, of.sizes.kv, reasons[of])

    reasons = {Workload(each, sizes): "" for each in candidates}
    if kv_open:
        reasons = dict(_coded(of, budget, time) for of in reasons)
    if candidates == (policy,):
        return chosen(next(iter(reasons)), "")
    fitting = [of for of in reasons if goes(of.policy, sizes, rewrites) and not of.over(budget)]
    if len(fitting) < 2:
        return chosen((fitting or [*reasons])[0], _why_alone(prompt, candidates, fitting))
    seconds = [time(of).seconds for of in fitting]
    found = next(number for number, each in enumerate(seconds) if each <= TIE * min(seconds))
    other = 0 if found else min(range(1, len(fitting)), key=seconds.__getitem__)
    return chosen(
        fitting[found],
        f"{seconds[found] / seconds[other]:.2g} of the time of {fitting[other].policy} where a forward commits "
        f"{tokens_per_forward}: an estimate ({rates.source})",
    )


def _coded(raw: Workload, budget: MemoryBudget, time: Callable[[Workload], CallTime]) -> tuple[Workload, str]:
    """The call with the keys and values that it is to have, and what raw ones would cost where they do not fit."""
    streams, over = raw.needed(budget).streams, raw.over(budget)
    moved = 0 if streams is None else sum(one.records for one in streams.streams if one.feature in KEY_VALUE)
    coded = raw.resized(kv=CHOSEN_CODE)
    if not (moved or over) or coded.over(budget) or coded.total() >= raw.total():
        return raw, ""
    changed = f"keys and values {CHOSEN_CODE}, which changes answers"
    if over:
        return coded, f"{changed}: raw ones do not fit"
    longer = _step(time(raw)) / _step(time(coded))
    cost = f"{format_bytes(moved)} to the device in each step, {longer:.2g} times as long as with {CHOSEN_CODE}"
    if longer <= PATIENCE:
        return raw, f"raw keys and values: {cost} (an estimate)"
    return coded, f"{changed}: raw ones would bring {cost} (an estimate)"


def choose_form(
    policy: Policy, shape: ModelShape, dtype: str, gpu: Gpu | None, budget: MemoryBudget, *, rates: Rates | None = None
) -> tuple[WeightForm, str]:
    """The form that the weights are to have, and what to tell of it where that is a code. Weights are loaded before
    there is a call, so that what decides is a small one: of one sequence, with one block behind a prompt as long.

    Raw, unless layers have to be streamed in that call, which then takes so much longer than with the quickest form
    (`PATIENCE`); then the first of `CODES`, least drop first, of which that is not so.
    """
    block = max(1, min(DEFAULT_BLOCK_LENGTH, shape.max_context // 2))
    context = min(2 * block, shape.max_context)
    sizes = CallSizes(shape=shape, batch=1, context=context, block_length=block, dtype=dtype, gpu=gpu)
    rates = nominal_rates(None if gpu is None else gpu.name) if rates is None else rates
    rate: dict[str, Any] = {"tokens_per_forward": 1, "rates": rates}
    seconds: dict[WeightForm, float] = {}
    streamed: dict[WeightForm, int] = {}
    for form in (RAW_WEIGHTS, *map(WeightForm, CODES)):
        of_form = replace(sizes, weights=form)
        call = Workload(choose(policy, of_form, budget, **rate).policy, of_form)
        if call.over(budget):
            continue
        needed = call.needed(budget)
        streamed[form] = 0 if needed.weights is None else needed.weights.moved
        if form is RAW_WEIGHTS and not streamed[form]:
            return form, ""
        seconds[form] = call_time(call.policy, of_form, needed, rates, tokens_per_forward=1).seconds
    if not seconds:
        return RAW_WEIGHTS, ""  # what it lacks is then said
    least = min(seconds.values())
    form = next(form for form in seconds if not streamed[form] or seconds[form] <= PATIENCE * least)
    if form is RAW_WEIGHTS:
        return form, ""
    raw = ""
    if RAW_WEIGHTS in seconds:
        longer = seconds[RAW_WEIGHTS] / seconds[form]
        raw = (
            f": raw ones would bring {format_bytes(streamed[RAW_WEIGHTS])} to the device in each step, and a call take "
            f"{longer:.2g} times as long (an estimate)"
        )
    return form, f"weights {form}, which changes answers ({told_drop(form)}){raw}"


def _step(time: CallTime) -> float:
    """Seconds of the shortest kind of forward."""
    return min(kind.seconds for kind in time.kinds.values())


def goes(policy: Policy, sizes: CallSizes, rewrites: bool) -> bool:
    """Whether the model and the policy go together in such a call."""
    try:
        check_policy(
            policy, sizes.shape, name=sizes.shape.family, block_length=sizes.block_length, guidance=None, ordered=False,
            rewrites=rewrites,
        )  # fmt: skip
    except ValueError:
        return False
    return True


def _why_alone(prompt: int, candidates: tuple[Policy, ...], fitting: list[Workload]) -> str:
    if BlockCausal() in candidates:
        return "keys and values of finished blocks are exact"
    if len(candidates) == 1:
        return f"caches lose answers to prompts below {LEAST_STALE_PROMPT} tokens, as this one of {prompt}"
    return "nothing else fits the budget" if fitting else "nothing fits the budget"
