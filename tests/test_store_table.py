"""Rows of several calls, each stored in memory of its own: written and read by a table, as by each call alone."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from allocations import Allocations
from long_cases import and_long
from torch import Tensor
from workloads.launches import counting
from workloads.models import in_records
from workloads.plain_layers import COLUMNS, CONFIGS, forward_of, model_of

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.forward.together import logits_together, store_table
from tiered.kernels import block_attention_ref, store_rows_ref
from tiered.kernels.attention_splits import partial_bytes, shared_splits
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import RowCode
from tiered.kernels.store_table import OwnRows, StoreTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, KV_HEADS, HEADS, HEAD_DIM = 3, 2, 4, 32
CODES = [None, *RowCode]


@dataclass(frozen=True)
class Call:
    """A call: sequences, columns of its memory, and its rows, each with the columns that it reads."""

    batch: int
    length: int
    columns: range
    reads: tuple[tuple[int, int], ...]


# Blocks that read what is in front of them and themselves, a causal part of a prompt, one row, windows.
CALLS: dict[str, list[Call]] = {
    "blocks": [Call(1, 40, range(8, 12), ((0, 12),) * 4), Call(2, 70, range(60, 68), ((0, 68),) * 8)],
    "a prompt and a row": [
        Call(1, 24, range(5), tuple((0, row + 1) for row in range(5))),
        Call(1, 90, range(80, 81), ((0, 81),)),
    ],
    "windows": [
        Call(1, 24, range(6, 10), ((3, 10),) * 4),
        Call(1, 33, range(30, 33), ((0, 33), (17, 31), (25, 33))),
    ],
    "one": [Call(1, 20, range(20), ((0, 20),) * 20)],
}


def table_of(calls: list[Call], code: RowCode | None, dtype: torch.dtype) -> StoreTable:
    """A table over random keys and values."""
    generator, own = torch.Generator().manual_seed(0), list[OwnRows]()
    for call in calls:
        memory = []
        for _ in range(2):
            size = LAYERS, call.batch, KV_HEADS, call.length, HEAD_DIM
            rows = torch.randn(size, generator=generator).to(DEVICE, dtype)
            memory.append(rows if code is None else CodedRows.of(rows, code).bytes.view(dtype))
        own.append(OwnRows(memory[0], memory[1], call.columns, call.reads))
    return StoreTable.of(own, code, HEAD_DIM)


def kernel(reference: ModuleType) -> ModuleType:
    """The module of the Triton kernel, on a GPU or in the interpreter."""
    pytest.importorskip("triton")
    return __import__(reference.__name__.removesuffix("_ref"), fromlist=["kernel"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("calls", CALLS)
def test_rows_are_written_into_the_memory_of_their_calls(calls: str, code: RowCode | None, dtype: torch.dtype):
    tables = [table_of(CALLS[calls], code, dtype) for _ in range(2)]
    count = len(tables[0].rows)
    drawn = torch.randn(2, 1, count, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    keys, values = drawn.to(DEVICE, dtype).transpose(2, 3)
    for table, module in zip(tables, (store_rows_ref, kernel(store_rows_ref)), strict=True):
        module.store_rows(table.coded(keys), table.coded(values), table, 1)
    untouched = table_of(CALLS[calls], code, dtype)
    for ours, theirs, before in zip(*(table.calls for table in (*tables, untouched)), strict=True):
        for name in ("keys", "values"):
            found, expected, old = (getattr(of, name).view(torch.uint8) for of in (ours, theirs, before))
            assert torch.equal(found, expected)
            changed = (found != old).any(-1).any(2)  # [layers, batch, columns]
            assert not changed[[0, 2]].any() and changed[1].nonzero()[:, 1].unique().tolist() == [*ours.columns]


@pytest.mark.covering(2)
@pytest.mark.parametrize("softened", [{}, {"scale": 0.2, "soft_cap": 3.0, "sinks": 1}], ids=["plain", "softened"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("calls", CALLS)
def test_attention_of_all_calls_is_that_of_each(
    calls: str, code: RowCode | None, splits: int, softened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    module = kernel(block_attention_ref)
    monkeypatch.setattr(module, "shared_splits", lambda *_, **__: splits)
    table = table_of(CALLS[calls], code, torch.float32)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(1, len(table.rows), HEADS, HEAD_DIM, generator=generator).to(DEVICE).transpose(1, 2)
    options = {name: value for name, value in softened.items() if name != "sinks"}
    if "sinks" in softened:
        sinks = torch.randn(2, HEADS, softened["sinks"], HEAD_DIM, generator=generator).to(DEVICE)
        options |= {"sink_keys": sinks[0], "sink_values": sinks[1]}
    expected = block_attention_ref.attention_apart(queries, table, 2, **options)
    found = module.attention_apart(queries, table, 2, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.transpose(1, 2).is_contiguous()


def test_calls_split_no_more_than_they_booked():
    """All rows have as many splits, but a call with a short prompt has booked no partial results."""
    own: dict[str, Any] = {"element_bytes": 4}
    short, long = Call(1, 40, range(8, 12), ((0, 12),) * 4), Call(1, 1100, range(1092, 1096), ((0, 1096),) * 4)
    assert shared_splits(((1, 4, 1096),), HEADS, KV_HEADS, HEAD_DIM, code=None, **own) == 4
    table, rows = table_of([short, long], None, torch.float32), 8
    queries = torch.randn(1, HEADS, rows, HEAD_DIM, device=DEVICE)
    with Allocations() as allocated:
        kernel(block_attention_ref).attention_apart(queries, table, 0)
    parts = allocated.peak - HEADS * rows * (HEAD_DIM + 2) * 4
    booked = [partial_bytes(1, HEADS, KV_HEADS, 4, length, HEAD_DIM, **own) for length in (40, 1100)]
    assert parts == 2 * HEADS * rows * (HEAD_DIM + 2) * 4 == sum(booked)


def test_rows_that_do_not_fit_are_refused():
    table = table_of(CALLS["one"], None, torch.float32)
    rows = torch.zeros(1, KV_HEADS, 20, HEAD_DIM, device=DEVICE)
    for module in (store_rows_ref, kernel(store_rows_ref)):
        for keys, values, told in (
            (rows[:, :, 1:], rows, r"keys \(1, 2, 19, 32\) of torch.float32 do not fit memory for \(1, 2, 20, 32\)"),
            (rows, rows.half(), r"values \(1, 2, 20, 32\) of torch.float16"),
        ):
            with pytest.raises(ValueError, match=told):
                module.store_rows(keys, values, table, 0)


# Rows of a canvas of 24 columns in blocks of 8, and those of them whose logits are asked for.
ASKED: list[tuple[Rows, slice]] = [
    (Rows.span(8, 16), slice(0, 8)),
    (Rows.span(0, 16), slice(8, 16)),
    (Rows.span(0, 24), slice(0, 0)),
    (Rows.span(16, 24), slice(0, 8)),
]


def asked_of(model: Any, generator: torch.Generator, kv: RowCode | None = None) -> list[tuple[Forward, Pass]]:
    """Passes of several calls, behind one over all columns of each."""
    found = []
    for rows, output in ASKED:
        forward = forward_of(model, kv)
        ids = torch.randint(0, 120, (1, COLUMNS), generator=generator)
        forward.logits(Pass(ids, forward.rows, slice(0, 8)))
        found.append((forward, Pass(ids.flip(1), rows, output)))
    return found


@pytest.mark.covering(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not in its interpreter")
@pytest.mark.parametrize("kv", [None, RowCode.FP8])
@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_calls_answer_together_as_each_alone(family: str, kv: RowCode | None, random_model: Callable[[Any], Any]):
    model = in_records(random_model({"model_type": family, **CONFIGS[family]}))
    alone = asked_of(model, torch.Generator().manual_seed(0), kv)
    expected = [forward.logits(pass_) for forward, pass_ in alone]
    together = asked_of(model, torch.Generator().manual_seed(0), kv)
    with counting() as counted, counted.span(Op.FORWARD):
        assert store_table(together, [pass_.rows for _, pass_ in together]) is not None
        found = logits_together(together)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, Tensor)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for (ours, pass_), (theirs, _) in zip(together, alone, strict=True):
        for layer in range(model.shape.layers):
            rows = [
                forward.keys(layer)[:, :, pass_.rows.within.start : pass_.rows.within.stop]
                for forward in (ours, theirs)
            ]
            # In FP8 rounding may choose the code beside.
            torch.testing.assert_close(*rows, rtol=1e-4 if kv is None else 0.13, atol=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not in its interpreter")
@pytest.mark.parametrize("family", and_long(["sdar"], CONFIGS))
def test_three_calls_launch_no_more_in_a_layer_than_one(family: str):
    model = in_records(model_of(family).to(torch.bfloat16))

    def launched(calls: int) -> int:
        asked = [(forward_of(model), Pass(torch.zeros(1, COLUMNS, dtype=torch.int64), *ASKED[0])) for _ in range(calls)]
        with torch.no_grad(), counting() as found, found.span(Op.FORWARD):
            logits_together(asked)
        return sum(number for (_, layer, *_), number in found.launches.items() if layer == 1)

    assert launched(3) == launched(1) - 1  # keys and values are written in one launch
