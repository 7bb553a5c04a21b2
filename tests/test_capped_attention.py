"""Capped attention against float64 arithmetic, by the reference and by the Triton kernel."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiered.kernels import capped_attention_ref

# The reference anywhere; the Triton kernel on a GPU where there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"masked": False, "partly": False},
    "pads": {"partly": False},
    "final rows see final columns": {"masked": False},
    "pads and final rows": {},
    "a head for each key head": {"kv_heads": 4},
    "one key head": {"heads": 3, "kv_heads": 1, "batch": 1},
    "no sinks": {"sinks": 0},
    "no sinks, pads in front": {"sinks": 0, "partly": False, "length": 100},
    "two sinks": {"sinks": 2},
    "whole tiles": {"head_dim": 32, "length": 64, "rows": 16, "batch": 1},
    "several tiles of rows": {"rows": 37, "batch": 1},
    "one row, one column": {"rows": 1, "length": 1, "masked": False, "partly": False},
    "tiny scores": {"scale": 1e-3},
    "scores beyond the cap": {"scale": 30.0},
    "scores far beyond the cap": {"scale": 300.0},
    "a small cap": {"soft_cap": 0.5},
    "bfloat16": {"dtype": torch.bfloat16},
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """What goes in."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    soft_cap: float
    sink_keys: Tensor
    sink_values: Tensor
    key_mask: Tensor | None = None
    visible: Tensor | None = None

    def to(self, device: str) -> "Case":
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in given.items() if isinstance(value, Tensor)})

    def by(self, implementation: str) -> Tensor:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return attention(implementation)(given.pop("queries"), given.pop("keys"), given.pop("values"), **given)

    def true(self) -> Tensor:
        """In float64, row by row, over the columns that the row sees."""
        batch, heads, rows, head_dim = self.queries.shape
        group = heads // self.keys.shape[1]
        mixed = torch.zeros(batch, heads, rows, head_dim, dtype=torch.float64, device=self.queries.device)
        for b in range(batch):
            for h in range(heads):
                for r in range(rows):
                    seen = torch.ones(self.keys.shape[2], dtype=torch.bool, device=self.queries.device)
                    if self.key_mask is not None:
                        seen &= self.key_mask[b]
                    if self.visible is not None:
                        seen[int(self.visible[b, r]) :] = False
                    keys = torch.cat([self.sink_keys[h], self.keys[b, h // group, seen]]).double()
                    values = torch.cat([self.sink_values[h], self.values[b, h // group, seen]]).double()
                    scores = keys @ self.queries[b, h, r].double() / head_dim**0.5
                    if len(scores):
                        mixed[b, h, r] = (self.soft_cap * (scores / self.soft_cap).tanh()).softmax(0) @ values
        return mixed


def attention(implementation: str) -> Callable[..., Tensor]:
    if implementation == "reference":
        return capped_attention_ref.capped_attention
    pytest.importorskip("triton")
    from tiered.kernels import capped_attention

    return capped_attention.capped_attention


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def random_case(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 5,
    length: int = 70,
    head_dim: int = 24,
    sinks: int = 1,
    masked: bool = True,
    partly: bool = True,
    soft_cap: float = 5.0,
    scale: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Pads on the right of one sequence and on the left of the next; of each row's columns, the first to some."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    key_mask = torch.ones(batch, length, dtype=torch.bool)
    for b in range(batch):
        key_mask[b, slice(0, 40) if b % 2 else slice(length - 4, length)] = False
    visible = torch.randint(0, length + 1, (batch, rows), generator=generator)
    return Case(
        queries=normal(batch, heads, rows, head_dim) * scale,
        keys=normal(batch, kv_heads, length, head_dim),
        values=normal(batch, kv_heads, length, head_dim),
        soft_cap=soft_cap,
        sink_keys=normal(heads, sinks, head_dim),
        sink_values=normal(heads, sinks, head_dim),
        key_mask=key_mask if masked else None,
        visible=visible if partly else None,
    )


def assert_close(found: Tensor, case: Case, expected: Tensor | None = None) -> None:
    assert found.dtype == case.queries.dtype and found.shape == case.queries.shape
    expected = case.true() if expected is None else expected
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(implementation: str, shape: str):
    case = random_case(**SHAPES[shape]).to(device_of(implementation))
    assert_close(case.by(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sinks", [0, 1])
def test_rows_that_see_nothing(implementation: str, sinks: int):
    case = random_case(sinks=sinks).to(device_of(implementation))
    assert case.key_mask is not None and case.visible is not None
    case.key_mask[0] = False  # a sequence, and a row of the next
    case.visible[1] = torch.tensor([0, 70, 45, 40, 3], device=case.visible.device)
    found = case.by(implementation)
    assert_close(found, case)
    nothing = torch.zeros(case.visible.shape, dtype=torch.bool, device=found.device)
    nothing[0], nothing[1] = True, case.visible[1] <= 40  # its first 40 columns are pads
    expected = case.sink_values.mT[None].mT.expand(2, -1, -1, -1) if sinks else found.new_zeros(2, 4, 1, 24)
    by_row = nothing[:, None, :, None].expand_as(found)
    assert torch.equal(found[by_row], expected.expand_as(found)[by_row])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_honoured(implementation: str):
    """Queries as a projection leaves them, keys and values as the first columns of a store of many layers have them."""
    case = random_case(length=40, masked=False).to(device_of(implementation))
    store = torch.full((2, 3, 2, 2, 50, 24), torch.nan, device=case.keys.device)
    store[0, :2, :, 1, :40], store[1, :2, :, 1, :40] = case.keys, case.values
    assert case.visible is not None
    view = replace(
        case,
        queries=case.queries.transpose(1, 2).contiguous().transpose(1, 2),
        keys=store[0, :2, :, 1, :40],
        values=store[1, :2, :, 1, :40],
        sink_keys=case.sink_keys.mT.contiguous().mT,
        visible=torch.stack([case.visible, case.visible * 0], dim=2)[..., 0].to(torch.int32),
    )
    assert_close(view.by(implementation), case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pads_key_may_hold_anything(implementation: str):
    case = random_case(partly=False).to(device_of(implementation))
    assert case.key_mask is not None
    expected = case.true()
    case.keys.transpose(1, 2)[~case.key_mask] = torch.nan
    assert_close(case.by(implementation), case, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_without_cap_and_sinks_it_is_plain_attention(implementation: str, heads: int, kv_heads: int):
    sizes: dict[str, Any] = {"sinks": 0, "partly": False, "soft_cap": 1e6, "scale": 1.0}
    case = random_case(heads=heads, kv_heads=kv_heads, **sizes).to(device_of(implementation))
    assert case.key_mask is not None
    expected = F.scaled_dot_product_attention(
        case.queries, case.keys, case.values, attn_mask=case.key_mask[:, None, None], enable_gqa=True
    )
    torch.testing.assert_close(case.by(implementation), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("at_once", [1, 1120, 2240, 4480])  # five rows count as eight
def test_chunks_of_sequences_and_heads_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch):
    case = random_case(batch=3)
    whole, sizes, mixed = case.by("reference"), [], capped_attention_ref._mixed

    def watched(queries: Tensor, *rest: Any) -> Tensor:
        sizes.append(queries.shape[:2])
        return mixed(queries, *rest)

    monkeypatch.setattr(capped_attention_ref, "PAIRS_AT_ONCE", at_once)
    monkeypatch.setattr(capped_attention_ref, "_mixed", watched)
    torch.testing.assert_close(case.by("reference"), whole, rtol=0, atol=1e-6)
    assert sizes == {1: [(1, 2)] * 6, 1120: [(1, 2)] * 6, 2240: [(1, 4)] * 3, 4480: [(2, 4), (1, 4)]}[at_once]


def test_no_more_keys_are_copied_than_there_are_pairs(monkeypatch: pytest.MonkeyPatch):
    case, sizes, mixed = random_case(batch=3, rows=1, dtype=torch.bfloat16), [], capped_attention_ref._mixed

    def watched(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        sizes.append(keys.numel())
        return mixed(queries, keys, *rest)

    monkeypatch.setattr(capped_attention_ref, "PAIRS_AT_ONCE", 2 * 24 * 70)
    monkeypatch.setattr(capped_attention_ref, "_mixed", watched)
    assert_close(case.by("reference"), case)
    assert sizes == [2 * 24 * 70] * 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_that_do_not_go_together(implementation: str):
    case = random_case()
    with pytest.raises(ValueError, match="do not fit keys"):
        replace(case, keys=case.keys[:1]).by(implementation)


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
    expected = (soft_cap * (scores.double() / soft_cap).tanh() / 2).tanh().to(case.keys.device)
    torch.testing.assert_close(case.by("triton")[0, 0, :, 0].double(), expected, rtol=1e-6, atol=3e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(24, 24, 32), (32, 32, 512), (28, 4, 32)])
def test_at_the_size_of_a_model(dtype: torch.dtype, heads: int, kv_heads: int, rows: int):
    size: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "rows": rows, "length": 5000, "head_dim": 128}
    case = random_case(dtype=dtype, soft_cap=30.0, **size).to("cuda")
    single = {name: getattr(case, name).float() for name in ("queries", "keys", "values", "sink_keys", "sink_values")}
    expected = replace(case, **single).by("reference")
    assert_close(case.by("triton"), case, expected.double())
