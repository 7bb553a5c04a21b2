"""The product of rows and a weight is the same whichever of them is the left factor."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.projection import ONE_ORDER, adjoining, project, project_joined
from tiered.kernels.row_code import WeightCode


@pytest.mark.parametrize("rows", [(0,), (1, 5), (4, 4), (2, 40), (1, 256), (257,), (3, 100)])
def test_every_row_count_gives_the_plain_product(rows: tuple[int, ...]) -> None:
    hidden, weight = torch.randn(*rows, 24), torch.randn(40, 24)
    out = project(hidden, weight)
    assert out.shape == (*rows, 40)
    torch.testing.assert_close(out.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("code", [None, *WeightCode])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_among_any_rows(threads: int, code: WeightCode | None) -> None:
    hidden, values = torch.randn(max(ONE_ORDER), 192), torch.randn(320, 192)
    weight = values if code is None else CodedRows.of(values, code)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        every = project(hidden, weight)
        counts = [rows for rows in sorted(ONE_ORDER) if rows < 40 or rows % 8 < 2]
        assert all(torch.equal(project(hidden[:rows], weight), every[:rows]) for rows in counts)
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("code", [None, *WeightCode])
def test_weights_that_adjoin_are_one(code: WeightCode | None) -> None:
    whole: Any = torch.randn(96, 64)
    whole = whole if code is None else CodedRows.of(whole, code)
    parts = whole[:40], whole[40:48], whole[48:]
    joined: Any = adjoining(parts)
    values = joined if code is None else joined.values()
    assert torch.equal(values, whole if code is None else whole.values())
    assert (joined if code is None else joined.bytes).data_ptr() == (whole if code is None else whole.bytes).data_ptr()
    assert adjoining((parts[0], parts[2])) is None and adjoining((parts[1], parts[0])) is None
    assert adjoining(parts[1:]).shape == (56, 64)  # pyright: ignore[reportOptionalMemberAccess]


def test_weights_of_their_own_memory_do_not_adjoin() -> None:
    """Not even if the allocator puts one behind the other."""
    memory = torch.randn(24, 8)
    behind = torch.frombuffer(memory.numpy()[12:], dtype=torch.float32).view(12, 8)
    first = torch.frombuffer(memory.numpy()[:12], dtype=torch.float32).view(12, 8)
    assert behind.data_ptr() == first.data_ptr() + first.nbytes and adjoining((first, behind)) is None
    assert adjoining((memory[:12].t(), memory[12:].t())) is None
    assert adjoining((memory[:12].as_subclass(Quantised), memory[12:])) is None


def test_a_cpu_has_no_joined_product() -> None:
    weights = torch.randn(96, 64).split(48)
    assert adjoining(weights) is not None and project_joined(torch.randn(1, 20, 64), weights) is None


def test_a_projection_that_is_set_is_the_one_that_runs(tiny_model: Any) -> None:
    """In a copy of a model, which shares no module with it."""
    copied, hidden = deepcopy(tiny_model), torch.randn(1, 3, 32)
    expected = tiny_model.feed_forward(0, hidden)
    assert expected.any() and torch.equal(copied.feed_forward(0, hidden), expected)
    copied.blocks[0].ff_out = nn.Linear(48, 32, bias=False).requires_grad_(False)
    copied.blocks[0].ff_out.weight.zero_()
    assert not copied.feed_forward(0, hidden).any()
    assert torch.equal(tiny_model.feed_forward(0, hidden), expected)
    assert all(copied.blocks[number] is block for number, block in enumerate(copied.blocks))
    assert not {*copied.modules()} & {*tiny_model.modules()}
