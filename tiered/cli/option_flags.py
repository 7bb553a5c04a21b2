"""Flags of the options of `generate`, from their dataclasses. Importing this module imports torch."""

import argparse
import inspect
import re
from collections import defaultdict
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from tiered.core.aliases import ALIASES, GIDD_ALIASES, resolve_aliases
from tiered.decoding.rules.registry import COMMIT_OPTIONS, COMMIT_RULES
from tiered.options import OPTION_NAMES, GenerationOptions

# Type of each option that a flag can carry: a number or a word. Switches have flags of their own.
_KINDS: dict[str, type] = {
    name: next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), str)
    for name, hint in get_type_hints(GenerationOptions).items()
    if bool not in (hint, *get_args(hint))
}
# Options that come first in the help.
_COMMON = ("max_new_tokens", "confidence_threshold", "temperature", "seed")
# Names in official scripts, with their types.
_OFFICIAL = {
    alias: _KINDS[name]
    for alias, name in (*ALIASES.items(), *GIDD_ALIASES.items())
    if name in _KINDS and alias not in _KINDS
}


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option, with its line of the dataclass's "Attributes" section as help."""
    own, sentences = parser.add_argument_group("options of generate"), attributes_of(GenerationOptions)
    sentences["commit"] += f"; rules: {', '.join(COMMIT_RULES)}"
    defaults = {field.name: field.default for field in fields(GenerationOptions)}
    for name in _KINDS.keys() - COMMIT_OPTIONS.keys():
        sentences[name] += _default(defaults[name])
    of_rules = parser.add_argument_group("options of commit rules")
    own.add_argument("--no-stop-at-eos", action="store_true", help="denoise every block, as the official scripts do")
    own.add_argument("--eos-early-stop", action=argparse.BooleanOptionalAction, help=_help(sentences["eos_early_stop"]))
    for name, kind in _KINDS.items():
        group, text = (of_rules, _of_rules(name)) if name in COMMIT_OPTIONS else (own, sentences[name])
        group = parser if name in _COMMON else group
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=_help(text))
    for name, kind in _OFFICIAL.items():
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        parser.add_argument(*flags, dest=name, type=kind, help=argparse.SUPPRESS)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given options of `Runtime.generate` under the library's own names. Raises `ValueError` for two names of one
    option with different values."""
    names = (*_KINDS, *_OFFICIAL, "eos_early_stop")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    # The mask token has no flag, so its id does not matter here.
    return {"stop_at_eos": not args.no_stop_at_eos, **resolve_aliases(given, OPTION_NAMES, mask_token_id=0)}


def attributes_of(cls: type) -> dict[str, str]:
    """The lines of a docstring's "Attributes" section, by name; "" for other names, and for all under `python -OO`."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    told = re.findall(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    sentences = {name: " ".join(text.split()).removesuffix(".") for names, text in told for name in names.split(", ")}
    return defaultdict(str, sentences)


def _help(text: str) -> str:
    # A flag is never None: it is not given.
    return text.replace(". None for ", ". Not given: ").replace("None for ", "not given: ").replace("%", "%%")


def _of_rules(name: str) -> str:
    """Help of the option `name` from the first rule that has it, with the default if all rules share it."""
    rules = [(rule, field) for rule in COMMIT_RULES.values() for field in fields(rule) if field.name == name]
    text, defaults = attributes_of(rules[0][0])[name], {field.default for _, field in rules}
    names = ", ".join(rule.name for rule, _ in rules)
    return f"under {names}: {text}{_default(defaults.pop()) if len(defaults) == 1 else ''}"


def _default(value: object) -> str:
    return "" if value is None or value is MISSING else f" (default: {value})"
