"""The gate of an MLP against float64 arithmetic, by the reference and by the Triton kernel."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tiered.kernels import gate_mul_ref
from tiered.kernels.gate_mul_ref import Activation

# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
SHAPES = {"plain": (2, 5, 24), "several tiles": (3, 7, 1000), "whole tiles": (2, 1024), "one": (1, 1), "none": (0, 8)}
# Of an entry, twice rounded; the interpreter cuts bfloat16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}
# Torch computes 1 + tanh, which cancels far below zero.
NEAR_ZERO: dict[Activation, float] = {"silu": 1e-7, "gelu": 5e-7}
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
}


def gated(implementation: str) -> Callable[..., Tensor]:
    if implementation == "reference":
        return gate_mul_ref.gate_mul
    pytest.importorskip("triton")
    from tiered.kernels import gate_mul

    return gate_mul.gate_mul


def inputs(implementation: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"
    gate, up = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return gate * 4, up


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_product(implementation: str, shape: str, dtype: torch.dtype, activation: Activation):
    gate, up = inputs(implementation, SHAPES[shape], dtype)
    product = gated(implementation)(gate, up, activation)
    assert product.dtype == dtype
    expected = ACTIVATIONS[activation](gate.double()) * up.double()
    torch.testing.assert_close(product.double(), expected, rtol=TOLERANCE[dtype], atol=NEAR_ZERO[activation])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_rounded_before_the_product(implementation: str, activation: Activation):
    """In float16, where each of the two roundings shows."""
    gate, up = inputs(implementation, (4, 256), torch.float16)
    gate = gate.abs()
    activated = ACTIVATIONS[activation](gate.float())
    expected, other = activated.half() * up, (activated * up.float()).half()
    product = gated(implementation)(gate, up, activation)
    assert (product != expected).double().mean() < 0.01 < (product != other).double().mean()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("entry", "expected"),
    [(-1e4, 0.0), (1e4, 1e4), (torch.inf, torch.inf), (-torch.inf, torch.nan), (torch.nan, torch.nan)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero(implementation: str, entry: float, expected: float, activation: Activation):
    gate, up = inputs(implementation, (2, 8), torch.float32)
    clean = gated(implementation)(gate, torch.ones_like(up), activation)
    gate[1, 3] = entry
    product = gated(implementation)(gate, torch.ones_like(up), activation)
    torch.testing.assert_close(product[1, 3].item(), expected, equal_nan=True)
    product[1, 3] = clean[1, 3]
    assert torch.equal(product, clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_may_differ(implementation: str):
    gate, up = inputs(implementation, (6, 20), torch.float32)
    expected = gated(implementation)(gate, up)
    turned, part = gated(implementation)(gate.t().contiguous().t(), up), gated(implementation)(gate[:, 3:9], up[:, 3:9])
    torch.testing.assert_close(turned, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(part, expected[:, 3:9], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_reach_both(activation: Activation):
    gate, up = (part.double().requires_grad_() for part in inputs("reference", (2, 6), torch.float32))
    assert torch.autograd.gradcheck(partial(gate_mul_ref.gate_mul, activation=activation), (gate, up))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("change", [lambda up: up[1:], lambda up: up.double()], ids=["shape", "dtype"])
def test_branches_that_do_not_fit_are_refused(implementation: str, change: Callable[[Tensor], Tensor]):
    gate, up = inputs(implementation, (2, 6), torch.float32)
    with pytest.raises(ValueError, match="does not fit gate"):
        gated(implementation)(gate, change(up))
