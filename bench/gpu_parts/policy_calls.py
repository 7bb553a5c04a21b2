"""One call of a policy over the random LLaDA: the kinds and times of its forwards, and faults of its answer. Its bytes
by the ledger, by torch and by the driver stand beside planned and booked ones."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from allocations import resident_peak
from torch import Tensor

import tiered
from gpu_parts.random_llada import llada_config, random_ids
from gpu_parts.setting import Setting
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.models.base import DiffusionModel
from tiered.models.weight_form import FIXED_WEIGHTS
from tiered.offload.codec_bytes import Codec
from tiered.output import GenerationOutput
from tiered.planning.plan import Plan
from tiered.policies.base import Policy, Step, StepKind
from tiered.policies.polestar import hidden_bytes
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

BLOCK = 32
_TINY_RECORD = 4  # rows


class Resident(Polestar):
    """Polestar with hidden states that stay on the device."""

    __slots__ = ()
    hidden_tier = Tier.DEVICE


# The most important policies come first, because a day may run out of time.
_VARIANTS: Mapping[str, Policy] = {
    "fast_dllm_dual": make_policy("fast_dllm_dual"),
    "polestar_resident": Resident(codec=Codec.RAW),
    "polestar_raw": Polestar(codec=Codec.RAW),
    "polestar_delta": Polestar(codec=Codec.NVFP4_DELTA),
    "uniform": make_policy("uniform"),
    "none": make_policy("none"),
}
NAMES = tuple(_VARIANTS)


def policy_of(variant: str, setting: Setting) -> Policy:
    """The policy of one of `NAMES`; at tiny sizes with more clusters than an update renews."""
    policy = _VARIANTS[variant]
    return replace(policy, clusters=6, top_m=2) if setting.tiny and isinstance(policy, Polestar) else policy


def small_records(setting: Setting) -> AbstractContextManager[object]:
    """Records of a few rows in a rehearsal. Else its slots would hold all records, and nothing would be fetched."""
    return patch.object(hidden_bytes, "RECORD_ROWS", _TINY_RECORD) if setting.tiny else nullcontext()


def patient(policy: Policy) -> Policy:
    """`policy`, if it updates, with plain steps in a call of four forwards: refresh, step, step, update."""
    return replace(policy, update_threshold=BLOCK // 2) if isinstance(policy, Polestar) else policy


def one_after_another(answer: int, steps: int) -> dict[str, Any]:
    """Options of `generate` for a number of forwards that does not depend on the tokens."""
    return {"max_new_tokens": answer, "block_length": BLOCK, "steps": steps, "stop_at_eos": False}


@dataclass
class Kinds(Inspector):
    """Notes the kind of every forward."""

    kinds: list[StepKind] = field(default_factory=list)

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        self.kinds.append(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCall:
    """Sizes of a call: positions of prompt and answer together, tokens of the answer, steps of all its blocks."""

    positions: int
    answer: int = BLOCK
    steps: int

    def options(self) -> dict[str, Any]:
        """Options of `generate`."""
        return one_after_another(self.answer, self.steps)

    def run(self, runtime: Runtime, setting: Setting) -> "Measured":
        """The call, with every forward's kind noted."""
        kinds, ids = Kinds(), random_ids(setting, self.positions - self.answer)
        out = runtime.generate(ids, inspector=kinds, **self.options())
        return Measured(out=out, kinds=tuple(kinds.kinds), answer=out.sequences[0, -self.answer :].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of a call: its output, the kinds of its forwards, in order, and the token ids of its answer."""

    out: GenerationOutput
    kinds: tuple[StepKind, ...]
    answer: list[int]

    def milliseconds(self) -> dict[StepKind, list[float]]:
        """Milliseconds of the forwards with their commits, by kind."""
        by_kind: dict[StepKind, list[float]] = {}
        for kind, of_step in zip(self.kinds, self.out.timings.steps, strict=True):
            by_kind.setdefault(kind, []).append(1000 * of_step)
        return by_kind

    def faults(self, model: DiffusionModel) -> Iterator[str]:
        """Faults that no call may have, even with random weights."""
        if strangers := [token for token in self.answer if not 0 <= token < model.shape.vocab_size]:
            yield f"tokens {strangers} are not in the vocabulary"
        if left := self.answer.count(model.mask_token_id):
            yield f"{left} of {len(self.answer)} tokens are still masks"


def planned(setting: Setting, policy: Policy, call: PolicyCall, memory: MemoryBudget | None = None) -> Plan:
    """The plan of exactly this call."""
    sizes: dict[str, Any] = {"context": call.positions, "max_new_tokens": call.answer, "block_length": BLOCK}
    config = llada_config(setting)
    return tiered.plan(config, policy=policy, memory=memory, device=setting.device, weights=FIXED_WEIGHTS, **sizes)


class CallMemory:
    """The device's memory before a call; `figures` and `faults` compare it with the memory of the call."""

    def __init__(self, device: torch.device) -> None:
        """Give back memory that torch has freed, so that its peak is the need of the call."""
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._allocated = torch.cuda.memory_allocated() if self._cuda else None
        self._outside = self._outside_torch()
        self._resident = _resident_peak(restart=True)

    def figures(self, out: GenerationOutput, plan: Plan) -> dict[str, Any]:
        """Bytes; None if the device keeps no such count, as the CPU does not.

        `libraries_before_bytes`: bytes that torch held before the call beside the weights. Libraries keep them; they
        are a part of `libraries_booked_bytes`.
        `plan_difference_share`: the peak of torch over the plan's total, less 1.
        """
        plans, booked, peak = plan.tiers[Tier.DEVICE], out.memory.peak_device_bytes, out.memory.allocator_peak
        at_peak, pins = out.memory.tiers[Tier.DEVICE].at_peak, out.tiers
        stats = torch.cuda.memory_stats() if self._cuda else {}
        row: dict[str, Any] = {"planned_device_bytes": plans.total, "planned_host_bytes": plan.tiers[Tier.HOST].total}
        row |= {"booked_device_bytes": booked, "booked_host_bytes": out.memory.peak_host_bytes}
        for name, accounts in (("planned", plans.accounts), ("booked", at_peak)):
            row[f"{name}_device_accounts_bytes"] = {account.value: size for account, size in accounts.items()}
        row |= {"allocator_peak_bytes": peak, "libraries_booked_bytes": at_peak.get(Account.LIBRARIES, 0)}
        row["libraries_before_bytes"] = self._before(out)
        row["plan_difference_share"] = None if peak is None else (peak - plans.total) / plans.total
        row["booked_difference_share"] = None if peak is None else (peak - booked) / booked
        for name in ("reserved", "inactive_split"):
            row[f"{name}_peak_bytes"] = stats.get(f"{name}_bytes.all.peak")
        row |= {"outside_torch_before_bytes": self._outside, "outside_torch_after_bytes": self._outside_torch()}
        row["pinned_asked_bytes"] = None if pins is None else pins.pinned_requested
        row["pinned_bytes"] = pins.pinned_actual if pins is not None and pins.pinned else None
        return row | {"resident_before_bytes": self._resident, "resident_peak_bytes": _resident_peak()}

    def faults(self, out: GenerationOutput, cap: int | None = None) -> Iterator[str]:
        """Faults of a call that held more than its books, or more than `cap`: law 4."""
        peak, booked = out.memory.allocator_peak, out.memory.peak_device_bytes
        for limit, what in ((booked, "that were booked"), (cap, "of the cap")):
            if peak is not None and limit is not None and peak > limit:
                libraries = out.memory.tiers[Tier.DEVICE].at_peak.get(Account.LIBRARIES, 0)
                before = self._before(out)
                known = "" if before is None else f"; {before} were there before the call, {libraries} are libraries'"
                yield f"torch held {peak} bytes, {peak - limit} more than the {limit} {what}{known}"

    def _before(self, out: GenerationOutput) -> int | None:
        """Bytes that torch held before the call beside the weights."""
        weights = out.memory.tiers[Tier.DEVICE].at_peak.get(Account.WEIGHTS, 0)
        return None if self._allocated is None else self._allocated - weights

    def _outside_torch(self) -> int | None:
        """Bytes of the device in use that torch's allocator does not hold: the context, libraries, other processes."""
        if not self._cuda:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def _resident_peak(restart: bool = False) -> int | None:
    """As `resident_peak`; if the system refuses a restart, the peak of the process."""
    if restart:
        with suppress(OSError):
            return resident_peak(restart=True)
    return resident_peak()
