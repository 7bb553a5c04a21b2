"""The reference of the drift, carried from update to update: as good as one made anew, wherever the attention goes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from full_drift import full_drift
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tiered.kernels import proxy_drift_ref
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import proxy_scores
from tiered.policies.polestar import kept_attention
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
        self.key_mask = None
        if self.masked:
            self.key_mask = torch.ones(self.batch, self.length, dtype=torch.bool)
            self.key_mask[0, :7] = self.key_mask[-1, -3:] = self.key_mask[-1, BLOCK.stop - 1] = False
        self.sink_keys = self.grid(2, self.heads, self.sinks, 4) * self.scale if self.sinks else None
        self.restart()

    def grid(self, most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=self.generator).float()

    def new_queries(self, clusters: int) -> Tensor:
        queries = self.grid(3, self.batch, self.heads, clusters, 4)
        queries[..., 3] = 1
        return queries

    def restart(self) -> None:
        self.reference, self.last_keys = self.anew(self.queries), self.keys.clone()

    def anew(self, queries: Tensor) -> DriftReference:
        changing = torch.arange(BLOCK.start, BLOCK.stop).expand(self.batch, -1)
        of: dict[str, Any] = {"soft_cap": self.soft_cap, "sink_keys": self.sink_keys}
        if self.clustered:
            of |= {"cluster_of": self.cluster_of, "clusters": self.clusters}
        return DriftReference.of(queries, self.keys, changing, None, self.key_mask, **of)

    def members(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of each sequence's chosen clusters (−1: none), pads and all; with filler, which is anything."""
        found = [torch.isin(of, chosen[b][chosen[b] >= 0]).nonzero()[:, 0] for b, of in enumerate(self.cluster_of)]
        most = max(map(len, found)) + 2
        columns = torch.randint(0, self.length, (self.batch, most), generator=self.generator)
        valid = torch.zeros(self.batch, most, dtype=torch.bool)
        for b, own in enumerate(found):
            # Filler in front, or behind.
            place = slice(0, len(own)) if b % 2 else slice(most - len(own), most)
            columns[b, place], valid[b, place] = own, True
        return columns, valid

    def at(self, keys: Tensor, columns: Tensor, valid: Tensor | None = None) -> Tensor:
        """`keys` at `columns`; NaN where not valid."""
        found = keys.gather(2, columns[:, None, :, None].expand(-1, self.kv_heads, -1, 4))
        return found if valid is None else found.masked_fill(~valid[:, None, :, None], torch.nan)

    def raise_(self, columns: Tensor, valid: Tensor, scores: float) -> None:
        for b in range(self.batch):
            self.keys[b, :, columns[b, valid[b]], 3] += 2 * scores

    def block_keys(self) -> Tensor:
        return self.keys[:, :, BLOCK]

    def change(self, columns: Tensor, valid: Tensor) -> None:
        for b in range(self.batch):
            own = columns[b, valid[b]]
            self.keys[b, :, own] += self.scale * self.grid(1, self.kv_heads, len(own), 4)

    def step(self) -> None:
        """A step without an update: the block has new keys."""
        self.keys[:, :, BLOCK] += self.scale * self.grid(1, self.batch, self.kv_heads, BLOCK.stop - BLOCK.start, 4)
        self.assert_law(proxy_drift_ref.proxy_drift(self.queries, self.block_keys(), self.reference))

    def update(self, chosen: Tensor, rise: float, moved: Tensor) -> None:
        """New keys for the members of `chosen`, which also rise by `rise`; new queries for `moved`. −1 is neither."""
        columns, valid = self.members(chosen)
        wide = self.reference.widened(self.queries, self.at(self.keys, columns, valid), columns, valid)
        self.assert_law(proxy_drift_ref.proxy_drift(self.queries, self.joint_keys(columns, valid), wide))
        self.change(columns, valid)
        self.raise_(columns, valid, rise)
        keys = self.joint_keys(columns, valid)
        self.assert_law(proxy_drift_ref.proxy_drift(self.queries, keys, wide))
        narrow = wide.refreshed(self.queries, keys).narrowed(slice(BLOCK.stop - BLOCK.start))
        queries = self.new_queries(moved.shape[1])
        there = moved >= 0
        for b in range(self.batch):
            self.queries[b, :, moved[b, there[b]]] = queries[b, :, there[b]]
        self.reference = narrow.replaced(self.anew(queries), moved.where(there, 10**6), there)
        self.last_keys = self.keys.clone()
        self.assert_made_anew()

    def joint_keys(self, columns: Tensor, valid: Tensor) -> Tensor:
        return torch.cat([self.block_keys(), self.at(self.keys, columns, valid)], dim=2)

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
        torch.testing.assert_close(self.reference.scores, expected.scores, rtol=0, atol=0)
        assert torch.equal(self.reference.columns, expected.columns)
        assert torch.equal(self.reference.kept.sizes, expected.kept.sizes)
        for ours, theirs in [
            (self.reference.rest, expected.rest),
            (self.reference.kept.sums, expected.kept.sums),
        ]:
            torch.testing.assert_close(ours.value, theirs.value, rtol=1e-6, atol=4e-6)


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
    world.raise_(*world.members(chosen), first)
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
    world.raise_(*world.members(chosen), 60.0)
    world.restart()
    columns, valid = world.members(chosen)
    wide = world.reference.widened(world.queries, world.at(world.keys, columns), columns, valid)
    shares = wide.log_probabilities(wide.scores)[..., -1]
    assert (shares < -40).all()
    world.raise_(columns, valid, -120.0)
    found = proxy_drift_ref.proxy_drift(world.queries, world.joint_keys(columns, valid), wide)
    assert (found > 40).all()
    world.assert_law(found)


@pytest.mark.parametrize("rise", [-120.0, 0.0, 120.0])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, 0), (30.0, 1)])
def test_the_law_in_triton(rise: float, soft_cap: float | None, sinks: int):
    """With a rest that holds next to nothing, and that a column has been subtracted from."""
    proxy_drift = pytest.importorskip("tiered.kernels.proxy_drift").proxy_drift
    world = World(4, soft_cap=soft_cap, sinks=sinks)
    world.raise_(*world.members(torch.tensor([[1], [2]])), 60.0 if rise else 0.0)
    world.restart()
    columns, valid = world.members(torch.tensor([[1], [2]]))
    some = torch.full((2, 1), NO_CLUSTER.start)  # of the columns in no cluster: it is subtracted
    columns, valid = torch.cat([columns, some], dim=1), torch.cat([valid, some > 0], dim=1)
    wide = world.reference.widened(world.queries, world.at(world.keys, columns, valid), columns, valid)
    world.change(columns, valid)
    world.raise_(columns, valid, rise)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = world.queries.to(device), world.joint_keys(columns, valid).to(device)
    rest = LogSumExp(wide.rest.peak.to(device), wide.rest.mass.to(device))
    world.assert_law(proxy_drift(*given, replace(wide, rest=rest, scores=wide.scores.to(device))).cpu())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_law_on_rounded_scores(seed: int, kv_heads: int):
    """Scores of about 30 that differ in their rounding from product to product, as a model's do."""
    world = World(seed, kv_heads=kv_heads, scale=5.0)
    world.queries += torch.rand(world.queries.shape, generator=world.generator)
    world.keys += torch.rand(world.keys.shape, generator=world.generator)
    world.restart()
    for rise in (-20.0, 20.0):
        columns, valid = world.members(picked(world, 3))
        wide = world.reference.widened(world.queries, world.at(world.keys, columns), columns, valid)
        world.change(columns, valid)
        world.raise_(columns, valid, rise)
        keys = world.joint_keys(columns, valid)
        world.assert_law(proxy_drift_ref.proxy_drift(world.queries, keys, wide))
        world.reference = wide.refreshed(world.queries, keys).narrowed(slice(6))
        world.last_keys = world.keys.clone()
    world.step()


@pytest.mark.parametrize("clustered", [False, True], ids=["no clusters", "half of each cluster"])
def test_columns_that_are_no_whole_clusters(clustered: bool):
    """They are subtracted: good as long as they do not hold nearly all of their part."""
    world = World(5, clustered=clustered, scale=0.25)
    for _ in range(3):
        columns = torch.stack([torch.randperm(18, generator=world.generator)[:9] for _ in range(world.batch)])
        valid = torch.ones_like(columns, dtype=torch.bool)
        wide = world.reference.widened(world.queries, world.at(world.keys, columns), columns)
        world.change(columns, valid)
        keys = world.joint_keys(columns, valid)
        world.assert_law(proxy_drift_ref.proxy_drift(world.queries, keys, wide))
        world.reference = wide.refreshed(world.queries, keys).narrowed(slice(6))
        world.last_keys = world.keys.clone()
        world.assert_made_anew()
        world.step()


@pytest.mark.parametrize("sinks", [0, 2])
def test_all_columns_without_clusters_leave_nothing_but_sinks(sinks: int):
    """The count says so, where the subtraction would leave noise."""
    world = World(6, clustered=False, masked=False, sinks=sinks)
    columns = torch.tensor([[i for i in range(48) if i not in range(18, 24)]]).repeat(2, 1)
    keys = world.at(world.keys, columns) * 1.0000002  # not the scores that were added
    wide = world.reference.widened(world.queries, keys, columns)
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
    wide = world.reference.widened(world.queries, torch.full((2, 2, 2, 4), torch.nan), pads)
    assert (wide.columns[:, 6:] == -1).all() and (wide.scores[..., 6:] == -torch.inf).all()
    torch.testing.assert_close(wide.rest.value, world.reference.rest.value, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [slice(2, 4), slice(0, 0), slice(3, None), slice(None, -1), slice(4, 2)])
def test_any_columns_may_stay_changing(keep: slice):
    world = World(8, masked=False)
    narrow = world.reference.narrowed(keep)
    index = torch.arange(18, 24)[keep].expand(2, -1)
    expected = DriftReference.of(world.queries, world.keys, index, cluster_of=world.cluster_of, clusters=world.clusters)
    assert torch.equal(narrow.columns, expected.columns) and torch.equal(narrow.scores, expected.scores)
    assert torch.equal(narrow.kept.sizes, expected.kept.sizes)
    torch.testing.assert_close(narrow.rest.value, expected.rest.value)


def test_a_changing_column_comes_back_to_its_cluster():
    """A finished block whose clusters were numbered beforehand: it can be taken out again, whole."""
    world = World(9, clusters=4, masked=False)
    world.cluster_of[:, BLOCK] = 3
    world.restart()
    assert torch.equal(world.reference.narrowed(slice(0)).kept.sizes[:, 4], (world.cluster_of == 3).sum(1))


def test_new_clusters_are_joined():
    world = World(10)
    more = world.new_queries(3)
    joined = world.reference.joined(world.anew(more))
    world.queries = torch.cat([world.queries, more], dim=2)
    world.reference = joined
    world.assert_made_anew()
    world.step()


def test_a_batch_is_its_sequences():
    """With other columns, and another number of them."""
    drifts = []
    for alone in (None, 0, 1):
        world = World(11)
        chosen = torch.tensor([[0, 1], [3, -1]])
        columns, valid = world.members(chosen)
        wide = world.reference
        if alone is not None:
            columns = columns[alone : alone + 1, valid[alone]]
            valid = torch.ones_like(columns, dtype=torch.bool)
            for name in ("queries", "keys", "cluster_of", "key_mask"):
                setattr(world, name, getattr(world, name)[alone : alone + 1])
            world.batch = 1
            world.restart()
        wide = world.reference.widened(world.queries, world.at(world.keys, columns, valid), columns, valid)
        keys = world.joint_keys(columns, valid) * 1.25
        drifts.append(proxy_drift_ref.proxy_drift(world.queries, keys, wide))
    torch.testing.assert_close(drifts[0], torch.cat(drifts[1:]), rtol=2e-6, atol=1e-7)
    assert (drifts[0] > 0.01).all()


def test_the_work_of_an_update_does_not_grow_with_the_length():
    counts = []
    for length in (48, 3000):
        world = World(12, length=length, masked=False)
        columns = torch.arange(24, 40).expand(2, -1)
        old, wide_keys, other = (
            world.at(world.keys, columns),
            world.joint_keys(columns, torch.ones(2, 16, dtype=torch.bool)),
            world.anew(world.new_queries(2)),
        )
        with FlopCounterMode(display=False) as counter:
            wide = world.reference.widened(world.queries, old, columns)
            narrow = wide.refreshed(world.queries, wide_keys).narrowed(slice(6))
            narrow.replaced(other, torch.tensor([[0, 1], [2, 3]]))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_an_update_reads_nothing_back():
    """A tensor that is fake has no values: whoever asks for one, or for a shape that depends on one, gets an error."""
    with FakeTensorMode():
        queries, keys = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 40, 8)
        block, extra = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
        valid, mask = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 40, dtype=torch.bool)
        of: Callable[[Tensor], DriftReference] = lambda queries: DriftReference.of(  # noqa: E731
            queries, keys, block, None, mask, cluster_of=torch.zeros(2, 40, dtype=torch.int64), clusters=5
        )
        wide = of(queries).widened(queries, keys[:, :, :9], extra, valid)
        proxy_drift_ref.proxy_drift(queries, keys[:, :, :15], wide)
        narrow = wide.refreshed(queries, keys[:, :, :15]).narrowed(slice(6))
        moved = torch.zeros(2, 2, dtype=torch.int64)
        done = narrow.replaced(of(queries[:, :, :2]), moved, valid[:, :2]).joined(of(queries[:, :, :1]))
    assert done.scores.shape == (2, 4, 6, 6) and done.kept.sums.peak.shape == (2, 4, 6, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, r: r.widened(w.queries, w.keys[:, :, :3], torch.zeros(2, 4, dtype=torch.int64)), "columns"),
        (lambda w, r: r.widened(w.queries[:, :, 1:], w.keys[:, :, :3], torch.zeros(2, 3, dtype=torch.int64)), "do not"),
        (lambda w, r: r.narrowed(slice(0, 6, 2)), "without a step"),
        (lambda w, r: r.replaced(r, torch.zeros(2, 2, dtype=torch.int64)), "5 clusters cannot replace 2"),
        (lambda w, r: r.replaced(r.narrowed(slice(2)), torch.zeros(2, 5, dtype=torch.int64)), "same batch"),
        (lambda w, r: r.joined(World(0, clusters=4).reference), "same batch"),
    ],
)
def test_what_does_not_go_together(call: Callable[[World, DriftReference], object], message: str):
    world = World(0)
    with pytest.raises(ValueError, match=message):
        call(world, world.reference)


@pytest.mark.parametrize("at_once", [1, 20 * 2 * 4 * 5, 1 << 19])
def test_sums_of_parts_in_chunks(at_once: int, monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def watched(*given: Any) -> Tensor:
        scores = proxy_scores(*given)
        sizes.append(scores.shape[3])
        return scores

    world = World(13, scale=2.0, masked=False)
    monkeypatch.setattr(kept_attention, "SCORES_AT_ONCE", at_once)
    monkeypatch.setattr(kept_attention, "proxy_scores", watched)
    part = world.cluster_of.clone()
    part[:, 5] = 6  # part 5 has no column
    found = kept_attention.attention_by_part(world.queries, world.keys, part, 7)
    for p in range(7):
        there = (part == p)[:, None, None].expand(-1, 4, 5, -1)
        expected = world.scores64(world.keys).masked_fill(~there, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(found.value[..., p].double(), expected, rtol=1e-6, atol=1e-6)
    assert sizes == {1: [16] * 3, 800: [20, 20, 8]}.get(at_once, [48])


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
