"""The embedded model's tasks as task files of lm-evaluation-harness, which then need no download.

    python bench/harness_tasks.py tasks/ --examples 100
    python -m tiered.evaluation run --model tiered --model_args pretrained=embedded --apply_chat_template \\
        --tasks tiered_embedded --include_path tasks/

The folder holds `<task>.jsonl` and `<task>.yaml` for each task, named `tiered_embedded_<task>`, one group of them all,
`tiered_embedded`, and their metric. Examples are of the test split: no model was trained on them. The task files name
the folder's absolute path, so write the folder again rather than move it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from training.tasks import TASKS, sample

from tiered.core.checks import check_integer, unknown_name
from tiered.core.whole_file import write_then_rename

GROUP = "tiered_embedded"


# The harness finds the functions of a task file beside it.
METRIC = '''"""Exact match of an answer, with runs of white space taken as one space."""


def process_results(doc, results):
    return {"exact_match": float(results[0].split() == doc["answer"].split())}
'''


def write_tasks(
    folder: Path,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    examples: int = 100,
    seed: int = 0,
    size: int | None = None,
    max_gen_toks: int = 32,
) -> list[str]:
    """Write the task files into `folder`.

    Args:
        folder: made if it is missing.
        tasks: names in `training.tasks.TASKS`.
        examples: number of examples of each task: `sample(task, "test", seed)` and the seeds behind it.
        seed: seed of the first example.
        size: size of every example, in the task's unit; None for sizes drawn within its bounds.
        max_gen_toks: tokens of an answer.

    Returns:
        The harness's names of the tasks, the group's first.

    Raises:
        TypeError, ValueError: no such task, or a number out of range.
    """
    for task in tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    check_integer("examples", examples, least=1)
    check_integer("max_gen_toks", max_gen_toks, least=1)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "metric.py", METRIC)
    names = []
    for task in tasks:
        drawn = [sample(task, "test", seed + number, size=size) for number in range(examples)]
        rows = folder / f"{task}.jsonl"
        _write(rows, "".join(json.dumps(asdict(example)) + "\n" for example in drawn))
        names.append(f"{GROUP}_{task}")
        _write(folder / f"{task}.yaml", _task_file(names[-1], rows.resolve(), max_gen_toks))
    mean = [{"metric": "exact_match", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": GROUP, "task": names, "aggregate_metric_list": mean, "metadata": {"version": 1.0}}
    _write(folder / f"_{GROUP}.yaml", json.dumps(group, indent=2) + "\n")
    return [GROUP, *names]


def _task_file(name: str, rows: Path, max_gen_toks: int) -> str:
    settings = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max_gen_toks},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    # JSON is YAML; the tag is the one line that is not JSON.
    return "process_results: !function metric.process_results\n" + "".join(
        f"{key}: {json.dumps(value)}\n" for key, value in settings.items()
    )


def _write(path: Path, text: str) -> None:
    write_then_rename(path, lambda part: part.write_text(text, encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write a folder, and print the names of its tasks."""
    parser = argparse.ArgumentParser(
        prog="bench/harness_tasks.py",
        description="Write the embedded model's tasks as task files of lm-evaluation-harness.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--examples", type=int, default=100, help="of each task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first example (default: %(default)s)")
    parser.add_argument("--size", type=int, help="of every example, in its task's unit (default: drawn)")
    parser.add_argument("--max-gen-toks", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        names = write_tasks(**vars(args))
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    print(" ".join(names))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
