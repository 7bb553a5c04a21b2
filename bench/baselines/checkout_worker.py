"""One checkout of this repository: requests as lines of JSON on stdin, answers on stdout.

    PYTHONPATH=ROOT:BENCH python -P -m baselines.checkout_worker [CHECKPOINT]

`tiered` is ROOT's, all else BENCH's; requests and answers are those of baselines/checkout.py. The first line is
{"root": ROOT}, and comes when the checkpoint is loaded. Only ROOT's public API and ranges are used, so that an earlier
revision answers as well.
"""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from workloads.timing import Timed, Timing

import tiered
from baselines.official_worker import serve
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import recording

ROOT = Path(tiered.__file__).resolve().parents[1]


class Answers:
    """Answers of the model in a checkpoint."""

    def load(self, checkpoint: str | None) -> dict[str, Any]:
        """Load the checkpoint; None for requests that need none."""
        if checkpoint is not None:
            self._runtime = tiered.from_pretrained(checkpoint, policy="none", dtype="float32", device="cpu")
        return {"root": str(ROOT)}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a call, or count the launches of a policy."""
        if "launches" in request:
            from workloads.launches import count

            return {"rows": count(request["launches"], request["options"])}
        runtime, ids = (
            self._runtime.with_policy(request["policy"], **request["options"]),
            torch.tensor([request["prompt"]]),
        )
        began = time.perf_counter()
        timing = Timing()
        with recording(timing):
            out = runtime.generate(ids, stop_at_eos=False, **request["call"])
        seconds = time.perf_counter() - began
        return {
            "tokens": out.sequences[0, ids.shape[1] :].tolist(),
            "seconds": seconds,
            "forwards": out.num_forwards,
            "rows": sum(out.rows_per_step),
            "kinds": by_kind(timing, out.rows_per_step, out.timings.steps),
        }


def by_kind(timing: Timing, rows: list[float], seconds: list[float]) -> dict[str, dict[str, Any]]:
    """The forwards of each kind, and the time of each operation in them, without that of ranges inside it."""
    kinds = timing.kinds
    ops: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for each in timing.ranges:
        if each.forward is not None and in_step(each) and each.op not in CONTAINERS:
            ops[kinds[each.forward]][each.op.value] += each.own_ns
    return {
        kind: {
            "forwards": kinds.count(kind),
            "rows": sum(n for n, of in zip(rows, kinds, strict=True) if of == kind),
            "ms": 1e3 * sum(s for s, of in zip(seconds, kinds, strict=True) if of == kind),
            "ops": {op: ns / 1e6 for op, ns in own.most_common()},
        }
        for kind, own in ops.items()
    }


def in_step(timed: Timed) -> bool:
    """False for a range between two steps, such as the publication of a block."""
    while timed.outer is not None:
        timed = timed.outer
    return timed.op is Op.STEP


def main() -> None:
    """Serve the checkout that is on the path."""
    answers = Answers()
    serve(lambda: answers.load(next(iter(sys.argv[1:]), None)), answers.answer, str(ROOT))


if __name__ == "__main__":
    main()
