"""The bytes of one call in every tier, booked before it begins."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import Buffer, dtype_name
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.modes import Turn
from tiered.forward.library_bytes import gpu_of
from tiered.forward.sizes import CallShape
from tiered.forward.streamed_weights import StreamedWeights
from tiered.forward.together import shared_bytes
from tiered.kernels.row_code import RowCode
from tiered.models.base import DiffusionModel
from tiered.models.weight_form import FIXED_WEIGHTS
from tiered.offload.device import computing_on, restart_allocator_peak
from tiered.offload.transport import Transport
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.tiers.host_pool import HostPool
from tiered.tiers.tiers import Tiers


class CallContext:
    """Books the calls of one model in one ledger, and makes their tiers.

    Calls of one thread may take turns. Calls of several threads run in parallel, unless layers of the weights are
    streamed: their ring and the model's matrices serve one thread at a time.
    """

    def __init__(
        self,
        model: DiffusionModel,
        ledger: Ledger,
        transport: Callable[[], Transport] | None,
        kv: RowCode | None,
        weights: StreamedWeights | None,
    ) -> None:
        """
        Args:
            transport: makes a call's transport between the tiers; None for the device's own.
            kv: code of keys and values; None for raw ones.
            weights: weights of the model that may leave the device; None if all stay.
        """
        self._loaded: DiffusionModel | None = model
        self._ledger, self._transport = ledger, transport
        self.kv = kv
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, dtype_name(parameter.dtype)
        self._gpu = gpu_of(self.device)
        self._turn = Turn()
        self._under_way: set[object] = set()
        self._pool = HostPool(ledger, self.device) if weights is None else weights.pool
        self.weights = weights
        own = dict.fromkeys(Tier, 0) if weights is None else weights.held()
        # Bytes held between calls, without idle host memory and streamed weights.
        self._standing = {tier: ledger.held(tier) - ledger.idle(tier) - own[tier] for tier in Tier}

    @property
    def model(self) -> DiffusionModel:
        """The model. Raises `ValueError` if the runtime is closed."""
        if self._loaded is None:
            raise ValueError("the runtime is closed; load the model again with tiered.from_pretrained")
        return self._loaded

    @property
    def budget(self) -> MemoryBudget:
        return self._ledger.budget

    @property
    def closed(self) -> bool:
        return self._loaded is None

    def close(self) -> None:
        """Drop the model and the host memory that calls share, and release both in the ledger. It waits while layers of
        the weights are streamed to another thread."""
        with self._turn.held():
            self._loaded = None
            if self.weights is not None:
                self.weights.close()
                self.weights = None
            self._pool.close()
            self._ledger.release({Account.WEIGHTS: self._ledger.held(Tier.DEVICE, Account.WEIGHTS)})

    def sizes(self, batch: int, context: int, block_length: int, **more: Any) -> CallShape:
        """The sizes of a call of this model; `more`: other fields of `CallShape`."""
        return CallShape(
            shape=self.model.shape,
            batch=batch,
            context=context,
            block_length=block_length,
            dtype=self._dtype,
            weights=FIXED_WEIGHTS if self.weights is None else self.weights.records.form,
            kv=self.kv,
            gpu=self._gpu,
            **more,
        )

    def check_alone(self, policy: Policy, sizes: CallShape) -> None:
        """Raise `TierCapacityError` if a tier has no room for the call even without other calls."""
        self._needed(policy, sizes, self._standing, self.weights)

    def _needed(
        self,
        policy: Policy,
        sizes: CallShape,
        held: Mapping[Tier, int],
        weights: StreamedWeights | None,
        inspected: Mapping[Account, int] = MappingProxyType({}),
    ) -> CallBytes:
        hint = _hint(policy.needs(sizes).records)
        needed = CallBytes.fitting(
            policy,
            sizes,
            self._ledger.budget,
            {**held, Tier.DEVICE: held[Tier.DEVICE] + sum(inspected.values())},
            None if weights is None else weights.now.streaming(0),
            own={} if weights is None else weights.held(),
            hint=hint + (", or generate without the inspector" if inspected else ""),
        )
        beside = [Buffer("inspector", account, (nbytes,)) for account, nbytes in inspected.items()]
        return replace(needed, buffers=(*needed.buffers, *beside))

    @contextmanager
    def booked(
        self,
        policy: Policy,
        sizes: CallShape,
        inspected: Mapping[Account, int] = MappingProxyType({}),
        *,
        beside: Sequence[tuple[Policy, CallShape]] = (),
        reported: ExitStack | None = None,
    ) -> Iterator[tuple[Tiers | None, CallBytes]]:
        """Book the bytes of a call while the `with` lasts. It waits while layers of the weights are streamed to another
        thread.

        Yields the call's tiers, None if nothing leaves the device, and its bytes.

        Args:
            inspected: device bytes of the call's inspector, by account.
            beside: calls that wait to begin beside this one. If layers of the weights are streamed, more of them are,
                so that as many of these calls as possible have room, in order.
            reported: stack of a call that reports its memory. The ledger restarts its peaks, unless another call is
                under way. If layers of the weights are streamed, no other thread's call begins before the stack is
                closed.

        Raises:
            TierCapacityError: a tier has no room for the call.
        """
        with ExitStack() as own, ExitStack() as call:
            turn = own if reported is None else reported
            turn.enter_context(self._turn.held())
            _ = self.model  # raises if another thread has closed the runtime meanwhile
            call.enter_context(computing_on(self.device))
            needed = self._settled(policy, sizes, inspected, beside, reported=reported is not None)
            key = object()
            self._under_way.add(key)
            call.callback(self._under_way.discard, key)
            call.enter_context(self._ledger.holding(needed.fixed, hint=_hint(needed.records)))
            tiers = None
            if needed.records is not None or needed.streams is not None:
                transport = None if self._transport is None else self._transport()
                tiers = Tiers(self._ledger, device=self.device, transport=transport, pool=self._pool)
                call.enter_context(tiers)
            if self.weights is None or not self.weights.now.layers:
                turn.close()
            else:
                weights = self.weights
                call.push(lambda kind, *_: weights.rest(failed=kind is not None))
            yield tiers, needed

    def _settled(
        self,
        policy: Policy,
        sizes: CallShape,
        inspected: Mapping[Account, int],
        beside: Sequence[tuple[Policy, CallShape]],
        *,
        reported: bool,
    ) -> CallBytes:
        ledger = self._ledger
        # Layers that another call uses cannot move.
        weights = None if self._under_way else self.weights
        own = dict.fromkeys(Tier, 0) if weights is None else weights.held()
        held = {tier: ledger.held(tier) - ledger.idle(tier) - own[tier] for tier in Tier}
        needed = self._needed(policy, sizes, held, weights, inspected)
        for room in self._held_with(beside, held):
            if needed.weights is None or not needed.weights.layers:
                break  # all weights stay, and the others wait
            try:
                found = self._needed(policy, sizes, room, weights, inspected)
            except TierCapacityError:
                break
            if found.streams != needed.streams:
                break  # room for others must not make this call copy more of its own features
            needed = found
        if weights is not None and needed.weights is not None:
            weights.settle(needed.weights)
            weights.restart()
            own = weights.held()
        if reported and not self._under_way:  # the report leaves out the load and the call before
            ledger.restart_peaks()
            restart_allocator_peak(self.device)
        # A call that cannot end does not begin: the records that it books later must fit too.
        for tier, amounts in needed.tiers(ledger.budget).items():
            ledger.require(sum(amounts.values()) - own[tier], tier)
        return needed

    def _held_with(
        self, calls: Sequence[tuple[Policy, CallShape]], held: Mapping[Tier, int]
    ) -> Iterator[Mapping[Tier, int]]:
        """`held` and the bytes of the first of `calls`, of the first two, and so on."""
        budget = self._ledger.budget
        for policy, sizes in calls:
            more = CallBytes.of(policy, sizes, budget).tiers(budget)
            held = {tier: held[tier] + sum(more.get(tier, {}).values()) for tier in Tier}
            held[Tier.DEVICE] += shared_bytes(sizes)
            yield held


def _hint(records: object | None) -> str:
    fewer = "" if records is None else "lower `clusters`, "
    return f"raise `memory`, {fewer}shorten the prompt or max_new_tokens, or pass fewer sequences at once"
