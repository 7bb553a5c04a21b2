"""Law 2 for records in residency, and rows stored there, under random delays; no wait is one too many."""

from collections.abc import Callable

import pytest
import residency_fuzz
import stored_rows_fuzz
from residency_fuzz import Outcome, without

from tiered.offload.fence import Region

Run = Callable[..., Outcome]
KINDS: dict[str, tuple[Run, int]] = {  # with the schedules that are run at least
    "records": (residency_fuzz.run_schedule, 60),
    "stored rows": (stored_rows_fuzz.run_schedule, 40),
}
SOAK = 1000
TRIES = 1500  # schedules until a missing wait must have shown; it takes 1 to 100 as a rule
# A home is overwritten or given back only after the copies that read it, because compute waits for them, or the host.
# Stored rows come back to a slot behind what left it, so their home is not read before its last write either.
NEEDED = [
    ("records", Region.FETCH_SLOT, "read"),
    ("records", Region.FETCH_SLOT, "write"),
    ("records", Region.HOST_SLOT, "read"),
    ("records", Region.LOAD_SLOT, "read"),
    ("records", Region.LOAD_SLOT, "write"),
    ("stored rows", Region.FETCH_SLOT, "read"),
    ("stored rows", Region.FETCH_SLOT, "write"),
]
kinds = pytest.mark.parametrize("kind", KINDS)


def compare(run: Run, seeds: range) -> None:
    outcomes = {seed: run(seed) for seed in seeds}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome.corrupt} == {}
    assert sum(outcome.answers for outcome in outcomes.values()) > 5 * len(seeds)


@kinds
def test_no_schedule_changes_a_bit(kind: str):
    run, least = KINDS[kind]
    compare(run, range(least))


@pytest.mark.long
@kinds
def test_no_schedule_of_many_changes_a_bit(kind: str):
    run, least = KINDS[kind]
    compare(run, range(least, SOAK))


@pytest.mark.parametrize(("kind", "region", "access"), NEEDED)
def test_every_wait_is_needed(kind: str, region: Region, access: str):
    run, faulty = KINDS[kind][0], without(region, access)
    assert any(run(seed, traffic=faulty).corrupt for seed in range(TRIES))


@kinds
def test_one_job_after_another_is_right_too(kind: str):
    run, _ = KINDS[kind]
    assert not any(run(seed, asynchronous=False).corrupt for seed in range(20))


@pytest.mark.gpu
@kinds
def test_no_schedule_changes_a_bit_on_the_device(kind: str):
    run, _ = KINDS[kind]
    outcomes = [run(seed, device="cuda") for seed in range(20)]
    assert not any(outcome.corrupt for outcome in outcomes) and sum(outcome.answers for outcome in outcomes) > 100
