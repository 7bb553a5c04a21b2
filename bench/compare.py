"""Compare all policies, presets and transformers' own caches on an embedded model: accuracy, forwards, speed, bytes.

    python bench/compare.py                              # everything once, about a quarter of an hour on one core
    python bench/compare.py --rounds 3                   # everything three times, with the spread of the speeds
    python bench/compare.py --baselines                  # transformers' caches, and the policies to hold them against
    python bench/compare.py --model embedded-uniform     # the same questions to the model of uniform noise
    python bench/compare.py --quick                      # every row with two examples, a few minutes; keeps nothing
    python bench/compare.py --table docs/benchmarks.md   # measures nothing: puts the tables of the file into the page
    python bench/compare.py --table README.md            # and the short one there; docs/policies.md has both noises

Every policy has its defaults. Answers have 32 tokens in blocks of 8, so that a canvas has finished blocks and blocks to
come; a policy that is made for another call gets that one, and `none` answers it too. Every example is from the test
split. Speeds are compared within a round, in which all variants answer a question in turn; `none` has two names, and
what lies between them is noise. A row is written as soon as it is measured, and a second run keeps the rows that the
same weights, options, examples and machine have given. A policy that a call does not fit, and a baseline that cannot be
had here, is a row that says why. The last line is JSON: figures by policy and commit rule, and the noise floor.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from baselines.variants import BASELINES, Baseline
from comparing.kept_rows import Rows
from comparing.one_row import measure
from comparing.page import put_tables
from comparing.questions import BLOCK, CANVAS, FOLDER, NOISES, Setting, settings
from comparing.rounds import AGAIN, OtherAnswersError, noise_floor
from comparing.summary import by_policy, is_long, screen_table
from rich.console import Console
from rows_file import weights_basis
from scoring import score_examples
from variants import Variant, all_variants

import tiered
from tiered.core.provenance import provenance
from tiered.embedded import tasks

COSTS = FOLDER / "policy_cost.json"
QUICK_EXAMPLES = 2
# What baselines are read beside.
BESIDE_BASELINES = ("none", AGAIN, "fast_dllm_prefix", "fast_dllm_dual", "polestar")


def compared(model: str) -> list[Variant | Baseline]:
    """All that answer: the policies, `none` once more, and, where transformers has the architecture, its own ways."""
    first, *rest = all_variants(slides=model == "embedded")
    baselines = BASELINES if model == "embedded" else ()
    return [first, Variant(name=AGAIN, policy="none"), *rest, *baselines]


def chosen(names: str | None, variants: Sequence[Variant | Baseline]) -> list[Variant | Baseline]:
    """The variants that a comma-separated list names, whose names may have commas in them; None: all. Raises
    `ValueError` for a name that is none."""
    if names is None:
        return list(variants)
    by_name = {variant.name: variant for variant in variants}
    found, rest = {}, names
    while rest := rest.strip(" ,"):
        name = max((name for name in by_name if f"{rest},".startswith(f"{name},")), key=len, default=None)
        if name is None:
            raise ValueError(f"no policy {rest.partition(',')[0]!r}; there are {'; '.join(by_name)}")
        found[name] = by_name[name]
        rest = rest[len(name) :]
    return list(found.values())


def measure_rounds(
    rows: Rows, groups: Iterable[Sequence[Setting]], rounds: int, ask: Callable[[Setting, int], bool]
) -> None:
    """Measure what `rows` lacks, a group after the other, all of them in each round. `ask` measures a setting in one
    round and says whether it got figures. A reference whose sample is of another session is measured again in a group
    that something else was measured in, or there would be nothing to hold its speed against."""
    groups = list(groups)
    for number in range(rounds):
        for group in groups:
            missing = [setting for setting in group if rows.lacks(setting, number, rounds)]
            measured = [setting.variant for setting in missing if ask(setting, number)]
            needed = {variant.reference for variant in measured} - {variant.name for variant in measured}
            for setting in group:
                if setting.variant.name in needed:
                    ask(setting, number)


def read_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [noise.model for noise in NOISES.values()]
    parser.add_argument("--model", choices=models, default="embedded", help="who answers (default: embedded)")
    parser.add_argument("--out", type=Path, help="file of the rows (default: bench/results/compare[_uniform].json)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measure every row so often (default: 1)")
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--policies",
        metavar="NAME,…",
        help="measure these alone; rows of others stay in the file; a speed has a ratio where `none` is among them",
    )
    who.add_argument("--baselines", action="store_true", help=f"the baselines and {', '.join(BESIDE_BASELINES)} alone")
    parser.add_argument("--seed", type=int, default=0, help="number of the first example")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EXAMPLES} examples a row")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already holds")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="put the tables into FILE.md; measure nothing")
    args = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    return parser, args


def main() -> None:
    parser, args = read_arguments()
    noise = next(noise for noise in NOISES.values() if noise.model == args.model)
    if args.table is not None:
        files = {name: args.out if args.out and each is noise else each.results for name, each in NOISES.items()}
        try:
            put_tables(args.table, files, COSTS)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return
    if args.quick and args.out is not None and args.out.resolve() == noise.results:
        parser.error(f"--quick --out {args.out}: rows of {QUICK_EXAMPLES} examples would replace those of the tables")
    path = args.out or (None if args.quick else noise.results)
    known = compared(noise.model)
    names = ",".join([*BESIDE_BASELINES, *(each.name for each in BASELINES)]) if args.baselines else args.policies
    if args.baselines and noise.model != "embedded":
        parser.error(f"--baselines: transformers has no model of the architecture of {noise.model!r}")
    examples, console = QUICK_EXAMPLES if args.quick else None, Console(stderr=True)
    torch.set_num_threads(args.threads)
    machine = {name: value for name, value in provenance().items() if name not in ("command", "revision")}
    basis = weights_basis(noise.model) | {"split": "test", "seed": args.seed, "canvas": CANVAS, "block": BLOCK}
    basis |= {"device": "cpu"} | machine
    try:
        variants = chosen(names, known)
        planned = [setting for group in settings(noise, known, examples) for setting in group]
        rows = Rows(path, basis, planned, lambda line: console.print(line, highlight=False, soft_wrap=True))
    except ValueError as error:
        parser.error(str(error))
    if args.fresh:
        rows.forget(variant.name for variant in variants)
    runtime = tiered.from_pretrained(noise.model, policy="none", device="cpu")
    # The first call pays for thread pools and the math library's workspaces.
    score_examples(runtime, [tasks.sample("copy", "test", 0)], max_new_tokens=CANVAS, block_length=BLOCK)

    def ask(setting: Setting, number: int) -> bool:
        row = rows.add(measure(runtime, setting, args.seed, noise.commits[setting.commit]), number)
        console.print(json.dumps(row), highlight=False, soft_wrap=True)
        return "why" not in row

    try:
        measure_rounds(rows, settings(noise, variants, examples), args.rounds, ask)
    except OtherAnswersError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    for commit in noise.commits:
        Console(width=240).print(screen_table(rows.in_order(), commit))
    floor = noise_floor(rows.in_order(), is_long)
    print(json.dumps(by_policy(rows.in_order()) | ({} if floor is None else {"noise_floor": floor})))


if __name__ == "__main__":
    main()
