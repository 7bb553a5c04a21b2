"""The drift of centroids against its definition in float64, over several updates, and the state of a reference."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from full_drift import full_drift, full_output_drift
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tiered.core.rows import Rows
from tiered.policies.polestar import drift
from tiered.policies.polestar.drift import Changed, DriftReference, LayerKeys

LAW = 1e-5  # |measured − defined|, relative if the drift is above 1
ROUNDING = 2**-8  # of what columns give, up to which it counts as unmoved
BLOCK = Rows.span(18, 24)
HERE = slice(0, BLOCK.count)


@dataclass
class World:
    """A layer's keys and values at the last update and now. Keys and queries lie on a grid, so that scores are exact in
    float32, unless `rounded`. The first element of a query is 1, so a rise of a key's first element moves all its
    scores alike. `output`: drift is that of the output."""

    seed: int
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    clusters: int = 5
    length: int = 48
    head_dim: int = 4
    scale: float = 1.0
    masked: bool = True
    soft_cap: float | None = None
    sinks: int = 0
    rounded: bool = False
    output: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    queries: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)
    last: tuple[Tensor, Tensor] = field(init=False)
    written: Tensor = field(init=False)
    key_mask: Tensor | None = field(init=False)
    sink_keys: Tensor | None = field(init=False)
    reference: DriftReference = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.queries = self.new_queries(self.clusters)
        self.keys = self.new_keys(self.batch, self.kv_heads, self.length)
        self.values = self.grid(2, *self.keys.shape)
        self.key_mask = None
        if self.masked:
            self.key_mask = torch.ones(self.batch, self.length, dtype=torch.bool)
            self.key_mask[0, :7] = self.key_mask[-1, -3:] = self.key_mask[-1, 23] = False
            self.key_mask = self.key_mask.to(self.device)
        self.sink_keys = self.new_keys(self.heads, self.sinks) if self.sinks else None
        self.restart()

    def grid(self, most: int, *shape: int) -> Tensor:
        found = torch.randint(-most, most + 1, shape, generator=self.generator).float()
        if self.rounded:
            found += torch.rand(shape, generator=self.generator)
        return found.to(self.device, self.dtype)

    def new_keys(self, *shape: int, most: int = 2) -> Tensor:
        return self.scale * self.grid(most, *shape, self.head_dim)

    def new_queries(self, clusters: int) -> Tensor:
        queries = self.grid(3, self.batch, self.heads, clusters, self.head_dim)
        queries[..., 0] = 1
        return queries

    @property
    def layer(self) -> LayerKeys:
        values = self.values if self.output else None
        return LayerKeys(self.keys, values, self.key_mask, self.soft_cap, self.sink_keys)

    def restart(self) -> None:
        self.reference = DriftReference.of(self.queries, self.layer, BLOCK)
        self.remember()

    def remember(self) -> None:
        """Take the present keys and values as those of the last update."""
        self.last = self.keys.clone(), self.values.clone()
        self.written = torch.zeros(self.batch, self.length, dtype=torch.bool, device=self.device)
        self.written[:, 18:24] = True  # every step writes the block

    def rows(self, most: int) -> Rows:
        """Up to `most` columns of each sequence outside the block, pads among them. A filler row has any column."""
        outside = torch.tensor([column for column in range(self.length) if not 18 <= column < 24])
        index = torch.stack(
            [outside[torch.randperm(len(outside), generator=self.generator)[:most]] for _ in range(self.batch)]
        )
        valid = torch.rand(index.shape, generator=self.generator) > 0.3
        return Rows.at(index.where(valid, 20).to(self.device), valid.to(self.device))

    def behind_block(self, rows: Rows) -> Rows:
        """The block's rows and these."""
        block, index = (each.index.to(self.device).expand(self.batch, -1) for each in (BLOCK, rows))
        valid = None if rows.valid is None else torch.cat([torch.ones_like(block, dtype=torch.bool), rows.valid], dim=1)
        return Rows.at(torch.cat([block, index], dim=1), valid)

    def change(self, rows: Rows, rise: float = 0.0, only: Tensor | None = None) -> None:
        """New keys and values at `rows`; scores rise by `rise` beside."""
        for b, index in enumerate(rows.index.to(self.device).expand(self.batch, -1)):
            if only is None or only[b]:
                own = index if rows.valid is None else index[rows.valid[b]]
                self.keys[b, :, own] += self.new_keys(self.kv_heads, len(own), most=1)
                self.keys[b, :, own, 0] += rise * self.head_dim**0.5
                self.values[b, :, own] += self.grid(1, self.kv_heads, len(own), self.head_dim)
                self.written[b, own] = True

    def measured(self, rows: Rows | None = None, rise: float = 0.0, updating: Tensor | None = None) -> Tensor:
        """Drift with new keys at `rows` as well, in the order of an update: old keys are read before they are
        written."""
        every, then = BLOCK, self.reference.block
        if rows is not None:
            then = joined(then, self.layer.at(rows))
            every = self.behind_block(rows)
            self.change(rows, rise, updating)
        how = self.queries, self.layer, Changed(every, then, HERE), updating
        found, reference = self.reference.measured(*how)
        if len(lost := found.isnan().any(0).nonzero()[:, 0]):
            found, reference = self.reference.mended(found, reference, lost, *how)
        self.reference = reference
        return found

    def assert_law(self, found: Tensor, **rest: Any) -> None:
        limits = self.key_mask, self.soft_cap, self.sink_keys
        if self.output:
            true, given = full_output_drift(self.queries, self.last, (self.keys, self.values), self.written, *limits)
            unmoved = (found == 0) & (true <= (ROUNDING + LAW) * given)
        else:
            true = full_drift(self.queries, self.keys, self.last[0], *limits, **rest)
            unmoved = torch.zeros_like(found, dtype=torch.bool)
        assert found.dtype == torch.float32
        assert (unmoved | ((found.double() - true).abs() <= LAW * true.clamp(min=1))).all(), (found, true)

    def step(self) -> None:
        """A step without an update: the block has new keys, and the reference stays."""
        self.change(BLOCK)
        before = self.reference
        self.assert_law(self.measured())
        self.reference = before

    def update(self, rows: Rows, rise: float = 0.0) -> None:
        self.assert_law(self.measured(rows, rise))
        self.remember()
        self.assert_made_anew()

    def assert_made_anew(self) -> None:
        anew = DriftReference.of(self.queries, self.layer, BLOCK)
        assert all(map(torch.equal, self.reference.block, anew.block))
        sums, others = (of.peak + of.mass.log() for of in (self.reference.sums, anew.sums))
        torch.testing.assert_close(sums, others, rtol=1e-6, atol=4e-6)


def joined(first: tuple[Tensor, ...], last: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One behind the other, by column."""
    return tuple(torch.cat(each, dim=2) for each in zip(first, last, strict=True))


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([2.0**-10, 0.125, 1.0]),
    rises=st.lists(st.sampled_from([0.0, 4.0, -4.0, 30.0, -60.0]), min_size=1, max_size=4),
    most=st.sampled_from([0, 3, 20, 42]),
    kv_heads=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.integers(0, 2),
    output=st.booleans(),
)
# Nearly all of the attention lies on the changed columns, then on the others, and so again.
@example(0, 0.125, [30.0, -60.0, 30.0], 20, 2, True, None, 0, False)
@example(0, 0.125, [30.0, -60.0, 30.0], 20, 2, True, None, 0, True)
@example(1, 1.0, [0.0, -60.0, 4.0], 42, 4, True, 30.0, 1, False)
@settings(max_examples=150)
def test_the_law_over_several_updates(
    seed: int,
    scale: float,
    rises: list[float],
    most: int,
    kv_heads: int,
    masked: bool,
    soft_cap: float | None,
    sinks: int,
    output: bool,
):
    world = World(seed, kv_heads=kv_heads, scale=scale, masked=masked, soft_cap=soft_cap, sinks=sinks, output=output)
    for rise in rises:
        world.step()
        world.update(world.rows(most), rise)
    world.step()


@pytest.mark.parametrize("shape", [{}, {"soft_cap": 4.0, "sinks": 2}, {"masked": False, "kv_heads": 4}])
def test_the_move_of_a_centroid_is_drift(shape: dict[str, Any]):
    """With new keys beside it: all columns are compared, and the sinks."""
    world = World(3, **shape)
    last_queries, rows = world.queries.clone(), Rows.span(0, world.length)
    world.change(BLOCK)
    then = world.keys.clone()
    then[:, :, 18:24] = world.reference.block[0]
    world.change(world.rows(9), 2.0)
    world.queries[:, :, 1:3] = world.new_queries(2)
    found, world.reference = world.reference.measured(
        world.queries, world.layer, Changed(rows, (then,), slice(18, 24)), last_queries=last_queries
    )
    world.assert_law(found, last_queries=last_queries)
    assert (found[:, 1:3] > 0.1).all()
    world.assert_made_anew()


@pytest.mark.parametrize("seed", range(4))
def test_the_law_on_rounded_scores(seed: int):
    """Scores of about 15 that differ in their rounding from product to product, as a model's do."""
    world = World(seed, rounded=True, scale=2.0)
    for rise in (-10.0, 10.0):
        world.update(world.rows(12), rise)
        world.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output", [False, True])
def test_keys_of_16_bits(dtype: torch.dtype, output: bool):
    """Their products are exact in float32: drift is as good as that of keys of 32 bits."""
    world = World(4, dtype=dtype, soft_cap=30.0, sinks=1, output=output)
    world.update(world.rows(12), 4.0)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the kernels run on: a GPU if there is one, else the interpreter."""
    pytest.importorskip("triton")

    def kernel(reference: Callable[..., Any], _: torch.device) -> Callable[..., Any]:
        return getattr(importlib.import_module(reference.__module__.removesuffix("_ref")), reference.__name__)

    monkeypatch.setattr(drift, "for_device", kernel)
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape", [{}, {"soft_cap": 30.0, "sinks": 1}, {"clusters": 70, "kv_heads": 1, "batch": 1, "output": True}]
)
def test_the_law_in_triton(triton: str, shape: dict[str, Any]):
    """70 clusters take two launches."""
    world = World(5, device=triton, **shape)
    for rise in (20.0, -20.0):
        world.update(world.rows(9), rise)
        world.step()


@pytest.mark.parametrize("output", [False, True])
def test_unchanged_keys_have_not_drifted(output: bool):
    """Nor have those that differ by rounding (`clustering.unit_rows.rounding`)."""
    world = World(6, sinks=1, output=output)
    assert (world.measured() == 0).all()
    world.keys += 2**-12 * world.grid(1, *world.keys.shape)
    assert (world.measured() == 0).all()


def test_weights_do_not_see_values():
    """A value that changes moves the output alone, in proportion."""
    found = {}
    for output in (False, True):
        world = World(12, output=output)
        reference = world.reference
        world.values[:, :, 18:24] *= 2
        once = world.measured()
        world.reference, world.values[:, :, 18:24] = reference, world.values[:, :, 18:24] * 1.5
        found[output] = once, world.measured()
    assert all((each == 0).all() for each in found[False])
    torch.testing.assert_close(found[True][1], 2 * found[True][0])
    assert (found[True][0] > 0.01).all()


def test_an_update_looks_at_changed_keys_alone(monkeypatch: pytest.MonkeyPatch):
    """If nearly all that a centroid attends to has changed, its drift is NaN."""
    world = World(9, scale=0.25)
    rows, reference = world.rows(12), world.reference
    monkeypatch.setattr(LayerKeys, "log_sums", None)
    then = joined(reference.block, world.layer.at(rows))
    every = world.behind_block(rows)
    world.change(rows, 0.5)
    found, _ = reference.measured(world.queries, world.layer, Changed(every, then, HERE))
    world.assert_law(found)
    world.change(rows, 70.0, torch.tensor([True, False]))
    for updating, known in ((None, [False, True]), ([True, True], [False, True]), ([False, True], [True, True])):
        here = None if updating is None else torch.tensor(updating)
        found, _ = reference.measured(world.queries, world.layer, Changed(every, then, HERE), here)
        assert (~found.isnan()).all(1).tolist() == known


def test_lost_clusters_alone_are_computed_anew(monkeypatch: pytest.MonkeyPatch):
    """Of other sequences, and of other clusters, drift stays what it is in a call of their own."""
    world, asked = World(9, scale=0.25), list[int]()
    world.queries[:, :, 2:, 0] = 0  # does not see the rise
    world.restart()
    rows, log_sums, reference = world.rows(12), LayerKeys.log_sums, world.reference
    monkeypatch.setattr(LayerKeys, "log_sums", lambda keys, of: asked.append(of.shape[2]) or log_sums(keys, of))
    then = joined(reference.block, world.layer.at(rows))
    every = world.behind_block(rows)
    world.change(rows, 70.0, torch.tensor([True, False]))
    how = world.queries, world.layer, Changed(every, then, HERE)
    found, now = reference.measured(*how)
    lost = found.isnan().any(0).nonzero()[:, 0]
    assert found.isnan()[0].nonzero()[:, 0].tolist() == lost.tolist() == [0, 1] and not asked
    mended, world.reference = reference.mended(found, now, lost, *how)
    assert asked == [2]
    world.assert_law(mended)
    assert torch.equal(mended.where(~found.isnan(), 0), found.nan_to_num())
    world.assert_made_anew()


def test_sequences_that_do_not_update_stay_as_they_are():
    """And go on drifting from their own last update."""
    world = World(7)
    before, updating = world.reference, torch.tensor([True, False])
    world.change(BLOCK)
    found = world.measured(world.rows(8), 1.0, updating)
    world.assert_law(found)
    world.last[0][0] = world.keys[0]
    for now, then in (
        (world.reference.block[0], before.block[0]),
        (world.reference.sums.peak, before.sums.peak),
    ):
        assert torch.equal(now[1], then[1]) and not torch.equal(now[0], then[0])
    assert torch.equal(world.reference.sums.mass[1], before.sums.mass[1])
    world.step()


@pytest.mark.parametrize("output", [False, True])
def test_pads_and_filler_do_not_matter(output: bool):
    """Keys and values of pads are NaN, and filler rows have the columns of pads."""
    world = World(8, output=output)
    rows = world.rows(30)
    assert world.key_mask is not None and rows.valid is not None
    for stored in (world.keys, world.values):
        stored.transpose(1, 2)[~world.key_mask] = torch.nan
    pads = torch.tensor([[3], [46]])
    assert not world.key_mask.gather(1, pads).any() and not rows.valid.all()
    world.restart()
    found = world.measured(Rows.at(rows.index.where(rows.valid, pads), rows.valid))
    world.keys, world.values = world.keys.nan_to_num(), world.values.nan_to_num()
    world.last = world.last[0].nan_to_num(), world.last[1].nan_to_num()
    world.assert_law(found)


def test_a_new_cluster_is_joined_and_moved():
    """A copy of the first until then."""
    world = World(10, sinks=1)
    joined = world.reference.append()
    assert torch.equal(joined.sums.peak[:, :, 5], world.reference.sums.peak[:, :, 0])
    more = world.new_queries(1)
    filler = torch.tensor([[5, 0]] * 2), torch.tensor([[True, False]] * 2)
    joined.recenter(torch.cat([more, more], dim=2), world.layer, *filler)
    world.queries, world.reference = torch.cat([world.queries, more], dim=2), joined
    world.assert_made_anew()
    world.step()


@pytest.mark.parametrize("output", [False, True])
def test_a_batch_is_its_sequences(output: bool):
    world = World(11, output=output)
    rows, drifts = world.rows(12), []
    columns = torch.cat([each.index.to(world.device).expand(2, -1) for each in (BLOCK, rows)], dim=1)
    world.change(BLOCK)
    world.change(rows, 1.0)
    assert rows.valid is not None and world.key_mask is not None
    valid = torch.cat([torch.ones(2, BLOCK.count, dtype=torch.bool), rows.valid], dim=1)
    for alone in (slice(0, 2), slice(0, 1), slice(1, 2)):
        queries, every = world.queries[alone], Rows.at(columns[alone], valid[alone])
        then, now = (
            LayerKeys(keys[alone], values[alone] if output else None, world.key_mask[alone])
            for keys, values in (world.last, (world.keys, world.values))
        )
        reference = DriftReference.of(queries, then, BLOCK)
        drifts.append(reference.measured(queries, now, Changed(every, then.at(every), HERE), anew=True)[0])
    torch.testing.assert_close(drifts[0], torch.cat(drifts[1:]), rtol=1e-5, atol=1e-6)
    assert (drifts[0] > 0.001).all()
    kept = world.reference.of_sequences([1])
    assert all(torch.equal(one[0], both[1]) for one, both in zip(kept.block, world.reference.block, strict=True))


def test_an_update_reads_nothing_back():
    """A tensor that is fake has no values: a read of one, or of a shape that depends on one, raises."""
    with FakeTensorMode():
        queries, mask = torch.zeros(2, 4, 5, 8), torch.ones(2, 40, dtype=torch.bool)
        keys = LayerKeys(torch.zeros(2, 2, 40, 8), torch.zeros(2, 2, 40, 8), mask)
        rows = Rows.at(torch.zeros(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.bool))
        reference = DriftReference.of(queries, keys, BLOCK)
        found, after = reference.measured(queries, keys, Changed(rows, keys.at(rows), HERE), updating=mask[:, 0])
        done = after.append()
        done.recenter(queries[:, :, :2], keys, torch.zeros(2, 2, dtype=torch.int64), mask[:, :2])
    assert found.shape == (2, 5) and done.sums.peak.shape == (2, 4, 6)
    assert [of.shape for of in done.block] == [(2, 2, 6, 8)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4)], ids=["LLaDA-8B", "Dream-7B"])
def test_at_the_size_of_a_model(dtype: torch.dtype, heads: int, kv_heads: int):
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "clusters": 80, "length": 5000, "head_dim": 128}
    world = World(0, scale=0.25, dtype=dtype, device="cuda", sinks=1, **sizes)
    world.update(world.rows(256), 2.0)
    world.step()


def test_queries_that_do_not_fit_are_refused():
    world = World(0)
    with pytest.raises(ValueError, match="do not fit keys"):
        LayerKeys(world.keys.repeat(1, 2, 1, 1)[:, 1:]).log_sums(world.queries)
