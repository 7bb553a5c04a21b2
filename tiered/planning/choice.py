"""Which policy a call runs under, and which code its keys and values are in, if that is open: decided before the call
begins, and the same every time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes
from tiered.core.features import KEY_VALUE
from tiered.core.rates import Rates, nominal_rates
from tiered.forward.sizes import AUTO, DEFAULT_BLOCK_LENGTH, RAW, CallSizes, Gpu
from tiered.kernels.row_code import RowCode
from tiered.models.shape import ModelShape
from tiered.models.weight_form import CODES, RAW_WEIGHTS, WeightForm, told_drop
from tiered.planning.times import CallTime, answer_of, call_time, prompt_of
from tiered.planning.workload import Workload
from tiered.policies.auto import Auto
from tiered.policies.base import Policy
from tiered.policies.block_causal import BlockCausal
from tiered.policies.row_schedule import LEAST_STALE_PROMPT, SELDOM, row_schedule


class Row(NamedTuple):
    """A row of `TABLE`.

    Attributes:
        least_prompt: tokens of the shortest prompt from which on the policy was measured to answer as `none` does.
        least_blocks: blocks of the answer from which on the policy is the fastest.
        policy: what such a call runs under.
    """

    least_prompt: int
    least_blocks: int
    policy: Policy


# The first row whose numbers a call reaches is what `auto` means; below all of them it is `none`. Seconds: the map of
# docs/benchmarks.md (regimes), which tests/test_choice.py holds the rows to. Answers: docs/policies.md (drops: several
# blocks behind 1000 and 2000 tokens), docs/benchmarks.md (compare) and docs/embedded-model.md (accuracy).
TABLE: tuple[Row, ...] = (
    Row(960, 2, row_schedule("fast_dllm_dual", refresh_blocks=SELDOM)),
    Row(LEAST_STALE_PROMPT, 1, row_schedule("fast_dllm_dual")),
)
# An option that is "auto": its value in calls of one block or a short prompt, and in all others.
REFRESHES: Mapping[str, tuple[Any, Any]] = {"refresh": ("full", "drift"), "refresh_blocks": (1, SELDOM)}
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
    prompt: int | None = None,
    kv_open: bool = False,
    tokens_per_forward: int = 1,
    rates: Rates | None = None,
) -> Choice:
    """The policy that a call of `sizes` runs under: `policy` itself, unless an option of it is "auto". `TABLE` decides
    that by the prompt, the blocks of the answer and the `budget`.

    Args:
        prompt: tokens of the shortest prompt; None for prompts as long as the canvas has room for.
        kv_open: the code of keys and values is not that of `sizes`: they are raw, unless a step would be slowed down by
            streaming them, or they do not fit at all; then in `CHOSEN_CODE`, if that fits.
        tokens_per_forward, rates: of the estimate that `kv_open` needs.
    """
    prompt = prompt_of(sizes) if prompt is None else prompt
    chosen, why = _by_table(policy, sizes, budget, prompt)
    if not kv_open:
        return Choice(chosen, why, sizes.kv)
    rates = nominal_rates(None if sizes.gpu is None else sizes.gpu.name) if rates is None else rates

    def time(of: Workload) -> CallTime:
        return call_time(of.policy, of.sizes, of.needed(budget), rates, tokens_per_forward=tokens_per_forward)

    found, kv_why = _coded(Workload(chosen, sizes), budget, time)
    return Choice(chosen, why, found.sizes.kv, kv_why)


def _by_table(policy: Policy, sizes: CallSizes, budget: MemoryBudget, prompt: int) -> tuple[Policy, str]:
    """The policy that `policy` means in such a call, and why if an option of it is "auto"."""
    blocks = answer_of(sizes) // sizes.block_length
    if not isinstance(policy, Auto):
        seldom = prompt >= LEAST_STALE_PROMPT and blocks > 1
        opened = {name: of[seldom] for name, of in REFRESHES.items() if getattr(policy, name, None) == AUTO}
        why = f"{blocks} block{'s' * (blocks > 1)} behind {prompt} tokens"
        return (replace(policy, **opened), why) if opened else (policy, "")
    if sizes.shape.block_causal:
        return BlockCausal(), "keys and values of finished blocks are exact"
    row = next((row for row in TABLE if prompt >= row.least_prompt and blocks >= row.least_blocks), None)
    none = row_schedule("none")
    if row is None:
        return none, f"caches lose answers to prompts below {LEAST_STALE_PROMPT} tokens, as this one of {prompt}"
    if not Workload(row.policy, sizes).over(budget):
        return row.policy, f"the fastest measured for {blocks} block{'s' * (blocks > 1)} behind {prompt} tokens"
    fits = not Workload(none, sizes).over(budget)
    return none, "nothing else fits the budget" if fits else "nothing fits the budget"


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
