"""The pair of kernels that an update measures drift with, beside their plain torch twins."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.kernels import proxy_drift_ref, proxy_widen_ref
from tiered.policies.polestar.drift_reference import DriftReference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BLOCK = 60, slice(20, 28)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Columns that begin to change, and what is kept of them.

    Attributes:
        extra: columns of each sequence.
        flagged: some are filler.
        updating: of each sequence; None: all.
        indexed: keys are read from the whole cache.
        keep: of the block's 8 columns and those behind them.
    """

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    clusters: int = 5
    head_dim: int = 24
    extra: int = 19
    parts: int = 5
    flagged: bool = True
    updating: tuple[bool, ...] | None = (True, False)
    indexed: bool = True
    keep: tuple[int, int] = (0, 8)
    soft_cap: float | None = None
    sinks: int = 0
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "all parts that there may be": Case(parts=17, sinks=1, clusters=3),
    "one part": Case(parts=1, clusters=20),
    "one part and sinks": Case(parts=1, sinks=2),
    "several tiles of centroids": Case(clusters=35, batch=1, updating=None),
    "several tiles of columns": Case(extra=40, batch=1, updating=None, parts=3),
    "keys in order": Case(indexed=False),
    "no filler, all update": Case(flagged=False, updating=None, kv_heads=4),
    "no filler, some update": Case(flagged=False, keep=(0, 8)),
    "another block": Case(updating=None, keep=(10, 15)),
    "nothing kept": Case(updating=None, keep=(0, 0), batch=1),
    "nothing begins": Case(extra=0),
    "a soft cap": Case(soft_cap=1.5, sinks=1, heads=3, kv_heads=1),
    "bfloat16": Case(dtype=torch.bfloat16, batch=1, updating=None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pair_is_its_twins(name: str):
    case, generator = CASES[name], torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, case.dtype)

    queries = normal(case.batch, case.clusters, case.heads, case.head_dim).transpose(1, 2)
    keys = normal(case.batch, case.kv_heads, LENGTH, case.head_dim)
    key_mask = torch.ones(case.batch, LENGTH, dtype=torch.bool, device=DEVICE)
    key_mask[0, :5] = key_mask[-1, BLOCK.start] = False
    cluster_of = torch.randint(-1, case.parts - 1, (case.batch, LENGTH), generator=generator).to(DEVICE)
    block = torch.arange(BLOCK.start, BLOCK.stop, device=DEVICE).expand(case.batch, -1)
    reference = DriftReference.of(
        queries, keys, block, None, key_mask, soft_cap=case.soft_cap,
        sink_keys=normal(case.heads, case.sinks, case.head_dim) if case.sinks else None,
        **({"cluster_of": cluster_of, "clusters": case.parts - 1} if case.parts > 1 else {}),
    )  # fmt: skip

    # The members of part 1 first, so that it is dropped as a whole.
    order = (torch.arange(LENGTH, device=DEVICE) + LENGTH * (cluster_of != 0)).argsort(1)
    order = torch.stack([each[(each < BLOCK.start) | (each >= BLOCK.stop)] for each in order])
    columns, valid = order[:, : case.extra], None
    if case.flagged:
        valid = (torch.rand(columns.shape, generator=generator).to(DEVICE) > 0.2) | (cluster_of.gather(1, columns) == 0)
    updating = None if case.updating is None else torch.tensor(case.updating, device=DEVICE)
    index = torch.cat([block, columns], dim=1)

    def given(keys: Tensor, index: Tensor, anything: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Where keys stand in order, filler is no number."""
        if case.indexed:
            return keys, index
        found = keys.gather(2, index[:, None, :, None].expand(-1, case.kv_heads, -1, case.head_dim))
        return (found if anything is None else found.masked_fill(anything[:, None, :, None], torch.nan)), None

    filler = None if valid is None else ~valid
    wide = both("proxy_widen", queries, *given(keys, columns, filler), reference, columns, valid, updating)
    state = dict(zip(("scores", "columns", "sums", "sizes"), wide, strict=True))
    assert case.parts == 1 or not case.extra or (state["sizes"] == 0).any()
    now = keys + normal(*keys.shape)
    filler = None if filler is None else torch.cat([torch.zeros_like(block, dtype=torch.bool), filler], dim=1)
    drift = both("proxy_drift", queries, *given(now, index, filler), replace(reference, **state), case.keep, updating)
    assert (drift[0] > 0.01).all() and drift[1].shape[3] == case.keep[1] - case.keep[0]


def both(name: str, *given: Any) -> Any:
    """What the twin gives, once the kernel has given the same."""
    module = __import__(f"tiered.kernels.{name}", fromlist=[name])
    twin: Callable[..., Any] = getattr({"proxy_drift": proxy_drift_ref, "proxy_widen": proxy_widen_ref}[name], name)
    found, expected = getattr(module, name)(*given), twin(*given)
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=2e-6)
    return expected


def tensors(result: Any) -> list[Tensor]:
    parts = [getattr(result, field.name) for field in fields(result)] if is_dataclass(result) else result
    return [part for one in parts for part in ([one] if isinstance(one, Tensor) else tensors(one))]
