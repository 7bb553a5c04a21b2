"""Inputs of bench/report.py for tests: a small sweep and one file of every other kind."""

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

MADE = {
    "command": "python bench/made.py --by test",
    "revision": "0123456789abcdef",
    "processor": "test processor",
    "threads": 1,
    "python": "3.11",
    "torch": "2.13",
    "transformers": "5.23",
}
WEIGHTS = "ab" * 32
CLUSTERS, TOP_M, THRESHOLDS, RUNS = (4, 8), (1, 2), (0, 4), 2
EXAMPLES = {"sort": 40, "lookup": 10}
REFUSED, FAILED = (8, 2, 0), (4, 1, 4)
WHY = {"refused": "needs 3 MiB of <b>device</b> memory", "failed": "killed by signal 9"}
FIGURES = (
    *("examples", "correct", "exact_match", "nfe", "tokens_per_forward", "tokens_per_second", "ms_per_forward"),
    *("first_block_ms", "updates", "device_bytes", "host_bytes", "to_device_bytes", "to_host_bytes"),
    *("copy_ms", "hidden_ms", "exposed_ms", "seconds"),
)
_TYPES = {
    **dict.fromkeys(
        ("point", "status", "why", "model", "policy", "policy_options", "codec", "budget", "task"), pyarrow.string()
    ),
    **dict.fromkeys(("confidence", "exact_match", "nfe", "tokens_per_forward", "tokens_per_second"), pyarrow.float64()),
    **dict.fromkeys(
        ("ms_per_forward", "first_block_ms", "copy_ms", "hidden_ms", "exposed_ms", "seconds"), pyarrow.float64()
    ),
}


def sweep_rows(policy: str = "polestar") -> list[dict[str, Any]]:
    """Rows of all points over C, M and T, one of which was refused and one failed, and of `none`."""
    rows = []
    for number, knobs in enumerate([*itertools.product(CLUSTERS, TOP_M, THRESHOLDS), None]):
        status = "refused" if knobs == REFUSED else "failed" if knobs == FAILED else "ok"
        for run, task in itertools.product(range(RUNS), EXAMPLES):
            rows.append(_row(number, knobs, policy if knobs else "none", status, run, task))
    return rows


def _row(number: int, knobs: Any, policy: str, status: str, run: int, task: str) -> dict[str, Any]:
    clusters, top_m, threshold = knobs or (None, None, None)
    examples = EXAMPLES[task]
    correct = examples - (threshold or 0) * (3 if task == "sort" else 0) - (0 if top_m in (2, None) else 1)
    nfe = 16.0 + number
    figures = {
        "examples": examples,
        "correct": correct,
        "exact_match": correct / examples,
        "nfe": nfe,
        "tokens_per_forward": 0.5 + number / 100,
        "tokens_per_second": (20.0 + number) * (5 if task == "sort" else 1) + run,
        "ms_per_forward": 9.0 + number,
        "first_block_ms": 80.0 + number,
        "updates": 3 + number,
        "device_bytes": (20 + number) * 2**20 + (0 if task == "lookup" else -(2**19)),
        "host_bytes": 1000 + number,
        "to_device_bytes": int(nfe * examples) * (100 + 17 * number),
        "to_host_bytes": 500 + number,
        "copy_ms": 9.0,
        "hidden_ms": 8.0,
        "exposed_ms": 1.0,
        "seconds": 2.0 + number / 10 + (1 if task == "lookup" else 0),
    }
    return {
        "point": f"{number:016x}",
        "run": run,
        "status": status,
        "why": WHY.get(status),
        "model": "embedded",
        "policy": policy,
        "policy_options": json.dumps({"clusters": clusters} if knobs else {}),
        "clusters": clusters,
        "top_m": top_m,
        "update_threshold": threshold,
        "codec": "nvfp4_delta" if knobs else None,
        "context": 992,
        "batch": 1,
        "budget": None,
        "budget_bytes": None,
        "confidence": None,
        "task": task,
        **(figures if status == "ok" else dict.fromkeys(FIGURES)),
    }


def write_sweep(folder: Path, rows: list[dict[str, Any]], **types: Any) -> None:
    """rows.parquet and run.json; `types`: of columns that shall have another."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(sweep_rows()[0])
    schema = pyarrow.schema([(name, types.get(name, _TYPES.get(name, pyarrow.int64()))) for name in names])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), folder / "rows.parquet")
    fixed = {"model": "embedded", "weights_sha256": WEIGHTS, "max_new_tokens": 32, "block_length": 8}
    head = {"schema": "tiered sweep 1", "grid": {"axes": {}, "options": {}, "fixed": fixed}, "weights_sha256": WEIGHTS}
    (folder / "run.json").write_text(json.dumps(head | {"points": 9, "rows": len(rows), "skipped": []} | MADE))


def memory(name: str = "polestar, test call") -> dict[str, Any]:
    """memory.json: one call of six forwards."""
    timeline = [
        {
            "forward": forward,
            "block": max(0, forward) // 3,
            "kind": "" if forward < 0 else "refresh" if forward == 0 else "update" if forward == 3 else "step",
            "seconds": 0.5 * (forward + 1),
            "tiers": {
                "device": {"weights": 7 * 2**20, "key": (forward + 1) * 2**19, "centroids": 1000 + forward},
                "host": {"hidden": 4096 * (forward + 1)} if forward >= 0 else {},
                "disk": {},
            },
        }
        for forward in range(-1, 6)
    ]
    checks = [
        {"tier": "device", "what": "features", "ledger": 5000, "allocator": 5010, "difference": 10, "allowed": 50.0},
        {"tier": "device", "what": "passes", "ledger": 5000, "allocator": 3000, "difference": -2000, "allowed": None},
        {"tier": "host", "what": "arena", "ledger": 8000, "allocator": 9000, "difference": 1000, "allowed": 80.0},
    ]
    layers = {
        str(layer): {"copy_ms": 10.0 * layer, "hidden_ms": 9.0 * layer, "exposed_ms": 1.0 * layer, "bytes": 300 * layer}
        for layer in (1, 2)
    }
    drift = [
        {"forward": forward, "layer": layer, "mean": 0.001 * (forward + 1) * 10**layer, "largest": 0.5 + layer}
        for forward in (0, 3)
        for layer in (0, 1, 2)
    ]
    call = {"name": name, "policy": "polestar", "positions": 1024, "batch": 1, "timeline": timeline, "checks": checks}
    caps = {"device": 12 * 2**20, "host": None, "disk": None}
    return {"calls": [call | {"layers": layers, "drift": drift, "caps": caps}], **MADE}


def overlap() -> dict[str, Any]:
    """overlap.json: one link, without and with prefetching."""
    rows = [
        {
            "link": "slow link",
            "prefetch_layers": prefetch,
            "layers": {
                "1": {"copy_ms": 40.0, "exposed_ms": 8.0 - 6 * prefetch},
                "2": {"copy_ms": 60.0, "exposed_ms": 2.0},
            },
        }
        for prefetch in (0, 1)
    ]
    return {"rows": rows, **MADE}


def compare() -> dict[str, Any]:
    """compare.json: two policies, a baseline with a spread, and a policy that does not fit."""
    rows = []
    for number, policy in enumerate(("fast_dllm_dual", "dllm_cache", "transformers offloaded")):
        for task, size, examples in (("sort", None, 40), ("lookup", 992, 10)):
            correct = examples - (3 * number if size is None else 0)
            figures = {"correct": correct, "exact_match": correct / examples, "nfe": 13.0, "tokens_per_forward": 0.8}
            speed = {"tokens_per_second": 30.5 + number, "low": 30.0 + number, "high": 32.0 + number}
            sizes = {"device_bytes": (18 + number) * 2**20, "host_bytes": 0}
            rows.append(
                {"policy": policy, "task": task, "size": size, "commit": "one a step", "examples": examples}
                | figures
                | speed
                | sizes
            )
    refusal = {"policy": "dkv_greedy", "task": "sort", "size": None, "commit": "one a step", "examples": 40}
    rows.append(refusal | {"why": "goes with random order | alone"})
    head = {"model": "embedded", "weights_sha256": WEIGHTS, "canvas": 32, "block": 8}
    return head | {"rows": rows, **MADE}


def ops() -> dict[str, Any]:
    """ops.json: one call."""
    named = [("attention", 50.0), ("MLP", 30.0), ("commit", 16.0)]
    found = [{"op": op, "ms": ms, "share": ms / 100, "count": 7} for op, ms in named]
    call = {"name": "polestar, timed", "policy": "polestar", "positions": 64, "wall_ms": 100.0, "sum_ms": 96.0}
    return {"calls": [call | {"covered": 0.96, "ops": found}], **MADE}


def throughput() -> dict[str, Any]:
    """throughput.json: two policies at two contexts."""
    rows = [
        {"policy": policy, "context": context, "batch": 1, "confidence": None, "tokens_per_second": speed}
        | {"low": speed - 1, "high": speed + 2, "rounds": 5, "device_bytes": 2**20, "host_bytes": 0, "nfe": 32.0}
        for policy, context, speed in (
            ("none", 64, 90.0),
            ("none", 512, 10.0),
            ("polestar", 64, 70.0),
            ("polestar", 512, 40.0),
        )
    ]
    return {"rows": rows, **MADE}


FILES = {"memory": memory, "overlap": overlap, "compare": compare, "ops": ops, "throughput": throughput}


def write_all(folder: Path) -> None:
    """A sweep in `folder`/sweep and one of each other file beside it."""
    write_sweep(folder / "sweep", sweep_rows())
    for name, make in FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(make()))
