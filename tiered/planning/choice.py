"""Which policy a call runs under, where that is left open: decided before it begins, and the same every time."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.rates import Rates, nominal_rates
from tiered.forward.sizes import CallSizes
from tiered.planning.checks import check_policy
from tiered.planning.rehearsal import prompt_of
from tiered.planning.times import call_time
from tiered.planning.workload import Workload
from tiered.policies.base import Policy
from tiered.policies.schedule import LEAST_STALE_PROMPT

# Candidates whose times are so close are equal: a rehearsal is no closer to a call.
TIE = 1.1


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """What a call runs under.

    Attributes:
        policy: it leaves nothing open.
        why: where something was; "": it was asked for as it is.
    """

    policy: Policy
    why: str = ""

    def __str__(self) -> str:
        return f"{self.policy}: {self.why}" if self.why else str(self.policy)

    def __repr__(self) -> str:
        return f"<Choice {self}>"

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {"policy": self.policy.name, "policy_options": asdict(self.policy), "why": self.why}


def choose(
    policy: Policy,
    sizes: CallSizes,
    budget: MemoryBudget,
    *,
    tokens_per_forward: int,
    rewrites: bool = False,
    prompt: int | None = None,
    rates: Rates | None = None,
) -> Choice:
    """The policy that a call of `sizes` runs under: `policy` itself, unless it leaves something open; then the fastest
    of its candidates (`Policy.candidates`) that fits the `budget`, or where several are within a tenth of it, the
    plainest of them. Where none fits, the plainest: what it lacks is then said.

    Args:
        tokens_per_forward: that are committed in each, of a sequence.
        rewrites: whether any token of a block may change in a step.
        prompt: tokens of the shortest prompt; None: all are as long as the canvas has room for.
        rates: of the machine; None: nominal ones, by its name.
    """
    longest = prompt_of(sizes)
    prompt = longest if prompt is None else prompt
    candidates = policy.candidates(sizes, prompt)
    if candidates == (policy,):
        return Choice(policy)
    fitting = [each for each in candidates if goes(each, sizes, rewrites) and not Workload(each, sizes).over(budget)]
    if len(fitting) < 2:
        return Choice((fitting or candidates)[0], _why_alone(prompt, candidates, fitting))
    rates = nominal_rates(None if sizes.gpu is None else sizes.gpu.name) if rates is None else rates
    # Prompts of about one length have one rehearsal.
    block = sizes.block_length
    about = replace(sizes, context=sizes.context + -longest % block)
    seconds = [
        call_time(
            each, about, Workload(each, sizes).needed(budget), rates, tokens_per_forward=tokens_per_forward
        ).seconds
        for each in fitting
    ]
    found = next(number for number, time in enumerate(seconds) if time <= TIE * min(seconds))
    other = 0 if found else min(range(1, len(fitting)), key=seconds.__getitem__)
    return Choice(
        fitting[found],
        f"{seconds[found] / seconds[other]:.2g} of the time of {fitting[other]} where a forward commits "
        f"{tokens_per_forward}: an estimate ({rates.source})",
    )


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


def _why_alone(prompt: int, candidates: tuple[Policy, ...], fitting: list[Policy]) -> str:
    if len(candidates) == 1:
        return f"caches lose answers to prompts below {LEAST_STALE_PROMPT} tokens, as this one of {prompt}"
    return "nothing else fits the budget" if fitting else "nothing fits the budget"
