"""Measure Polestar against the caches it builds on: accuracy and work, and memory.

    python bench/polestar.py --out FILE.json     # about half an hour on two cores
    python bench/polestar.py --quick             # everything with a few examples

Five parts, each written as soon as it is measured, beside what FILE holds of the others (bench/overlap.py measures what
of the copies is hidden):
  table    the embedded model's held-out tasks under each policy and commit rule, one row each
  memory   bytes by tier and account: runs of two models, and plans for LLaDA-8B
  trigger  what the update threshold T does to a task that hangs on fresh looks at its prompt
  early    what drift-aware commits do to the same task, on more examples
  drift    how far cached keys and values of the prompt are from an uncached pass, by policy and option
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from polestar_memory import memory
from rich.console import Console
from rows_file import write_rows
from scoring import score_examples
from tally import Tally

import tiered
from tiered.core.provenance import provenance
from tiered.embedded import tasks
from tiered.observe.analysis.reports import Area
from tiered.observe.analysis.token_drift import measure_token_drift

PARTS = ("memory", "table", "trigger", "early", "drift")
BLOCK = 32

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fast_dllm_prefix": ("fast_dllm_prefix", {}),
    "fast_dllm_dual": ("fast_dllm_dual", {}),
    "polestar, raw": ("polestar", {"codec": "raw"}),
    "polestar, nvfp4_delta": ("polestar", {}),
    "polestar-paper": ("polestar-paper", {}),
    "polestar-window": ("polestar-window", {}),
}
COMMITS: dict[str, dict[str, Any]] = {
    "one a step": {},
    "threshold 0.99": {"confidence_threshold": 0.99},
    "threshold 0.9": {"confidence_threshold": 0.9},
    "threshold 0.7": {"confidence_threshold": 0.7},
    "drift_aware 0.9": {"commit": "drift_aware", "confidence_threshold": 0.9},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Examples of one task. `size`: tokens of the prompt, for lookups; `positions`: of the canvas, about."""

    task: str
    examples: int
    positions: int | None = None
    commits: tuple[str, ...]

    def sample(self, count: int) -> list[tasks.Example]:
        """The first `count` examples of the test split."""
        size = None if self.positions is None else self.positions - BLOCK
        return [tasks.sample(self.task, "test", seed, size=size) for seed in range(count)]


# One token a step takes 32 forwards an example, confident ones two or three.
SLOW, FAST = tuple(COMMITS)[:1], tuple(COMMITS)[1:]
QUESTIONS = (
    Question(task="sort", examples=120, commits=FAST),
    Question(task="chain", examples=100, commits=FAST),
    Question(task="lookup", examples=40, positions=256, commits=FAST),
    Question(task="lookup", examples=6, positions=2048, commits=FAST),
    Question(task="sort", examples=60, commits=SLOW),
    Question(task="chain", examples=40, commits=SLOW),
)


def table(runtime: tiered.Runtime, share: float, console: Console) -> Iterator[dict[str, Any]]:
    """One row for each question, commit rule and policy."""
    for question in QUESTIONS:
        examples = question.sample(max(4, round(share * question.examples)))
        for commit in question.commits:
            for name, (policy, options) in POLICIES.items():
                tally = Tally()
                scores = score_examples(
                    runtime.with_policy(policy, **options),
                    examples,
                    max_new_tokens=BLOCK,
                    block_length=BLOCK,
                    watch=tally,
                    **COMMITS[commit],
                )
                row = {
                    "task": question.task,
                    "positions": question.positions,
                    "commit": commit,
                    "policy": name,
                    "examples": len(examples),
                    "correct": scores.correct,
                    "nfe": round(scores.mean_forwards, 3),
                    "tokens_per_forward": round(scores.mean_tokens_per_forward, 3),
                    "tokens_per_second": round(tally.tokens / tally.seconds, 1),
                    "rows_per_forward": round(tally.rows_per_forward, 1),
                    "updates": tally.updates,
                    "device_bytes": tally.device,
                    "host_bytes": tally.host,
                    "moved_bytes": dict(tally.moved),
                }
                console.print(json.dumps(row), highlight=False, soft_wrap=True)
                yield row


def trigger(runtime: tiered.Runtime, share: float) -> list[dict[str, Any]]:
    """Sorting under several thresholds, between the dual cache, which never updates, and `none`."""
    rows = []
    for commit in ("one a step", "threshold 0.99", "threshold 0.9"):
        examples = QUESTIONS[0].sample(max(4, round(share * (60 if commit in SLOW else 120))))
        for threshold in (0, 1, 2, 4, 8):
            tally = Tally()
            scores = score_examples(
                runtime.with_policy("polestar", update_threshold=threshold),
                examples,
                max_new_tokens=BLOCK,
                block_length=BLOCK,
                watch=tally,
                **COMMITS[commit],
            )
            rows.append(
                {
                    "task": "sort",
                    "commit": commit,
                    "update_threshold": threshold,
                    "examples": len(examples),
                    "correct": scores.correct,
                    "nfe": round(scores.mean_forwards, 3),
                    "rows_per_forward": round(tally.rows_per_forward, 1),
                    "updates": tally.updates,
                    "moved_bytes": dict(tally.moved),
                }
            )
    return rows


def early(runtime: tiered.Runtime, share: float) -> list[dict[str, Any]]:
    """Sorting with confident tokens alone, and with nearly confident ones beside them."""
    rows = []
    examples = QUESTIONS[0].sample(max(4, round(share * 360)))
    for policy in ("none", "fast_dllm_dual", "polestar", "polestar-window"):
        for commit in ("threshold 0.9", "drift_aware 0.9"):
            scores = score_examples(
                runtime.with_policy(policy), examples, max_new_tokens=BLOCK, block_length=BLOCK, **COMMITS[commit]
            )
            rows.append(
                {
                    "task": "sort",
                    "commit": commit,
                    "policy": policy,
                    "examples": len(examples),
                    "correct": scores.correct,
                    "nfe": round(scores.mean_forwards, 3),
                }
            )
    return rows


DRIFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast_dllm_dual": ("fast_dllm_dual", {}),
    "polestar, raw": ("polestar", {"codec": "raw"}),
    "polestar, fp8": ("polestar", {"codec": "fp8"}),
    "polestar, nvfp4_delta": ("polestar", {}),
    "polestar, raw, clusters by layer": ("polestar", {"codec": "raw", "cluster_layers": 1}),
    "polestar, nvfp4_delta, clusters by layer": ("polestar", {"cluster_layers": 1}),
    "polestar-paper, raw": ("polestar-paper", {"codec": "raw"}),
}


def drift(runtime: tiered.Runtime, examples: int) -> list[dict[str, Any]]:
    """Cosine distance of the prompt's keys and values, mean over steps and layers; two tokens a step."""
    rows = []
    for task, size in (("lookup", 992), ("sort", None)):
        for name, (policy, options) in DRIFTS.items():
            chosen = runtime.with_policy(policy, **options)
            distances, moved, repairs = [], 0, 0
            for seed in range(examples):
                chat = [[{"role": "user", "content": tasks.sample(task, "test", seed, size=size).prompt}]]
                call = {"max_new_tokens": BLOCK, "block_length": BLOCK, "steps": BLOCK // 2, "stop_at_eos": False}
                report = measure_token_drift(chosen, chat, **call)
                prompt = list(Area).index(Area.PROMPT)
                distances.append([np.nanmean(report.keys[..., prompt]), np.nanmean(report.values[..., prompt])])
                out = chosen.generate(chat, **call)
                moved += sum(out.memory.moved.values())
                repairs += sum(update.repairs for update in out.updates)
            keys, values = np.mean(distances, axis=0)
            rows.append(
                {"task": task, "policy": name, "keys": keys, "values": values, "moved_bytes": moved, "repairs": repairs}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; without, nothing is kept")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a few examples of each task")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {args.parts}: no part {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    runtime = tiered.from_pretrained("embedded", device="cpu")
    result: dict[str, Any] = {"measured": {}}
    if args.out is not None and args.out.exists():
        result |= json.loads(args.out.read_text())

    def keep(name: str, value: Any) -> None:
        result[name] = value
        result["measured"][name] = {"device": "cpu"} | provenance() | {"threads": args.threads}
        if args.out is not None:
            head = {part: figures for part, figures in result.items() if part != "table"}
            write_rows(args.out, head, result.get("table", []), name="table")

    if "memory" in parts:
        keep("memory", memory(runtime, args.quick))
    rows: list[dict[str, Any]] = []
    if "table" in parts:
        for row in table(runtime, 0.02 if args.quick else 1.0, console):
            rows.append(row)
            keep("table", rows)
    if "trigger" in parts:
        keep("trigger", trigger(runtime, 0.02 if args.quick else 1.0))
    if "early" in parts:
        keep("early", early(runtime, 0.02 if args.quick else 1.0))
    if "drift" in parts:
        keep("drift", drift(runtime, 1 if args.quick else 2))
    summary: dict[str, Any] = {"rows": len(rows)}
    if "memory" in result:
        for name in ("features_over_dual", "host_bytes_per_element"):
            summary[name] = {run: round(figures[name], 4) for run, figures in result["memory"]["runs"].items()}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
