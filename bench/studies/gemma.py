"""DiffusionGemma beside transformers' own caches, and its logits in tiles beside whole ones.

Part `cache` compares the logits of a canvas behind prompts below, at and beyond the window of a tiny random model. It
asks transformers' `generate` with its dynamic, static and quantized cache, and the library. A quantized cache takes no
layers with a window, so the same model without windows is asked as well. Part `head` proposes tokens with the heads of
DiffusionGemma and LLaDA at their released sizes, in float32, from logits in tiles and from whole ones. Tokens are by
the sums that DiffusionGemma's rule reads, the likeliest, or drawn under a cut. It takes a quarter of an hour on two
idle cores.

The last line of stdout says, each null as long as its rows are missing,

    families_identical           true if the library's logits are within 5e-4 of those of the dynamic cache everywhere
    logit_bytes_tiled_over_whole    the largest of part `head`
    tiled_over_whole_time        the largest
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads import gemma
from workloads.answer_tables import pivot, where

from tiered.core.checks import unknown_name

CLOSE = 5e-4
AXES: Axes = {
    "part": ["cache", "head"],
    "layers": [*gemma.KINDS],
    "cache": [*gemma.CACHES],
    "prompt": [8, 12, 40],
    "head": [*gemma.HEADS],
    "propose": ["sums", "likeliest", "cut"],
    "rows": [128, 256],
    "divisor": [1],
    "repeats": [5],
}
QUICK: Axes = {
    "layers": ["windows"], "cache": ["dynamic", "tiered"], "prompt": [40], "rows": [256],
    "divisor": [8], "repeats": [1],
}  # fmt: skip
OF = ()
TIMED = ("whole_s", "tiles_s")
HEAD = {
    "whole, MiB": "{whole_mib:.0f}",
    "tiles": "{tiles_mib:.0f}",
    "booked in bfloat16, MiB": "{booked_mib}",
    "whole, s": "{whole_s:.2f}",
    "in tiles": "{tiles_s:.2f}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The caches of a prompt next to each other."""
    for part in axes["part"]:
        if part not in AXES["part"]:
            raise unknown_name("part", part, AXES["part"])
        names = ("layers", "prompt", "cache") if part == "cache" else ("head", "propose", "rows", "divisor", "repeats")
        for values in product(*(axes[name] for name in names)):
            settings: dict[str, Any] = dict(zip(names, values, strict=True))
            if part == "head" and (settings["head"] == "diffusion-gemma") != (settings["propose"] == "sums"):
                continue
            for name, allowed in (("layers", gemma.KINDS), ("cache", gemma.CACHES), ("head", gemma.HEADS)):
                if settings.get(name) not in (None, *allowed):
                    raise unknown_name(name, settings[name], allowed)
            yield {"part": part} | settings


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """See `workloads.gemma`."""
    return gemma.cache_rows(settings) if settings["part"] == "cache" else gemma.head_rows(settings)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`gemma_cache`: the largest difference from the dynamic cache, and the largest move of logits by another prompt;
    `gemma_head`: bytes and seconds."""
    seen = merged(rows, of=OF, timed=TIMED)
    caches = [row for row in seen if row["part"] == "cache"]
    columns = dict.fromkeys(row["prompt"] for row in caches)
    of_head = [
        row
        | {f"{name}_mib": row[f"{name}_bytes"] / 2**20 for name in ("whole", "tiles")}
        | {"booked_mib": " → ".join(f"{row[f'{name}_booked'] / 2**20:.0f}" for name in ("whole", "tiles"))}
        for row in seen
        if row["part"] == "head" and row["status"] == "ok"
    ]
    return {
        "gemma_cache": pivot(
            caches,
            lambda row: f"{row['layers']}: {row['cache']}",
            {f"{prompt} tokens": (where(prompt=prompt), _difference) for prompt in columns},
        ),
        "gemma_head": rows_table("`{head}`, {propose}: {rows} rows", HEAD, of_head),
    }


def _difference(rows: Sequence[Row]) -> str:
    return f"{rows[0]['difference']:.1e}; {rows[0]['moved']:.1f}"


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of the last line."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    ours = [row["difference"] for row in seen if row.get("cache") == gemma.OURS]
    head = [row for row in seen if row["part"] == "head"]
    return {
        "families_identical": max(ours) <= CLOSE if ours else None,
        "logit_bytes_tiled_over_whole": max((r["tiles_bytes"] / r["whole_bytes"] for r in head), default=None),
        "tiled_over_whole_time": max((r["tiles_s"] / r["whole_s"] for r in head), default=None),
    }
