"""The command line of bench/gpu_day.py."""

import argparse
import re
from pathlib import Path

from gpu_parts.part import PARTS, Part, part_named

RESULTS = Path(__file__).resolve().parents[1] / "results"
MINUTES = 9.0


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default: {MINUTES:g})")
    parser.add_argument(
        "--parts", default=None, metavar="LIST", help=f"some alone: {', '.join(part.name for part in PARTS[1:])}"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="default: bench/results/gpu")
    parser.add_argument("--label", default="", help="behind the device's name in the file's, such as before")
    parser.add_argument("--replace", action="store_true", help="write over the file of another day")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; needs --out")
    parser.add_argument("--show", type=Path, default=None, metavar="FILE", help="only the summary of this file")
    parser.add_argument("--worker", metavar="COMMAND", help="another command for the process of a part")
    return parser


def parts_of(names: str | None) -> list[Part]:
    """The parts that were asked for, in the order of `PARTS`, the machine always first.

    Raises:
        ValueError: with the nearest name, where one is unknown.
    """
    if names is None:
        return list(PARTS)
    asked = {part_named(name.strip()) for name in names.split(",")}
    return [part for part in PARTS if part in asked or part is PARTS[0]]


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the folder filled in, and made absolute. Raises `ValueError` with what is wrong in them."""
    if not 0 < args.minutes < float("inf"):
        raise ValueError(f"--minutes {args.minutes:g}; a number above 0 is allowed")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}; a whole number from 0 to {2**63 - 1} is allowed")
    if not re.fullmatch(r"[A-Za-z0-9._-]*", args.label):
        raise ValueError(f"--label {args.label!r}; letters, digits, '.', '_' and '-' are allowed")
    if args.rehearse and args.out is None:
        raise ValueError("--rehearse needs --out FOLDER: what it measures means nothing")
    args.out = (RESULTS / "gpu" if args.out is None else args.out).resolve()
    if args.rehearse and args.out.is_relative_to(RESULTS):
        raise ValueError(f"--rehearse --out {args.out}; any folder but {RESULTS} is allowed")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out}; a folder is allowed")
    return args


def slug(device: str) -> str:
    """The name of a device as a file has it: `nvidia-h100-80gb-hbm3`."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
