"""The embedded model answers checkable questions with `polestar` and with other policies.

    python bench/demo.py [--rounds N] [--out FILE.json]

Questions are long-context lookups and list tasks of the test split, which training never saw. Every answer is checked;
every figure is of this run.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from measuring.provenance import provenance
from training.tasks import Example, sample, score

import tiered
from tiered.core.byte_size import format_bytes
from tiered.core.checks import check_integer
from tiered.core.whole_file import check_new_file

# Policy and options by name: one token a forward, as in the official samplers, or every confident token.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fast_dllm_dual": ("fast_dllm_dual", {}),
    "polestar": ("polestar", {}),
    "fast_dllm_dual, threshold 0.9": ("fast_dllm_dual", {"confidence_threshold": 0.9}),
    "polestar, threshold 0.9": ("polestar", {"confidence_threshold": 0.9}),
}
LISTS = [sample(task, "test", 0) for task in ("copy", "reverse", "sort", "replace", "insert", "remove")]
# Examples that are answered together.
BATCHES = {
    "lookup, 1024-token prompts": [sample("lookup", "test", seed, size=1024) for seed in range(2)],
    "lists": LISTS,
}
EXPLAINED = """
NFE: forwards of the batch. TPF: tokens per forward of a sequence. tokens/s: tokens of all answers.
Both leave end-of-sequence and padding out. Device, host: peak bytes; the host
holds hidden states as NVFP4 deltas."""


def answer(runtime: tiered.Runtime, examples: list[Example], options: dict[str, Any]) -> tiered.GenerationOutput:
    """All answers of a batch, in one call."""
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    return runtime.generate(chats, max_new_tokens=32, block_length=32, **options)


def measure(runtime: tiered.Runtime, examples: list[Example], rounds: int) -> dict[str, dict[str, Any]]:
    """Answers by way, whether each is right, and figures. The ways take turns in each round; rates are medians."""
    figures: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for way, (policy, options) in list(WAYS.items()) * rounds:
        out = answer(runtime.with_policy(policy), examples, options)
        assert out.text is not None
        rates[way].append(out.timings.tokens_per_second)
        figures[way] = {
            "answers": out.text,
            "correct": [score(example, text) for example, text in zip(examples, out.text, strict=True)],
            "num_forwards": out.num_forwards,
            "tokens_per_forward": out.tokens_per_forward.mean().item(),
            "tokens_per_second": statistics.median(rates[way]),
            "peak_device_bytes": out.memory.peak_device_bytes,
            "peak_host_bytes": out.memory.peak_host_bytes,
        }
    return figures


def show(name: str, examples: list[Example], figures: dict[str, Any]) -> None:
    """The figures, one row a way; then question, answer and verdict of every example, as `polestar` answered it."""
    print(
        f"\n{name}\n{'policy':<30}{'correct':>8}{'NFE':>5}{'TPF':>6}{'tokens/s':>10}{'speed':>7}{'device':>11}{'host':>11}"
    )
    for way, row in figures.items():
        right, rate = f"{sum(row['correct'])}/{len(row['correct'])}", row["tokens_per_second"]
        print(
            f"{way:<30}{right:>8}{row['num_forwards']:>5}{row['tokens_per_forward']:>6.2f}{rate:>10.1f}"
            f"{rate / figures['none']['tokens_per_second']:>6.1f}x"
            f"{format_bytes(row['peak_device_bytes']):>11}{format_bytes(row['peak_host_bytes']):>11}"
        )
    given = figures["polestar"]
    for example, text, right in zip(examples, given["answers"], given["correct"], strict=True):
        question = example.prompt if len(example.prompt) < 90 else f"{example.prompt[:48]} … {example.prompt[-32:]}"
        print(f"  {question}\n    → {text}   ({'right' if right else f'WRONG, it is {example.answer}'})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=1, help="how often each policy answers (default: 1)")
    arguments = parser.parse_args()
    check_integer("rounds", arguments.rounds, least=1)
    if arguments.out:
        check_new_file("--out", arguments.out)
    runtime, results = tiered.from_pretrained("embedded"), {}
    shape = runtime.model.shape
    print(f"embedded model: {shape.parameters:,} parameters, {shape.layers} layers, on {runtime.device}")
    answer(runtime, LISTS, {})  # warm up
    for name, examples in BATCHES.items():
        results[name] = measure(runtime, examples, arguments.rounds)
        show(name, examples, results[name])
    print(EXPLAINED)
    if arguments.out:
        record = {"results": results, "rounds": arguments.rounds, "tiered": tiered.__version__, **provenance()}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
