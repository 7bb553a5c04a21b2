"""The bytes of a call by tier and account, forward by forward: the ledger, and beside it what torch allocates.

Every operation of another, equal call is watched; the module that asked for a storage tells it from others. Kept bytes
(features, rings, records and the memory that they lie in) have to agree within 1 % and a page. Passes are booked before
they begin, at the most that they can take, and allocations have to stay below.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from allocations import Allocations, resident_peak
from measuring.worker import refusing
from torch import Tensor

import tiered
from tiered.core.canvas import Canvas
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.observers import CallInspector
from tiered.forward.forward import Forward
from tiered.inputs import Inputs
from tiered.models.presets import preset_names, read_preset
from tiered.models.shape import ModelShape
from tiered.models.weight_form import FIXED_WEIGHTS, weight_bytes
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.policies.base import PolicyState, Step, StepKind
from workloads.subjects import loaded, prompts, variant_named

BLOCK, STEPS, PAGE = 32, 32, 4096
# Kept bytes: accounts that do not come and go with passes, and by tier the modules that ask for their storages.
KEPT = frozenset(Account) - {
    Account.WEIGHTS, Account.CENTROIDS, Account.LOGITS, Account.ACTIVATIONS, Account.LIBRARIES
}  # fmt: skip
ASKED_BY = {
    Tier.DEVICE: ("tiered.forward.feature_store", "tiered.offload.chunk"),
    Tier.HOST: ("tiered.offload.pinning",),
}
FEATURES = (Account.KEY, Account.VALUE, Account.CENTROIDS, Account.STAGING, Account.HIDDEN)
OF = ("about", "tier", "account", "forward", "layer", "what")
TIMED = ("busy_ms", "hidden_ms", "exposed_ms", "resident_bytes")


class MemoryTimeline(CallInspector):
    """Reads `ledger` after each forward.

    A call books the passes of a model before it begins, at the most that they can take, so `ACTIVATIONS` and `LOGITS`
    are level. Bytes move with records and centroids alone.

    Attributes:
        rows: bytes by tier and account after each forward; "forward" -1 is before the first.
        widest: by tier, bytes of `KEPT` in the ledger and in `allocations` after the forward at which they differ most.
            Of equal ones, the one with most bytes counts.
        host_peak: most bytes of the host tier after a forward.
    """

    def __init__(self, ledger: Ledger, allocations: Allocations | None = None) -> None:
        self._ledger, self._allocations, self._forward = ledger, allocations, -1
        self.rows: list[dict[str, Any]] = []
        self.widest: dict[Tier, tuple[int, int]] = dict.fromkeys(ASKED_BY, (0, 0))
        self.host_peak = 0
        self._note(0, "")

    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """No row is stored yet."""
        self._references = {tier: self._ledger.accounts(tier).get(Account.CENTROIDS, 0) for tier in Tier}

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        self._note(step.block, kind.value)
        for tier, modules in ASKED_BY.items():
            accounts = self._ledger.accounts(tier)
            booked = sum(size for account, size in accounts.items() if account in KEPT)
            # Centroids of stored rows are kept too.
            booked += accounts.get(Account.CENTROIDS, 0) - self._references.get(tier, 0)
            both = booked, booked if self._allocations is None else self._allocations.held_by(*modules)
            self.widest[tier] = max(self.widest[tier], both, key=lambda pair: (abs(pair[0] - pair[1]), pair[0]))

    def _note(self, block: int, kind: str) -> None:
        tiers = {tier: self._ledger.accounts(tier) for tier in Tier}
        self.rows += by_account(tiers, about="bytes", forward=self._forward, block=block, **{"pass": kind})
        self.host_peak = max(self.host_peak, self._ledger.held(Tier.HOST))
        self._forward += 1


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    """Rows, which "about" tells apart: "bytes" after each forward, "features" at the peak, "resident" (growth of the
    process), "check", "copies" and "drift". A model that is only planned has "plan" and "features".

    `settings` has those of a model, "policy" (a variant's name), "options" of it, "positions" (prompt and answer),
    "answer" (tokens) and "room". That is the share of the call's bytes beside the weights that fits; None for no cap.
    """
    variant, positions, answer = variant_named(settings["policy"]), settings["positions"], settings["answer"]
    given = dict(variant.given) | settings["options"]
    with refusing():
        if settings["model"] in preset_names():
            config = read_preset(settings["model"]) | {"max_sequence_length": positions}
            plan = tiered.plan(
                config, context=positions, block_length=BLOCK, policy=variant.policy, weights=FIXED_WEIGHTS, **given
            )
            tiers = {tier: of.accounts for tier, of in plan.tiers.items()}
            return [*by_account(tiers, about="plan"), features(tiers, plan.shape, positions)]
        runtime, prompt = loaded(settings, paths, positions), prompts(settings, positions - answer)
        call = variant.call(answer=answer, block=BLOCK) | {"steps": STEPS, "stop_at_eos": False}
        runtime = with_books(runtime.with_policy(variant.policy, **given), settings["room"], prompt, **call)
        # A short call pays for thread pools and the math library's workspaces.
        runtime.generate(prompts(settings, min(256, positions - answer)), **call)
        runtime = afresh(runtime, runtime.ledger.budget)
        before, timeline = resident_peak(restart=True), MemoryTimeline(runtime.ledger)
        out = runtime.generate(prompt, inspector=timeline, **call)
        after, booked = resident_peak(), _without_weights(runtime, out) + out.memory.peak_host_bytes
    tiers = {tier: report.at_peak for tier, report in out.memory.tiers.items()}
    rows = [*timeline.rows, features(tiers, runtime.model.shape, out.sequences.shape[1])]
    if before is not None and after is not None:
        rows.append({"about": "resident", "ledger": booked, "resident_bytes": after - before})
    return [*rows, *checks(runtime, prompt, **call), *copies(out), *drift(out)]


def with_books(runtime: tiered.Runtime, room: float | None, prompt: Inputs, **call: Any) -> tiered.Runtime:
    """The runtime with a ledger of its own, which has the weights, and a cap by `room` as in `measure`."""

    weights, budget = weight_bytes(runtime.model.shape, "float32"), None
    if room is not None:
        taken = _without_weights(runtime, runtime.generate(prompt, **call))
        budget = tiered.MemoryBudget(device=weights + int(room * taken), host="4GiB")
    return afresh(runtime, budget)


def afresh(runtime: tiered.Runtime, budget: tiered.MemoryBudget | None) -> tiered.Runtime:
    """The runtime under `budget`, with no host memory of earlier calls."""
    ledger = Ledger(budget)
    ledger.allocate({Account.WEIGHTS: weight_bytes(runtime.model.shape, "float32")})
    return tiered.Runtime(runtime.model, policy=runtime.policy, ledger=ledger, tokenizer=runtime.tokenizer)


def by_account(tiers: Mapping[Tier, Mapping[Account, int]], **of: Any) -> Iterator[dict[str, Any]]:
    """A row for each account that holds bytes."""
    for tier, accounts in tiers.items():
        for account, size in accounts.items():
            if size:
                yield of | {"tier": tier.value, "account": account.value, "bytes": size}


def features(tiers: Mapping[Tier, Mapping[Account, int]], shape: ModelShape, positions: int) -> dict[str, Any]:
    """Features on the device, and hidden states on the host by their elements: of all layers but first and last."""
    device, hidden = tiers[Tier.DEVICE], tiers[Tier.HOST].get(Account.HIDDEN, 0)
    kept = sum(device.get(account, 0) for account in FEATURES)
    element = hidden / ((shape.layers - 2) * positions * shape.width) if hidden else None
    return {"about": "features", "feature_bytes": kept, "bytes_per_element": element}


def checks(runtime: tiered.Runtime, prompt: Inputs, **call: Any) -> list[dict[str, Any]]:
    """Bytes of a call by the ledger, beside bytes that torch allocates while it runs."""
    runtime = afresh(runtime, runtime.ledger.budget)
    with Allocations() as allocations:
        kept = MemoryTimeline(runtime.ledger, allocations)
        out = runtime.generate(prompt, inspector=kept, **call)
    rows = [check(tier, "kept", *both, allowed=int(0.01 * both[0]) + PAGE) for tier, both in kept.widest.items()]
    # Without a GPU both tiers are ordinary memory. Weights were there before.
    booked = _without_weights(runtime, out) + kept.host_peak
    rows.append(check("both", "peak, passes included", booked, allocations.peak, allowed=None))
    if out.memory.allocator_peak is not None:
        peaks = out.memory.peak_device_bytes, out.memory.allocator_peak
        rows.append(check(Tier.DEVICE, "peak of CUDA's allocator", *peaks, allowed=None))
    return rows


def _without_weights(runtime: tiered.Runtime, out: GenerationOutput) -> int:
    return out.memory.peak_device_bytes - runtime.ledger.held(Tier.DEVICE, Account.WEIGHTS)


def check(tier: str, what: str, ledger: int, allocator: int, *, allowed: int | None) -> dict[str, Any]:
    """`allowed`: bytes of difference; None if the allocator has to stay below the ledger, because passes are in it."""
    difference = allocator - ledger
    agrees = difference <= 0 if allowed is None else abs(difference) <= allowed
    row = {"about": "check", "tier": str(tier), "what": what, "ledger": ledger, "allocator": allocator}
    row |= {"difference": difference, "allowed": allowed, "agrees": agrees}
    why = f"{tier}, {what}: {allocator} bytes allocated, {ledger} in the ledger"
    return row if agrees else row | {"status": "failed", "why": why}


def copies(out: GenerationOutput) -> Iterator[dict[str, Any]]:
    """The time of each layer's fetches, and the parts of it that compute hid, and waited for."""
    for layer, ways in sorted(out.tiers.layers.items()) if out.tiers is not None else ():
        if (way := ways[Lane.FETCH]).jobs:
            times = {"busy_ms": way.busy_ns, "hidden_ms": way.hidden_ns, "exposed_ms": way.exposed_ns}
            yield {"about": "copies", "layer": layer, "bytes": way.nbytes} | {n: ns / 1e6 for n, ns in times.items()}


def drift(out: GenerationOutput) -> Iterator[dict[str, Any]]:
    """The drift of the clusters of each layer at each update: their mean and the largest."""
    for update in out.updates:
        found = [of_cluster for of_sequence in update.drift for of_cluster in of_sequence]
        if found:
            at = {"about": "drift", "forward": update.forward, "layer": update.layer}
            yield at | {"mean": sum(found) / len(found), "largest": max(found)}
