"""The conditions that conftest.py promises to every other test."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor


def made_by_empty(dtype: torch.dtype) -> list[Tensor]:
    """A tensor from each call that leaves its memory unwritten."""
    written = torch.zeros(8, dtype=dtype)
    return [
        torch.empty(8, dtype=dtype),
        torch.empty_like(written),
        written.new_empty(8),
        torch.empty_strided((4, 2), (2, 1), dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_unwritten_memory_is_nan(dtype: torch.dtype):
    assert all(tensor.float().isnan().all() for tensor in made_by_empty(dtype))


def test_unwritten_memory_is_nan_in_other_threads():
    with ThreadPoolExecutor(1) as pool:
        assert all(tensor.isnan().all() for tensor in pool.submit(made_by_empty, torch.float32).result())


def test_unwritten_codes_are_the_largest():
    assert all((tensor == 255).all() for tensor in made_by_empty(torch.uint8))


@pytest.mark.gpu
def test_gpu_tests_have_a_gpu():
    assert torch.empty(8, device="cuda").isnan().all()


def test_triton_is_interpreted_only_without_a_gpu():
    assert (os.environ.get("TRITON_INTERPRET") == "1") is not torch.cuda.is_available()


def test_the_network_is_shut():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    hub = sys.modules.get("huggingface_hub.constants")
    assert hub is None or hub.HF_HUB_OFFLINE


@pytest.mark.parametrize("strength", [1, 2])
def test_a_covering_has_all_values_in_few_cases(strength: int, request: pytest.FixtureRequest):
    marks: dict[tuple[int, ...], list[pytest.MarkDecorator]] = {case: [] for case in product(range(6), repeat=3)}
    items = [
        SimpleNamespace(
            nodeid=f"test_table.py::test[{case}]", keywords={}, add_marker=marks[case].append,
            callspec=SimpleNamespace(params=dict(zip("abc", case, strict=True))),
            get_closest_marker={"covering": pytest.mark.covering(strength).mark}.get,
        )
        for case in marks
    ]  # fmt: skip
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    conftest.pytest_collection_modifyitems(items)  # pyright: ignore[reportOptionalMemberAccess]
    kept = [case for case, added in marks.items() if pytest.mark.long not in added]
    for some in combinations(range(3), strength):
        assert {tuple(case[each] for each in some) for case in kept} == {*product(range(6), repeat=strength)}
    assert len(kept) < 3 * 6**strength
