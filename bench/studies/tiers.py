"""Losses and costs of codecs on real hidden states, and the speed of the pieces, on the CPU.

The embedded model reads a long lookup. The input rows of its layers at a block's first step are clustered, encoded,
offloaded and fetched back by cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads.answer_tables import Column, pivot, where
from workloads.codecs import codecs, decode, keys_values, kmeans, offload

from tiered.core.checks import unknown_name

AUTO = 16  # the number of clusters="auto" in this context: about 64 rows each
AXES: Axes = {
    "part": ["codecs", "kv", "offload", "decode", "kmeans"],
    "clusters": [4, 8, AUTO, 32, 64],
}
QUICK: Axes = {"clusters": [AUTO]}
OF = ("codec", "of", "layer")
TIMED = ("encode_ns", "decode_ns", "store_ms", "fetch_ms", "over_copy", "over_record_copy", "over_faiss")
SETTINGS, SIZES = ("clusters", "width"), ("bytes_per_element",)
FIGURES = (*TIMED[2:], *SIZES, "error", "records")


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """A point for each number of clusters, and for each of the other parts."""
    settings: dict[str, list[dict[str, int]]] = {
        "codecs": [{"clusters": clusters} for clusters in axes["clusters"]],
        "kv": [{}],
        "offload": [{"clusters": AUTO}],
        "decode": [{}],
        "kmeans": [{"width": 256, "clusters": 16}, {"width": 4096, "clusters": 64}],
    }
    for part in axes["part"]:
        if part not in settings:
            raise unknown_name("part", part, settings)
        yield from ({"part": part} | each for each in settings[part])


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one part."""
    parts = {"codecs": codecs, "kv": keys_values, "offload": offload, "decode": decode, "kmeans": kmeans}
    return parts[settings["part"]](**{name: settings[name] for name in SETTINGS if name in settings})


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`codecs`: by number of clusters, mean over layers; `layers`: by layer; `kv_scales`: of keys and values, by
    layer; `pieces`: the rest."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    found = [row for row in seen if row["part"] == "codecs"]
    auto = [row for row in found if row["clusters"] == AUTO and row["error"]]

    def of(codec: str, figure: str, digits: int) -> Column:
        return where(codec=codec), lambda own: f"{sum(row[figure] for row in own) / len(own):.{digits}f}"

    errors = {name: of(name, "error", 4) for name in ("fp8", "nvfp4", "nvfp4_delta")}
    delta = {"SQNR dB": ("sqnr_db", 1), "bytes/element": ("bytes_per_element", 4)}
    delta |= {"+ centroids": ("centroid_bytes_per_element", 4), "of bf16": ("ratio_to_bf16", 3)}
    coded = [row for row in seen if row["part"] == "kv"]
    layers: dict[str, Column] = {
        str(layer): (where(layer=layer), lambda own: f"{own[0]['error']:.4f}")
        for layer in sorted({row["layer"] for row in [*auto, *coded]})
    }
    rest: dict[str, Column] = {"": (where(), lambda own: "; ".join(map(figures, own)))}
    return {
        "codecs": pivot(
            found, lambda row: f"C {row['clusters']}", errors | {k: of("nvfp4_delta", *v) for k, v in delta.items()}
        ),
        "layers": pivot(auto, lambda row: f"`{row['codec']}`", layers),
        "kv_scales": pivot(coded, lambda row: f"{row['of']}, {row['codec']}", layers),
        "pieces": pivot([row for row in seen if row["part"] not in ("codecs", "kv")], what, rest),
    }


def what(row: Row) -> str:
    """The part of a row, and its settings."""
    return ", ".join([row["part"], *(f"{name} {row[name]}" for name in ("codec", *SETTINGS) if name in row)])


def figures(row: Row) -> str:
    """The figures of a row, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {row[name]:.4g}" for name in FIGURES if name in row)
