"""Standard output of a command: its text, or with `--json` one line of JSON, and nothing else."""

import argparse
import json
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which means the same in every command."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON with all figures in place of text")


def print_result(args: argparse.Namespace, text: object, record: Mapping[str, Any]) -> None:
    """Print `text`, or with `--json` the `record`.

    On a terminal, control characters other than line breaks and tabs become �, because the terminal would execute those
    that a model writes. In a pipe or a file the text stays as it is.
    """
    if args.json:
        print(json.dumps(record))
    else:
        print(_harmless(str(text)) if sys.stdout.isatty() else text)


def _harmless(text: str) -> str:
    lines = text.replace("\r\n", "\n")
    return "".join(_UNPRINTABLE if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in lines)
