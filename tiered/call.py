"""What one call takes of every tier, booked before it begins, and the forward that it runs on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from tiered.call_tiers import call_tiers, check_room
from tiered.core.canvas import Canvas
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.attention_drift import AttentionDrift
from tiered.decoding.observers import Inspector
from tiered.forward.costs import compared_at_a_time
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.stream_costs import StreamCosts
from tiered.forward.streamed_store import StreamedFeatureStore
from tiered.forward.traced_model import traced
from tiered.inputs import Prompts
from tiered.models.base import DiffusionModel
from tiered.offload.device import computing_on
from tiered.offload.transport import Transport
from tiered.planning.call_costs import CallCosts
from tiered.planning.call_sizes import CallSizes
from tiered.planning.library_costs import gpu_of
from tiered.planning.policy_costs import added
from tiered.policies.base import Policy
from tiered.policies.none import NoCache
from tiered.tiers.manager import TierManager


class CallSpace:
    """Makes what calls of one model run in, within one ledger."""

    def __init__(self, model: DiffusionModel, ledger: Ledger, transport: Callable[[], Transport] | None = None) -> None:
        """`transport` makes what carries copies between the tiers of a call; None: by device."""
        self._loaded: DiffusionModel | None = model
        self._ledger, self._transport = ledger, transport
        weights = next(model.parameters())
        self._device, self._dtype = weights.device, weights.dtype
        self._dtype_name = str(self._dtype).removeprefix("torch.")
        self._gpu = gpu_of(self._device)

    @property
    def model(self) -> DiffusionModel:
        """What calls run. Raises `ValueError` once it is closed."""
        if self._loaded is None:
            raise ValueError("the runtime is closed; load the model again with tiered.from_pretrained")
        return self._loaded

    @property
    def closed(self) -> bool:
        """Whether there is a model no more."""
        return self._loaded is None

    def close(self) -> None:
        """Let the model go, and take its weights off the books."""
        self._loaded = None
        self._ledger.release({Account.WEIGHTS: self._ledger.held(Tier.DEVICE, Account.WEIGHTS)})

    def costs(
        self,
        policy: Policy,
        batch: int,
        length: int,
        block_length: int,
        *,
        answer: int | None = None,
        guidance: bool = False,
        sampled: bool = False,
        attention_rows: int = 0,
        inspector: Inspector | None = None,
    ) -> CallCosts:
        """What a call takes, with as few features streamed as the budget needs; arguments as in `CallSizes`."""
        sizes = CallSizes(
            policy=policy,
            shape=self.model.shape,
            batch=batch,
            context=length,
            block_length=block_length,
            dtype=self._dtype_name,
            answer=answer,
            guidance=guidance,
            sampled=sampled,
            attention_rows=attention_rows,
            gpu=self._gpu,
        )
        held = {tier: self._ledger.held(tier) for tier in Tier}
        held[Tier.DEVICE] += sum(self.inspector_bytes(inspector, batch, length).values())
        return CallCosts.of(sizes, self._ledger.budget, held)

    @contextmanager
    def reserve(self, costs: CallCosts, inspected: Mapping[Account, int] | None = None) -> Iterator[None]:
        """Book what passes take, and an inspector (`inspector_bytes`), for as long as the block lasts, which
        computes on the model's device.

        Raises:
            TierCapacityError: a tier has no room for all of `costs`, and the inspector's.
        """
        inspected = inspected or {}
        check_room(self._ledger, costs, inspected)
        with self._ledger.holding(added(costs.passes, inspected)), computing_on(self._device):
            yield

    def inspector_bytes(self, inspector: Inspector | None, sequences: int, length: int) -> Mapping[Account, int]:
        """What an inspector takes on the device over canvases of `length` columns."""
        if inspector is None:
            return {}
        return inspector.device_bytes(self.model.shape, sequences=sequences, length=length, dtype=self._dtype_name)

    def store(
        self,
        policy: Policy,
        batch: int,
        length: int,
        answer_start: int = 0,
        *,
        streams: StreamCosts | None = None,
        tiers: TierManager | None = None,
    ) -> FeatureStore:
        """Where a policy's features are; with `streams`, some of them in `tiers`."""
        features = policy.features(self.model.shape)
        sizes = {"batch": batch, "length": length, "answer_start": answer_start}
        if streams is not None and tiers is not None:
            return StreamedFeatureStore(self.model.shape, features, streams, tiers, **sizes)
        return FeatureStore(self.model.shape, features, **sizes, dtype=self._dtype, device=self._device)

    def attention_drift(self, measured: int, sequences: int, length: int, block_length: int) -> AttentionDrift:
        """What measures the drift of `measured` sequences, the first of those that go through a forward."""
        chunk = compared_at_a_time(
            self.model.shape,
            batch=sequences,
            attention_rows=measured,
            context=length,
            block_length=block_length,
            dtype=self._dtype_name,
        )
        shape = self.model.shape
        return AttentionDrift(
            measured,
            shape.heads,
            block_length,
            length,
            chunk=chunk,
            device=self._device,
            soft_cap=shape.soft_cap,
            sink_keys=self.model.sink_keys(shape.layers - 1),
        )

    def uncached(self, prompts: Prompts) -> Forward:
        """One forward over `prompts`, with a store that every layer overwrites."""
        batch, length = prompts.ids.shape
        padded = not bool(prompts.mask.all())
        positions = prompts.mask.long().cumsum(dim=1).sub_(1).clamp_(min=0) if padded else None
        return Forward(
            self.model,
            self.store(NoCache(), batch, length),
            torch.arange(length, device=self._device)[None] if positions is None else positions,
            prompts.mask if padded else None,
        )

    def tiers(self, costs: CallCosts):
        """The tiers of a call, open as long as the block lasts; None where nothing leaves the device."""
        return call_tiers(self._ledger, costs, device=self._device, dtype=self._dtype, make_transport=self._transport)

    def forward(
        self,
        canvas: Canvas,
        policy: Policy,
        sequences: int,
        tiers: TierManager | None,
        streams: StreamCosts | None = None,
    ) -> Forward:
        """The forward of one call; with guidance `sequences` is twice the canvas's."""
        positions, key_mask = canvas.positions(), canvas.key_mask()
        if key_mask is not None and sequences > canvas.batch:
            positions, key_mask = positions.repeat(2, 1), key_mask.repeat(2, 1)
        store = self.store(policy, sequences, canvas.length, canvas.prompt_length, streams=streams, tiers=tiers)
        return Forward(traced(self.model), store, positions, key_mask, tiers)
