"""What to lower or raise when a call does not fit the device, each with a number that does fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiered.byte_size import format_bytes
from tiered.features import Feature
from tiered.planning.workload import Workload

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to make a plan fit.

    Attributes:
        text: what to do, for people.
        change: the same as arguments of `plan`; the plan made with them fits.
    """

    text: str
    change: Mapping[str, Any]


def advise(workload: Workload, cap: int, uncached: Mapping[Feature, int]) -> list[Advice]:
    """The changes that bring `workload`'s total within `cap` bytes, cheapest in quality and speed first.

    `uncached`: what the policy `none` keeps. Empty where the workload fits already.
    """
    return list(_changes(workload, cap, uncached)) if workload.total() > cap else []


def _changes(workload: Workload, cap: int, uncached: Mapping[Feature, int]) -> Iterator[Advice]:
    block = workload.block_length
    batch = workload.largest("batch", cap)
    if 0 < batch < workload.batch:
        yield Advice(f"lower the batch to {batch}", {"batch": batch})
    elif workload.batch > 1 and (context := replace(workload, batch=1).largest("context", cap, multiple=block)):
        yield Advice(f"lower the batch to 1 and the context to {context}", {"batch": 1, "context": context})
    if context := workload.largest("context", cap, multiple=block):
        yield Advice(f"lower the context to {context}", {"context": context})
    alternatives = (
        (
            replace(workload, guidance=False),
            "do without guidance, which doubles the sequences",
            {"cfg": False},
        ),
        (
            replace(workload, dtype="bfloat16"),
            "use dtype bfloat16",
            {"dtype": "bfloat16"},
        ),
        (
            replace(workload, features=uncached),
            "use policy none, which keeps no layer's keys and values and recomputes every row in every step",
            {"policy": "none"},
        ),
    )
    for alternative, text, change in alternatives:
        if alternative != workload and (total := alternative.total()) <= cap:
            yield Advice(f"{text}: {format_bytes(total)}", change)
    # Rounded up to what can be typed, so that it is never a byte short.
    memory = f"{-(-workload.total() // _MIB)}MiB"
    yield Advice(f"raise the device memory to {memory}", {"memory": memory})
