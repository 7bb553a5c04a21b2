"""The tiers of one call: opened when it begins, within what is left of the budget, and closed when it ends."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.transport import Transport
from tiered.planning.call_costs import CallCosts
from tiered.tiers.host_costs import LOAD_SLOTS
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers

PLAIN_HINT = "raise `memory`, shorten the prompt or max_new_tokens, or pass fewer sequences at once"
HINT = "raise `memory`, lower `clusters`, narrow `window_blocks`, shorten the prompt or pass fewer sequences at once"


@contextmanager
def call_tiers(
    ledger: Ledger,
    costs: CallCosts,
    *,
    device: torch.device,
    dtype: torch.dtype,
    make_transport: Callable[[], Transport] | None = None,
) -> Iterator[TierManager | None]:
    """A manager with rings that fit what `costs` says; None for a call whose features are all on the device.

    What passes take (`CallCosts.passes`) is booked by the caller, who has looked whether there is room for all that the
    manager books as records and centroids come (`check_room`). What hidden states take beside is booked here.

    Raises:
        TierCapacityError: a tier is too small.
    """
    hidden, streams = costs.hidden, costs.streams
    if hidden is None and streams is None:
        yield None
        return
    beside: dict[Account, int] = {}
    if hidden is not None:
        beside = {Account.CENTROIDS: hidden.references, Account.ACTIVATIONS: hidden.activations}
    with (
        ledger.holding(beside, hint=HINT),
        open_tiers(
            ledger,
            device=device,
            dtype=dtype,
            transport=None if make_transport is None else make_transport(),
            slot_bytes=costs.slot_bytes,
            fetch_slots=0 if hidden is None else hidden.fetch_slots,
            store_slots=costs.store_slots,
            page_slots=0 if streams is None else streams.page_slots,
            load_slots=LOAD_SLOTS,
        ) as tiers,
    ):
        yield tiers


def check_room(ledger: Ledger, costs: CallCosts, inspected: Mapping[Account, int]) -> None:
    """Raise TierCapacityError where a tier has no room for all of `costs`, and the device for what an inspector takes
    beside, so that a call that cannot end does not begin. Nothing of it is booked yet."""
    hint = PLAIN_HINT if costs.hidden is None else HINT
    if inspected:
        hint += ", or generate without the inspector"
    for tier, amounts in costs.tiers(ledger.budget).items():
        beside = inspected if tier is Tier.DEVICE else {}
        ledger.require(sum(amounts.values()) + sum(beside.values()), tier, hint=hint)
