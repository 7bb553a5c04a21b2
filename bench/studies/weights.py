"""Copies of streamed weights that compute hides, costs of disk and loading, and effects of codes on logits.

Parts, all of them on the CPU, with a thread that computes and one that copies, and random models in float32:

    stream  the same call with resident layers, with all of them streamed over a slowed link, and with a loop that
            fetches a layer, computes it and fetches the next; the copy stands in the same ratio to computing as that of
            LLaDA-8B's layers on a GPU behind PCIe 4 and 5, or takes as long. The answers are the same, or it fails
    disk    a forward whose layers are read from the checkpoint, or in a code from the scratch file, beside accelerate's
            `disk_offload` of a Llama with the same weights, which brings embedding and head as well; the page cache has
            all files. Without the extra `accelerate` its row says so
    load    the peak of anonymous memory of a process that loads a model, over the booked bytes and one raw tensor
    logits  KL of logits beside raw weights, and bytes an element, of the embedded models and a random one

It takes about ten minutes on two idle cores. The last line of stdout says, each null as long as its rows are missing,

    streamed_over_bound     a call over the longer, forward by forward, of computing and copying alone: the largest
    hidden_share            hidden time of copies over the time that computing could hide: the smallest
    over_synchronous        a call over that of the loop, where a copy takes as long as computing: the largest
    over_disk_offload       layers from the checkpoint over accelerate's: the largest
    load_peak_over_plan     the largest
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from measuring.worker import RefusedError
from workloads import weight_files, weight_loading, weight_logits, weight_streams
from workloads.models import paths, weights
from workloads.subjects import RANDOM
from workloads.weight_loading import LOAD, in_bytes
from workloads.weight_streams import LINKS

from tiered.core.byte_size import format_bytes
from tiered.core.checks import unknown_name
from tiered.models.weight_form import CODES, RAW, WITH_HEAD, WeightForm
from tiered.policies.registry import make_policy

CODED = [*CODES, *(code + WITH_HEAD for code in CODES)]
AXES: Axes = {
    "part": ["stream", "disk", "load", "logits"],
    "policy": ["none", "fast_dllm_dual"],
    "link": [*LINKS],
    "width": [512],
    "layers": [12],
    "context": [480],
    "steps": [8],
    "rows": [32, 512],
    "form": [RAW, "int4"],
    "streamed": [0, 1],
    "model": ["embedded", "embedded-uniform", RANDOM],
    "code": CODED,
    "examples": [20],
}
QUICK: Axes = {
    "policy": ["fast_dllm_dual"], "link": ["as long"], "width": [64], "layers": [4], "context": [32], "steps": [3],
    "rows": [32], "form": ["int4"], "streamed": [1], "model": ["embedded-uniform", RANDOM], "code": ["int8"],
    "examples": [1],
}  # fmt: skip
OF = ("way",)
TIMED = (*weight_streams.TIMED, "forward_ms", "over_disk_offload", "peak_bytes", "peak_over_plan")
STREAM = {
    "copying over computing": "{forward_ratio:.2f}",
    "resident, ms": "{resident_ms:.1f}",
    "streamed": "{streamed_ms:.1f}",
    "loop": "{synchronous_ms:.1f}",
    "bound": "{bound_ms:.1f}",
    "over bound": "{over_bound:.3f}",
    "over loop": "{over_synchronous:.3f}",
    "hidden": "{hidden_share:.1%}",
}
DISK = {"ms": "{forward_ms:.1f}", "over `disk_offload`": "{over_disk_offload:.3f}"}
LOGITS = {
    "bytes an element": "{bytes_per_element:.3f}", "weights": "{whole}", "KL": "{kl:.2e}",
    "99th percentile": "{kl_p99:.2e}", "another token": "{other_token:.1%}",
}  # fmt: skip


def local(axes: Axes) -> dict[str, Any]:
    """The paths of the embedded models."""
    return {"paths": paths([model for model in axes["model"] if model != RANDOM])}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Part by part. The links of a policy stand next to each other, and the forms of a model."""
    for width, layers in product(axes["width"], axes["layers"]):
        if width < 64 or width % 64 or layers < 3:
            raise ValueError(f"width = {width}, layers = {layers}; a multiple of 64, and 3 or more are allowed")
    for name in ("form", "code"):
        for form in axes[name]:
            WeightForm.of(form)
    for part in axes["part"]:
        if part not in AXES["part"]:
            raise unknown_name("part", part, AXES["part"])
        for width, layers in product(axes["width"], axes["layers"]):
            sizes = {"part": part, "width": width, "layers": layers}
            if part == "stream":
                for policy, context, steps, link in product(*(axes[n] for n in ("policy", "context", "steps", "link"))):
                    make_policy(policy)  # raises for an unknown name
                    if link not in LINKS:
                        raise unknown_name("link", link, LINKS)
                    yield sizes | {"policy": policy, "context": context, "steps": steps, "link": link}
            elif part == "disk":
                yield from (sizes | {"rows": rows} for rows in axes["rows"])
            elif part == "load":
                for streamed, form in product(axes["streamed"], axes["form"]):
                    yield sizes | {"form": form, "streamed": streamed}
            else:
                for model, code, examples in product(axes["model"], axes["code"], axes["examples"]):
                    of = sizes | {"model": RANDOM} if model == RANDOM else {"part": part} | weights(model)
                    yield of | {"form": code, "examples": examples}


def measure(settings: Mapping[str, Any], **local: Any) -> Iterator[Row]:
    """See `workloads.weight_streams`, `weight_files`, `weight_loading` and `weight_logits`."""
    if settings["device"] != "cpu":
        raise RefusedError(
            f"device {settings['device']}: links are slowed down, and memory is looked at, on the CPU alone"
        )
    if settings["part"] == "logits":
        return weight_logits.measure(settings, **local)
    parts = {"stream": weight_streams, "disk": weight_files, "load": weight_loading}
    return parts[settings["part"]].measure(settings)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`weights`: streaming; `weights_disk`: files; `weights_load`: loading; `weights_logits`: codes."""
    seen = merged(rows, of=OF, timed=TIMED)

    def of(part: str) -> list[Row]:
        return [row for row in seen if row["part"] == part]

    load = [in_bytes(row) | {"how": "streamed" if row["streamed"] else "resident"} for row in of("load")]
    logits = [
        row | ({"whole": format_bytes(row["weight_bytes"])} if "weight_bytes" in row else {}) for row in of("logits")
    ]
    disk = [{"way": "all"} | row for row in of("disk")]
    return {
        "weights": rows_table("`{policy}`, {link}", STREAM, of("stream")),
        "weights_disk": rows_table("{rows} rows, {way}", DISK, disk),
        "weights_load": rows_table("{form}, {how}", LOAD, load),
        "weights_logits": rows_table("{model}, {form}", LOGITS, logits),
    }


def last_line(rows: Sequence[Row]) -> dict[str, float | None]:
    """The figures that have goals, of medians over rounds, for the last line."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]

    def of(figure: str, **wanted: Any) -> list[float]:
        own = [row for row in good if figure in row and all(row.get(name) == value for name, value in wanted.items())]
        return [round(row[figure], 3) for row in own]

    return {
        "streamed_over_bound": max(of("over_bound"), default=None),
        "hidden_share": min(of("hidden_share"), default=None),
        "over_synchronous": max(of("over_synchronous", link=weight_streams.AS_LONG), default=None),
        "over_disk_offload": max(of("over_disk_offload", way=weight_files.FILES), default=None),
        "load_peak_over_plan": max(of("peak_over_plan"), default=None),
    }
