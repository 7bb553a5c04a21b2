"""Train an embedded model on CPU.

    python bench/train_embedded.py --out runs/embedded                         # train
    python bench/train_embedded.py --out runs/embedded --resume                # go on after an interruption
    python bench/train_embedded.py --out runs/embedded --resume --export DIR   # and write a checkpoint to load
    python bench/measure.py accuracy --model DIR --out DIR/accuracy            # measure it on the test split
    python bench/train_embedded.py --config embedded-uniform --out runs/uniform    # the one with uniform noise
    python bench/train_embedded.py --config embedded-blocks --start embedded --out runs/blocks    # that sees blocks

`training` and docs/embedded-training.md describe the training. A run uses `--workers` cores, one for each batch of a
step. It validates on the validation split alone.
"""

import argparse
import ctypes
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from measuring.provenance import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from training.export import export
from training.loop import train
from training.settings import Settings
from training.trainer import Trainer

import tiered
from tiered.models.locate import read_config

# Parameters of glibc's mallopt: bytes kept free at the top of the heap; allocations by mmap; arenas.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_pages() -> None:
    """Let the allocator keep memory that a step frees: tens of megabytes come and go at every step.

    All threads share one arena, because heaps of other arenas are given back whatever is set.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument(
        "--start", metavar="MODEL", help="begin with these weights, which know the answers of one block"
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the averaged weights there in the end")
    parser.add_argument(
        "--config",
        default="embedded",
        help="an embedded model, or the path of another config.json of LLaDA, GIDD or SDAR",
    )
    # The optimizers' matrices are small: if other processes run, two threads wait for each other most of the time.
    parser.add_argument("--threads", type=int, default=1, help="of everything but the batches of a step")
    for setting in fields(Settings):
        parser.add_argument(f"--{setting.name.replace('_', '-')}", type=int, default=setting.default)
    return parser.parse_args()


def main() -> None:
    args = parse()
    keep_pages()
    torch.set_num_threads(args.threads)
    config = read_config(args.config)
    settings = Settings(**{setting.name: getattr(args, setting.name) for setting in fields(Settings)})
    trainer, checkpoint = Trainer(config, settings), args.out / "checkpoint.safetensors"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start:
        trainer.start_from(tiered.from_pretrained(args.start, device="cpu").model)
    if args.resume and checkpoint.exists():
        trainer.restore(checkpoint)
    elif checkpoint.exists():
        raise SystemExit(f"{checkpoint} is there already: add --resume to go on from it, or choose another --out")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, (args.out / "log.jsonl").open("a") as file:

        def log(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            progress.console.print(json.dumps(line), highlight=False, soft_wrap=True)

        bar = progress.add_task("training", total=settings.steps, completed=trainer.standing.step)
        train(trainer, checkpoint, log=log, advance=lambda step: progress.update(bar, completed=step))
    summary = asdict(trainer.standing)
    if args.export:
        report = provenance() | {"settings": asdict(settings), "split": "validation"} | summary
        export(trainer.average, config, args.export, report)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
