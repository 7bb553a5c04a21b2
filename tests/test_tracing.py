"""Traces: ranges, copies and waits of a call add up, and recording changes nothing."""

import gzip
import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulation import Link, LinkSpeed, SimulatedThreads
from torch import Tensor
from workloads import timing as timing_module
from workloads.timing import Timing

import tiered
from tiered.core.events import CopyEnded, Waited
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder, TimedRange, active, recording, span, spanned
from tiered.forward.traced_model import PIECES, traced
from tiered.models.base import DiffusionModel
from tiered.observe.trace import OpTime, TracedCall, add_copies, op_times, trace_call, trace_report, write_trace
from tiered.offload.lane import Lane
from tiered.offload.transport import Transport
from tiered.output import GenerationOutput
from tiered.policies.polestar import hidden_bytes
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
    return SimulatedThreads(link=Link(fetch=LinkSpeed(latency=0.006), store=LinkSpeed(latency=0.001)))


@pytest.fixture(scope="module")
def call(model: DiffusionModel) -> TracedCall:
    """A call with updates, whose copies are slow. Stored rows have too few slots to stay there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hidden_bytes, "RECORD_ROWS", 4)
        patched.setattr(hidden_bytes, "MOST_SLOTS", 3)
        return trace_call(Runtime(model, policy=Polestar(**UPDATES), transport=slow_fetches), prompts(), **CALL)


def ranges(call: TracedCall) -> list[dict[str, Any]]:
    """Our ranges in the order of their beginnings."""
    found = [event for event in call.trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def of_tiers(call: TracedCall, category: str) -> list[dict[str, Any]]:
    return [event for event in call.trace["traceEvents"] if event.get("cat") == category and event["pid"] == "tiered"]


def test_own_time_is_without_inner_ranges(monkeypatch: pytest.MonkeyPatch):
    now, waits = [1000], []
    monkeypatch.setattr(timing_module, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    with recording(Timing(lambda: waits.append(now[0]))) as timing, span(Op.STEP):
        with span(Op.FORWARD, kind="step"), span(Op.LAYER, 3):
            now[0] += 20
            for _ in range(2):
                with span(Op.DRIFT):
                    now[0] += 300
                    with span(Op.QKV, 7):
                        now[0] += 4000
        with span(Op.COMMIT):
            now[0] += 600000
    assert list(timing.by_op().items()) == [
        (Op.COMMIT, (600000, 1)), (Op.QKV, (8000, 2)), (Op.DRIFT, (600, 2)), (Op.LAYER, (20, 1))
    ]  # fmt: skip
    assert [each.layer for each in timing.ranges] == [None, None, 3, 3, 7, 3, 7, None]
    assert [each.ns for each in timing.ranges[:2]] == [608620, 8620] and len(waits) == 2 * len(timing.ranges)


def test_forwards_are_counted_by_steps():
    with recording(Timing()) as timing:
        with span(Op.EMBED):
            pass
        for kind in ("refresh", "step"):
            with span(Op.STEP), span(Op.FORWARD, kind=kind):
                pass
        with span(Op.PUBLISH):
            pass
    assert [each.forward for each in timing.ranges] == [None, 0, 0, 1, 1, 1]
    assert timing.kinds == ["refresh", "step"]


def test_a_decorated_call_is_a_range():
    @spanned(Op.GATHER)
    def add(one: int, *, other: int) -> int:
        return one + other

    with recording(Timing()) as timing:
        assert add(1, other=2) == 3
        with pytest.raises(TypeError):
            add("1", other=2)  # pyright: ignore[reportArgumentType]
    assert [each.op for each in timing.ranges] == [Op.GATHER] * 2
    assert all(each.ended for each in timing.ranges) and timing.innermost is None


def test_a_range_costs_nothing_without_a_recording(model: DiffusionModel, monkeypatch: pytest.MonkeyPatch):
    def made(*_: object) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(TimedRange, "__init__", made)
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
    others = {
        "from_config",
        "rotary",
        "sink_keys",
        "queries",
        "keys_of_values",
        "keys_values",
        "queries_keys_values",
        "attend",
        "attend_part",
        "attend_apart",
    }
    methods = {name for name, value in vars(DiffusionModel).items() if callable(getattr(value, "__func__", value))}
    assert {name for name in methods if not name.startswith("_")} == {*PIECES, *others}


def test_forwards_layers_and_kinds(call: TracedCall, model: DiffusionModel):
    out, layers, found = call.out, model.shape.layers, ranges(call)
    count = Counter(event["name"].partition("/")[0] for event in found)
    assert count["step"] == count["forward"] == count["head"] == out.num_forwards == len(call.kinds)
    assert count["layer"] == layers * out.num_forwards and Counter(call.kinds) == out.steps_by_kind
    mlps = {(event["args"]["forward"], event["name"]) for event in found if event["name"].startswith("mlp")}
    assert mlps == set(itertools.product(range(out.num_forwards), (f"mlp/L{layer}" for layer in range(layers))))
    for op in (Op.QKV, Op.ATTENTION, Op.ATTENTION_OUT, Op.WRITE, Op.DRIFT, Op.DECODE, Op.ENCODE):
        names = {event["name"] for event in found if event["name"].partition("/")[0] == op}
        assert names and names <= {f"{op}/L{layer}" for layer in range(layers)}, op
    for op, kind in (("fetch", "update"), ("clustering", "refresh")):
        forwards = {event["args"]["forward"] for event in found if event["name"].startswith(op)}
        assert forwards == {number for number, of in enumerate(call.kinds) if of == kind}
    assert all(event["args"]["kind"] == call.kinds[event["args"]["forward"]] for event in found[1:])
    # A torch operation is inside our ranges.
    assert any(event.get("cat") == "cpu_op" for event in call.trace["traceEvents"])


def test_copies_are_on_their_tracks_with_their_bytes(call: TracedCall):
    stats = call.out.tiers
    assert stats is not None and stats.ways[Lane.FETCH].jobs
    named = [
        event for event in call.trace["traceEvents"] if event["name"] == "thread_name" and event["pid"] == "tiered"
    ]
    tracks = {event["args"]["name"]: event["tid"] for event in named}
    moving = [lane for lane in Lane if stats.ways[lane].jobs]
    assert set(tracks) == {"waits", *(f"copy: {lane}" for lane in moving)}
    assert len(set(tracks.values())) == len(tracks)
    for lane in moving:
        copies = [event for event in of_tiers(call, "copy") if event["tid"] == tracks[f"copy: {lane}"]]
        assert len(copies) == stats.ways[lane].jobs
        assert sum(event["args"]["bytes"] for event in copies) == stats.ways[lane].nbytes
        for layer, lanes in stats.layers.items():
            of_layer = [event for event in copies if event["name"] == f"{lane}/L{layer}"]
            assert sum(event["args"]["bytes"] for event in of_layer) == lanes[lane].nbytes
        times = sorted((event["ts"], event["ts"] + event["dur"]) for event in copies)
        assert all(first[1] <= second[0] + 2e-3 for first, second in itertools.pairwise(times))
        # Copies slowed down to 6 and 1 ms.
        assert all(event["dur"] >= (6000 if lane is Lane.FETCH else 1000) for event in copies)


def test_copies_and_ranges_are_on_one_clock(call: TracedCall):
    fetches = [event for event in of_tiers(call, "copy") if event["name"].startswith("fetch/")]
    steps = [event for event in ranges(call) if event["name"] == "step"]
    for fetch in fetches:
        step = steps[fetch["args"]["forward"]]
        assert fetch["args"]["kind"] == "update"
        assert step["ts"] <= fetch["ts"] and fetch["ts"] + fetch["dur"] <= step["ts"] + step["dur"]
    # A wait is inside the range of that name.
    ours = [event for event in ranges(call) if event["name"].startswith("wait/")]
    for wait in of_tiers(call, "waits"):
        end = wait["ts"] + wait["dur"]
        assert any(own["ts"] - 100 <= wait["ts"] and end <= own["ts"] + own["dur"] + 100 for own in ours)


def test_waits_are_the_exposed_time(call: TracedCall):
    assert call.out.tiers is not None
    assert call.out.tiers.ways[Lane.FETCH].exposed_ns > 1_000_000, "fetches of 6 ms hide behind nothing here"
    for lane, stats in call.out.tiers.ways.items():
        waits = [event for event in of_tiers(call, "waits") if f"wait for {lane}" in event["name"]]
        copies = [event for event in of_tiers(call, "copy") if event["name"].startswith(lane)]
        exposed, busy = (sum(round(1000 * event["dur"]) for event in events) for events in (waits, copies))
        assert (exposed, max(0, busy - exposed)) == (stats.exposed_ns, stats.hidden_ns)


def event(name: str, ts: float, dur: float, category: str = "user_annotation", **args: Any) -> dict[str, Any]:
    tid = 7 if category == "kernel" else 1
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_copies_are_moved_to_the_profilers_clock():
    trace: dict[str, Any] = {"traceEvents": [event("step", 100.0, 45.0), event("mlp/L3", 103.0, 5.0)]}
    recorder = Recorder()
    with recording(recorder), span(Op.STEP), span(Op.FORWARD, kind="update"):
        pass
    recorder.events.append(
        CopyEnded(lane=Lane.SAVE, nbytes=12, copies=2, submitted=4000, started=6500, ended=9000, failed=True)
    )
    recorder.events.append(
        CopyEnded(lane=Lane.FETCH, nbytes=34, copies=1, submitted=7000, started=7000, ended=9000, layer=3)
    )
    recorder.events.append(Waited(lane=Lane.FETCH, late=True, began=8000, ended=9000, layer=3))
    recorder.events.append(Waited(lane=Lane.STORE, late=False, began=8000, ended=8000))
    add_copies(trace, recorder, [7000])
    added = [each for each in trace["traceEvents"] if each["pid"] == "tiered" and each["ph"] == "X"]
    assert [(each["cat"], each["name"], each["ts"], each["dur"]) for each in added] == [
        ("copy", "save", 99.5, 2.5), ("copy", "fetch/L3", 100.0, 2.0), ("waits", "wait for fetch/L3", 101.0, 1.0)
    ]  # fmt: skip
    step = {"forward": 0, "kind": "update"}
    assert [each["args"] for each in added] == [
        {"bytes": 12, "pieces": 2, "queued_us": 2.5, "failed": True},
        {"bytes": 34, "pieces": 1, "queued_us": 0.0, "failed": False} | step, {"late": True} | step,
    ]  # fmt: skip
    assert trace["traceEvents"][1]["args"] == step


def test_operations_have_their_own_time_and_that_of_their_kernels():
    launch = {"category": "cuda_runtime", "correlation": 5}
    late = {"category": "cuda_runtime", "correlation": 6}
    trace = {
        "traceEvents": [
            event("step", 0.0, 100.0), event("drift/L1", 10.0, 50.0), event("qkv/L1", 20.0, 30.0),
            event("cudaLaunchKernel", 25.0, 2.0, **launch), event("cudaLaunchKernel", 55.0, 2.0, **late),
            event("mlp/L1", 60.0, 10.0), event("gemm", 70.0, 8.0, "kernel", correlation=5),
            event("gemm", 80.0, 1.0, "kernel", correlation=6), event("gemm", 90.0, 1.0, "kernel", correlation=9),
        ]
    }  # fmt: skip
    assert op_times(trace["traceEvents"]) == [
        OpTime(Op.QKV, 30, 8, 1),
        OpTime(Op.DRIFT, 20, 1, 1),
        OpTime(Op.MLP, 10, 0, 1),
    ]


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
    with recording(Timing()) as timing:
        found = runtime.generate(prompts(), **call)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.steps_by_kind == plain.steps_by_kind
    count = Counter(each.op for each in timing.ranges)
    assert bool(count[Op.GUIDANCE]) == ("cfg_scale" in options)
    assert bool(count[Op.VERIFY]) == (policy == "dllm_cache")
    assert bool(count[Op.WATCH]) == bool(count[Op.CHUNKS]) == (policy == "elastic_cache")


class Stops:
    """A streamer that fails in the middle of a call."""

    def put(self, value: Tensor) -> None: ...

    def put_draft(self, value: Tensor) -> None:
        raise RuntimeError("enough")

    def end(self) -> None: ...


def test_an_error_leaves_no_recorder_behind(model: DiffusionModel):
    recorder = Timing()
    with pytest.raises(RuntimeError, match="enough"), recording(recorder):
        Runtime(model, policy=Polestar(**UPDATES)).generate(prompts(), streamer=Stops(), **CALL)
    assert active() is None
    assert recorder.ranges and all(each.ended for each in recorder.ranges) and recorder.innermost is None
    with pytest.raises(ValueError, match="max_new_tokenz"):
        trace_call(Runtime(model, policy=Polestar()), prompts(), max_new_tokenz=3)
    assert active() is None


def test_a_recording_inside_another_takes_its_place():
    with recording(Timing()) as outer:
        with recording(Timing()) as inner, span(Op.MLP):
            assert active() is inner
        assert active() is outer
    assert (len(outer.ranges), len(inner.ranges), active()) == (0, 1, None)


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
            assert sum(isinstance(each, CopyEnded) for each in recorder.events) == sum(
                stats.jobs for stats in out.tiers.ways.values()
            )


def test_work_in_a_thread_of_its_own_is_not_waited_for():
    from tiered.offload.fence import Fence, Region
    from tiered.tiers.traffic import Traffic

    transport, counted = SimulatedThreads(compute_thread=True), []
    with recording(Timing()) as timing:
        traffic = Traffic(transport, counted.append)
        traffic.compute(Lane.FETCH, writes=[Fence(Region.FETCH_SLOT)], layer=2).synchronize()
        traffic.synchronize()
    transport.close()
    assert [(each.op, each.layer) for each in timing.ranges] == [(Op.WAIT, 2)] and timing.ranges[0].ended
    [waited] = counted
    assert waited.exposed_ns == waited.ended - waited.began >= 0


def test_a_report_has_times_and_copies(call: TracedCall):
    out, lines, times = call.out, trace_report(call).splitlines(), call.ops
    assert out.tiers is not None
    rows = [line.split() for line in lines[2 : 2 + len(times)]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (each.op.value, f"{each.us / 1000:.2f}", str(each.count)) for each in times
    ]
    named = sum(each.us for each in times) / 1e6 / out.timings.total
    assert 0.5 < named <= 1 and not CONTAINERS & {each.op for each in times}
    fetch = out.tiers.ways[Lane.FETCH]
    [line] = [line for line in lines if line.startswith("fetch") and "KiB" in line]
    expected = [f"{ns / 1e6:.2f}" for ns in (fetch.busy_ns, fetch.hidden_ns, fetch.exposed_ns)] + [str(fetch.late)]
    assert line.split()[-4:] == expected


def test_the_page_explains_every_name():
    page = (Path(__file__).parents[1] / "docs" / "tracing.md").read_text()
    assert not [op for op in Op if f"`{op}`" not in page]


def test_files(tmp_path: Path):
    trace = {"traceEvents": [event("step", 0.0, 1.0)]}
    for name in ("one.json", "two.json.gz"):
        write_trace(tmp_path / name, trace)
    assert json.loads((tmp_path / "one.json").read_text()) == trace
    assert json.loads(gzip.decompress((tmp_path / "two.json.gz").read_bytes())) == trace
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "no" / "a.json", trace)
    assert len(list(tmp_path.iterdir())) == 2
