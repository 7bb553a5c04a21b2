"""Attention of a block's rows against float64 arithmetic, by the reference and by the Triton kernel."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import Allocations
from torch import Tensor

from tiered.kernels import attention_splits, block_attention_ref
from tiered.kernels.coded_rows import CodedRows, KeyValue
from tiered.kernels.keys_of_values import Keys, KeysOfValues
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.row_code import RowCode
from tiered.models.attention import Limits, attend

# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
CODES = [None, *RowCode]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"masked": False, "padded": False, "partly": False},
    "a mask": {"padded": False, "partly": False},
    "pads in front": {"masked": False, "partly": False, "sinks": None, "soft_cap": None},
    "final rows see final columns": {"masked": False, "padded": False},
    "rows see what is in their windows": {"windowed": True, "sinks": None, "soft_cap": None},
    "rows see what is in their windows, nvfp4": {"windowed": True, "masked": False, "code": RowCode.NVFP4},
    "all at once": {},
    "all at once, fp8": {"code": RowCode.FP8},
    "all at once, nvfp4": {"code": RowCode.NVFP4},
    "no cap, no sinks, fp8": {"code": RowCode.FP8, "soft_cap": None, "sinks": None, "head_dim": 24},
    "no cap, no sinks, nvfp4": {"code": RowCode.NVFP4, "soft_cap": None, "sinks": None, "head_dim": 48},
    "a head for each key head": {"kv_heads": 4},
    "one key head": {"heads": 3, "kv_heads": 1, "batch": 1, "code": RowCode.NVFP4},
    "no sinks": {"sinks": 0},
    "two sinks, no cap": {"sinks": 2, "soft_cap": None, "code": RowCode.FP8},
    "whole tiles": {"length": 64, "rows": 16, "batch": 1, "padded": False},
    "several tiles of rows": {"rows": 37, "batch": 1, "length": 40},
    "one row, one column": {"rows": 1, "length": 1, "masked": False, "padded": False, "partly": False, "sinks": None},
    "one row, one column, fp8": {"rows": 1, "length": 1, "masked": False, "padded": False, "code": RowCode.FP8},
    "sinks and no column": {"length": 0, "masked": False, "padded": False, "partly": False},
    "tiny scores": {"times": 1e-3},
    "scores far beyond the cap": {"times": 300.0},
    "a small cap": {"soft_cap": 0.5},
    "large scores": {"times": 20.0, "soft_cap": None, "sinks": None, "code": RowCode.NVFP4},
    "a scale": {"scale": 1.0, "times": 0.5},
    "a scale, nvfp4": {"scale": 0.05, "soft_cap": None, "code": RowCode.NVFP4},
    "a scale, bfloat16": {"scale": 1.0, "times": 0.5, "dtype": torch.bfloat16},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, fp8": {"dtype": torch.bfloat16, "code": RowCode.FP8},
    **{
        f"heads of {head_dim}, {code}": {"head_dim": head_dim, "code": code, "rows": 3, "length": 37, "batch": 1}
        for head_dim in (256, 512)
        for code in CODES
    },
    **{
        f"keys of values, {code}, {name}": {"turning": turning, "code": code, "dtype": dtype, **sizes}
        for code in CODES
        for name, dtype, turning, sizes in (
            ("a part turns", torch.float32, 5, {}),
            ("all turn, windows", torch.float32, 16, {"windowed": True, "masked": False, "one_table": True}),
            ("none turns", torch.float32, 0, {"kv_heads": 4, "sinks": None, "soft_cap": None}),
            ("several tiles", torch.float16, 8, {"rows": 37, "batch": 1, "length": 40}),
            ("heads of 512", torch.float32, 64, {"head_dim": 512, "rows": 3, "length": 37, "batch": 1}),
        )
    },
    "keys of values, an odd size": {"turning": 3, "head_dim": 24, "sinks": 2},
    "keys of values, one row, one column": {"turning": 4, "rows": 1, "length": 1, "masked": False, "padded": False},
    "float16, nvfp4": {"dtype": torch.float16, "code": RowCode.NVFP4, "soft_cap": None, "sinks": None},
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Case:
    queries: Tensor
    keys: Keys
    values: KeyValue
    scale: float | None = None
    soft_cap: float | None = None
    sink_keys: Tensor | None = None
    sink_values: Tensor | None = None
    key_mask: Tensor | None = None
    start: Tensor | None = None
    stop: Tensor | None = None

    def to(self, device: str) -> "Case":
        def moved(value: Any) -> Any:
            if isinstance(value, KeysOfValues):
                tables = {name: getattr(value, name).to(device) for name in ("weight", "cos", "sin")}
                return replace(value, stored=values, **tables)
            if isinstance(value, CodedRows):
                return replace(value, bytes=value.bytes.to(device))
            return value.to(device) if isinstance(value, Tensor) else value

        values = moved(self.values)
        return replace(Case(**{field.name: moved(getattr(self, field.name)) for field in fields(self)}), values=values)

    def by(self, implementation: str) -> tuple[Tensor, LogSumExp]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return attention(implementation)(given.pop("queries"), given.pop("keys"), given.pop("values"), **given)

    def hidden(self) -> Tensor:
        """[batch, rows, length]: columns that a row does not see."""
        column = torch.arange(self.keys.shape[2], device=self.queries.device)
        hidden = torch.zeros(
            len(self.queries), self.queries.shape[2], len(column), dtype=torch.bool, device=column.device
        )
        for mask in (
            None if self.key_mask is None else ~self.key_mask[:, None],
            None if self.start is None else column < self.start[..., None],
            None if self.stop is None else column >= self.stop[..., None],
        ):
            hidden = hidden if mask is None else hidden | mask
        return hidden

    def true(self) -> tuple[Tensor, Tensor]:
        """In float64: the output, zeros for a row that sees nothing, and the log-sum-exp of its scores."""
        heads, group = self.queries.shape[1], self.queries.shape[1] // self.keys.shape[1]
        stored = (each if isinstance(each, Tensor) else each.values() for each in (self.keys, self.values))
        keys, values = (each.double().repeat_interleave(group, 1) for each in stored)
        hidden = self.hidden()[:, None].expand(-1, heads, -1, -1)
        values = values.where(~hidden.all(2)[..., None], 0)  # columns that no row sees may hold anything
        if self.sink_keys is not None and self.sink_values is not None:
            sinks = (each.double().expand(len(keys), -1, -1, -1) for each in (self.sink_keys, self.sink_values))
            keys, values = (torch.cat(both, 2) for both in zip(sinks, (keys, values), strict=True))
            hidden = F.pad(hidden, (self.sink_keys.shape[1], 0))
        scale = self.queries.shape[3] ** -0.5 if self.scale is None else self.scale
        scores = self.queries.double() @ keys.mT * scale
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(3).nan_to_num(0.0) @ values, scores.logsumexp(3)


def attention(implementation: str) -> Callable[..., tuple[Tensor, LogSumExp]]:
    if implementation == "reference":
        return block_attention_ref.block_attention
    pytest.importorskip("triton")
    from tiered.kernels import block_attention

    return block_attention.block_attention


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def random_case(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 5,
    length: int = 70,
    head_dim: int = 32,
    sinks: int | None = 1,
    masked: bool = True,
    padded: bool = True,
    partly: bool = True,
    windowed: bool = False,
    soft_cap: float | None = 5.0,
    times: float = 2.0,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    code: RowCode | None = None,
    turning: int | None = None,
    one_table: bool = False,
) -> Case:
    """A mask with holes, pads on the left of every other sequence or windows, and an end of each row's columns.
    `turning`: pairs of elements that turn in keys of values. It is None for keys of their own."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def stored() -> Tensor | CodedRows:
        values = normal(batch, kv_heads, length, head_dim)
        return values if code is None else CodedRows.of(values, code)

    def of_values(values: Tensor | CodedRows, pairs: int) -> KeysOfValues:
        angles = 9 * torch.randn(1 if one_table else batch, 1, length, head_dim // 2, generator=generator)
        weight = normal(head_dim) * 0.3 + 1
        return KeysOfValues(values, weight, angles.cos()[..., :pairs], angles.sin()[..., :pairs])

    key_mask = torch.rand(batch, length, generator=generator) < 0.8
    first = torch.tensor([[(0, min(40, length - 1))[b % 2]] for b in range(batch)])
    if windowed:
        first = torch.randint(-9, length, (batch, rows), generator=generator)
    queries, keys, values = normal(batch, heads, rows, head_dim) * times, stored(), stored()
    return Case(
        queries=queries,
        keys=keys if turning is None else of_values(values, turning),
        values=values,
        scale=scale,
        soft_cap=soft_cap,
        sink_keys=None if sinks is None else normal(heads, sinks, head_dim),
        sink_values=None if sinks is None else normal(heads, sinks, head_dim),
        key_mask=key_mask if masked else None,
        start=first if padded or windowed else None,
        stop=torch.randint(0, length + 1, (batch, rows), generator=generator) if partly else None,
    )


def assert_close(found: tuple[Tensor, LogSumExp], case: Case, true: tuple[Tensor, Tensor] | None = None) -> None:
    (mixed, whole), (of_rows, of_scores) = found, case.true() if true is None else true
    assert mixed.dtype == case.queries.dtype and mixed.shape == case.queries.shape
    torch.testing.assert_close(mixed.double(), of_rows, rtol=0, atol=TOLERANCE[mixed.dtype])
    assert whole.peak.dtype == whole.mass.dtype == torch.float32
    torch.testing.assert_close((whole.peak + whole.mass.log()).double(), of_scores, rtol=2e-6, atol=2e-5)
    assert torch.equal(whole.mass == 0, of_scores == -torch.inf)


@pytest.fixture
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_splits, "LEAST_COLUMNS", 20)
    monkeypatch.setattr(block_attention_ref, "CODED_AT_ONCE", 20)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(implementation: str, shape: str):
    case = random_case(**SHAPES[shape]).to(device_of(implementation))
    assert_close(case.by(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.usefixtures("several_parts")
def test_columns_in_parts_are_merged(implementation: str, code: RowCode | None):
    """Programs of their own take the parts; the reference takes parts of codes in turn. A row may see nothing of
    one."""
    cases: list[dict[str, Any]] = [{"soft_cap": None, "sinks": None, "rows": 37, "batch": 1}, {"dtype": torch.float16}]
    cases.append({"turning": 8, "sinks": None, "soft_cap": None})
    for sizes in cases:
        case = random_case(code=code, **sizes).to(device_of(implementation))
        assert_close(case.by(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", list(SHAPES)[::3])
def test_the_log_sum_exp_alone(implementation: str, shape: str):
    """Without values the sums are those with values, bit for bit."""
    case = random_case(**SHAPES[shape]).to(device_of(implementation))
    without: dict[str, Any] = {"values": None}
    (_, with_values), (_, alone) = case.by(implementation), replace(case, **without).by(implementation)
    assert torch.equal(alone.peak, with_values.peak) and torch.equal(alone.mass, with_values.mass)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.usefixtures("several_parts")
def test_the_same_bits_every_time(code: RowCode | None):
    case = random_case(code=code, soft_cap=None).to(device_of("triton"))
    (mixed, whole), (again, whole_again) = case.by("triton"), case.by("triton")
    assert torch.equal(mixed, again)
    assert torch.equal(whole.peak, whole_again.peak) and torch.equal(whole.mass, whole_again.mass)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("sinks", "code"), [(None, None), (1, RowCode.FP8)])
@pytest.mark.usefixtures("several_parts")
def test_rows_that_see_nothing(implementation: str, sinks: int | None, code: RowCode | None):
    case = random_case(sinks=sinks, code=code, masked=False).to(device_of(implementation))
    assert case.start is not None and case.stop is not None
    case.start[0] = 70  # a sequence, and rows of the next: its first 40 columns are pads
    case.stop[1] = torch.tensor([0, 70, 45, 40, 3], device=case.stop.device)
    mixed, whole = found = case.by(implementation)
    assert_close(found, case)
    nothing = case.hidden().all(2)
    assert nothing.sum() == 5 + 3
    sink = mixed.new_zeros(4, 1, 32) if case.sink_values is None else case.sink_values
    by_row = nothing[:, None, :, None].expand_as(mixed)
    assert torch.equal(mixed[by_row], sink.expand(2, 4, 5, 32)[by_row])
    assert bool((whole.mass[by_row[..., 0]] == (0 if sinks is None else 1)).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("code", CODES)
def test_strides_are_honoured(implementation: str, code: RowCode | None):
    """Queries as a projection leaves them, keys and values as some columns of a store of many layers have them."""
    case = random_case(length=40, masked=False, code=code).to(device_of(implementation))

    def in_a_store(rows: Any) -> Any:
        plain = rows.bytes if isinstance(rows, CodedRows) else rows
        store = plain.new_full((3, 2, 2, 2, 50, plain.shape[3]), 255 if isinstance(rows, CodedRows) else torch.nan)
        view = store[1, :2, :, 1, 3:43].copy_(plain)
        return replace(rows, bytes=view) if isinstance(rows, CodedRows) else view

    assert case.stop is not None and case.sink_keys is not None
    view = replace(
        case,
        queries=case.queries.transpose(1, 2).contiguous().transpose(1, 2),
        keys=in_a_store(case.keys),
        values=in_a_store(case.values),
        sink_keys=case.sink_keys.mT.contiguous().mT,
        stop=torch.stack([case.stop, case.stop * 0], dim=2)[..., 0].to(torch.int32),
    )
    assert_close(view.by(implementation), view, case.true())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_may_lie_far_apart(implementation: str):
    """So far that their addresses take 64 bits. Three pages of the memory are touched."""
    case = random_case(batch=1, heads=1, kv_heads=1, rows=3, length=20, head_dim=16, dtype=torch.float16)
    case = case.to(device_of(implementation))
    memory = torch.UntypedStorage((4 << 30) + 32, device=case.queries.device)
    apart = case.queries.new_empty(0).set_(memory, 0, (1, 1, 3, 16), (1, 1, 1 << 30, 1)).copy_(case.queries)  # pyright: ignore
    assert_close(replace(case, queries=apart).by(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("by_mask", [True, False])
def test_a_hidden_key_may_hold_anything(implementation: str, by_mask: bool):
    case = random_case(masked=by_mask, padded=not by_mask, partly=False).to(device_of(implementation))
    expected = case.true()
    assert isinstance(case.keys, Tensor)
    case.keys.transpose(1, 2)[case.hidden()[:, 0]] = torch.nan
    assert_close(case.by(implementation), case, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_without_cap_and_sinks_it_is_torchs_attention(
    implementation: str, heads: int, kv_heads: int, scale: float | None
):
    """And joining heads copies nothing."""
    sizes: dict[str, Any] = {"sinks": None, "partly": False, "soft_cap": None, "times": 1.0, "masked": False}
    case = random_case(heads=heads, kv_heads=kv_heads, scale=scale, **sizes).to(device_of(implementation))
    expected = attend(case.queries, case.keys, case.values, Limits(~case.hidden()[:, 0]), scale=scale)
    mixed, _ = case.by(implementation)
    joined = mixed.transpose(1, 2).flatten(2)
    torch.testing.assert_close(joined, expected, rtol=0, atol=2e-6)
    assert joined.data_ptr() == mixed.data_ptr()


@pytest.mark.parametrize("code", RowCode)
def test_the_codes_are_read_as_they_decode(code: RowCode):
    """A row that sees one column finds that column's values, bit for bit."""
    rows = torch.cat([torch.linspace(-6, 6, 96), torch.logspace(-9, 3, 96)]).view(12, 16)
    rows = torch.cat([rows, rows.flip(0) * 2.0**-20], dim=1)[None, None]
    coded = CodedRows.of(rows, code)
    columns = replace(coded, bytes=coded.bytes.view(12, 1, 1, -1))
    case = Case(torch.zeros(12, 1, 1, 32), columns, columns)
    mixed, _ = case.to(device_of("triton")).by("triton")
    assert torch.equal(mixed.cpu().view(12, 32), coded.values()[0, 0])


@pytest.mark.parametrize("at_once", [1, 1120, 2240, 4480])  # five rows count as eight
def test_chunks_of_sequences_and_heads_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch):
    case = random_case(batch=3)
    whole, sizes, mixed = case.by("reference"), [], block_attention_ref._mixed

    def watched(queries: Tensor, *rest: Any) -> Any:
        sizes.append(queries.shape[:2])
        return mixed(queries, *rest)

    monkeypatch.setattr(block_attention_ref, "PAIRS_AT_ONCE", at_once)
    monkeypatch.setattr(block_attention_ref, "_mixed", watched)
    torch.testing.assert_close(case.by("reference")[0], whole[0], rtol=0, atol=1e-6)
    assert sizes == {1: [(1, 2)] * 6, 1120: [(1, 2)] * 6, 2240: [(1, 4)] * 3, 4480: [(2, 4), (1, 4)]}[at_once]


@pytest.mark.parametrize("code", CODES)
def test_no_more_keys_are_copied_than_there_are_pairs(code: RowCode | None, monkeypatch: pytest.MonkeyPatch):
    case, sizes, part = random_case(batch=3, rows=1, dtype=torch.bfloat16, code=code), [], block_attention_ref._add_part

    def watched(queries: Tensor, keys: Any, *rest: Any) -> Tensor:
        sizes.append(keys.shape[1:])
        return part(queries, keys, *rest)

    columns = 70 if code is None else 35
    monkeypatch.setattr(block_attention_ref, "CODED_AT_ONCE", 35)
    monkeypatch.setattr(block_attention_ref, "PAIRS_AT_ONCE", 2 * 32 * columns)
    monkeypatch.setattr(block_attention_ref, "_add_part", watched)
    assert_close(case.by("reference"), case)
    assert sizes == [(2, columns, 32)] * (3 * 70 // columns)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_that_do_not_go_together(implementation: str):
    case = random_case()
    with pytest.raises(ValueError, match="do not fit keys"):
        replace(case, keys=case.keys[:1, :]).by(implementation)
    with pytest.raises(ValueError, match="in one code"):
        replace(case, keys=random_case(code=RowCode.FP8).keys).by(implementation)
    made = random_case(turning=5)
    with pytest.raises(ValueError, match="other values"):
        replace(made, values=made.values.clone()).by(implementation)  # pyright: ignore
    with pytest.raises(ValueError, match="do not fit values"):
        replace(made, keys=replace(made.keys, weight=torch.ones(31))).by(implementation)  # pyright: ignore
    with pytest.raises(ValueError, match="a multiple of 32"):
        random_case(turning=5, head_dim=48, code=RowCode.NVFP4).by(implementation)


@pytest.mark.parametrize("soft_cap", [0.3, 30.0, 1e6])
def test_the_cap_of_the_kernel(soft_cap: float):
    """One key and a sink with the score 0: their weights tell the capped score, of any size."""
    size = torch.tensor([1e-4, 0.01, 0.2499, 0.2501, 0.6, 1.0, 4.0, 100.0]) * min(soft_cap, 30.0)
    scores = torch.cat([-size, size])
    case = Case(
        queries=torch.zeros(1, 1, 16, 16), keys=torch.ones(1, 1, 1, 16), values=torch.ones(1, 1, 1, 16),
        soft_cap=soft_cap, sink_keys=torch.zeros(1, 1, 16), sink_values=-torch.ones(1, 1, 16),
    ).to(device_of("triton"))  # fmt: skip
    case.queries[0, 0, :, 0] = scores * 4
    expected = (soft_cap * (scores.double() / soft_cap).tanh() / 2).tanh().to(case.queries.device)
    torch.testing.assert_close(case.by("triton")[0][0, 0, :, 0].double(), expected, rtol=1e-6, atol=3e-7)


# Programs cover the device if rows are few, and every part is long enough to pay for its program.
@pytest.mark.parametrize(
    ("tiles", "length", "expected"),
    [(32, 32768, 8), (4, 131072, 66), (4, 1024, 4), (264, 131072, 1), (133, 131072, 1), (1, 255, 1), (1000, 9, 1)],
)
def test_splits_are_a_function_of_sizes(tiles: int, length: int, expected: int):
    assert attention_splits.splits(tiles, length) == expected


@pytest.mark.usefixtures("several_parts")
def test_the_kernel_allocates_what_its_parts_are_booked_with():
    case = random_case(masked=False)
    with Allocations() as allocated:
        case.by("triton")
    booked = attention_splits.partial_bytes(2, 4, 2, 5, 70, 32, element_bytes=4)
    assert allocated.peak - 2 * 4 * 5 * (32 + 2) * 4 == booked  # all parts that there may be: 3 of each row


@pytest.mark.gpu
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(24, 24, 32), (32, 32, 512), (28, 4, 32)])
def test_at_the_size_of_a_model(dtype: torch.dtype, heads: int, kv_heads: int, rows: int, code: RowCode | None):
    size: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "rows": rows, "length": 5000, "head_dim": 128}
    case = random_case(dtype=dtype, soft_cap=30.0, code=code, **size).to("cuda")
    names = (
        ("queries", "sink_keys", "sink_values") if code else ("queries", "keys", "values", "sink_keys", "sink_values")
    )
    expected = replace(case, **{name: getattr(case, name).float() for name in names}).by("reference")
    assert_close(case.by("triton"), case, (expected[0].double(), (expected[1].peak + expected[1].mass.log()).double()))
