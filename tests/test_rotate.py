"""Rotation of queries and keys against complex arithmetic in float64, by the reference and by the Triton kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels import rms_norm_ref, rotate_ref
from tiered.kernels.rotate_ref import HeadNorms
from tiered.models.rope import Rotary
from tiered.models.rotation import Rotation

# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
LENGTH = 50
# Batch, tables (0: none is asked by column), heads, rows, head_dim.
SHAPES = {
    "all columns": (2, 0, 2, LENGTH, 8),
    "scattered": (3, 1, 2, 7, 8),
    "a table for each sequence": (3, 3, 2, 7, 8),
    "the first sequences of more": (2, 4, 1, 5, 8),
    "several tiles of rows": (1, 1, 2, 37, 128),
    "a half that is no power of two": (2, 2, 1, 20, 24),
    "one pair": (1, 1, 3, 4, 2),
    "no rows": (2, 1, 2, 0, 8),
}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rotated_by(implementation: str) -> Callable[..., Tensor]:
    if implementation == "reference":
        return rotate_ref.rotate
    pytest.importorskip("triton")
    from tiered.kernels import rotate

    return rotate.rotate


def norms_of(heads: Tensor, count: int, offset: float | None) -> HeadNorms:
    weights = torch.randn(2, heads.shape[3], generator=torch.Generator().manual_seed(2)).to(heads) + 1
    return HeadNorms(weights[0], weights[1], count, 1e-5, offset)


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def inputs(shape: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Rotary]:
    """Heads as a projection leaves them, and the angles of their rows."""
    batch, tables, heads, rows, head_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(batch, rows, heads, head_dim, generator=generator).to(device, dtype)
    positions = torch.randint(0, 4000, (max(1, tables), LENGTH), generator=generator).to(device)
    rotary = Rotary.of(positions, head_dim, Rotation())
    if tables:
        columns = torch.stack([torch.randperm(LENGTH, generator=generator)[:rows] for _ in range(batch)])
        rotary = rotary.at(Rows.at(columns.to(device)))
    return projected.transpose(1, 2), rotary


def true(heads: Tensor, rotary: Rotary) -> Tensor:
    """Pairs of elements are complex numbers; row by row."""
    result = torch.empty(heads.shape, dtype=torch.float64, device=heads.device)
    angles = torch.complex(rotary.cos.double(), rotary.sin.double())[:, 0]
    for b in range(heads.shape[0]):
        for r in range(heads.shape[2]):
            column = r if rotary.columns is None else int(rotary.columns[b, r])
            left, right = heads[b, :, r].double().chunk(2, dim=-1)
            turned = torch.complex(left, right) * angles[b if len(angles) > 1 else 0, column]
            result[b, :, r] = torch.cat([turned.real, turned.imag], dim=-1)
    return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_turn_by_their_angles(implementation: str, shape: str, dtype: torch.dtype):
    heads, rotary = inputs(shape, dtype, device_of(implementation))
    rotated = rotated_by(implementation)(heads, rotary.cos, rotary.sin, rotary.columns)
    assert rotated.dtype == dtype and rotated.shape == heads.shape
    torch.testing.assert_close(rotated.double(), true(heads, rotary), rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_has_the_references_bits(shape: str, dtype: torch.dtype):
    heads, rotary = inputs(shape, dtype, device_of("triton"))
    expected, found = (rotated_by(which)(heads, rotary.cos, rotary.sin, rotary.columns) for which in IMPLEMENTATIONS)
    assert torch.equal(found, expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads_are_normed_and_rotated_as_in_two_steps(
    implementation: str, shape: str, dtype: torch.dtype, offset: float | None
):
    """Every count of heads that are queries; sums of squares may come in another order, which can change a rounding."""
    heads, rotary = inputs(shape, dtype, device_of(implementation))
    for count in range(heads.shape[1] + 1):
        norms = norms_of(heads, count, offset)
        normed = torch.cat(
            [
                rms_norm_ref.rms_norm(part.flatten(0, 1), weight, 1e-5, offset=offset).view(part.shape)
                for part, weight in zip(heads.split([count, heads.shape[1] - count], 1), norms[:2], strict=True)
            ],
            dim=1,
        )
        found = rotated_by(implementation)(heads, rotary.cos, rotary.sin, rotary.columns, norms)
        assert found.dtype == dtype and found.shape == heads.shape
        tolerance = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), true(normed, rotary), rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_norms_that_do_not_fit_are_refused(implementation: str):
    heads, rotary = inputs("scattered", torch.float32, device_of(implementation))
    norms = norms_of(heads, 1, None)
    for wrong, told in (
        (norms._replace(queries=norms.queries[1:]), r"weight \(7,\) of torch.float32 does not fit"),
        (norms._replace(keys=norms.keys.half()), r"weight \(8,\) of torch.float16 does not fit"),
        (norms._replace(count=3), "3 heads of queries are not among 2"),
    ):
        with pytest.raises(ValueError, match=told):
            rotated_by(implementation)(heads, rotary.cos, rotary.sin, rotary.columns, wrong)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_span_is_its_columns(implementation: str, shared: bool):
    """A view of the tables, or columns by number, in a table for all sequences or one for each."""
    device = device_of(implementation)
    rotary = Rotary.of(torch.randint(0, 900, (1 if shared else 2, LENGTH), device=device), 8, Rotation())
    heads = torch.randn(2, 3, 12, 8, device=device)
    columns = torch.arange(20, 32, device=device).expand(2, -1)
    span, scattered = (
        rotated_by(implementation)(heads, at.cos, at.sin, at.columns)
        for at in (rotary.at(Rows.span(20, 32)), rotary.at(Rows.at(columns)))
    )
    assert torch.equal(span, scattered)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_honoured(implementation: str):
    """Heads whose elements are apart, columns that are every other one of more, tables that are laid out unlike."""
    heads, rotary = inputs("a table for each sequence", torch.float32, device_of(implementation))
    assert rotary.columns is not None
    expected = rotated_by(implementation)(heads, rotary.cos, rotary.sin, rotary.columns)
    columns = torch.stack([rotary.columns, rotary.columns + 1], 2)[:, :, 0]
    sine = rotary.sin.transpose(2, 3).contiguous().transpose(2, 3)
    apart = heads.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rotated_by(implementation)(apart, rotary.cos, sine, columns), expected)


def test_a_column_out_of_range_changes_no_other_row():
    """The kernel reads no angles there: the row is anything, and the others are right."""
    heads, rotary = inputs("scattered", torch.float32, device_of("triton"))
    expected = rotate_ref.rotate(heads, rotary.cos, rotary.sin, rotary.columns)
    assert rotary.columns is not None
    columns = rotary.columns.clone()
    columns[:, 2], columns[:, 5] = -(2**40), 2**40
    found = rotated_by("triton")(heads, rotary.cos, rotary.sin, columns)
    kept = [0, 1, 3, 4, 6]
    assert torch.equal(found[:, :, kept], expected[:, :, kept])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "columns", "tables", "head_dim"),
    [(7, None, 1, 8), (LENGTH, None, 2, 8), (7, 6, 1, 8), (7, 7, 2, 8), (7, 7, 1, 10)],
    ids=["other rows", "other sequences", "other columns", "too few tables", "other heads"],
)
def test_bad_arguments_are_refused(implementation: str, rows: int, columns: int | None, tables: int, head_dim: int):
    heads = torch.randn(3, 2, rows, head_dim, device=device_of(implementation))
    cos, sin = torch.ones(2, tables, 1, LENGTH, 4, device=heads.device)
    numbers = None if columns is None else torch.zeros(3, columns, dtype=torch.int64, device=heads.device)
    with pytest.raises(ValueError, match="do not fit heads"):
        rotated_by(implementation)(heads, cos, sin, numbers)
