"""One call of a policy over the random LLaDA: the kinds of its forwards, what each took, and whether it makes sense."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tiered
from gpu_parts.call_watch import Kinds
from gpu_parts.random_llada import llada_config, random_ids
from gpu_parts.setting import Setting
from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier
from tiered.models.base import DiffusionModel
from tiered.offload.codec_bytes import Codec
from tiered.output import GenerationOutput
from tiered.planning.plan import Plan
from tiered.policies.base import Policy, StepKind
from tiered.policies.fast_dllm import FastDLLMDual
from tiered.policies.none import NoCache
from tiered.policies.polestar.policy import Polestar
from tiered.policies.uniform_cache import UniformCache
from tiered.runtime import Runtime

BLOCK = 32
# What matters most comes first, for a day that runs out of time.
_VARIANTS: Mapping[str, Policy] = {
    "fast_dllm_dual": FastDLLMDual(),
    "polestar_resident": Polestar(codec=Codec.RAW, hidden_tier=Tier.DEVICE),
    "polestar_raw": Polestar(codec=Codec.RAW),
    "polestar_delta": Polestar(codec=Codec.NVFP4_DELTA),
    "uniform": UniformCache(),
    "none": NoCache(),
}
NAMES = tuple(_VARIANTS)


def policy_of(variant: str, setting: Setting) -> Policy:
    """The policy of one of `NAMES`; at tiny sizes with more clusters than an update renews."""
    policy = _VARIANTS[variant]
    return replace(policy, clusters=6, top_m=2) if setting.tiny and isinstance(policy, Polestar) else policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCall:
    """Sizes of a call.

    Attributes:
        positions: prompt and answer together.
        answer: tokens of it, in blocks of `BLOCK`.
        steps: of all blocks together.
    """

    positions: int
    answer: int = BLOCK
    steps: int

    def options(self) -> dict[str, Any]:
        """Of `generate`: as many forwards and tokens whatever the tokens are."""
        return {
            "max_new_tokens": self.answer, "block_length": BLOCK, "steps": self.steps, "stop_at_eos": False
        }  # fmt: skip

    def run(self, runtime: Runtime, setting: Setting) -> "Measured":
        """The call, with every forward's kind noted."""
        kinds = Kinds()
        ids = random_ids(setting, self.positions - self.answer)
        out = runtime.generate(ids, inspector=kinds, **self.options())
        return Measured(out=out, kinds=tuple(kinds.kinds), answer=out.sequences[0, -self.answer :].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of a call.

    Attributes:
        out: of the runtime.
        kinds: of the forwards, in order.
        answer: token ids.
    """

    out: GenerationOutput
    kinds: tuple[StepKind, ...]
    answer: list[int]

    def milliseconds(self) -> dict[StepKind, list[float]]:
        """Of the forwards with their commits, by kind.

        Raises:
            RuntimeError: there are not as many times as forwards.
        """
        seconds = self.out.timings.steps
        if len(seconds) != len(self.kinds):
            raise RuntimeError(f"{len(seconds)} times of {len(self.kinds)} forwards")
        by_kind: dict[StepKind, list[float]] = {}
        for kind, of_step in zip(self.kinds, seconds, strict=True):
            by_kind.setdefault(kind, []).append(1000 * of_step)
        return by_kind

    def faults(self, model: DiffusionModel) -> Iterator[str]:
        """What no call may come to, however random its weights are."""
        strangers = [token for token in self.answer if not 0 <= token < model.shape.vocab_size]
        if strangers:
            yield f"tokens {strangers} are not in the vocabulary"
        left = self.answer.count(model.mask_token_id)
        if left:
            yield f"{left} of {len(self.answer)} tokens are still masks"


def patient(policy: Policy) -> Policy:
    """`policy`, where it updates, with plain steps in a call of four forwards: refresh, step, step, update."""
    return replace(policy, update_threshold=BLOCK // 2) if isinstance(policy, Polestar) else policy


def planned(setting: Setting, policy: Policy, call: PolicyCall, memory: MemoryBudget | None = None) -> Plan:
    """What `tiered.plan` says of exactly this call."""
    return tiered.plan(
        llada_config(setting),
        context=call.positions,
        max_new_tokens=call.answer,
        block_length=BLOCK,
        policy=policy,
        memory=memory,
        device=setting.device,
    )
