"""Errors that callers catch: they pass whole between processes, and an error about room names a size that is enough."""

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
import tiered.core.errors
import tiered.offload.errors
from tiered.core.budget import MemoryBudget
from tiered.core.errors import ContextLengthError, NonFiniteError, TierCapacityError
from tiered.core.features import Tier
from tiered.offload.errors import CorruptRecordError, NoRoomError, OffloadError, PinError, TransferError

GOLDEN = Path(__file__).parent / "goldens" / "llada" / "llada_tiny_gqa"

# By type: its arguments, and a part of its message.
ERRORS: dict[type[Exception], tuple[tuple[Any, ...], str]] = {
    TierCapacityError: (
        (3000, 1000, Tier.HOST, "", 36 << 10),
        '36.00 KiB in all: a budget of "36KiB" or more is enough',
    ),
    NonFiniteError: (
        ("the weight w", "load float32", [1], torch.arange(3)),
        "the weight w is not finite; load float32",
    ),
    ContextLengthError: (("too long",), "too long"),
    OffloadError: (("failed",), "failed"),
    NoRoomError: ((5, 4, 8, "the arena"), "the arena of 8 bytes has no room for 5 bytes (4 are free)"),
    PinError: ((5, "raise ulimit -l"), "raise ulimit -l"),
    TransferError: (("closed",), "closed"),
    CorruptRecordError: (("another name",), "another name"),
}
WAYS: dict[str, Callable[[Exception], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {number}": lambda e, n=number: pickle.loads(pickle.dumps(e, n)) for number in (2, 5)},
}


def test_every_error_is_in_the_table():
    def defined(module: ModuleType) -> set[type]:
        return {value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__}

    assert set(ERRORS) == {
        kind for kind in defined(tiered.core.errors) | defined(tiered.offload.errors) if issubclass(kind, Exception)
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_travel(kind: type[Exception], way: str):
    arguments, text = ERRORS[kind]
    error = kind(*arguments)
    there = WAYS[way](error)
    assert type(there) is kind and text in str(error)
    assert str(there) == str(error) and repr(there) == repr(error)
    assert {name: str(value) for name, value in vars(there).items()} == {
        name: str(value) for name, value in vars(error).items()
    }


# Code for another process, which then need not import this file.
ALLOCATE = """
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account
from tiered.core.ledger import Ledger

Ledger(MemoryBudget(device={cap})).allocate({{Account.WEIGHTS: 2}})
"""


def test_out_of_a_process():
    """An error in a pool's process reaches the caller, and the pool goes on."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(TierCapacityError, match='a budget of "2B" or more') as caught:
            pool.submit(exec, ALLOCATE.format(cap=1)).result(60)
        assert (caught.value.needed, caught.value.available, caught.value.tier) == (2, 1, Tier.DEVICE)
        assert pool.submit(exec, ALLOCATE.format(cap=2)).result(60) is None


IDS = torch.arange(400).view(2, 200)
CALL: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6}
load = partial(tiered.from_pretrained, GOLDEN, dtype="float32", policy="polestar", weights="raw")


@pytest.mark.parametrize(
    ("budget", "tiers"),
    [
        ({"device": "1MiB", "host": "1MiB"}, ["device", "device"]),  # the weights, and then the call
        ({"host": 5000}, ["host"]),
        ({"device": "3MiB", "host": 0}, ["device", "host"]),
        ({"host": "1KiB", "disk": "64MiB"}, ["host"]),  # which takes no state
    ],
)
def test_the_budget_in_the_message_is_enough(budget: dict[str, Any], tiers: list[str], tmp_path: Path):
    expected = load().generate(IDS, **CALL).sequences
    memory = MemoryBudget(**budget, disk_path=tmp_path if "disk" in budget else None)
    asked, sequences = [], torch.empty(0)
    while len(asked) <= len(tiers):
        try:
            sequences = load(memory=memory).generate(IDS, **CALL).sequences
            break
        except TierCapacityError as error:
            (found,) = re.findall(r'in all: a budget of "(\w+)" or more is enough; ', str(error))
            assert error.total is not None
            assert error.total - error.needed == (getattr(memory, error.tier) or 0) - error.available
            memory = replace(memory, **{error.tier: found})
            assert error.total <= getattr(memory, error.tier) <= 1.1 * error.total
            asked.append(error.tier)
    assert asked == tiers and torch.equal(sequences, expected)
