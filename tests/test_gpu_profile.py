"""Figures of a profiler's trace: of a sample written by hand in Kineto's format, and of a trace on the CPU."""

import gzip
import importlib
import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from host_waits import HostWait

from tiered.core.ops import Op
from tiered.core.spans import Recorder, recording, span

BENCH = Path(__file__).resolve().parents[1] / "bench"
MAIN, LANE = 4242, 4250  # threads of the host
COMPUTE, FETCH, STORE = 7, 20, 24  # streams
KINDS = ["refresh", "update", "update"]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


def part(name: str) -> Any:
    return importlib.import_module(f"gpu_parts.{name}")


class Sample:
    """Events as Kineto writes them: calls of the host, work of the device, and arrows from one to the other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "ts": 100.0, "pid": MAIN, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "cat": "Trace", "ts": 90.0, "dur": 2100.0, "pid": "Spans", "tid": "PyTorch Profiler",
             "name": "PyTorch Profiler (0)", "args": {"Op count": 0}},
            {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces",
             "tid": "Trace PyTorch Profiler", "ts": 90.0},
        ]  # fmt: skip
        self._correlation = count(11)

    def range(self, name: str, ts: float, end: float, category: str = "user_annotation") -> None:
        """On the host, or with category gpu_user_annotation on the device, where it has the same name."""
        on_host = category != "gpu_user_annotation"
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": MAIN if on_host else 0,
             "tid": MAIN if on_host else COMPUTE, "ts": ts, "dur": end - ts,
             "args": {"External id": 5, "Record function id": 0, "Ev Idx": 4}}
        )  # fmt: skip

    def call(self, name: str, ts: float, dur: float = 5.0, tid: int = MAIN, correlation: int | None = None) -> int:
        """Of the runtime, or of the driver."""
        number = next(self._correlation) if correlation is None else correlation
        category = "cuda_driver" if name.startswith("cuL") else "cuda_runtime"
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": MAIN, "tid": tid, "ts": ts, "dur": dur,
             "args": {"External id": 9, "cbid": 211, "correlation": number}}
        )  # fmt: skip
        return number

    def kernel(self, name: str, ts: float, end: float, correlation: int, stream: int = COMPUTE) -> None:
        args = {"queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": correlation,
                "registers per thread": 32, "shared memory": 0, "grid": [1, 1, 1], "block": [128, 1, 1],
                "est. achieved occupancy %": 3}  # fmt: skip
        self._did("kernel", name, ts, end, stream, args)

    def copy(self, name: str, ts: float, end: float, correlation: int, stream: int, nbytes: int) -> None:
        category = "gpu_memset" if name.startswith("Memset") else "gpu_memcpy"
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "bytes": nbytes,
                "memory bandwidth (GB/s)": 1.0}  # fmt: skip
        self._did(category, name, ts, end, stream, args)

    def _did(self, category: str, name: str, ts: float, end: float, stream: int, args: dict[str, Any]) -> None:
        at = {"pid": 0, "tid": stream, "ts": ts}
        self.events += [
            {"ph": "X", "cat": category, "name": name, **at, "dur": end - ts, "args": {"External id": 9, **args}},
            {"ph": "f", "id": args["correlation"], **at, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        ]

    def trace(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms", "traceEvents": self.events}


def sample() -> Sample:
    """A refresh and two updates of two layers. A kernel of the last runs when its step is over."""
    made = Sample()
    for began, forward, layers, ended, end in (
        (100, 150, [(200, 500), (500, 900)], 1000, 1100),
        (1100, 1120, [(1130, 1400), (1400, 1700)], 1800, 1900),
        (1900, 1910, [(1920, 1930), (1930, 1940)], 1990, 2100),
    ):
        made.range("step", began, end)
        made.range("forward", forward, ended)
        for layer, (first, last) in enumerate(layers):
            made.range(f"layer/L{layer}", first, last)
            made.range(f"mlp/L{layer}", first, first + 5)
        made.range("step", began + 150, end + 150, "gpu_user_annotation")
        made.range("aten::mm", forward, forward + 1, "cpu_op")
    made.kernel("gemm", 300, 400, made.call("cudaLaunchKernel", 210))
    made.kernel("gemm", 600, 700, made.call("cudaLaunchKernelExC", 520))
    made.kernel("triton_norm", 690, 760, made.call("cuLaunchKernelEx", 910))
    made.copy(
        "Memcpy DtoH (Device -> Pageable)", 800, 810, made.call("cudaMemcpyAsync", 1005, correlation=3), COMPUTE, 64
    )
    made.call("cudaStreamSynchronize", 1010, 40)
    stored = made.call("cudaMemcpyAsync", 450, tid=LANE)
    made.copy("Memcpy DtoH (Device -> Pinned)", 460, 560, stored, STORE, 4096)
    made.call("cudaEventSynchronize", 455, 15, tid=LANE)
    made.kernel("gemm", 1200, 1300, made.call("cudaLaunchKernel", 1140))
    fetched = made.call("cudaMemcpyAsync", 1150, tid=LANE)
    made.copy("Memcpy HtoD (Pinned -> Device)", 1250, 1350, fetched, FETCH, 8192)
    made.kernel("decode", 1420, 1500, made.call("cudaLaunchKernel", 1410))
    made.call("cudaStreamSynchronize", 1420, 20)
    made.call("cudaEventSynchronize", 1750, 10)
    made.copy("Memset (Device)", 1510, 1515, made.call("cudaMemsetAsync", 1690), COMPUTE, 128)
    made.kernel("gemm", 2110, 2120, made.call("cudaLaunchKernel", 1915))
    made.kernel("lost", 2120, 2121, 999)
    return made


def test_figures_by_kind():
    found = part("profile_counts").ProfiledCall(sample().trace(), KINDS)
    assert found.by_kind() == {
        "refresh": {
            "steps": 1,
            "wall_ms": 1.0,
            "busy_ms": 0.27,
            "kernels": 3.0,
            "kernels_in_layers": 2.0,
            "copies": {
                "Memcpy DtoH (Device -> Pageable)": {"count": 1.0, "bytes": 64.0},
                "Memcpy DtoH (Device -> Pinned)": {"count": 1.0, "bytes": 4096.0},
            },
            "blocking_calls": {"cudaStreamSynchronize": {"count": 1.0, "ms": 0.04}},
            "waits_in_forward": 0.0,
            "waits_in_layers": 0.0,
        },
        "update": {
            "steps": 2,
            "wall_ms": 0.5,
            "busy_ms": 0.0975,
            "kernels": 1.5,
            "kernels_in_layers": 1.0,
            "copies": {
                "Memcpy HtoD (Pinned -> Device)": {"count": 0.5, "bytes": 4096.0},
                "Memset (Device)": {"count": 0.5, "bytes": 64.0},
            },
            "blocking_calls": {
                "cudaEventSynchronize": {"count": 0.5, "ms": 0.005},
                "cudaStreamSynchronize": {"count": 0.5, "ms": 0.01},
            },
            "waits_in_forward": 1.0,
            "waits_in_layers": 0.5,
        },
    }
    assert found.unclaimed == 1


def test_fetches_beside_the_stream_that_computes():
    found = part("profile_counts").ProfiledCall(sample().trace(), KINDS)
    assert found.fetches() == {"copies": 1, "ms": 0.1, "under_kernels_share": 0.5}


def test_kernels_with_most_time():
    top = part("profile_counts").ProfiledCall(sample().trace(), KINDS).top_kernels()
    assert [(row["name"], row["count"], row["ms"]) for row in top] == [
        ("gemm", 4, 0.31), ("decode", 1, 0.08), ("triton_norm", 1, 0.07)
    ]  # fmt: skip
    assert sum(row["share"] for row in top) == pytest.approx(1, abs=1e-3)


def test_calls_of_a_thread_with_another_name_count_all():
    """Calls may have another number than the thread that steps. Then the calls of all threads count."""
    made = sample()
    for event in made.events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            event["tid"] += 1000
    figures = part("profile_counts").ProfiledCall(made.trace(), KINDS).by_kind()
    assert figures["update"]["waits_in_layers"] == 0.5
    assert "cudaEventSynchronize" in figures["refresh"]["blocking_calls"]


def test_a_trace_that_lost_a_step_is_no_figure():
    with pytest.raises(ValueError, match="has 3 steps, the call had 2"):
        part("profile_counts").ProfiledCall(sample().trace(), KINDS[:2])


def test_overlapping_moments_count_once():
    assert part("profile_counts").covered([(5, 6), (0, 2), (1, 3), (3, 4), (5, 5.5)]) == 5
    assert part("profile_counts").covered([]) == 0


def test_a_small_trace_keeps_the_work_of_the_device(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    row = part("profile_counts").write_small_trace(path, sample().trace())
    assert row == {"file": "trace.json.gz", "bytes": path.stat().st_size, "events": row["events"], "whole": True}
    kept = json.loads(gzip.decompress(path.read_bytes()))
    counts = Counter(event.get("cat") for event in kept["traceEvents"])
    assert counts["kernel"] == 7 and counts["gpu_memcpy"] == 3 and counts["ac2g"] == 11
    assert not {"cpu_op", "gpu_user_annotation", "Trace"} & set(counts)
    # The rest gives the same figures.
    read = part("profile_counts").ProfiledCall
    assert read(kept, KINDS).by_kind() == read(sample().trace(), KINDS).by_kind()


def test_a_trace_is_cut_until_it_fits(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    whole = part("profile_counts").write_small_trace(path, sample().trace())
    row = part("profile_counts").write_small_trace(path, sample().trace(), most=whole["bytes"] - 1)
    assert row["bytes"] == path.stat().st_size < whole["bytes"] and not row["whole"]
    kept = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert 0 < len(kept) == row["events"] < whole["events"]
    assert max(event["ts"] for event in kept) < 1500 and {event["ph"] for event in kept} >= {"M", "X"}


def wait(line: str, at: str, what: str = "flagged") -> HostWait:
    return HostWait(line, what, at)


def test_waits_by_kind_and_line():
    found = Counter(
        {
            wait("a.py:1", "0 layer fetch"): 4,
            wait("a.py:1", "1 layer fetch"): 2,
            wait("a.py:1", "2 layer fetch"): 1,
            wait("b.py:2", "1 forward head"): 3,
            wait("c.py:3", "2 step commit", "event"): 5,
            wait("d.py:4", "-1 outside -"): 7,
        }
    )
    row = part("profile").wait_figures(found, KINDS)
    assert row["waits_by_kind"] == {
        "refresh": {"steps": 1, "waits": 4.0, "waits_in_forward": 4.0, "waits_in_layers": 4.0},
        "update": {"steps": 2, "waits": 5.5, "waits_in_forward": 3.0, "waits_in_layers": 1.5},
    }
    lines = [(line["kind"], line["place"], line["op"], line["line"], line["count"]) for line in row["lines"]]
    assert lines == [
        ("outside", "outside", "-", "d.py:4", 7), ("update", "step", "commit", "c.py:3", 5),
        ("refresh", "layer", "fetch", "a.py:1", 4), ("update", "layer", "fetch", "a.py:1", 3),
        ("update", "forward", "head", "b.py:2", 3),
    ]  # fmt: skip
    assert row["lines_left_out"] == 0


def test_the_place_of_a_wait():
    at = part("profile")._at
    assert at() == "-1 outside -"
    with recording(Recorder()):
        assert at() == "-1 outside -"
        with span(Op.STEP):
            assert at() == "0 step step"
            with span(Op.FORWARD, kind="update"):
                with span(Op.EMBED):
                    assert at() == "0 forward embed"
                with span(Op.LAYER, 3):
                    assert at() == "0 layer layer"
                    with span(Op.FETCH):
                        assert at() == "0 layer fetch"
                assert at() == "0 forward forward"
            with span(Op.COMMIT):
                assert at() == "0 step commit"
        with span(Op.STEP):
            assert at() == "1 step step"


def test_the_part_on_a_cpu(tmp_path: Path):
    profile = part("profile")
    setting = part("setting").Setting(device="cpu", tiny=True, seed=0, stem=str(tmp_path / "cpu"))
    rows = {case: profile.measure(setting, case) for case in profile.cases(setting)}
    json.dumps(rows, allow_nan=False)
    steps = rows["plain and update steps"]["steps"]
    assert {kind: figures["steps"] for kind, figures in steps.items()} == {"refresh": 1, "step": 4, "update": 3}
    assert set(rows["block steps"]["steps"]) == {"refresh", "step"}
    for figures in steps.values():
        # A CPU starts no kernels.
        assert figures["kernels"] == 0 and figures["idle_share"] == 1 and figures["unwatched_ms"] > 0
        assert figures["wall_ms"] > 0 and not figures["blocking_calls"]
    assert rows["host waits"]["lines"] == []
    kept = json.loads(gzip.decompress((tmp_path / "cpu.trace.json.gz").read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in kept)
    assert names["step"] == 8 and names["layer/L2"] == 8
