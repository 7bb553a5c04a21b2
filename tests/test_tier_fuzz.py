"""Law 2 under random delays: asynchronous answers are the synchronous ones, bit for bit; and the test can tell."""

import pytest
from tier_fuzz import run_schedule, without

from tiered.offload.fence import Region

SCHEDULES = 60
REGIONS = (Region.FETCH_SLOT, Region.STORE_SLOT, Region.HOST_SLOT)  # of others, compute alone uses the bytes
SOAK = 1000
TRIES = 1000  # schedules until a missing wait must have shown; it takes 1 to 90 as a rule


def compare(seeds: range) -> None:
    outcomes = {seed: run_schedule(seed) for seed in seeds}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome.corrupt} == {}
    assert sum(outcome.answers for outcome in outcomes.values()) > 3 * len(seeds)  # schedules that compare something


def test_no_schedule_changes_a_bit():
    compare(range(SCHEDULES))


@pytest.mark.long
def test_no_schedule_of_many_changes_a_bit():
    compare(range(SCHEDULES, SOAK))


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("region", REGIONS)
def test_every_wait_is_needed(region: Region, access: str):
    faulty = without(region, access)
    assert any(run_schedule(seed, traffic=faulty).corrupt for seed in range(TRIES))


def test_one_job_after_another_is_right_too():
    assert not any(run_schedule(seed, asynchronous=False).corrupt for seed in range(20))
