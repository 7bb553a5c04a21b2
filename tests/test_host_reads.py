"""How often clustering makes the host wait for the device, counted by the calls that would wait. And no value of the
host goes to the device by a copy that waits."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.clustering.areas import cluster_areas, cut_clusters
from tiered.clustering.kmeans import kmeans
from tiered.clustering.unit_rows import UnitRows
from tiered.kernels.host_values import on_device

CALLS = ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
AREAS = ((0, 50), (58, 100))
ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("tiered", "clustering", "offload", "kernels")
# Once in a process, and between two calls of an evaluation.
MADE_THERE = {"kernels/decode_rows_ref.py", "tiered/evaluation/likelihood.py"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the calls that were made."""
    made: list[str] = []

    def noted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            made.append(name)
            return original(*arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
    yield made


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clusters", [2, 9])
def test_k_means(clusters: int, reads: list[str]):
    rows, valid = random(3, 100, 16), torch.ones(3, 100, dtype=torch.bool)
    kmeans(UnitRows.of(rows, valid), clusters, iterations=5, seed=0, backend="torch")
    assert reads == []


@pytest.mark.parametrize(("groups", "clusters"), [(1, 2), (6, 20)])
def test_regions(groups: int, clusters: int, reads: list[str]):
    hidden, valid = random(groups, 100, 8), torch.ones(groups, 100, dtype=torch.bool)
    cluster_areas(hidden, AREAS, clusters, valid=valid)
    assert reads == ["tolist"] * 2


def test_clusters_that_are_cut(reads: list[str]):
    hidden = random(2, 100, 8)
    indices = cluster_areas(hidden, AREAS, 6)
    reads.clear()
    cut_clusters(hidden, indices, 5)
    assert reads == []


def test_values_of_the_host_go_to_the_device_without_a_wait():
    """`torch.tensor(values, device=…)` and `like.new_tensor(values)` copy from ordinary memory, which waits on CUDA:
    `on_device` does not."""
    found = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            there = any(keyword.arg == "device" for keyword in node.keywords)
            if function.endswith(".new_tensor") or (function in ("torch.tensor", "torch.as_tensor") and there):
                found.add(name)
    assert found == MADE_THERE


@pytest.mark.parametrize(
    "values", [[1, 2], [], [True, False], torch.arange(3), torch.tensor([[0.1, -2.0]], dtype=torch.float64)], ids=str
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_they_arrive(values: Any, device: str):
    there = on_device(values, device)
    assert there.device.type == device
    torch.testing.assert_close(there.cpu(), torch.as_tensor(values), rtol=0, atol=0)
