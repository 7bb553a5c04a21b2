"""The tiers of one call: opened when it begins, within what is left of the budget, and closed when it ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tiered.errors import TierCapacityError
from tiered.features import Account, Tier
from tiered.ledger import Ledger
from tiered.offload.transport import Transport
from tiered.planning.tier_costs import LOAD_SLOTS, TierCosts
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers

HINT = "raise `memory`, lower `clusters`, narrow `window_blocks`, shorten the prompt or pass fewer sequences at once"


@contextmanager
def call_tiers(
    ledger: Ledger,
    costs: TierCosts | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    make_transport: Callable[[], Transport] | None = None,
) -> Iterator[TierManager | None]:
    """A manager with rings that fit what `costs` says; None for a policy that keeps nothing.

    What a pass takes on the device is booked for as long as the call lasts. What the manager books as records and
    centroids come is looked at before any work, so that a call that cannot end does not begin.

    Raises:
        TierCapacityError: a tier is too small.
    """
    if costs is None:
        yield None
        return
    for tier, amounts in costs.tiers(ledger.budget).items():
        _check_room(ledger, tier, sum(amounts.values()))
    with (
        ledger.holding({Account.CENTROIDS: costs.references, Account.ACTIVATIONS: costs.activations}, hint=HINT),
        open_tiers(
            ledger,
            device=device,
            dtype=dtype,
            transport=None if make_transport is None else make_transport(),
            slot_bytes=costs.slot_bytes,
            fetch_slots=costs.fetch_slots,
            store_slots=costs.store_slots,
            load_slots=LOAD_SLOTS,
        ) as tiers,
    ):
        yield tiers


def _check_room(ledger: Ledger, tier: Tier, needed: int) -> None:
    """Raise TierCapacityError where `tier` has no room for `needed` bytes more."""
    cap = ledger.budget.cap(tier)
    if cap is not None and ledger.held(tier) + needed > cap:
        raise TierCapacityError(needed, cap - ledger.held(tier), tier, HINT)
