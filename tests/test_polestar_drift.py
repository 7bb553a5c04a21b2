"""Polestar's updates: their drift, their forwards and their choices, against full drifts and plain counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_drift import full_drift, full_output_drift
from padded_prompts import padded
from polestar_variants import variant
from torch import Tensor

import tiered
from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.output import GenerationOutput
from tiered.policies.base import Step, StepKind
from tiered.policies.polestar import policy as polestar
from tiered.policies.polestar import update
from tiered.policies.polestar.cache import Refresh
from tiered.policies.polestar.drift import Changed, DriftReference, LayerKeys
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LAW = 1e-5  # |incremental − full|, relative if the drift is above 1
MASK, BLOCK = 511, 8
MEASURE = LayerState.measure


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


def generate(
    runtime: Runtime, lengths: Sequence[int] = (17, 9, 12), confidence_threshold: float = 0.3, **options: Any
) -> GenerationOutput:
    """A left-padded batch, 24 new tokens."""
    out = runtime.with_policy(variant(**options)).generate(
        **padded(*lengths), max_new_tokens=24, block_length=BLOCK, output_history=True, stop_at_eos=False,
        confidence_threshold=confidence_threshold,
    )  # fmt: skip
    assert out.history is not None
    return out


@dataclass
class Oracle:
    """Around `LayerState.measure`, once the layer's keys and values were written. It compares every drift with one of
    all that is stored, now and at the sequence's last refresh or update. A centroid that moves later in that pass has a
    new query, but over the same keys. If moves count as drift it has moved already."""

    last: dict[int, list[Tensor]] = field(default_factory=dict)  # keys and values, by layer
    drifts: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    sizes: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)  # of clusters, by update and layer
    stored: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)  # of their records
    members: dict[tuple[int, int], list[Members]] = field(default_factory=dict)
    updating: dict[tuple[int, int], list[bool]] = field(default_factory=dict)
    updates: int = -1
    moves: int = 0  # measurements in which centroids moved

    def refreshed(self, forward: Forward, layer: int) -> None:
        self.last[layer] = [each.clone() for each in key_value(forward, layer)]

    def measure(
        self,
        state: LayerState,
        forward: Forward,
        pass_: Pass,
        tracked: Span,
        active: int,
        some: Tensor | None,
        last_queries: Tensor | None,
    ) -> list[list[float]]:
        queries, layer = state.queries if last_queries is None else last_queries, state.layer
        found = MEASURE(state, forward, pass_, tracked, active, some, last_queries)
        updating = torch.ones(len(found), dtype=torch.bool) if some is None else some
        self.moves += last_queries is not None
        now, mask = key_value(forward, layer), forward.limits.key_mask
        for b, drift in enumerate(found):
            one = slice(b, b + 1)
            if not updating[b]:
                continue
            old, new = (of[one, :, : len(drift)] for of in (queries, state.queries))
            seen = None if mask is None else mask[one]
            measured = torch.tensor(drift)
            if state.of_output:
                then, own = (tuple(each[one] for each in of) for of in (self.last[layer], now))
                (true,), (given,) = full_output_drift(new, then, own, written(pass_.rows, b, forward.length), seen)
                # Less counts as unmoved.
                measured = measured.where((measured > 0) | (true > (2**-8 + LAW) * given), true)
            else:
                true = full_drift(new, now[0][one], self.last[layer][0][one], seen, last_queries=old)[0]
            self.drifts += true.tolist()
            self.errors += ((measured - true).abs() / true.clamp_min(1)).tolist()
            for last, each in zip(self.last[layer], now, strict=True):
                last[b] = each[b]
        self.updates += layer == 0
        at = self.updates, layer
        self.updating[at] = updating.tolist()
        self.members[at] = [*state.members]
        self.stored[at] = [[*one.sizes] for one in state.members]
        self.sizes[at] = [[len(columns_of(one, cluster)) for cluster in range(len(one.sizes))] for one in state.members]
        return found


def columns_of(members: Members, cluster: int) -> list[int]:
    return np.flatnonzero(members.cluster_of == cluster).tolist()


def key_value(forward: Forward, layer: int) -> list[Tensor]:
    """All keys and values that are stored."""
    return [forward.store.view(feature, layer) for feature in (Feature.KEY, Feature.VALUE)]


def written(rows: Rows, sequence: int, length: int) -> Tensor:
    """Which columns of a sequence are among `rows`."""
    found = torch.zeros(1, length, dtype=torch.bool)
    own = rows.index[sequence if len(rows.index) > 1 else 0]
    found[0, own if rows.valid is None else own[rows.valid[sequence]]] = True
    return found


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    watching, make = Oracle(), LayerState.of.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def refreshed(kind: type[LayerState], forward: Forward, layer: int, *rest: Any) -> LayerState:
        watching.refreshed(forward, layer)
        return make(kind, forward, layer, *rest)

    monkeypatch.setattr(LayerState, "of", classmethod(refreshed))
    monkeypatch.setattr(LayerState, "measure", lambda *given: watching.measure(*given))
    return watching


CASES: dict[str, dict[str, Any]] = {
    "few clusters": {"clusters": 5, "top_m": 2},
    "clusters of each layer": {"clusters": 5, "top_m": 2, "cluster_layers": 1},
    "shared clusters": {"clusters": 6, "top_m": 2, "cluster_layers": 2},
    "by drift": {"clusters": 5, "top_m": 2, "refresh": "drift", "cluster_layers": 1},
    "every second block by drift": {"clusters": 6, "top_m": 1, "refresh": "drift", "refresh_blocks": 2},
    "all of them": {"clusters": 5, "top_m": 99, "codec": "raw", "update_threshold": 0, "cluster_layers": 1},
    "few, renewed once in a while": {"clusters": 9, "top_m": 2, "update_threshold": 2},
    "beside those from below": {"clusters": 20, "top_m": 1, "cluster_layers": 1, "from_below": "beside"},
    "of the output": {"clusters": 20, "top_m": 2, "cluster_layers": 1, "from_below": "beside", "drift": "output"},
    "of the output, by drift": {"clusters": 6, "top_m": 2, "refresh": "drift", "drift": "output"},
    "many": {"clusters": 20, "top_m": 3, "lengths": (160, 131)},
    "many, by drift": {"clusters": 20, "top_m": 3, "lengths": (160, 131), "refresh": "drift", "cluster_layers": 1},
    "with the moves of centroids": {"clusters": 6, "top_m": 2, "tier": "device", "moves": True, "cluster_layers": 1},
    "moves, shared clusters, by drift": {"clusters": 6, "top_m": 2, "moves": True, "refresh": "drift"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_drift_of_updates_is_that_of_all_keys(runtime: Runtime, oracle: Oracle, case: str):
    out = generate(runtime, **{"update_threshold": 1, **CASES[case]})
    top_m = CASES[case]["top_m"]
    moves = "moves" in CASES[case]
    assert max(oracle.errors) <= LAW and (oracle.moves > 0) == moves
    groups = [0, *range(1, 3, CASES[case].get("cluster_layers", 4))]
    assert max(oracle.drifts) > 1e-3 and len(out.updates) == len(groups) * (oracle.updates + 1) > 7
    for number, layer in enumerate(out.updates):
        at = number // len(groups), groups[number % len(groups)]
        assert layer.layer == at[1] and [drift != [] for drift in layer.drift] == oracle.updating[at]
        for b, (drift, clusters) in enumerate(zip(layer.drift, layer.clusters, strict=True)):
            # First what the layer below has renewed by half or more, unless moves count; the most drifted first. What
            # all rows have left is not chosen.
            below = {
                row for one in (out.updates[number - 1].clusters[b] if layer.layer else ())
                for row in columns_of(oracle.members[at[0], out.updates[number - 1].layer][b], one)
            }  # fmt: skip
            rows = [{*columns_of(oracle.members[at][b], cluster)} for cluster in range(len(drift))]
            goes_on = [not moves and bool(of) and 2 * len(of & below) >= len(of) for of in rows]
            left = [cluster for cluster, of in enumerate(rows) if of]
            best = sorted(left, key=lambda one: (not goes_on[one], -drift[one], one))
            more = sum(goes_on) if CASES[case].get("from_below") == "beside" else 0
            assert clusters == best[: top_m + more]
            assert layer.rows[b] == sum(oracle.sizes[at][b][cluster] for cluster in clusters)
    # Rows of a forward: those of each layer's output but the last, and of the first's input; filled up to the longest.
    for first in range(0, len(out.updates), len(groups)):
        layers = out.updates[first : first + len(groups)]
        number = layers[0].forward
        active = 2 * BLOCK if number in beginnings(out) else BLOCK
        at = first // len(groups)
        renewed = [
            each.layers
            * max(sum(oracle.stored[at, each.layer][b][c] for c in of) for b, of in enumerate(each.clusters))
            for each in layers
        ]
        assert out.rows_per_step[number] == active + sum(renewed) / 4


@pytest.mark.parametrize("drift", ["weights", "output"])
def test_clusters_that_stand_still_are_chosen_by_number(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, drift: str):
    """Only rounding makes them differ."""
    measured, generator = DriftReference.measured, torch.Generator().manual_seed(0)

    def still(
        self: DriftReference, queries: Tensor, attended: LayerKeys, changed: Changed, *rest: Any
    ) -> tuple[Tensor, DriftReference]:
        last = tuple(each + 2**-16 * torch.rand(each.shape, generator=generator) for each in attended.at(changed.rows))
        sums = attended.log_sums(queries)
        return measured(replace(self, sums=sums), queries, attended, replace(changed, last=last), *rest)

    monkeypatch.setattr(DriftReference, "measured", still)
    out = generate(runtime, clusters=6, top_m=2, update_threshold=1, drift=drift)
    # Layers above choose first what this one hands up.
    first = [update for update in out.updates if update.layer == 0]
    assert first and all(chosen in ([], [0, 1]) for update in first for chosen in update.clusters)


def commits(out: GenerationOutput) -> list[list[int]]:
    """Tokens that every forward committed, by sequence."""
    assert out.history is not None
    waiting = [(state == MASK).sum(1) for state in out.history]
    return [(before - after).tolist() for before, after in pairwise(waiting)]


def beginnings(out: GenerationOutput) -> set[int]:
    """Forwards that begin a block."""
    assert out.history is not None
    states = torch.stack(out.history[:-1])[:, :, -24:].unflatten(2, (3, BLOCK)) == MASK
    pending = states.any(3).any(1).int().argmax(1).tolist()  # the first block of any sequence with something to commit
    return {number for number in range(len(pending)) if number == 0 or pending[number] != pending[number - 1]}


def predicted(out: GenerationOutput, threshold: int, cumulative: int, by_drift: int) -> dict[int, list[bool]]:
    """Forwards that update, and their sequences, counted from the commits of each forward."""
    assert out.history is not None
    committed, batch, block = commits(out), len(out.sequences), -1
    since, found = [0] * batch, dict[int, list[bool]]()
    for forward, state in enumerate(out.history[:-1]):
        begins = forward in beginnings(out)
        block += begins
        if begins and not block % by_drift:
            since = [0] * batch
        else:
            left = (state[:, -24 + BLOCK * block :][:, :BLOCK] == MASK).any(1).tolist()
            due = [
                bool(begins or (left[b] and (committed[forward - 1][b] > threshold or since[b] > cumulative)))
                for b in range(batch)
            ]
            if any(due):
                found[forward] = due
                since = [0 if due[b] else since[b] for b in range(batch)]
        since = [since[b] + committed[forward][b] for b in range(batch)]
    return found


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """The rows of every step, as the policy gives them."""
    made: list[Pass] = []
    rows: Callable[..., Pass] = polestar.Drifting.rows

    def noted(self: polestar.Drifting, step: Step) -> Pass:
        made.append(rows(self, step))
        return made[-1]

    monkeypatch.setattr(polestar.Drifting, "rows", noted)
    return made


@pytest.mark.parametrize(
    ("threshold", "cumulative", "options"),
    [
        (0, None, {}),
        (1, 3, {}),
        (2, 0, {}),
        (9, 9, {}),
        (1, 2, {"refresh": "drift", "refresh_blocks": 2}),
        (2, 4, {"refresh": "drift"}),
        (9, None, {"refresh": "drift"}),
    ],
)
def test_updates_happen_when_enough_was_committed(
    runtime: Runtime, plans: list[Pass], threshold: int, cumulative: int | None, options: dict[str, Any]
):
    out = generate(runtime, clusters=4, top_m=1, update_threshold=threshold, cumulative=cumulative, **options)
    by_drift = options.get("refresh_blocks", 4) if options.get("refresh") == "drift" else 1
    expected = predicted(out, threshold, threshold if cumulative is None else cumulative, by_drift)
    assert {layer.forward: [bool(drift) for drift in layer.drift] for layer in out.updates} == expected
    assert (len(expected) > 1) == (threshold < 9 or bool(options))
    for number, plan in enumerate(plans):
        assert (plan.kind is StepKind.UPDATE) == (number in expected)
        if plan.kind is StepKind.STEP:  # a step as in any cache
            assert plan.program is None and out.rows_per_step[number] == BLOCK
    assert len(plans) == out.num_forwards and out.steps_by_kind.get("update", 0) == len(expected)


def test_sequences_that_are_not_due_take_a_plain_step(runtime: Runtime):
    """Nothing of theirs but the block is recomputed beside others that update."""
    out = generate(runtime, clusters=4, top_m=2, update_threshold=1)
    apart = [layer for layer in out.updates if not all(layer.drift)]
    assert apart
    for layer in apart:
        for drift, clusters, rows, patched in zip(layer.drift, layer.clusters, layer.rows, layer.patched, strict=True):
            assert bool(drift) == bool(clusters) == bool(rows) and (drift or not patched)


@pytest.mark.parametrize("refresh", ["full", "drift"])
def test_records_and_centroids_follow_the_rows(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, refresh: str):
    """After an update records hold the last input rows of the layer, and the query of a centroid is that of its
    mean."""
    rows_in, errors = dict[int, Tensor](), list[float]()
    cluster_rows, lead = Refresh.__call__, update.Update._lead

    def refreshed(self: Refresh, forward: Forward, layer: int, pass_: Pass) -> Pass:
        rows_in[layer] = pass_.hidden.clone()
        return cluster_rows(self, forward, layer, pass_)

    def checked(self: update.Update, forward: Forward, state: LayerState, pass_: Pass) -> Pass:
        if state.layer in rows_in:
            pass_.rows.put(rows_in[state.layer][:, None], pass_.hidden[:, None])
        left = lead(self, forward, state, pass_)
        if not self._kept or state.stored is None:  # a refresh comes first, or embeddings are looked up
            return left
        for b in range(len(state.members)):
            for cluster, size in enumerate(state.members[b].sizes):
                columns = state.members[b].columns[state.members[b].slice_of(cluster)]
                live = state.members[b].cluster_of[columns] == cluster
                rows = rows_in[state.layer].new_empty(size, rows_in[state.layer].shape[2])
                state.stored.read(state.layer, state.places([(b, cluster)]), rows, [slice(0, size)])
                rows = rows[torch.from_numpy(live)]
                assert torch.equal(rows, rows_in[state.layer][b, columns[live]])
                if len(live) == len(rows) > 0:  # a centroid that members have left waits for its next move
                    normed = forward.model.attention_norm(state.layer, rows.mean(0).expand(len(state.members), 1, -1))
                    query = forward.queries(state.layer, Rows.at(state.medoids[:, cluster : cluster + 1]), normed)
                    errors.append((query[b, :, 0] - state.queries[b, :, cluster]).abs().max().item())
        return left

    monkeypatch.setattr(Refresh, "__call__", refreshed)
    monkeypatch.setattr(update.Update, "_lead", checked)
    out = generate(runtime, clusters=5, top_m=2, update_threshold=1, codec="raw", refresh=refresh)
    assert sum(map(sum, (layer.patched for layer in out.updates))) > 9  # else no centroid would have moved
    assert max(errors) < 1e-4
