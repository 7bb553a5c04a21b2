"""Hooks of mkdocs (mkdocs.yml): the pages that are made of the code at each build, and links out of docs/."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import tiered
from tiered.cli.call import CommandParser
from tiered.cli.main import build_parser
from tiered.cli.option_flags import attributes_of
from tiered.decoding.rules.registry import COMMIT_OPTIONS, COMMIT_RULES
from tiered.options import GenerationOptions
from tiered.policies.registry import POLICIES
from tiered.serving.metrics import registry_of
from tiered.serving.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Pages of the root, by their name on the site.
OF_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def commands() -> str:
    """Every command with its flags, from argparse."""
    parts = ["# Command line\n"]
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in subparsers.choices.items():
        if isinstance(command, CommandParser) and command.late is not None:
            command.late(command)  # flags that a command adds when it is asked for
        parts.append(f"## tiered {name}\n\n{' '.join((command.description or '').split())}\n")
        for group in command._action_groups:
            rows = [
                [_code(", ".join(action.option_strings) or str(action.metavar or action.dest)), _help(action)]
                for action in group._group_actions
                if action.help != argparse.SUPPRESS and "--help" not in action.option_strings
            ]
            if rows:
                title = group.title if group.title not in ("options", "positional arguments") else "flag"
                parts.append(_table([title or "flag", "meaning"], rows))
    return "\n".join(parts)


def _help(action: argparse.Action) -> str:
    # argparse fills its own marks in; `%` is doubled in help.
    return ((action.help or "") % {"default": action.default, "prog": "tiered"}).strip()


def options() -> str:
    """The options of `generate`, of commit rules and of policies, from their dataclasses."""
    parts = ["# Options\n", "## Of generate\n"]
    parts.append(
        _options(GenerationOptions, {f.name: f.default for f in fields(GenerationOptions)}, but=COMMIT_OPTIONS)
    )
    parts.append("## Of commit rules\n\n[What each does](../commit-rules.md).\n")
    for name, rule in COMMIT_RULES.items():
        if own := {field.name: field.default for field in fields(rule)}:
            parts.append(f"### {name}\n\n{_options(rule, own)}")
    parts.append("## Of policies\n\n[What each does](../policies.md).\n")
    for name, make in POLICIES.items():
        policy = make()
        if own := policy.defaults:
            parts.append(f"### {name}\n\n{_options(type(policy), own)}")
    return "\n".join(parts)


def _options(cls: type, defaults: Mapping[str, Any], but: Iterable[str] = ()) -> str:
    told = attributes_of(cls)
    rows = [
        [
            _code(name),
            "must be given" if default is MISSING else _code(repr(default)),
            told[name].replace("docs/models.md", "[models](../models.md)"),
        ]
        for name, default in defaults.items()
        if name not in but
    ]
    return _table(["option", "default", "meaning"], rows)


def metrics() -> str:
    """The metrics of `/metrics`, from a server's registry."""
    with tiered.from_pretrained("embedded", memory="64MiB") as runtime:
        found = list(registry_of(Scheduler(runtime)).collect())
    rows = [
        [
            _code(metric.name + "_total" * (metric.type == "counter")),
            metric.type,
            ", ".join(map(_code, getattr(metric, "_labelnames", ()))),
            metric.documentation,
        ]
        for metric in found
    ]
    return "# Metrics\n\n`tiered serve` answers `/metrics` in Prometheus' format.\n\n" + _table(
        ["metric", "type", "labels", "meaning"], rows
    )


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


# Functions that make the text of a page, by its name on the site.
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": commands,
    "reference/options.md": options,
    "reference/metrics.md": metrics,
    **{name: partial((ROOT / source).read_text, encoding="utf-8") for name, source in OF_ROOT.items()},
}


def turned(text: str, folder: Path, source: Path) -> str:
    """`text` with its links as the site needs them. `folder`: folder of the page on the site; `source`: its file.

    Links to pages of docs/ and of the root stay links. Pictures elsewhere come along (`pictures_of`). A link to another
    file of the repository becomes its words.
    """

    def replace(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        name, mark, part = target.partition("#")
        if "://" in target or not name:
            return found[0]
        file = (source.parent / name).resolve()
        if file.is_relative_to(DOCS):
            there = file.relative_to(DOCS)
        elif file.parent == ROOT and file.name in OF_ROOT.values():
            there = Path(next(page for page, source in OF_ROOT.items() if source == file.name))
        elif file.suffix == ".svg":
            there = Path("pictures", file.name)
        else:
            return words
        return f"{picture}[{words}]({os.path.relpath(there, folder)}{mark}{part})"

    return LINK.sub(replace, text)


def pictures_of(text: str, source: Path) -> Iterator[Path]:
    """Pictures outside docs/ that `text` shows."""
    for picture, _, target in LINK.findall(text):
        file = (source.parent / target).resolve()
        if picture and not file.is_relative_to(DOCS):
            yield file


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, made in PAGES.items():
        files.append(File.generated(config, name, content=made()))
    for page in DOCS.rglob("*.md"):
        for picture in pictures_of(page.read_text(encoding="utf-8"), page):
            if files.get_file_from_path(f"pictures/{picture.name}") is None:
                files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    source = ROOT / OF_ROOT[name] if name in OF_ROOT else DOCS / name
    # "python sketch" marks samples that tests do not run.
    return turned(markdown.replace("```python sketch", "```python"), Path(name).parent, source)
