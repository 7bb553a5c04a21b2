"""Rows scattered into a store against a loop, by the reference and by the Triton kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiered.core import rows as rows_module
from tiered.core.rows import Rows
from tiered.kernels import scatter_rows_ref


def scatter(implementation: str) -> Callable[..., None]:
    if implementation == "reference":
        return scatter_rows_ref.scatter_rows
    pytest.importorskip("triton")
    from tiered.kernels import scatter_rows

    return scatter_rows.scatter_rows


# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
SHAPES = {
    "plain": (2, 2, 50, 24, 11),
    "several tiles of rows": (1, 2, 90, 16, 70),
    "one element": (3, 1, 5, 1, 2),
    "every column": (1, 3, 32, 128, 32),
    "no rows": (2, 2, 5, 4, 0),
}


def inputs(shape: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A store in which every entry is another number, values of which no entry is in it, columns, and which count.

    The columns of rows that do not count are those of others.
    """
    batch, heads, length, elements, rows = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(batch * heads * length * elements).view(batch, heads, length, elements)
    values = -1 - torch.arange(batch * heads * rows * elements).view(batch, heads, rows, elements)
    index = torch.stack([torch.randperm(length, generator=generator)[:rows] for _ in range(batch)])
    valid = torch.rand(batch, rows, generator=generator) > 0.3
    index = index.where(valid, index.flip(1))
    return target.to(device, dtype), values.to(device, dtype), index.to(device), valid.to(device)


def expected(target: Tensor, values: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
    """`target` after the rows have been written one by one."""
    result = target.clone()
    for b, columns in enumerate(index.tolist()):
        for r, column in enumerate(columns):
            if valid is None or valid[b, r]:
                result[b, :, column] = values[b, :, r]
    return result


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_count_are_written_and_no_others(implementation: str, shape: str, dtype: torch.dtype):
    target, values, index, valid = inputs(shape, dtype, device_of(implementation))
    values[~valid[:, None].expand(values.shape[:3])] = torch.nan
    wanted = expected(target, values, index, valid)
    scatter(implementation)(target, values, index, valid)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_flags_every_row_counts(implementation: str, shape: str):
    target, values, index, _ = inputs(shape, torch.float32, device_of(implementation))
    index = torch.arange(index.shape[1], device=index.device).flip(0).expand(index.shape)
    wanted = expected(target, values, index, None)
    scatter(implementation)(target, values, index)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_honoured(implementation: str):
    """One layer of a store, values as a projection leaves them, columns and flags that are parts of others."""
    target, values, index, valid = inputs("plain", torch.float32, device_of(implementation))
    wanted = expected(target, values, index, valid)
    store = torch.full((3, 3, 2, 24, 50), -7.0, device=target.device)
    layer = store[1, :2].transpose(2, 3)
    layer.copy_(target)
    around = store.clone()
    around[1, :2] = wanted.transpose(2, 3)
    index, valid = torch.stack([index, index + 1], 2)[:, :, 0], torch.stack([valid, ~valid], 2)[:, :, 0]
    scatter(implementation)(layer, values.transpose(1, 2).contiguous().transpose(1, 2), index, valid)
    assert torch.equal(store, around)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_are_not_touched(implementation: str):
    """Every bfloat16 there is, subnormals too, but NaN, of whose many codes torch keeps one."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(device_of(implementation))
    values = bits.view(torch.bfloat16)
    values = values.where(values == values, torch.inf).view(1, 1, 512, 128)
    target = torch.zeros_like(values)
    scatter(implementation)(target, values, torch.arange(512, device=bits.device)[None])
    assert torch.equal(target.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize(
    "change",
    [lambda values: values[:, :1], lambda values: values[:, :, 1:], lambda values: values.double()],
    ids=["heads", "rows", "dtype"],
)
def test_values_that_do_not_fit_are_refused(change: Callable[[Tensor], Tensor]):
    target, values, index, valid = inputs("plain", torch.float32, device_of("triton"))
    with pytest.raises(ValueError, match="do not fit target"):
        scatter("triton")(target, change(values), index, valid)


def test_a_column_out_of_range_is_not_written():
    target, values, index, valid = inputs("plain", torch.float32, device_of("triton"))
    store = torch.cat([target, target, target], dim=2)
    before = store.clone()
    index[:] = torch.tensor([-1, 50, 99, -50, 51, 52, 53, 54, 55, 56, 57], device=index.device)
    scatter("triton")(store[:, :, 50:100], values, index, torch.ones_like(valid))
    assert torch.equal(store, before)


def test_rows_take_the_implementation_of_the_device(monkeypatch: pytest.MonkeyPatch):
    target, values, index, valid = inputs("plain", torch.float32, "cpu")
    asked = []

    def watched(reference: Callable[..., None], device: torch.device) -> Callable[..., None]:
        asked.append((reference, device))
        return reference

    monkeypatch.setattr(rows_module, "for_device", watched)
    wanted = expected(target, values, index, valid)
    Rows.at(index, valid).put(target, values)
    assert asked == [(scatter_rows_ref.scatter_rows, target.device)]
    assert torch.equal(target, wanted)
