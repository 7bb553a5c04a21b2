"""Calls of other sizes compile nothing: a kernel has the same signature in all calls of a model."""

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode

# Sizes of calls: 1, multiples of 16 and others, which Triton tells apart unless it may not.
SIZES = (1, 2, 3, 5, 16, 23, 48)
HEAD_DIM = 64


def calls_of_attention(code: RowCode | None) -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        batch = 1 + size % 2
        room = torch.zeros(batch, 2, 2 * size + 1, HEAD_DIM, dtype=torch.bfloat16)
        rows = room if code is None else CodedRows.of(room, code)
        queries, stored = torch.zeros(batch, 4, size, HEAD_DIM, dtype=torch.bfloat16), rows[:, :, 1 : size + 2]
        mask = torch.ones(batch, 2 * size + 1, dtype=torch.bool)[:, 1 : size + 2]
        seen = torch.ones(batch, 1 + size).long()
        yield lambda op, q=queries, kv=stored, mask=mask, seen=seen: op(
            q, kv, kv, key_mask=mask, start=seen[:, :1], stop=seen[:, 1:]
        )


def calls_of_scatter(code: RowCode | None) -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        room, rows = (torch.zeros(2, 2, length, HEAD_DIM) for length in (size + 7, size))
        if code is not None:
            room, rows = CodedRows.of(room, code).bytes, CodedRows.of(rows, code).bytes
        index, valid = torch.zeros(2, size + 1).long()[:, 1:], torch.ones(2, 2 * size, dtype=torch.bool)[:, :size]
        yield lambda op, to=room[:, :, 1:], rows=rows, index=index, valid=valid: op(to, rows, index, valid)


def calls_of_rotate() -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        heads, table = torch.zeros(2, 4, size, HEAD_DIM), torch.zeros(1, 1, size + 5, HEAD_DIM // 2)
        numbers = torch.zeros(2, size + 1).long()[:, 1:]
        yield lambda op, heads=heads, table=table, numbers=numbers: op(heads, table, table, numbers)


def calls_of_encode(code: RowCode) -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        rows, (coded, numbers, base) = torch.zeros(size, 64), numbered(code, size)
        yield lambda op, rows=rows, to=coded, at=numbers, base=base: op(rows, code, to, at, base)


def calls_of_decode(code: RowCode) -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        out, places, (coded, numbers, base) = torch.zeros(2 * size + 7, 64), parts(size), numbered(code, size)
        yield lambda op, of=coded, out=out, at=numbers, to=places, base=base: op(of, code, out, at, to, base)


def numbered(code: RowCode, size: int) -> tuple[Tensor, Tensor, RowBase]:
    """A buffer of rows in a code, the numbers of some, and their bases."""
    coded = torch.zeros(3 * size, code.row_bytes(64, residual=True), dtype=torch.uint8)
    return coded, parts(size), RowBase(torch.zeros(size, 64), parts(size))


def calls_of_picks() -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        sketch, draws = torch.zeros(2, size, 64), torch.zeros(size, 4 + size % 7).double()
        yield lambda op, sketch=sketch, draws=draws: op(sketch, sketch[..., 0] > 0, draws, 0.1)


def calls_of_far() -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        rank = torch.zeros(3, 2 * size)
        yield lambda op, rank=rank, empty=rank[:, :size] > 0: op(rank, empty, 0.1)


def calls_of_turn() -> Iterator[Callable[[Any], object]]:
    for size in SIZES:
        directions, flags = torch.zeros(2, size, 64), torch.zeros(2, size) > 0
        rows, inverse = torch.zeros(2, size + 1, 64).bfloat16()[:, 1:], torch.zeros(2, size + 1)[:, 1:]
        yield lambda op, of=directions, flags=flags, rows=rows, inverse=inverse: op(
            of, of, flags, flags.long(), rows, inverse
        )


def parts(size: int) -> Tensor:
    """Numbers that begin within their memory."""
    return torch.arange(size + 1)[1:]


# Attention has two tiles: of few rows and of many.
CALLS: dict[str, tuple[str, Iterator[Callable[[Any], object]], int]] = {
    **{f"block_attention, {code}": ("block_attention", calls_of_attention(code), 2) for code in (None, *RowCode)},
    **{f"scatter_rows, {code}": ("scatter_rows", calls_of_scatter(code), 1) for code in (None, *RowCode)},
    "rotate": ("rotate", calls_of_rotate(), 1),
    "greedy_picks": ("greedy_picks", calls_of_picks(), 1),
    "far_rows": ("far_rows", calls_of_far(), 1),
    "turn_directions": ("turn_directions", calls_of_turn(), 1),
    **{f"encode_rows, {code}": ("encode_rows", calls_of_encode(code), 1) for code in RowCode},
    **{f"decode_rows, {code}": ("decode_rows", calls_of_decode(code), 1) for code in RowCode},
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_all_sizes_have_one_signature(case: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    name, calls, tiles = CALLS[case]
    module = importlib.import_module(f"tiered.kernels.{name}")
    found: dict[str, set[str]] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, on: Tensor, **options: Any) -> None:
        found.setdefault(kernel.fn.__name__, set()).add(signature(kernel, arguments, options))

    monkeypatch.setattr(module, "launch", launch)
    for call in calls:
        call(getattr(module, name))
    assert found and {kernel: len(signatures) for kernel, signatures in found.items()} == dict.fromkeys(found, tiles)


def signature(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The name that Triton gives to a compiled kernel, whether or not kernels are interpreted here."""
    return repr(binder(kernel)(*arguments, **options)[1:])


@cache
def binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    kept = getattr(kernel, "kwargs", None) or {name: getattr(kernel, name) for name in names}
    compiled = JITFunction(kernel.fn, **{name: kept[name] for name in names})
    return create_function_from_signature(compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32)))
