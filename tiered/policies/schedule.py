"""When areas of the canvas are recomputed: the intervals that policies are put together from."""

import re

from tiered.core.checks import check_integer
from tiered.policies.base import Step

# Forwards of a sequence from one refresh to the next; "block" or "3 blocks": with the first forward of every block, or
# of every third; None: after a call's first forward never again.
Interval = int | str | None

# Tokens of a prompt from which on what caches leave stale was measured to cost no answers. Lookups in 256 tokens and
# more lose none under any cache; lists, which end at about 40 tokens, are sorted right in 98 of 100 cases without a
# cache and in 42 to 65 with one (docs/benchmarks.md, docs/embedded-model.md).
LEAST_STALE_PROMPT = 256
SELDOM = 4  # blocks from one refresh to the next, where a block need not begin with one


def check_interval(name: str, interval: object) -> None:
    """Raise `TypeError` or `ValueError` unless `interval` is None or an int of at least 1."""
    if interval is not None:
        check_integer(name, interval, least=1)


def check_interval_or_blocks(name: str, interval: object) -> None:
    """As `check_interval`; "block" and "3 blocks" are allowed too."""
    if not isinstance(interval, str):
        check_interval(name, interval)
    elif not blocks_of(interval):
        raise ValueError(f'{name} = {interval!r}; a number of forwards, "block", "3 blocks" or None is allowed')


def blocks_of(interval: Interval) -> int | None:
    """Blocks from one refresh to the next; None where an interval does not count them."""
    if interval == "block":
        return 1
    match = re.fullmatch(r"([1-9]\d*) blocks?", interval) if isinstance(interval, str) else None
    return int(match[1]) if match else None


def due(interval: Interval, step: Step, *, by_block: bool = False) -> tuple[bool, ...]:
    """Which active sequences refresh in this step. Everything is due in a call's first forward.

    An integer counts the forwards of each sequence, whatever block they were in; `by_block`: the forwards of the block.
    """
    if blocks := blocks_of(interval):
        return tuple(here and step.number == 0 and step.block % blocks == 0 for here in step.active)
    assert not isinstance(interval, str), interval
    counts = [step.number] * len(step.active) if by_block else step.forwards
    return tuple(
        here and (not forwards or (interval is not None and count % interval == 0))
        for here, forwards, count in zip(step.active, step.forwards, counts, strict=True)
    )
