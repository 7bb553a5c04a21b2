"""The drift of proxy attention against float64 arithmetic, and the law: incremental = full."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import full_drift
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tiered.core.rows import Rows
from tiered.kernels import proxy_drift_ref
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.policies.polestar.drift_reference import DriftReference

LAW = 1e-5  # |incremental − full|, relative where the drift is above 1


@dataclass
class Case:
    """Queries, keys at the last update and now, and the columns that may have changed in between."""

    queries: Tensor
    last_keys: Tensor
    keys: Tensor
    changing: Tensor
    valid: Tensor | None = None
    key_mask: Tensor | None = None
    soft_cap: float | None = None
    sink_keys: Tensor | None = None

    def reference(self) -> DriftReference:
        return DriftReference.of(
            self.queries, self.last_keys, self.changing, self.valid, self.key_mask,
            soft_cap=self.soft_cap, sink_keys=self.sink_keys,
        )  # fmt: skip

    def changed_keys(self) -> Tensor:
        """The keys of now at the changing columns."""
        return torch.stack([keys[:, index] for keys, index in zip(self.keys, self.changing, strict=True)])

    def full(self) -> Tensor:
        rest = self.key_mask, self.soft_cap, self.sink_keys
        return full_drift.full_drift(self.queries, self.keys, self.last_keys, *rest)

    def true(self) -> Tensor:
        """The drift in float64, by the definition of KL."""
        new, old = (scores64(self.queries, keys, self.key_mask) for keys in (self.keys, self.last_keys))
        if self.sink_keys is not None:
            of_sinks = scores64(self.queries, self.sink_keys[None].expand(len(self.queries), -1, -1, -1))
            new, old = torch.cat([new, of_sinks], dim=-1), torch.cat([old, of_sinks], dim=-1)
        if self.soft_cap is not None:
            new, old = (
                (self.soft_cap * (s / self.soft_cap).tanh()).where(s > -torch.inf, -torch.inf) for s in (new, old)
            )
        new, old = new.log_softmax(-1), old.log_softmax(-1)
        terms = (new.exp() * (new - old)).where(new > -torch.inf, 0.0)
        return terms.sum(-1).mean(1)

    def to(self, device: str) -> "Case":
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in given.items() if isinstance(value, Tensor)})


def assert_close(found: Tensor, true: Tensor) -> None:
    """A float32 drift is the float64 one, up to the rounding of scores of about 10."""
    torch.testing.assert_close(found.double(), true, rtol=2e-6, atol=1e-6)


def scores64(queries: Tensor, keys: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Scores in float64, head by head; −inf where masked."""
    group = queries.shape[1] // keys.shape[1]
    by_head = [
        queries[:, head].double() @ keys[:, head // group].double().transpose(-1, -2)
        for head in range(queries.shape[1])
    ]
    scores = torch.stack(by_head, dim=1) / queries.shape[-1] ** 0.5
    return scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], -torch.inf)


def random_case(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    clusters: int = 5,
    length: int = 70,
    head_dim: int = 24,
    changing: int = 37,
    filler: bool = True,
    masked: bool = True,
    dtype: torch.dtype = torch.float32,
    soft_cap: float | None = None,
    sinks: int | None = None,
) -> Case:
    """Pads on the left of one sequence and the right of the next; filler columns, which are anything, in any place."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries, last_keys = normal(batch, heads, clusters, head_dim), normal(batch, kv_heads, length, head_dim)
    index = torch.stack([torch.randperm(length, generator=generator)[:changing] for _ in range(batch)])
    valid = torch.rand(batch, changing, generator=generator) > 0.3 if filler else None
    if valid is not None:
        index = index.where(valid, index.flip(1))
    keys = last_keys.clone()
    for b in range(batch):
        for i, column in enumerate(index[b].tolist()):
            if valid is None or valid[b, i]:
                keys[b, :, column] += normal(kv_heads, head_dim)
    key_mask = torch.ones(batch, length, dtype=torch.bool)
    for b in range(batch):
        key_mask[b, slice(0, 9) if b % 2 else slice(length - 4, length)] = False
    sink_keys = None if sinks is None else normal(heads, sinks, head_dim).to(dtype)
    given = queries.to(dtype), last_keys.to(dtype), keys.to(dtype), index, valid, key_mask if masked else None
    return Case(*given, soft_cap, sink_keys)


# The reference anywhere; the Triton kernel on a GPU where there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
SHAPES = {
    "plain": {},
    "no pads, no filler": {"masked": False, "filler": False},
    "a head for each key head": {"kv_heads": 4},
    "one key head": {"heads": 3, "kv_heads": 1, "batch": 1},
    "whole tiles": {"head_dim": 32, "length": 64, "changing": 32, "clusters": 16, "batch": 1},
    "one column": {"length": 10, "changing": 1, "filler": False, "clusters": 1},
    "no column changes": {"changing": 0, "filler": False},
    "several tiles of rows": {"clusters": 35, "batch": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": 2},
    "soft cap and a sink": {"soft_cap": 1.5, "sinks": 1},
    "no sink, but a cap": {"soft_cap": 4.0, "sinks": 0, "kv_heads": 4},
    "every column changes, and a sink": {"length": 37, "masked": False, "filler": False, "sinks": 1},
    "soft cap and a sink, bfloat16": {"dtype": torch.bfloat16, "soft_cap": 1.5, "sinks": 1},
}


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def drift(implementation: str) -> Callable[[Tensor, Tensor, DriftReference], Tensor]:
    """Of queries, and of the keys that stand at the changing columns of a reference."""
    op = proxy_drift_ref.proxy_drift
    if implementation == "triton":
        pytest.importorskip("triton")
        from tiered.kernels import proxy_drift

        op = proxy_drift.proxy_drift
    return lambda queries, keys, reference: op(queries, keys, None, reference, (0, reference.columns.shape[1]))[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_honoured(implementation: str):
    """Queries as a projection leaves them, keys and scores transposed."""
    case = random_case().to(device_of(implementation))
    reference = case.reference()
    scores = reference.scores.mT.contiguous().mT
    sums = LogSumExp(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in astuple(reference.sums)))
    queries = case.queries.transpose(1, 2).contiguous().transpose(1, 2)
    keys = case.changed_keys().transpose(1, 3).contiguous().transpose(1, 3)
    assert_close(drift(implementation)(queries, keys, replace(reference, sums=sums, scores=scores)), case.true())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_does_not_count_does_not_matter(implementation: str):
    """Not even NaN: in a pad's key, in a filler's key, in a pad that is listed as changing."""
    case = random_case().to(device_of(implementation))
    assert case.key_mask is not None and case.valid is not None
    true = case.true()
    pads = ~case.key_mask
    assert (pads.gather(1, case.changing) & case.valid).any()
    for keys in (case.keys, case.last_keys):
        keys.transpose(1, 2)[pads] = torch.nan
    columns = case.changed_keys()
    columns.transpose(1, 2)[~case.valid] = torch.nan
    assert_close(drift(implementation)(case.queries, columns, case.reference()), true)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_nothing_may_be_attended_to(implementation: str):
    case = random_case().to(device_of(implementation))
    assert case.key_mask is not None
    case.key_mask[1] = False
    found = drift(implementation)(case.queries, case.changed_keys(), case.reference())
    assert (found[1] == 0).all() and (found[0] > 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_drift(implementation: str, shape: str):
    case = random_case(**SHAPES[shape]).to(device_of(implementation))
    found = drift(implementation)(case.queries, case.changed_keys(), case.reference())
    assert found.dtype == torch.float32 and found.shape == (case.queries.shape[0], case.queries.shape[2])
    assert_close(found, case.true())
    assert (found > 0.01).all() or case.changing.shape[1] < 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at_once", [1, 1 << 19])
def test_full_drift(shape: str, at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(full_drift, "SCORES_AT_ONCE", at_once)
    case = random_case(**SHAPES[shape])
    assert_close(case.full(), case.true())


def exact_case(
    seed: int,
    *,
    scale: float,
    moved: float,
    share: float,
    length: int,
    peak: float,
    soft_cap: float | None = None,
    sinks: int = 0,
) -> Case:
    """Keys on a grid, so that scores are exact in float32 and every form starts from the same ones.

    Scores reach 12 · `scale`; the keys of about `share` of the columns change, by `moved` times as much; one of them
    scores `peak` more than it did, or less.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-3, 4, (2, 2, 3, 4), generator=generator).float()
    queries[..., 3] = 1
    last_keys = scale * torch.randint(-2, 3, (2, 1, length, 4), generator=generator)
    keys = last_keys.clone()
    count = round(share * length)
    changing = torch.stack([torch.randperm(length, generator=generator)[:count] for _ in range(2)])
    for b in range(2):
        steps = torch.randint(-2, 3, (1, count, 4), generator=generator)
        keys[b, :, changing[b]] += moved * scale * steps
        if count:
            (last_keys if peak < 0 else keys)[b, :, changing[b, 0], 3] += 2 * abs(peak)
    sink_keys = scale * torch.randint(-2, 3, (2, sinks, 4), generator=generator) if sinks else None
    return Case(queries, last_keys, keys, changing, soft_cap=soft_cap, sink_keys=sink_keys)


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([2.0**-10, 0.125, 1.0, 16.0, 1024.0]),
    moved=st.sampled_from([0.0, 2.0**-8, 0.25, 1.0]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    length=st.integers(1, 40),
    peak=st.sampled_from([0.0, 5.0, -5.0, 60.0, -60.0, 8192.0, -8192.0]),
    soft_cap=st.sampled_from([None, 0.25, 5.0, 30.0]),
    sinks=st.integers(0, 2),
)
@example(
    seed=0, scale=1.0, moved=0.0, share=0.1, length=40, peak=-20.0, soft_cap=None, sinks=0
)  # nearly all was in a key that has lost it
@example(
    seed=0, scale=1.0, moved=0.0, share=0.1, length=40, peak=20.0, soft_cap=None, sinks=0
)  # and the other way round
@example(seed=0, scale=1.0, moved=1.0, share=1.0, length=40, peak=0.0, soft_cap=None, sinks=0)  # every key has changed
@example(seed=0, scale=1024.0, moved=1.0, share=0.5, length=40, peak=0.0, soft_cap=None, sinks=0)  # scores of 10⁴
@example(seed=0, scale=1.0, moved=1.0, share=1.0, length=40, peak=60.0, soft_cap=30.0, sinks=1)  # the rest is the sink
@settings(max_examples=300)
def test_the_law_incremental_is_full(seed: int, **shape: Any):
    case = exact_case(seed, **shape)
    incremental = drift("reference")(case.queries, case.changed_keys(), case.reference()).double()
    true = case.true()
    allowed = LAW * true.clamp(min=1)
    assert ((incremental - case.full().double()).abs() <= allowed).all()
    assert ((incremental - true).abs() <= allowed).all()
    assert (incremental >= 0).all()


# A peak is that of a column which changes: without one there is none.
SHARES = [(0.0, 0.0), *((share, peak) for share in (0.1, 1.0) for peak in (0.0, 20.0, -20.0, -8192.0))]


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 1024.0])
@pytest.mark.parametrize(("share", "peak"), SHARES)
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_the_law_in_triton(scale: float, share: float, peak: float, soft_cap: float | None):
    sinks = 0 if soft_cap is None else 1
    shape: dict[str, Any] = {"scale": scale, "share": share, "peak": peak, "soft_cap": soft_cap, "sinks": sinks}
    case = exact_case(1, moved=0.25, length=40, **shape).to(device_of("triton"))
    found = drift("triton")(case.queries, case.changed_keys(), case.reference()).double()
    true = case.true()
    assert ((found - true).abs() <= LAW * true.clamp(min=1)).all()
    assert (found >= 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_small_drifts_keep_their_order(implementation: str):
    """Down to 10⁻⁹, far below the rounding of a log-sum-exp: M clusters are chosen by their drift."""
    case = exact_case(3, scale=0.5, moved=2.0**-12, share=0.3, length=30, peak=0.0).to(device_of(implementation))
    found, true = drift(implementation)(case.queries, case.changed_keys(), case.reference()), case.true()
    assert true.max() < 1e-6 and true.min() < 1e-7
    torch.testing.assert_close(found.double(), true, rtol=0.02, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft_cap", [None, 2.0, 30.0])
def test_unchanged_keys_have_not_drifted(implementation: str, soft_cap: float | None):
    case = random_case(soft_cap=soft_cap, sinks=1).to(device_of(implementation))
    case.keys = case.last_keys
    assert (drift(implementation)(case.queries, case.changed_keys(), case.reference()) <= 1e-10).all()


def test_the_work_of_a_step_does_not_grow_with_the_length():
    counts = []
    for length in (80, 4000):
        case = random_case(length=length, changing=37)
        reference, keys = case.reference(), case.changed_keys()
        given = [case.queries, keys, reference.scores, reference.sums.peak, reference.sums.mass]
        with FlopCounterMode(display=False) as counter:
            drift("reference")(case.queries, keys, reference)
        counts.append((counter.get_total_flops(), [tensor.shape for tensor in given]))
    assert counts[0] == counts[1]
    assert counts[0][0] == 2 * case.queries.numel() * 37


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, None), (1.5, 2)])
def test_after_an_update_the_current_is_the_last(soft_cap: float | None, sinks: int | None):
    case = random_case(soft_cap=soft_cap, sinks=sinks)
    _, reference = case.reference().measured(case.queries, case.keys, Rows.at(case.changing))
    after = replace(case, last_keys=case.keys, keys=case.keys.clone())
    assert (drift("reference")(case.queries, after.changed_keys(), reference) <= 1e-10).all()
    assert case.valid is not None
    for b, index in enumerate(case.changing):
        after.keys[b, :, index[case.valid[b]]] *= 0.5
    found = drift("reference")(case.queries, after.changed_keys(), reference)
    assert_close(found, after.true())
    assert (found > 0.01).all()
    direct = after.reference()
    torch.testing.assert_close(reference.scores, direct.scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_that_do_not_go_together(implementation: str):
    case = random_case()
    queries, keys, reference = case.queries, case.changed_keys(), case.reference()
    with pytest.raises(ValueError, match="do not fit keys"):
        drift(implementation)(queries, keys.repeat(1, 2, 1, 1)[:, 1:], reference)
    for wrong in [(queries[:, :, 1:], keys), (queries, keys[:, :, 1:])]:
        with pytest.raises(ValueError, match="do not fit a reference"):
            drift(implementation)(*wrong, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4)], ids=["LLaDA-8B", "Dream-7B"])
def test_at_the_size_of_a_model(dtype: torch.dtype, heads: int, kv_heads: int):
    size: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "clusters": 64,
        "length": 5000,
        "head_dim": 128,
        "changing": 288,
        "soft_cap": 30.0 if heads == kv_heads else None,
        "sinks": 1,
    }
    case = random_case(dtype=dtype, **size).to("cuda")
    found = drift("triton")(case.queries, case.changed_keys(), case.reference())
    torch.testing.assert_close(found.double(), case.true(), rtol=1e-5, atol=1e-6)
