"""Recordings: ranges, copies and waits of a call add up, and recording changes nothing."""

import gzip
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tiered.core import spans as recorder_module
from tiered.core.events import CopyEnded, Waited
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder, Span, active, recording, span, spanned
from tiered.forward.traced_model import PIECES, traced
from tiered.models.base import DiffusionModel
from tiered.observe.trace.chrome_trace import chrome_trace
from tiered.observe.trace.op_times import OpTime, op_times, trace_report
from tiered.observe.trace.trace_call import trace_call
from tiered.observe.trace.trace_file import write_trace
from tiered.offload.lane import Lane
from tiered.offload.link import Link, LinkSpeed
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Transport
from tiered.output import GenerationOutput
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
CALL: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8, "steps": 8, "stop_at_eos": False}
UPDATES: dict[str, Any] = {"clusters": 5, "top_m": 2, "update_threshold": 0}


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32").model


def prompts(batch: int = 2, length: int = 40) -> Tensor:
    return torch.randint(0, 480, (batch, length), generator=torch.Generator().manual_seed(5))


def slow_fetches() -> Transport:
    return ThreadTransport(link=Link(fetch=LinkSpeed(latency=0.006), store=LinkSpeed(latency=0.001)))


@dataclass
class Recorded:
    """A call, and when it was made."""

    out: GenerationOutput
    recorder: Recorder
    began: int
    ended: int

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of the trace as a reader gets it, without names of tracks."""
        return [event for event in self.trace()["traceEvents"] if event["ph"] == "X"]

    def trace(self) -> dict[str, Any]:
        return json.loads(json.dumps(chrome_trace(self.recorder), allow_nan=False))


@pytest.fixture(scope="module")
def recorded(model: DiffusionModel) -> Recorded:
    """A call with updates, whose copies are slow."""
    runtime = Runtime(model, policy=Polestar(**UPDATES), transport=slow_fetches)
    began = time.monotonic_ns()
    with recording(Recorder()) as recorder:
        out = runtime.generate(prompts(), **CALL)
    return Recorded(out, recorder, began, time.monotonic_ns())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What recorders read; the function lets time pass."""
    at = [1000]
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(monotonic_ns=lambda: at[0]))

    def passes(ns: int) -> None:
        at[0] += ns

    return passes


def test_own_time_is_without_what_is_inside(clock: Callable[[int], None]):
    with recording(Recorder()) as recorder, span(Op.STEP):
        clock(1)
        with span(Op.FORWARD, kind="step"), span(Op.LAYER, 3):
            clock(20)
            for _ in range(2):
                with span(Op.DRIFT):
                    clock(300)
                    with span(Op.QKV, 7):
                        clock(4000)
            clock(50000)
        with span(Op.COMMIT):
            clock(600000)
    assert op_times(recorder) == [
        OpTime(Op.COMMIT, 600000, 1),
        OpTime(Op.LAYER, 50020, 1),
        OpTime(Op.QKV, 8000, 2),
        OpTime(Op.DRIFT, 600, 2),
    ]
    names = [each.name for each in recorder.spans]
    assert names == ["step", "forward", "layer/L3", "drift/L3", "qkv/L7", "drift/L3", "qkv/L7", "commit"]
    assert [each.own_ns for each in recorder.spans[:2]] == [1, 0]


def test_forwards_are_counted_by_steps():
    with recording(Recorder()) as recorder:
        with span(Op.EMBED):
            pass
        for kind in ("refresh", "step"):
            with span(Op.STEP), span(Op.FORWARD, kind=kind):
                pass
        with span(Op.PUBLISH):
            pass
    assert [each.forward for each in recorder.spans] == [None, 0, 0, 1, 1, 1]
    assert recorder.kinds == ["refresh", "step"]


def test_a_decorated_call_is_a_range():
    @spanned(Op.GATHER)
    def add(one: int, *, other: int) -> int:
        return one + other

    with recording(Recorder()) as recorder:
        assert add(1, other=2) == 3
        with pytest.raises(TypeError):
            add("1", other=2)  # pyright: ignore[reportArgumentType]
    assert [each.op for each in recorder.spans] == [Op.GATHER] * 2
    assert all(each.ended is not None for each in recorder.spans)


def test_ends_wait_for_the_device_and_mark_the_same_range():
    said: list[str] = []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            said.append(f"begin {self.name}")

        def __exit__(self, *_: object) -> None:
            said.append(f"end {self.name}")

    with recording(Recorder(synchronize=lambda: said.append("sync"), mark=Mark)), span(Op.LAYER, 2), span(Op.MLP):
        said.append("work")
    inner = ["sync", "begin mlp/L2", "work", "sync", "end mlp/L2"]
    assert said == ["sync", "begin layer/L2", *inner, "sync", "end layer/L2"]


def test_a_range_costs_nothing_while_nobody_records(model: DiffusionModel, monkeypatch: pytest.MonkeyPatch):
    def made(*_: object) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(Span, "__init__", made)
    assert span(Op.MLP, 1) is span(Op.STEP)
    assert traced(model) is model
    Runtime(model, policy=Polestar(**UPDATES)).generate(prompts(), **CALL)

    def many() -> int:
        before = sys.getallocatedblocks()
        for layer in range(1000):
            with span(Op.MLP, layer):
                pass
        return sys.getallocatedblocks() - before

    many()
    assert many() < 100


def test_every_piece_of_a_layer_has_a_name():
    # Others make no work for a pass, or are called by `Forward` alone, which names what is around them as well.
    others = {"from_config", "parameter_name", "rotary", "sink_keys", "queries", "keys_values", "attend"}
    methods = {name for name, value in vars(DiffusionModel).items() if callable(getattr(value, "__func__", value))}
    assert {name for name in methods if not name.startswith("_")} == {*PIECES, *others}


def test_ranges_are_whole_and_nested(recorded: Recorded):
    spans = recorded.recorder.spans
    assert spans[0].op is Op.PUBLISH or spans[0].op is Op.STEP
    for each in spans:
        assert each.ended is not None and recorded.began <= each.began <= each.ended <= recorded.ended
        if each.parent is not None:
            assert each.parent.ended is not None
            assert each.parent.began <= each.began and each.ended <= each.parent.ended
        assert each.own_ns >= 0
    # Whatever overlaps is nested, as Perfetto wants it of a track.
    open_ends: list[int] = []
    for each in spans:
        while open_ends and open_ends[-1] <= each.began:
            open_ends.pop()
        assert each.ended is not None and (not open_ends or each.ended <= open_ends[-1])
        open_ends.append(each.ended)


def test_forwards_layers_and_kinds(recorded: Recorded, model: DiffusionModel):
    spans, out, layers = recorded.recorder.spans, recorded.out, model.shape.layers
    count = Counter(each.op for each in spans)
    assert count[Op.STEP] == count[Op.FORWARD] == count[Op.HEAD] == out.num_forwards
    assert count[Op.LAYER] == layers * out.num_forwards
    assert Counter(recorded.recorder.kinds) == out.passes
    mlps = Counter((each.forward, each.layer) for each in spans if each.op is Op.MLP)
    assert set(mlps) == set(itertools.product(range(out.num_forwards), range(layers)))
    for op in (Op.QKV, Op.ATTENTION, Op.ATTENTION_OUT, Op.WRITE, Op.DRIFT, Op.DECODE, Op.ENCODE):
        assert {each.layer for each in spans if each.op is op} <= set(range(layers)), op
        assert count[op], op
    fetching = {each.forward for each in spans if each.op is Op.FETCH}
    assert fetching == {number for number, kind in enumerate(recorded.recorder.kinds) if kind == "update"}
    measured = {
        (each.forward, each.layer)
        for each in spans
        if each.op is Op.DRIFT and each.parent is not None and each.parent.op is Op.LAYER and each.forward in fetching
    }
    assert measured == set(itertools.product(fetching, (0, 1)))  # where a group of layers begins
    clustering = {each.forward for each in spans if each.op is Op.CLUSTERING}
    assert clustering == {number for number, kind in enumerate(recorded.recorder.kinds) if kind == "refresh"}


def test_copies_are_on_their_tracks_with_their_bytes(recorded: Recorded):
    stats = recorded.out.tiers
    assert stats is not None and stats.ways[Lane.FETCH].jobs
    names = {
        (event["tid"], event["args"]["name"])
        for event in recorded.trace()["traceEvents"]
        if event["name"] == "thread_name"
    }
    moving = {way for way in Lane if stats.ways[way].jobs}
    assert {name for _, name in names} == {"compute", "waits", *(f"copy: {way}" for way in moving)}
    tracks = {name: track for track, name in names}
    assert len(tracks) == len({track for track, _ in names})
    for way in moving:
        copies = [event for event in recorded.events if event["tid"] == tracks[f"copy: {way}"]]
        assert len(copies) == stats.ways[way].jobs
        assert sum(event["args"]["bytes"] for event in copies) == stats.ways[way].nbytes
        for layer, ways in stats.layers.items():
            of_layer = [event for event in copies if event["name"] == f"{way}/L{layer}"]
            assert sum(event["args"]["bytes"] for event in of_layer) == ways[way].nbytes
            assert {event["args"]["layer"] for event in of_layer} <= {layer}
        times = sorted((event["ts"], event["ts"] + event["dur"]) for event in copies)
        assert all(first[1] <= second[0] + 1e-3 for first, second in itertools.pairwise(times))
        # Copies slowed down to 6 and 1 ms.
        assert all(event["dur"] >= (6000 if way is Lane.FETCH else 1000) for event in copies)
    fetches = [event for event in recorded.events if event["cat"] == "copy" and event["name"].startswith("fetch/")]
    assert {event["args"]["kind"] for event in fetches} == {"update"}


def test_waits_are_the_exposed_time(recorded: Recorded):
    assert recorded.out.tiers is not None
    assert recorded.out.tiers.ways[Lane.FETCH].exposed_ns > 1_000_000, "fetches of 6 ms hide behind nothing here"
    for way, stats in recorded.out.tiers.ways.items():
        waits = [event for event in recorded.events if event["cat"] == "wait" and f"wait for {way}" in event["name"]]
        copies = [event for event in recorded.events if event["cat"] == "copy" and event["name"].startswith(way)]
        exposed, busy = (sum(round(1000 * event["dur"]) for event in events) for events in (waits, copies))
        assert (exposed, max(0, busy - exposed)) == (stats.exposed_ns, stats.hidden_ns)
    waiting = sum(each.own_ns for each in recorded.recorder.spans if each.op is Op.WAIT)
    exposed = sum(stats.exposed_ns for stats in recorded.out.tiers.ways.values())
    assert waiting >= exposed  # and what the host does to hand the work over
    # Work stands behind its wait, not in it.
    working = [each for each in recorded.recorder.spans if each.op in (Op.ENCODE, Op.DECODE)]
    assert working and not [each for each in working if each.parent is None or each.parent.op is Op.WAIT]


def test_time_runs_from_the_first_event_on(recorded: Recorded):
    starts = [event["ts"] for event in recorded.events]
    assert min(starts) == 0
    assert max(event["ts"] + event["dur"] for event in recorded.events) <= (recorded.ended - recorded.began) / 1000


def test_the_events_of_a_trace():
    """Number for number."""
    recorder = Recorder()
    with recording(recorder), span(Op.STEP), span(Op.FORWARD, kind="update"), span(Op.MLP, 3):
        pass
    for number, each in enumerate(recorder.spans):
        each.began, each.ended = 5000 + 1000 * number, 50_000
    recorder.add(CopyEnded(lane=Lane.SPILL, nbytes=12, copies=2, submitted=4000, started=6500, ended=9000, failed=True))
    recorder.add(CopyEnded(lane=Lane.FETCH, nbytes=34, copies=1, submitted=5000, started=5000, ended=7000, layer=3))
    recorder.add(Waited(lane=Lane.FETCH, late=True, began=6000, ended=7000, layer=3))
    recorder.add(Waited(lane=Lane.STORE, late=False, began=6000, ended=6000))
    events = [event for event in chrome_trace(recorder)["traceEvents"] if event["ph"] == "X"]
    said = [(event["tid"], event["cat"], event["name"], event["ts"], event["dur"]) for event in events]
    assert said == [
        (1, "compute", "step", 1.0, 45.0),
        (1, "compute", "forward", 2.0, 44.0),
        (1, "compute", "mlp/L3", 3.0, 43.0),
        (2, "wait", "wait for fetch/L3", 2.0, 1.0),
        (5, "copy", "spill", 2.5, 2.5),
        (4, "copy", "fetch/L3", 1.0, 2.0),
    ]
    step = {"forward": 0, "kind": "update"}
    assert [event["args"] for event in events] == [
        step, step, {"layer": 3} | step, {"layer": 3, "late": True} | step,
        {"bytes": 12, "pieces": 2, "queued_us": 2.5, "failed": True},
        {"layer": 3, "bytes": 34, "pieces": 1, "queued_us": 0.0, "failed": False} | step,
    ]  # fmt: skip


def test_an_empty_recording_is_a_trace():
    assert all(event["ph"] == "M" for event in chrome_trace(Recorder())["traceEvents"])


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("none", {}),
        ("polestar", {"cfg_scale": 0.5, "commit": "drift_aware"}),
        ("dllm_cache", {}),
        ("elastic_cache", {}),
        ("dkv_decode", {"temperature": 0.7, "seed": 3}),
    ],
)
def test_recording_changes_no_token(model: DiffusionModel, policy: str, options: Mapping[str, Any]):
    runtime = Runtime(model, policy=make_policy("fast_dllm_dual")).with_policy(policy)
    call = {name: value for name, value in CALL.items() if name != "steps" or "commit" not in options} | dict(options)
    plain = runtime.generate(prompts(), **call)
    found = trace_call(runtime, prompts(), **call)
    assert torch.equal(found.out.sequences, plain.sequences)
    assert found.out.passes == plain.passes
    count = Counter(each.op for each in found.recorder.spans)
    assert bool(count[Op.GUIDANCE]) == ("cfg_scale" in options)
    assert bool(count[Op.VERIFY]) == (policy == "dllm_cache")
    assert bool(count[Op.WATCH]) == bool(count[Op.PAGES]) == (policy == "elastic_cache")


class Stops:
    """A streamer that fails in the middle of a call."""

    def put(self, value: Tensor) -> None: ...

    def put_draft(self, value: Tensor) -> None:
        raise RuntimeError("enough")

    def end(self) -> None: ...


def test_an_error_leaves_no_recorder_behind(model: DiffusionModel):
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="enough"), recording(recorder):
        Runtime(model, policy=Polestar(**UPDATES)).generate(prompts(), streamer=Stops(), **CALL)
    assert active() is None
    assert recorder.spans and all(each.ended is not None for each in recorder.spans)
    with recording(recorder), span(Op.MLP):
        pass
    assert recorder.spans[-1].parent is None
    with pytest.raises(ValueError, match="max_new_tokenz"):
        trace_call(Runtime(model, policy=Polestar()), prompts(), max_new_tokenz=3)
    assert active() is None


def test_a_recording_inside_another_takes_its_place():
    with recording(Recorder()) as outer:
        with recording(Recorder()) as inner, span(Op.MLP):
            assert active() is inner
        assert active() is outer
    assert (len(outer.spans), len(inner.spans), active()) == (0, 1, None)


def test_threads_record_for_themselves(model: DiffusionModel):
    lengths = {8: Recorder(), 16: Recorder(), 24: None}
    outs: dict[int, GenerationOutput] = {}
    started = threading.Barrier(len(lengths))

    def call(tokens: int) -> None:
        runtime = Runtime(model, policy=Polestar(**UPDATES))
        options: dict[str, Any] = CALL | {"max_new_tokens": tokens, "steps": tokens // 2}
        recorder = lengths[tokens]
        started.wait()
        if recorder is None:
            outs[tokens] = runtime.generate(prompts(), **options)
            return
        with recording(recorder):
            outs[tokens] = runtime.generate(prompts(), **options)

    threads = [threading.Thread(target=call, args=(tokens,)) for tokens in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert active() is None
    for tokens, recorder in lengths.items():
        out = outs[tokens]
        if recorder is not None:
            assert len(recorder.kinds) == out.num_forwards == tokens // 2
            assert out.tiers is not None
            assert len(recorder.copies) == sum(stats.jobs for stats in out.tiers.ways.values())


def test_work_in_a_thread_of_its_own_is_not_waited_for(model: DiffusionModel):
    runtime = Runtime(
        model, policy=make_policy("fast_dllm_dual"), transport=lambda: ThreadTransport(compute_thread=True)
    )
    from tiered.offload.fence import Fence, Region
    from tiered.tiers.traffic import Traffic

    assert runtime.transport is not None
    transport, counted, ran = runtime.transport(), [], threading.Event()
    with recording(Recorder()) as recorder:
        traffic = Traffic(transport, counted.append)
        traffic.compute(Lane.FETCH, ran.set, writes=[Fence(Region.FETCH_SLOT)], layer=2).synchronize()
        traffic.synchronize()
    transport.close()
    assert ran.is_set()
    assert [each.name for each in recorder.spans] == ["wait/L2"] and recorder.spans[0].ended is not None
    [waited] = counted
    assert waited.exposed_ns == waited.ended - waited.began >= 0


def test_the_profiler_has_the_same_ranges(model: DiffusionModel):
    found = trace_call(Runtime(model, policy=Polestar(**UPDATES)), prompts(), profiled=True, **CALL)
    names = Counter(event["name"] for event in found.trace["traceEvents"] if event.get("cat") == "user_annotation")
    assert names == Counter(each.name for each in found.recorder.spans)
    assert any(event.get("cat") == "cpu_op" for event in found.trace["traceEvents"])


def test_a_report_has_times_and_copies(recorded: Recorded):
    out = recorded.out
    assert out.tiers is not None
    lines = trace_report(recorded.recorder, out.timings.total, out.tiers).splitlines()
    times = op_times(recorded.recorder)
    rows = [line.split() for line in lines[2 : 2 + len(times)]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (time.op.value, f"{time.ns / 1e6:.2f}", str(time.count)) for time in times
    ]
    assert not CONTAINERS & {time.op for time in times}
    fetch = out.tiers.ways[Lane.FETCH]
    [line] = [line for line in lines if line.startswith("fetch") and "KiB" in line]
    expected = [f"{ns / 1e6:.2f}" for ns in (fetch.busy_ns, fetch.hidden_ns, fetch.exposed_ns)] + [str(fetch.late)]
    assert line.split()[-4:] == expected
    assert not any("KiB" in line for line in trace_report(recorded.recorder, 1.0, None).splitlines())
    assert "copies" not in trace_report(recorded.recorder, 1.0, None)


def test_the_page_explains_every_name():
    page = (Path(__file__).parents[1] / "docs" / "tracing.md").read_text()
    assert not [op for op in Op if f"`{op}`" not in page]


def test_files(tmp_path: Path, recorded: Recorded):
    trace = recorded.trace()
    for name in ("one.json", "two.json.gz"):
        write_trace(tmp_path / name, trace)
    assert json.loads((tmp_path / "one.json").read_text()) == trace
    assert json.loads(gzip.decompress((tmp_path / "two.json.gz").read_bytes())) == trace
    assert len(list(tmp_path.iterdir())) == 2
    for name, error in (("a.txt", ValueError), (".json", ValueError), ("no/a.json", FileNotFoundError)):
        with pytest.raises(error):
            write_trace(tmp_path / name, trace)
    (tmp_path / "d.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_trace(tmp_path / "d.json", trace)
