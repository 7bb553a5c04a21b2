"""Root-mean-square norm against float64 arithmetic, by the reference and by the Triton kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiered.kernels import rms_norm_ref

# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
# Batch, rows, width.
SHAPES = {
    "plain": (2, 5, 24),
    "one row": (1, 1, 128),
    "one element": (3, 2, 1),
    "a width that is no power of two": (1, 3, 3584),
    "the largest width": (1, 2, 8192),
    "no rows": (2, 0, 24),
}
# Of an entry, twice rounded; the interpreter cuts bfloat16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}
EPS = 1e-5


def norm(implementation: str) -> Callable[..., Tensor]:
    if implementation == "reference":
        return rms_norm_ref.rms_norm
    pytest.importorskip("triton")
    from tiered.kernels import rms_norm

    return rms_norm.rms_norm


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(shape, generator=generator) * 3, torch.rand(shape[-1], generator=generator) + 0.5
    return hidden.to(device, dtype), weight.to(device, dtype)


def true(hidden: Tensor, weight: Tensor | None, offset: float | None) -> Tensor:
    x, scale = hidden.double(), 1.0 if weight is None else weight.double() + (offset or 0.0)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("weighted", "offset"), [(True, None), (True, 0.0), (True, 1.0), (False, None)])
def test_it_is_the_norm(implementation: str, shape: str, dtype: torch.dtype, weighted: bool, offset: float | None):
    hidden, weight = inputs(SHAPES[shape], dtype, device_of(implementation))
    weight = weight if weighted else None
    normed = norm(implementation)(hidden, weight, EPS, offset=offset)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), true(hidden, weight, offset), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [None, 0.0])
def test_it_is_rounded_before_the_weight_unless_it_has_an_offset(implementation: str, offset: float | None):
    """In float16, where each of the two roundings shows."""
    hidden, weight = inputs((2, 3, 256), torch.float16, device_of(implementation))
    x = hidden.float()
    once = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    twice, once = once.half() * weight, (once * weight.float()).half()
    expected, other = (twice, once) if offset is None else (once, twice)
    normed = norm(implementation)(hidden, weight, EPS, offset=offset)
    assert (normed != expected).double().mean() < 0.01 < (normed != other).double().mean()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_rows_and_strides(implementation: str):
    """A part of each sequence's rows, and a layout with rows innermost, are normed as a copy is: each row alone."""
    hidden, weight = inputs((3, 7, 40), torch.float32, device_of(implementation))
    expected = norm(implementation)(hidden, weight, EPS)
    assert torch.equal(norm(implementation)(hidden[:, 2:5], weight, EPS), expected[:, 2:5])
    turned = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(norm(implementation)(turned, weight, EPS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_branch_is_added_first(implementation: str, shape: str, dtype: torch.dtype):
    """In place, to a part of each sequence's rows; the norm is that of the rounded sum."""
    hidden, weight = inputs(SHAPES[shape], dtype, device_of(implementation))
    branch = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    op, room = norm(implementation), torch.cat([hidden, hidden, hidden], dim=1)
    part = room[:, hidden.shape[1] : 2 * hidden.shape[1]]
    normed = op(part, weight, EPS, branch=branch)
    if implementation == "reference" or dtype == torch.float32:
        assert torch.equal(part, hidden + branch)
    torch.testing.assert_close(part.double(), hidden.double() + branch.double(), rtol=TOLERANCE[dtype], atol=1e-6)
    assert torch.equal(normed, op(part, weight, EPS))
    for other in room.split(max(1, hidden.shape[1]), dim=1)[::2]:
        assert torch.equal(other, hidden)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_branch_is_added_in_any_layout(implementation: str):
    hidden, weight = inputs((3, 7, 40), torch.float32, device_of(implementation))
    op, branch = norm(implementation), torch.arange(840.0, device=hidden.device).view(3, 40, 7).transpose(1, 2)
    expected = op(hidden + branch, weight, EPS)
    for given in (hidden.clone(), hidden.transpose(1, 2).contiguous().transpose(1, 2)):
        normed = op(given, weight, EPS, branch=branch)
        assert torch.equal(given, hidden + branch)
        torch.testing.assert_close(normed, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "change", [lambda branch: branch[:, 1:], lambda branch: branch.double()], ids=["shape", "dtype"]
)
def test_a_branch_that_does_not_fit_is_refused(implementation: str, change: Callable[[Tensor], Tensor]):
    hidden, weight = inputs((1, 2, 16), torch.float32, device_of(implementation))
    with pytest.raises(ValueError, match="does not fit hidden"):
        norm(implementation)(hidden, weight, EPS, branch=change(hidden.clone()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("entry", "expected"),
    [(torch.nan, torch.nan), (torch.inf, torch.nan), (3e38, 0.0)],
    ids=["nan", "inf", "too large"],
)
def test_a_row_that_is_no_number_stays_one(implementation: str, entry: float, expected: float):
    """No other row changes. A number whose square is infinite in float32 gives an infinite norm."""
    hidden, weight = inputs((1, 3, 16), torch.float32, device_of(implementation))
    clean = norm(implementation)(hidden, weight, EPS)
    hidden[0, 1, 4] = entry
    normed = norm(implementation)(hidden, weight, EPS)
    assert torch.equal(normed[0, ::2], clean[0, ::2])
    torch.testing.assert_close(normed[0, 1, 4].item(), expected, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("change", [lambda weight: weight[1:], lambda weight: weight.double()], ids=["width", "dtype"])
def test_a_weight_that_does_not_fit_is_refused(implementation: str, change: Callable[[Tensor], Tensor]):
    hidden, weight = inputs((1, 2, 16), torch.float32, device_of(implementation))
    with pytest.raises(ValueError, match="does not fit hidden"):
        norm(implementation)(hidden, change(weight), EPS)
