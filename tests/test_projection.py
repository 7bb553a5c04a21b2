"""Multiplying rows by a weight answers the same whichever way round it goes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.kernels.projection import project


@pytest.mark.parametrize("rows", [(0,), (1, 5), (4, 4), (2, 40), (1, 256), (257,), (3, 100)])
def test_every_row_count_gives_the_plain_product(rows: tuple[int, ...]) -> None:
    hidden, weight = torch.randn(*rows, 24), torch.randn(40, 24)
    out = project(hidden, weight)
    assert out.shape == (*rows, 40)
    torch.testing.assert_close(out.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


def test_gradients_reach_both_factors() -> None:
    hidden, weight = torch.randn(2, 10, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    project(hidden, weight).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad, weight.detach().sum(0).expand(2, 10, 24), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weight.grad, hidden.detach().sum((0, 1)).expand(40, 24), atol=1e-4, rtol=1e-4)


class Quantised(Tensor):
    """A weight as torchao makes them: a class of its own, of which `F.linear` is the only product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.nn.functional.linear, Tensor.shape.__get__):  # pyright: ignore[reportAttributeAccessIssue]
            raise NotImplementedError(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_quantised_weight_is_a_right_factor() -> None:
    hidden, weight = torch.randn(2, 40, 24), torch.randn(40, 24)
    assert torch.equal(project(hidden, weight.as_subclass(Quantised)), torch.nn.functional.linear(hidden, weight))
