"""Law 2 for records in residency under random delays, and no wait too many: without any of them bytes are wrong."""

import pytest
from residency_fuzz import run_schedule
from tier_fuzz import without

from tiered.offload.fence import Region

SCHEDULES, SOAK = 60, 1000
TRIES = 1500  # schedules until a missing wait must have shown; it takes 1 to 100 as a rule
# A home is overwritten or given back only after the copies that read it, because compute waits for them, or the host.
NEEDED = [
    (Region.FETCH_SLOT, "read"),
    (Region.FETCH_SLOT, "write"),
    (Region.HOST_SLOT, "read"),
    (Region.LOAD_SLOT, "read"),
    (Region.LOAD_SLOT, "write"),
]


def compare(seeds: range) -> None:
    outcomes = {seed: run_schedule(seed) for seed in seeds}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome.corrupt} == {}
    assert sum(outcome.answers for outcome in outcomes.values()) > 5 * len(seeds)


def test_no_schedule_changes_a_bit():
    compare(range(SCHEDULES))


@pytest.mark.long
def test_no_schedule_of_many_changes_a_bit():
    compare(range(SCHEDULES, SOAK))


@pytest.mark.parametrize(("region", "access"), NEEDED)
def test_every_wait_is_needed(region: Region, access: str):
    faulty = without(region, access)
    assert any(run_schedule(seed, traffic=faulty).corrupt for seed in range(TRIES))


def test_one_job_after_another_is_right_too():
    assert not any(run_schedule(seed, asynchronous=False).corrupt for seed in range(20))
