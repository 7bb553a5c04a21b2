"""Budgets: sizes are normalised, nonsense is refused, one size is the device's."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from tiered.budget import MemoryBudget
from tiered.errors import TierCapacityError
from tiered.features import Tier


@pytest.mark.parametrize(
    ("memory", "caps"),
    [
        (None, (None, None, None)),
        ("12GiB", (12 * 2**30, None, None)),
        (4096, (4096, None, None)),
        (0, (0, None, None)),  # a cap of nothing, not no cap
        (MemoryBudget(), (None, None, None)),
        (MemoryBudget(device="1KiB", host=2, disk="3kB", disk_path="spill"), (1024, 2, 3000)),
        (MemoryBudget(disk=0), (None, None, 0)),
    ],
)
def test_caps(memory: Any, caps: tuple[int | None, ...]):
    budget = MemoryBudget.of(memory)
    assert tuple(budget.cap(tier) for tier in Tier) == caps
    assert (budget.device, budget.host, budget.disk) == caps


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"device": "12 gigs"}, ValueError, "12 gigs"),
        ({"host": -1}, ValueError, "negative"),
        ({"device": True}, TypeError, "True"),
        ({"device": False}, TypeError, "False"),
        ({"device": ""}, ValueError, "''"),
        ({"device": 0.5}, TypeError, "0.5"),
        ({"disk": "1GiB"}, ValueError, "disk_path"),
    ],
)
def test_refused(sizes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        MemoryBudget(**sizes)


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        MemoryBudget(device=1).device = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_capacity_error_says_what_is_missing_and_what_to_do():
    error = TierCapacityError(3 * 2**30, 2**30, Tier.HOST, "lower max_new_tokens")
    assert str(error) == (
        "the host tier needs 3.00 GiB but has 1.00 GiB (3221225472 of 1073741824 bytes); lower max_new_tokens"
    )
