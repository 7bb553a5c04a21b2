"""The reference of the drift, carried from update to update: as good as one made anew, wherever the attention goes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from full_drift import full_drift
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tiered.core.rows import Rows
from tiered.kernels.choice import for_device
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.policies.polestar import drift_reference
from tiered.policies.polestar.drift_reference import DriftReference

LAW = 1e-5  # |incremental − full|, relative where the drift is above 1
BLOCK = slice(18, 24)
NO_CLUSTER = slice(44, 48)


@dataclass
class World:
    """What a layer has in its cache, with all keys of the last update beside those of now.

    Keys and queries lie on a grid, so that scores are exact in float32. The last element of a query is 1: with `raise_`
    all scores of a column move alike.
    """

    seed: int
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    clusters: int = 5
    length: int = 48
    scale: float = 1.0
    masked: bool = True
    clustered: bool = True
    everywhere: bool = False  # no columns but the block's and the clusters'
    soft_cap: float | None = None
    sinks: int = 0
    device: str = "cpu"
    queries: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    last_keys: Tensor = field(init=False)
    cluster_of: Tensor = field(init=False)
    key_mask: Tensor | None = field(init=False)
    sink_keys: Tensor | None = field(init=False)
    reference: DriftReference = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.queries = self.new_queries(self.clusters)
        self.keys = self.grid(2, self.batch, self.kv_heads, self.length, 4) * self.scale
        self.cluster_of = torch.randint(0, self.clusters, (self.batch, self.length), generator=self.generator)
        self.cluster_of[:, BLOCK] = -1
        if not self.everywhere:
            self.cluster_of[:, NO_CLUSTER] = -1
        self.cluster_of = self.cluster_of.to(self.device)
        self.key_mask = None
        if self.masked:
            self.key_mask = torch.ones(self.batch, self.length, dtype=torch.bool)
            self.key_mask[0, :7] = self.key_mask[-1, -3:] = self.key_mask[-1, BLOCK.stop - 1] = False
            self.key_mask = self.key_mask.to(self.device)
        self.sink_keys = self.grid(2, self.heads, self.sinks, 4) * self.scale if self.sinks else None
        self.restart()

    def grid(self, most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=self.generator).float().to(self.device)

    def new_queries(self, clusters: int) -> Tensor:
        queries = self.grid(3, self.batch, self.heads, clusters, 4)
        queries[..., 3] = 1
        return queries

    def restart(self) -> None:
        self.reference, self.last_keys = self.anew(self.queries), self.keys.clone()

    def anew(self, queries: Tensor) -> DriftReference:
        changing = torch.arange(BLOCK.start, BLOCK.stop, device=self.device).expand(self.batch, -1)
        of: dict[str, Any] = {"soft_cap": self.soft_cap, "sink_keys": self.sink_keys}
        if self.clustered:
            of |= {"cluster_of": self.cluster_of, "clusters": self.clusters}
        return DriftReference.of(queries, self.keys, changing, None, self.key_mask, **of)

    def members(self, chosen: Tensor) -> Rows:
        """Columns of each sequence's chosen clusters (−1: none), pads and all; with filler, which is anything."""
        found = [
            torch.isin(of, chosen[b][chosen[b] >= 0]).nonzero()[:, 0] for b, of in enumerate(self.cluster_of.cpu())
        ]
        most = max(map(len, found)) + 2
        columns = torch.randint(0, self.length, (self.batch, most), generator=self.generator)
        valid = torch.zeros(self.batch, most, dtype=torch.bool)
        for b, own in enumerate(found):
            # Filler in front, or behind.
            place = slice(0, len(own)) if b % 2 else slice(most - len(own), most)
            columns[b, place], valid[b, place] = own, True
        return Rows.at(columns.to(self.device), valid.to(self.device))

    def raise_(self, rows: Rows, scores: float) -> None:
        for b, own in enumerate(counted(rows)):
            self.keys[b, :, own, 3] += 2 * scores

    def change(self, rows: Rows) -> None:
        for b, own in enumerate(counted(rows)):
            self.keys[b, :, own] += self.scale * self.grid(1, self.kv_heads, len(own), 4)

    def step(self) -> None:
        """A step without an update: the block has new keys."""
        self.keys[:, :, BLOCK] += self.scale * self.grid(1, self.batch, self.kv_heads, BLOCK.stop - BLOCK.start, 4)
        self.assert_law(self.reference.measured(self.queries, self.keys, Rows.span(BLOCK.start, BLOCK.stop))[0])

    def update(self, chosen: Tensor, rise: float, moved: Tensor) -> None:
        """New keys for the members of `chosen`, which also rise by `rise`; new queries for `moved`. −1 is neither."""
        rows = self.members(chosen)
        wide = self.reference.add_changing(self.queries, self.keys, rows)
        self.assert_law(wide.measured(self.queries, self.keys, self.joint(rows))[0])
        self.change(rows)
        self.raise_(rows, rise)
        found, narrow = wide.measured(self.queries, self.keys, self.joint(rows), slice(BLOCK.stop - BLOCK.start))
        self.assert_law(found)
        queries = self.new_queries(moved.shape[1])
        there = moved >= 0
        for b in range(self.batch):
            self.queries[b, :, moved[b, there[b]]] = queries[b, :, there[b]]
        moved, there = moved.clamp_min(0).to(self.device), there.to(self.device)
        narrow.recenter(queries, self.keys, moved, there, self.sink_keys)
        self.reference = narrow
        self.last_keys = self.keys.clone()
        self.assert_made_anew()

    def joint(self, rows: Rows) -> Rows:
        """The block's columns, and `rows` behind them."""
        assert rows.index is not None
        block = torch.arange(BLOCK.start, BLOCK.stop, device=self.device).expand(self.batch, -1)
        return Rows.at(torch.cat([block, rows.index], dim=1))

    def assert_law(self, found: Tensor) -> None:
        full = full_drift(self.queries, self.keys, self.last_keys, self.key_mask, self.soft_cap, self.sink_keys)
        for expected in (full.double(), self.true()):
            assert ((found.double() - expected).abs() <= LAW * expected.clamp(min=1)).all(), (found, expected)

    def true(self) -> Tensor:
        """The drift in float64, by the definition of KL."""
        new, old = (self.scores64(keys).log_softmax(-1) for keys in (self.keys, self.last_keys))
        return (new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)

    def scores64(self, keys: Tensor) -> Tensor:
        keys = keys.double().repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = self.queries.double() @ keys.mT / 2
        if self.sink_keys is not None:
            scores = torch.cat([scores, self.queries.double() @ self.sink_keys.double().mT / 2], dim=-1)
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        if self.key_mask is not None:
            scores[..., : self.length].masked_fill_(~self.key_mask[:, None, None], -torch.inf)
        return scores

    def assert_made_anew(self) -> None:
        """The reference is what `of` makes of the keys and queries of now."""
        expected = self.anew(self.queries)
        # The kernels' tanh is not torch's to the bit.
        allowed = 0.0 if self.soft_cap is None or drift_reference.for_device is for_device else 2e-6
        torch.testing.assert_close(self.reference.scores, expected.scores, rtol=0, atol=allowed)
        assert torch.equal(self.reference.columns, expected.columns)
        assert torch.equal(self.reference.sizes, expected.sizes)
        for ours, theirs in [
            (self.reference.rest, expected.rest),
            (self.reference.sums, expected.sums),
        ]:
            torch.testing.assert_close(ours.value, theirs.value, rtol=1e-6, atol=4e-6)


def counted(rows: Rows) -> list[Tensor]:
    """The columns of each sequence's valid rows."""
    assert rows.index is not None
    valid = torch.ones_like(rows.index, dtype=torch.bool) if rows.valid is None else rows.valid
    return [index[own] for index, own in zip(rows.index, valid, strict=True)]


def picked(world: World, most: int) -> Tensor:
    """Up to `most` clusters of each sequence, each sequence its own number; −1 behind, or before."""
    found = torch.full((world.batch, most), -1)
    for b in range(world.batch):
        count = int(torch.randint(0, most + 1, (), generator=world.generator))
        own = torch.randperm(world.clusters, generator=world.generator)[:count]
        found[b, slice(most - count, most) if b % 2 else slice(0, count)] = own
    return found


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([2.0**-10, 0.125, 1.0, 5.0, 256.0]),
    rises=st.lists(st.sampled_from([0.0, 4.0, -4.0, 30.0, -60.0, 120.0, -120.0, 4096.0]), min_size=1, max_size=4),
    first=st.sampled_from([0.0, 30.0, 60.0]),
    most=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
    everywhere=st.booleans(),
    same=st.booleans(),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.integers(0, 2),
)
# Nearly all lies in F, then in the rest, and so again: to subtract would leave noise.
@example(0, 5.0, [-120.0, 120.0, -120.0], 60.0, 2, 2, True, False, True, None, 0)
@example(0, 0.125, [-60.0, 60.0, -60.0], 30.0, 2, 2, True, True, True, None, 0)
# Every cluster, and no other column: nothing is left in the rest.
@example(1, 1.0, [0.0, -60.0, 4.0], 30.0, 5, 4, True, True, True, None, 0)
# And nothing but sinks.
@example(1, 1.0, [0.0, -60.0, 4.0], 30.0, 5, 4, True, True, True, 30.0, 1)
@settings(max_examples=150)
def test_the_law_over_several_updates(
    seed: int,
    scale: float,
    rises: list[float],
    first: float,
    most: int,
    kv_heads: int,
    masked: bool,
    everywhere: bool,
    same: bool,
    soft_cap: float | None,
    sinks: int,
):
    shape: dict[str, Any] = {"kv_heads": kv_heads, "scale": scale, "masked": masked, "everywhere": everywhere}
    world = World(seed, soft_cap=soft_cap, sinks=sinks, **shape)
    chosen = picked(world, most)
    world.raise_(world.members(chosen), first)
    world.restart()
    for rise in rises:
        world.step()
        world.update(chosen, rise, picked(world, most))
        chosen = chosen if same else picked(world, most)
    world.step()


def test_the_rest_goes_from_nothing_to_all():
    """The case that a subtraction cannot pass, seen to be that case: e⁻⁶⁰ of the attention, then all of it."""
    world = World(3, batch=1, masked=False)
    chosen = torch.tensor([[1]])
    world.raise_(world.members(chosen), 60.0)
    world.restart()
    rows = world.members(chosen)
    wide = world.reference.add_changing(world.queries, world.keys, rows)
    shares = wide.log_probabilities(wide.scores)[..., -1]
    assert (shares < -40).all()
    world.raise_(rows, -120.0)
    found, _ = wide.measured(world.queries, world.keys, world.joint(rows))
    assert (found > 40).all()
    world.assert_law(found)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the kernels run on: a GPU where there is one, else the interpreter."""
    pytest.importorskip("triton")

    def kernel(reference: Callable[..., Any], _: torch.device) -> Callable[..., Any]:
        return getattr(importlib.import_module(reference.__module__.removesuffix("_ref")), reference.__name__)

    monkeypatch.setattr(drift_reference, "for_device", kernel)
    return "cuda" if torch.cuda.is_available() else "cpu"


# The other way round, fall and rise, is the same twice over: two updates do both.
@pytest.mark.parametrize("rise", [pytest.param(-120.0, marks=pytest.mark.long), 0.0, 120.0])
@pytest.mark.parametrize(
    "shape", [{}, {"soft_cap": 30.0, "sinks": 1}, {"clusters": 15, "sinks": 2}, {"clustered": False, "kv_heads": 1}]
)
def test_the_law_in_triton(triton: str, rise: float, shape: dict[str, Any]):
    """Over two updates, with a rest that holds next to nothing."""
    world = World(4, device=triton, **shape)
    chosen = torch.tensor([[1, 0], [2, -1]])
    world.raise_(world.members(chosen), 60.0 if rise and world.clustered else 0.0)
    world.restart()
    for again in (rise, -rise) if world.clustered else (0.0, 0.0):
        world.update(chosen, again, torch.tensor([[1, -1], [0, 2]]))
        world.step()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_law_on_rounded_scores(seed: int, kv_heads: int):
    """Scores of about 30 that differ in their rounding from product to product, as a model's do."""
    world = World(seed, kv_heads=kv_heads, scale=5.0)
    world.queries += torch.rand(world.queries.shape, generator=world.generator)
    world.keys += torch.rand(world.keys.shape, generator=world.generator)
    world.restart()
    for rise in (-20.0, 20.0):
        rows = world.members(picked(world, 3))
        wide = world.reference.add_changing(world.queries, world.keys, rows)
        world.change(rows)
        world.raise_(rows, rise)
        found, world.reference = wide.measured(world.queries, world.keys, world.joint(rows), slice(6))
        world.assert_law(found)
        world.last_keys = world.keys.clone()
    world.step()


@pytest.mark.parametrize("clustered", [False, True], ids=["no clusters", "half of each cluster"])
def test_columns_that_are_no_whole_clusters(clustered: bool):
    """They are subtracted: good as long as they do not hold nearly all of their part."""
    world = World(5, clustered=clustered, scale=0.25)
    for _ in range(3):
        rows = Rows.at(torch.stack([torch.randperm(18, generator=world.generator)[:9] for _ in range(world.batch)]))
        wide = world.reference.add_changing(world.queries, world.keys, rows)
        world.change(rows)
        found, world.reference = wide.measured(world.queries, world.keys, world.joint(rows), slice(6))
        world.assert_law(found)
        world.last_keys = world.keys.clone()
        world.assert_made_anew()
        world.step()


def test_sequences_that_do_not_update_stay_as_they_are():
    """And go on drifting from their own last update."""
    world = World(14)
    rows, updating = world.members(torch.tensor([[0, 1], [1, 2]])), torch.tensor([True, False])
    before, last_keys = world.reference, world.keys.clone()
    world.keys[:, :, BLOCK] += world.scale
    wide = before.add_changing(world.queries, world.keys, rows, updating)
    world.change(rows.only(updating))
    found, world.reference = wide.measured(world.queries, world.keys, world.joint(rows), slice(6), updating)
    world.assert_law(found)
    world.last_keys[0] = world.keys[0]
    for now, then in (
        (world.reference.scores, before.scores),
        (world.reference.sums.peak, before.sums.peak),
        (world.reference.sums.mass, before.sums.mass),
        (world.reference.sizes, before.sizes),
        (world.reference.columns, before.columns),
    ):
        assert torch.equal(now[1], then[1])
    assert not torch.equal(world.reference.scores[0], before.scores[0]) and not torch.equal(world.keys, last_keys)
    world.step()


@pytest.mark.parametrize("sinks", [0, 2])
def test_all_columns_without_clusters_leave_nothing_but_sinks(sinks: int):
    """The count says so, where the subtraction would leave noise."""
    world = World(6, clustered=False, masked=False, sinks=sinks)
    rows = Rows.at(torch.tensor([[i for i in range(48) if i not in range(18, 24)]]).repeat(2, 1))
    keys = world.keys * 1.0000002  # not the scores that were added
    wide = world.reference.add_changing(world.queries, keys, rows)
    if not sinks:
        assert (wide.rest.mass == 0).all() and (wide.rest.peak == -torch.inf).all()
        return
    assert world.sink_keys is not None
    expected = (world.queries @ world.sink_keys.mT / 2).logsumexp(-1)
    torch.testing.assert_close(wide.rest.value, expected, rtol=0, atol=1e-6)


def test_pads_are_never_widened():
    """Members of no sequence's clusters, though `cluster_of` may count them in: as filler, even if valid."""
    world = World(7)
    assert world.key_mask is not None
    pads = torch.tensor([[0, 3], [45, 46]])
    assert not world.key_mask.gather(1, pads).any()
    wide = world.reference.add_changing(world.queries, torch.full_like(world.keys, torch.nan), Rows.at(pads))
    assert (wide.columns[:, 6:] == world.length).all() and (wide.scores[..., 6:] == -torch.inf).all()
    torch.testing.assert_close(wide.rest.value, world.reference.rest.value, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [slice(2, 4), slice(0, 0), slice(3, None), slice(None, -1), slice(4, 2)])
def test_any_columns_may_stay_changing(keep: slice):
    world = World(8, masked=False)
    _, narrow = world.reference.measured(world.queries, world.keys, Rows.span(18, 24), keep)
    index = torch.arange(18, 24)[keep].expand(2, -1)
    expected = DriftReference.of(world.queries, world.keys, index, cluster_of=world.cluster_of, clusters=world.clusters)
    assert torch.equal(narrow.columns, expected.columns) and torch.equal(narrow.scores, expected.scores)
    assert torch.equal(narrow.sizes, expected.sizes)
    torch.testing.assert_close(narrow.rest.value, expected.rest.value)


def test_a_changing_column_comes_back_to_its_cluster():
    """A finished block whose clusters were numbered beforehand: it can be taken out again, whole."""
    world = World(9, clusters=4, masked=False)
    world.cluster_of[:, BLOCK] = 3
    world.restart()
    _, narrow = world.reference.measured(world.queries, world.keys, Rows.span(18, 24), slice(0))
    assert torch.equal(narrow.sizes[:, 4], (world.cluster_of == 3).sum(1))


def test_a_new_cluster_is_joined_and_moved():
    """A copy of the first until then."""
    world = World(10, sinks=1)
    joined = world.reference.append()
    assert torch.equal(joined.scores[:, :, 5], joined.scores[:, :, 0])
    torch.testing.assert_close(joined.rest.value[:, :, 5], world.reference.rest.value[:, :, 0], rtol=0, atol=0)
    more = world.new_queries(1)
    joined.recenter(more, world.keys, torch.full((2, 1), 5), None, world.sink_keys)
    world.queries = torch.cat([world.queries, more], dim=2)
    world.reference = joined
    world.assert_made_anew()
    world.step()


def test_a_batch_is_its_sequences():
    """With other columns, and another number of them."""
    drifts = []
    for alone in (None, 0, 1):
        world = World(11)
        rows = world.members(torch.tensor([[0, 1], [3, -1]]))
        if alone is not None:
            rows = Rows.at(counted(rows)[alone][None])
            for name in ("queries", "keys", "cluster_of", "key_mask"):
                setattr(world, name, getattr(world, name)[alone : alone + 1])
            world.batch = 1
            world.restart()
        wide = world.reference.add_changing(world.queries, world.keys, rows)
        drifts.append(wide.measured(world.queries, world.keys * 1.25, world.joint(rows))[0])
    torch.testing.assert_close(drifts[0], torch.cat(drifts[1:]), rtol=2e-6, atol=1e-7)
    assert (drifts[0] > 0.01).all()


def test_the_work_of_an_update_does_not_grow_with_the_length():
    """But for that of centroids that move."""
    counts = []
    for length in (48, 3000):
        world = World(12, length=length, masked=False)
        rows = Rows.at(torch.arange(24, 40).expand(2, -1))
        with FlopCounterMode(display=False) as counter:
            wide = world.reference.add_changing(world.queries, world.keys, rows)
            wide.measured(world.queries, world.keys, world.joint(rows), slice(6))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_an_update_reads_nothing_back():
    """A tensor that is fake has no values: whoever asks for one, or for a shape that depends on one, gets an error."""
    with FakeTensorMode():
        queries, keys = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 40, 8)
        block, extra = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
        valid, mask = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 40, dtype=torch.bool)
        updating = valid[:, 0]
        reference = DriftReference.of(
            queries, keys, block, None, mask, cluster_of=torch.zeros(2, 40, dtype=torch.int64), clusters=5
        )
        wide = reference.add_changing(queries, keys, Rows.at(extra, valid), updating)
        joint = Rows.at(torch.cat([block, extra], dim=1))
        _, narrow = wide.measured(queries, keys, joint, slice(6), updating)
        done = narrow.append()
        done.recenter(queries[:, :, :2], keys, torch.zeros(2, 2, dtype=torch.int64), valid[:, :2])
    assert done.scores.shape == (2, 4, 6, 6) and done.sums.peak.shape == (2, 4, 6, 6)


ROWS = Rows.span(18, 24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, r: r.add_changing(w.queries[:, :, 1:], w.keys, ROWS), "do not fit a reference"),
        (lambda w, r: r.add_changing(w.queries, w.keys.repeat(1, 2, 1, 1)[:, 1:], ROWS), "do not fit keys"),
        (lambda w, r: r.measured(w.queries, w.keys, Rows.span(18, 23)), "where there are 6 columns"),
        (lambda w, r: r.measured(w.queries, w.keys, ROWS, slice(0, 6, 2)), "without a step"),
        (
            lambda w, r: r.recenter(w.queries, w.keys, torch.zeros(2, 2, dtype=torch.int64)),
            "5 clusters cannot be those of 2",
        ),
    ],
)
def test_what_does_not_go_together(call: Callable[[World, DriftReference], object], message: str):
    world = World(0)
    with pytest.raises(ValueError, match=message):
        call(world, world.reference)


def summed(*scores: float) -> LogSumExp:
    return LogSumExp.empty(torch.zeros(1)).plus(torch.tensor([scores]))


@pytest.mark.parametrize(
    ("whole", "part", "left"),
    [
        ([3.0, 1.0, 2.0], [1.0], [3.0, 2.0]),
        ([3.0, 1.0, 2.0], [3.0], [1.0, 2.0]),  # the largest: what is left has a mass below 1
        ([1e5, 1e5, 99990.0], [1e5], [1e5, 99990.0]),
        ([3.0, 1.0], [], [3.0, 1.0]),
        ([-200.0, -201.0], [-200.0], [-201.0]),
        ([5.0, 1.0], [5.0, 1.0], []),
        ([5.0], [5.00001], []),  # by its rounding, more than there is
        ([], [], []),
    ],
)
def test_columns_taken_out_of_a_sum(whole: list[float], part: list[float], left: list[float]):
    found, expected = summed(*whole).minus(summed(*part)), summed(*left)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-6, atol=1e-6)
    assert (found.peak == -torch.inf).item() == (not left) == (found.mass == 0).item()
    # As good as ever for what comes after.
    scores = torch.tensor([[0.5, 2.0, -torch.inf]])
    torch.testing.assert_close(found.plus(scores.clone()).value, expected.plus(scores.clone()).value)
    if left:
        torch.testing.assert_close(found.log_probability(scores), expected.log_probability(scores))
