"""What one call takes of every tier, booked before it begins, and the forward that it runs on."""

from collections.abc import Callable

import torch

from tiered.decoding.attention_drift import AttentionDrift
from tiered.decoding.canvas import Canvas
from tiered.decoding.loop import Inspector
from tiered.feature_store import FeatureStore
from tiered.forward import Forward
from tiered.inputs import Prompts
from tiered.ledger import Ledger
from tiered.models.base import DiffusionModel
from tiered.offload.transport import Transport
from tiered.planning.costs import compared_at_a_time
from tiered.planning.policy_costs import policy_bytes
from tiered.planning.tier_costs import TierCosts
from tiered.policies.base import Policy
from tiered.policies.none import NoCache
from tiered.tiers.call_tiers import call_tiers
from tiered.tiers.manager import TierManager


class CallSpace:
    """Makes what calls of one model run in, within one ledger."""

    def __init__(self, model: DiffusionModel, ledger: Ledger, transport: Callable[[], Transport] | None = None) -> None:
        """`transport` makes what carries copies between the tiers of a call; None: by device."""
        self._model, self._ledger, self._transport = model, ledger, transport
        weights = next(model.parameters())
        self._device, self._dtype = weights.device, weights.dtype

    def reserve(
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
    ):
        """Book what a pass takes for as long as the block lasts; arguments as in `policy_bytes`."""
        amounts = policy_bytes(
            policy,
            self._model.shape,
            batch=batch,
            context=length,
            block_length=block_length,
            dtype=str(self._dtype).removeprefix("torch."),
            answer=answer,
            guidance=guidance,
            sampled=sampled,
            attention_rows=attention_rows,
        )
        return self._ledger.holding(
            amounts, hint="raise `memory`, shorten the prompt or max_new_tokens, or pass fewer sequences at once"
        )

    def inspecting(self, inspector: Inspector | None, sequences: int, length: int):
        """Book what an inspector takes for as long as the block lasts."""
        dtype = str(self._dtype).removeprefix("torch.")
        amounts = (
            {}
            if inspector is None
            else inspector.device_bytes(self._model.shape, sequences=sequences, length=length, dtype=dtype)
        )
        return self._ledger.holding(amounts, hint="raise `memory`, or generate without the inspector")

    def store(self, policy: Policy, batch: int, length: int, answer_start: int = 0) -> FeatureStore:
        return FeatureStore(
            self._model.shape,
            policy.features(self._model.shape),
            batch=batch,
            length=length,
            answer_start=answer_start,
            dtype=self._dtype,
            device=self._device,
        )

    def attention_drift(self, measured: int, sequences: int, length: int, block_length: int) -> AttentionDrift:
        """What measures the drift of `measured` sequences, the first of those that go through a forward."""
        chunk = compared_at_a_time(
            self._model.shape,
            batch=sequences,
            attention_rows=measured,
            context=length,
            block_length=block_length,
            dtype=str(self._dtype).removeprefix("torch."),
        )
        return AttentionDrift(measured, self._model.shape.heads, block_length, length, chunk=chunk, device=self._device)

    def uncached(self, prompts: Prompts) -> Forward:
        """One forward over `prompts`, with a store that every layer overwrites."""
        batch, length = prompts.ids.shape
        padded = not bool(prompts.mask.all())
        positions = prompts.mask.long().cumsum(dim=1).sub_(1).clamp_(min=0) if padded else None
        return Forward(
            self._model,
            self.store(NoCache(), batch, length),
            torch.arange(length, device=self._device)[None] if positions is None else positions,
            prompts.mask if padded else None,
        )

    def tiers(self, policy: Policy, batch: int, length: int, block_length: int):
        """The tiers of a call, open as long as the block lasts; None where the policy keeps no hidden states."""
        options = policy.hidden()
        costs = None
        if options is not None:
            dtype = str(self._dtype).removeprefix("torch.")
            costs = TierCosts.of(
                options, self._model.shape, batch=batch, context=length, block_length=block_length, dtype=dtype
            )
        return call_tiers(self._ledger, costs, device=self._device, dtype=self._dtype, make_transport=self._transport)

    def forward(self, canvas: Canvas, policy: Policy, sequences: int, tiers: TierManager | None) -> Forward:
        """The forward of one call; with guidance `sequences` is twice the canvas's."""
        positions, key_mask = canvas.positions(), canvas.key_mask()
        if key_mask is not None and sequences > canvas.batch:
            positions, key_mask = positions.repeat(2, 1), key_mask.repeat(2, 1)
        store = self.store(policy, sequences, canvas.length, canvas.prompt_length)
        return Forward(self._model, store, positions, key_mask, tiers)
