"""Tokens a second, tokens a forward, ms a forward and the time to the first block, by context and batch.

The embedded model answers lookups, whose prompts may have any length. A random model (`--model random`), of LLaDA-8B's
proportions, shows how speed depends on size. Its answers mean nothing, and it is sure of no token, so it commits one a
step.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.worker import refusing
from workloads.answers import TIMED, Tally
from workloads.subjects import RANDOM, SIZES, loaded, local, points_of, prompts, variant_named

from tiered.core.byte_size import format_bytes

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

CALL: Axes = {"answer": [32], "block": [8], "context": [256, 1024, 2048], "batch": [1, 4], "confidence": [0.9, None]}
AXES: Axes = {**SIZES, "model": ["embedded"], **CALL, "policy": ["none", "fast_dllm_dual", "polestar"]}
QUICK: Axes = {"context": [128], "batch": [2], "confidence": [0.9]}
OF: Sequence[str] = ()
COLUMNS = {
    "tokens/s": "{tokens_per_second:.1f}",
    "p20-p80": "{tokens_per_second_low:.1f}-{tokens_per_second_high:.1f}",
    "TPF": "{tokens_per_forward:.2f}",
    "NFE": "{nfe:.1f}",
    "ms/forward": "{ms_per_forward:.2f}",
    "first block, ms": "{first_block_ms:.1f}",
    "device": "{device}",
    "host": "{host}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn within the same call."""
    return points_of(axes, *CALL, "policy")


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One call, after a warm-up. A random model's answers have no end."""
    variant, watch = variant_named(settings["policy"]), Tally()
    call = variant.call(answer=settings["answer"], block=settings["block"]) | {"seed": settings["seed"]}
    call |= {"stop_at_eos": False} if settings["model"] == RANDOM else {}
    rule = {} if settings["confidence"] is None else {"confidence_threshold": settings["confidence"]}
    with refusing():
        model = loaded(settings, paths, settings["context"] + settings["answer"])
        runtime = model.with_policy(variant.make())
        asked = prompts(settings, settings["context"], settings["batch"])
        # One forward a block: it pays for thread pools and the math library's workspaces.
        runtime.generate(asked, **call, block_steps=1)
        out = runtime.generate(asked, **call, **rule)
    watch(out)
    of_sequence = {"nfe": sum(out.forwards) / len(out.forwards), "tokens_per_forward": out.tokens_per_forward.mean()}
    yield watch.figures() | {name: float(figure) for name, figure in of_sequence.items()}


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A line for each point."""
    lines = []
    for row in merged(rows, of=OF, timed=TIMED):
        size = f", width {row['width']}, {row['layers']} layers" if "width" in row else ""
        rule = f"threshold {row['confidence']}" if "confidence" in row else "one a step"
        line = row | {"name": f"{row['model']}{size}, {row['batch']} x {row['context']}, {rule}: `{row['policy']}`"}
        for tier in ("device", "host"):
            line |= {tier: format_bytes(size) if (size := row.get(f"{tier}_bytes")) else "0"}
        lines.append(line)
    several = any(row.get("runs", 0) > 1 for row in lines)
    columns = {name: cell for name, cell in COLUMNS.items() if several or "_low" not in cell}
    return {"throughput": rows_table("{name}", columns, lines)}
