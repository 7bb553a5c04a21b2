"""What k-means refuses, and what it says."""

import sys

import pytest
import torch

from tiered.clustering.faiss_backend import Backend
from tiered.clustering.spherical import spherical_kmeans
from tiered.policies.registry import make_policy

BACKENDS: list[Backend] = ["torch", "faiss"]
ROWS = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
BAD = ROWS.clone()
BAD[1, 3, 2] = torch.nan
HUGE = ROWS.clone()
HUGE[0, 0] = 3e38
VALID = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clusters": 7}, ValueError, "6 rows cannot fill clusters = 7"),
        ({"clusters": 3, "valid": VALID}, ValueError, "2 valid rows cannot fill clusters = 3"),
        ({"clusters": 0}, ValueError, "clusters = 0"),
        ({"iterations": -1}, ValueError, "iterations = -1"),
        ({"rows": BAD}, ValueError, "not finite"),
        ({"rows": -torch.inf * ROWS}, ValueError, "not finite"),
        ({"rows": HUGE}, ValueError, "beyond float32"),
        ({"rows": 1e300 * ROWS.double()}, ValueError, "beyond float32"),
        ({"rows": BAD, "valid": ~VALID | True}, ValueError, "not finite"),
        ({"start": BAD[:, 2:4]}, ValueError, "in start is not finite"),
        ({"start": HUGE[:, :2]}, ValueError, "in start is not finite, or its norm is beyond float32"),
        ({"start": ROWS[:, :3]}, ValueError, r"start has shape \[2, 3, 4\]; allowed: \[2, 2, 4\]"),
        ({"start": ROWS[:1, :2]}, ValueError, r"start has shape \[1, 2, 4\]"),
        ({"valid": VALID[:, :5]}, ValueError, r"valid is torch.bool \[2, 5\]; allowed: torch.bool \[2, 6\]"),
        ({"valid": VALID.int()}, ValueError, "valid is torch.int32"),
        ({"rows": ROWS[0]}, ValueError, r"shape \[6, 4\]"),
        ({"rows": ROWS[:, :, :0]}, ValueError, r"shape \[2, 6, 0\]"),
        ({"rows": ROWS.int()}, TypeError, "torch.int32"),
    ],
)
def test_what_is_refused(backend: Backend, arguments: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        spherical_kmeans(**{"rows": ROWS, "clusters": 2, "backend": backend, **arguments})


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'scipy'; allowed: 'torch', 'faiss'"):
        spherical_kmeans(ROWS, 2, backend="scipy")  # pyright: ignore[reportArgumentType]


def test_without_faiss_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'faiss-cpu>="):
        spherical_kmeans(ROWS, 2, backend="faiss")
    with pytest.raises(ImportError, match=r"pip install 'faiss-cpu>="):
        make_policy("polestar", kmeans="faiss")
    spherical_kmeans(ROWS, 2)
