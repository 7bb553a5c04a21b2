"""The peak memory of a process that loads a model, beside the bytes that are booked then."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from baselines.asked import Asked
from measuring.process import BENCH

from tiered.core.byte_size import format_bytes
from tiered.models.shape import BYTES_PER_ELEMENT
from tiered.models.weight_form import WeightForm
from tiered.policies.registry import make_policy
from workloads.streamed_model import all_streamed, random_files, shape_of, sizes_of

# Columns of a table of peaks, from what `in_bytes` returns.
LOAD = {
    "device": "{device}", "host": "{host}", "a tensor": "{largest}", "peak": "{peak}", "over": "{peak_over_plan:.3f}",
}  # fmt: skip
EVERY = 5e-4  # seconds between two looks; a tensor of a model that is worth measuring takes longer to read


def measure(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: the peak of anonymous memory that another process took while loading, above its memory before.

    `settings` has "width" and "layers" of a random model, its "form", and "streamed". If it is true, the device has
    room for two layers and a tensor alone, else for all layers. "plan_bytes" are the bytes in the ledger once all is
    loaded: resident weights, the ring, and streamed weights in host memory. The largest tensor of the checkpoint is
    added, which stands beside its loaded form.
    """
    with random_files(settings["width"], settings["layers"], 64) as folder:
        yield peak_of_loading(folder, settings["form"], streamed=settings["streamed"])


def peak_of_loading(folder: Path, form: str, *, streamed: bool) -> dict[str, Any]:
    """The columns of that row, for the model in `folder`."""
    shape = shape_of(folder)
    largest = max(map(prod, shape.weight_shapes.values())) * BYTES_PER_ELEMENT[shape.dtype]
    least = all_streamed(make_policy("none"), sizes_of(shape, 1, WeightForm.of(form)))
    paths = os.pathsep.join([str(BENCH), str(BENCH.parent)])
    command = [sys.executable, "-P", str(Path(__file__).with_name("weight_loading_worker.py"))]
    environment = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    with Asked(command, threads=1, environment=environment) as process:
        before = anonymous_bytes(process.pid)
        with peak_of(process.pid) as peak:
            held = process.request(path=str(folder), weights=form, device=least + largest if streamed else None)
    booked = sum(held.values())
    grown = max(peak) - before
    return held | {
        "largest_bytes": largest,
        "plan_bytes": booked + largest,
        "peak_bytes": grown,
        "peak_over_plan": grown / (booked + largest),
    }


def in_bytes(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `measure`, with its bytes as they are written in tables."""
    names = ("device", "host", "largest", "peak")
    return {**row} | {name: format_bytes(int(row[f"{name}_bytes"])) for name in names if f"{name}_bytes" in row}


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """The anonymous memory of a process while the `with` lasts, looked at every `EVERY` seconds; all looks."""
    looks, stop = [anonymous_bytes(pid)], threading.Event()

    def look() -> None:
        while not stop.is_set():
            looks.append(anonymous_bytes(pid))
            time.sleep(EVERY)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        stop.set()
        thread.join()


def anonymous_bytes(pid: int) -> int:
    """Bytes of a process's memory that stand for no file; 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
