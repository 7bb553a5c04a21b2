"""Books: a trace of torch's profiler without what nobody looks at, in a file that fits a repository."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered.core.whole_file import write_then_rename

MOST_BYTES = 12 << 20
# Operators of torch are ten times as many as all else; our ranges say what they are part of.
DROPPED = frozenset({"cpu_op", "python_function", "overhead", "fwdbwd", "Trace", "gpu_user_annotation"})
_ARGS = ("stream", "correlation", "bytes", "grid", "block", "name", "sort_index", "labels")


def write_small_trace(path: Path, trace: Mapping[str, Any], *, most: int = MOST_BYTES) -> dict[str, Any]:
    """Write `trace` under gzip to `path`, cut to its first half, quarter and so on until it takes `most` bytes; what
    was written, for a row."""
    events = [_short(event) for event in trace["traceEvents"] if event.get("cat") not in DROPPED]
    timed = sorted(event["ts"] for event in events if event["ph"] != "M")
    kept = len(timed)
    while True:
        end = timed[kept - 1] if kept else 0
        part = [event for event in events if event["ph"] == "M" or event["ts"] <= end]
        text = json.dumps({"traceEvents": part, "displayTimeUnit": "ms"}, allow_nan=False, separators=(",", ":"))
        packed = gzip.compress(text.encode(), 6, mtime=0)
        if len(packed) <= most or not kept:
            break
        kept //= 2
    write_then_rename(path, lambda target: target.write_bytes(packed))
    return {"file": path.name, "bytes": len(packed), "events": len(part), "whole": kept == len(timed)}


def _short(event: Mapping[str, Any]) -> dict[str, Any]:
    args = {name: value for name, value in event.get("args", {}).items() if name in _ARGS}
    return {**{name: value for name, value in event.items() if name != "args"}, **({"args": args} if args else {})}
