"""Outputs of experts, by the reference and by the Triton kernel, row by row and for every split of the experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from allocations import Allocations
from torch import Tensor

import tiered
from tiered.forward.forward_bytes import part_buffers
from tiered.forward.sizes import CallShape, Gpu
from tiered.kernels import expert_outputs_ref
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.expert_outputs_ref import Picks
from tiered.kernels.expert_table import ExpertTable
from tiered.kernels.gate_mul_ref import Activation
from tiered.kernels.row_code import WeightCode
from tiered.models.shape import Experts

# The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
EXPERTS, PICKED, WIDTH, INNER = 7, 3, 72, 40
# Of the largest number. The interpreter cuts bfloat16 instead of rounding it, at each of three steps.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CODES = [None, *WeightCode]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
}


def module(implementation: str) -> Any:
    """The module of both operations."""
    if implementation == "reference":
        return expert_outputs_ref
    pytest.importorskip("triton")
    from tiered.kernels import expert_outputs

    return expert_outputs


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def given(
    device: str, count: int, dtype: torch.dtype = torch.float32, code: WeightCode | None = None
) -> tuple[Tensor, Picks, ExpertTable]:
    """Rows, the experts that each picks, and two stacks. Expert 2 is picked by all rows, expert 5 by none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, WIDTH, generator=generator).to(device, dtype)
    others = torch.rand(count, EXPERTS, generator=generator).index_fill_(1, torch.tensor([2, 5]), -1)
    experts = torch.cat([torch.full((count, 1), 2), others.topk(PICKED - 1).indices], dim=1).sort(dim=1).values
    weights = torch.rand(count, PICKED, generator=generator)
    stacks = [
        torch.randn(EXPERTS * out, inner, generator=generator).mul_(inner**-0.5).to(device, dtype)
        for out, inner in ((2 * INNER, WIDTH), (WIDTH, INNER))
    ]
    gate_up, down = stacks if code is None else [CodedRows.of(stack, code) for stack in stacks]
    return rows, Picks(experts.to(device), weights.to(device)), ExpertTable.of_stacks(gate_up, down, EXPERTS)


def answer(
    implementation: str,
    rows: Tensor,
    picks: Picks,
    table: ExpertTable,
    *groups: Sequence[int],
    activation: Activation = "silu",
) -> Tensor:
    """The weighted sums of all experts that are picked, at once; or of `groups` of experts, one after the other.
    Outputs of experts in no group are zero."""
    outputs = rows.new_zeros(*picks.experts.shape, rows.shape[1])
    ops = module(implementation)
    for only in groups or [picks.experts.unique().tolist()]:
        ops.expert_outputs(outputs, rows, picks, table, only, activation)
    return ops.sum_outputs(outputs, picks.weights)


def expected(
    rows: Tensor,
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int] = range(EXPERTS),
    activation: Activation = "silu",
) -> Tensor:
    """By the definition, in float64."""
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for row, (experts, weights) in enumerate(zip(picks.experts.tolist(), picks.weights.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            if expert in only:
                gate_up, down = (
                    (each.values() if isinstance(each, CodedRows) else each).double() for each in table.matrices(expert)
                )
                gate, up = (gate_up @ rows[row].double()).chunk(2)
                total[row] += weight * (down @ (ACTIVATIONS[activation](gate) * up))
    return total


# Each code and each type meets both activations.
@pytest.mark.covering(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("code", "dtype", "activation"),
    [
        (code, dtype, ("silu", "gelu")[(number + place) % 2])
        for number, code in enumerate(CODES)
        for place, dtype in enumerate(TOLERANCE)
    ],
    ids=str,
)
def test_a_row_is_the_weighted_sum_of_its_experts(
    implementation: str, code: WeightCode | None, dtype: torch.dtype, activation: Activation
):
    rows, picks, table = given(device_of(implementation), 21, dtype, code)
    total = answer(implementation, rows, picks, table, activation=activation)
    wanted = expected(rows, picks, table, activation=activation)
    assert total.dtype == dtype
    assert (total - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "code", "activation"),
    [(torch.float32, None, "silu"), (torch.float32, None, "gelu"), (torch.bfloat16, WeightCode.INT4, "gelu")],
    ids=str,
)
def test_bits_depend_on_no_other_row_and_no_other_expert(
    implementation: str, dtype: torch.dtype, code: WeightCode | None, activation: Activation
):
    rows, picks, table = given(device_of(implementation), 40, dtype, code)
    answers = partial(answer, implementation, activation=activation)
    whole = answers(rows, picks, table)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(rows.device)
    for some in (order, order[:1], order[:17]):
        mine = Picks(picks.experts[some], picks.weights[some])
        assert torch.equal(answers(rows[some], mine, table), whole[some])
    # Experts in any order and in groups; one has none, one has an expert that no row picked.
    assert torch.equal(answers(rows, picks, table, [6, 3], [], [2], [5, 1, 4, 0]), whole)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_may_lie_anywhere(implementation: str):
    device = device_of(implementation)
    rows, picks, table = given(device, 9)
    whole = answer(implementation, rows, picks, table, [1, 2, 6])
    torch.testing.assert_close(whole.double(), expected(rows, picks, table, [1, 2, 6]), rtol=1e-5, atol=1e-5)
    apart: list[list[Any]] = [[None] * EXPERTS, [None] * EXPERTS]
    for expert in (1, 2, 6):
        for place, matrix in zip(apart, table.matrices(expert), strict=True):
            assert isinstance(matrix, Tensor)
            place[expert] = matrix.cpu().pin_memory() if device == "cuda" and expert == 2 else matrix.clone()
    scattered = ExpertTable(*apart)
    assert torch.equal(answer(implementation, rows, picks, scattered, [1, 2, 6]), whole)
    with pytest.raises(ValueError, match="expert 3 has no matrices in this call"):
        answer(implementation, rows, picks, scattered, [2, 3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_picks_or_rows_nothing_is_added(implementation: str):
    rows, picks, table = given(device_of(implementation), 5)
    assert (answer(implementation, rows, picks, table, [], [5]) == 0).all()
    assert not answer(implementation, rows[:0], Picks(picks.experts[:0], picks.weights[:0]), table, [2]).numel()


def test_addresses_are_those_of_the_matrices():
    _, _, table = given("cpu", 1, code=WeightCode.NVFP4)
    device = torch.device("cpu")
    for expert, *both in table.addresses([0, 2, 6], device).tolist():
        matrices = table.matrices(expert)
        assert both == [matrix.bytes.data_ptr() for matrix in matrices if isinstance(matrix, CodedRows)]
    assert table.addresses(range(2), device) is table.addresses([0, 1], device)
    every: list[Any] = [None, *(torch.zeros(33) for _ in range(3)), torch.zeros(33)[1:]]
    assert ExpertTable(every, every).addresses([3], device).tolist() == [[3, *[every[3].data_ptr()] * 2]]
    with pytest.raises(ValueError, match="expert 0 has no matrices in this call"):
        ExpertTable(every, every).addresses([0, 3], device)
    with pytest.raises(ValueError, match="does not begin at a multiple of 16 bytes"):
        ExpertTable(every, every).addresses([3, 4], device)


def test_the_kernel_allocates_the_booked_bytes(monkeypatch: pytest.MonkeyPatch):
    kernels, launched = module("triton"), list[Any]()
    monkeypatch.setattr("tiered.kernels.expert_outputs.launch", lambda *given, **named: launched.append(given[0]))
    rows, picks, table = given("cpu", 300, torch.bfloat16)
    only = picks.experts.unique().tolist()
    table.addresses(only, rows.device)  # of which some is the host's
    with Allocations() as allocated:
        outputs = rows.new_empty(300, PICKED, WIDTH)
        kernels.expert_outputs(outputs, rows, picks, table, only)
        kernels.sum_outputs(outputs, picks.weights)
    assert len(launched) == 4
    experts = Experts(count=EXPERTS, picked=PICKED, width=INNER, shared_width=0, biased=False, dense=())
    shape = replace(tiered.plan("embedded", context=64).shape, width=WIDTH, experts=experts)
    gpu = Gpu(workspace_bytes=0, multiprocessors=1)
    sizes = CallShape(shape=shape, batch=1, context=300, block_length=300, dtype="bfloat16", gpu=gpu)
    own = "order of pairs, and tiles", "gates", "outputs of experts"
    booked = sum({buffer.name: buffer.nbytes for buffer in part_buffers(sizes) if buffer.name in own}.values())
    assert 0.99 * booked <= allocated.peak <= booked
