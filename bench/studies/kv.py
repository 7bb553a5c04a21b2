"""What keys and values lose in a codec: right answers by task and policy, and how far logits move.

The same unseen prompts under each codec. Whether keys and values are resident or streamed makes no difference to a bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads import answers, kv_logits
from workloads.answer_tables import mean, pivot, right_of, task, where
from workloads.answers import OF, TIMED, tasks_of
from workloads.models import paths, weights

from tiered.embedded.tasks import LONG_TASKS, TASKS
from tiered.forward.sizes import RAW
from tiered.kernels.row_code import RowCode

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

ANSWER, LONG_ANSWER = 32, 128
AXES: Axes = {
    "model": ["embedded"],
    "kv": [RAW, *RowCode],
    "policy": ["none", "fast_dllm_dual", "polestar"],
    "examples": [*(f"{name}:100" for name in TASKS), "lookup@1008:60", "lookup@2016:60"],
    "long": [f"{name}:40" for name in LONG_TASKS],
    "logits": [*(f"{name}:20" for name in TASKS), "lookup@1008:10"],
}
QUICK: Axes = {"kv": ["raw", "fp8"], "policy": ["none"], "examples": ["sort:1"], "long": [], "logits": ["sort:1"]}


def local(axes: Axes) -> dict[str, Any]:
    """Where the models are."""
    return {"paths": paths(axes["model"])}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Codecs in turn under each policy; then their logits."""
    for model, policy, kv in product(axes["model"], axes["policy"], axes["kv"]):
        for examples, answer in ((axes["examples"], ANSWER), (axes["long"], LONG_ANSWER)):
            call = {"max_new_tokens": answer, "block_length": ANSWER, "confidence_threshold": 0.9}
            of = {"part": "answers", "kv": kv, "policy": policy, "options": {"kv": kv}, "call": call}
            if examples:
                yield weights(model) | of | {"tasks": tasks_of(examples)}
    for model, kv in product(axes["model"], axes["kv"]):
        yield weights(model) | {"part": "logits", "kv": kv, "answer": ANSWER, "tasks": tasks_of(axes["logits"])}


def measure(settings: Mapping[str, Any], **local: Any) -> Iterator[dict[str, Any]]:
    """See `workloads.answers` and `workloads.kv_logits`."""
    return (answers if settings["part"] == "answers" else kv_logits).measure(settings, **local)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Right answers and forwards of an example, by task; and distances of logits."""
    seen, nfe = merged(rows, of=OF, timed=TIMED), mean("nfe", 1)
    told = [row for row in seen if row["part"] == "answers"]
    columns = {
        f"`{policy}`, {kv}": (where(policy=policy, kv=kv), lambda own: f"{right_of(own)}; {nfe(own)}")
        for policy, kv in dict.fromkeys((row["policy"], row["kv"]) for row in told)
    }
    far = {"KL": "{kl:.2e}", "99th percentile": "{kl_p99:.2e}", "another token": "{other_token:.1%}"}
    logits = [row | {"of": task(row)} for row in seen if row["part"] == "logits" and row["kv"] != "raw"]
    return {"kv": pivot(told, task, columns), "kv_logits": rows_table("{kv}: {of}", far, logits)}
