"""README.md and docs/: their Python runs, and the pages and modules that they and the code name exist.

A block that needs more than the embedded model is marked "```python sketch": it is only parsed, and its imports made.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiered

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python( sketch)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOLDERS = ("tiered", "bench", "kernels", "offload", "clustering", "tests")
PROMPT = "sort: Nora Ben Ivan Cleo Eva Gus Ada Hana Leo Mia Dora Finn Kai Lara Olga Paul"


def blocks(*, sketch: bool) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if bool(found[1]) is sketch:
                yield pytest.param(found[2], id=f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}")


@pytest.fixture(scope="module")
def runtime() -> tiered.Runtime:
    return tiered.from_pretrained("embedded")


@pytest.mark.parametrize("code", list(blocks(sketch=False)))
def test_python_of_the_pages_runs(code: str, runtime: tiered.Runtime):
    exec(code, {"tiered": tiered, "runtime": runtime, "prompt": PROMPT})


@pytest.mark.parametrize("code", list(blocks(sketch=True)))
def test_sketches_parse_and_import_what_exists(code: str):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tiered"):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_pages_that_are_named_exist():
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    named = {
        (path, page) for path in files for page in re.findall(r"\bdocs/[\w.-]+\.(?:md|svg)", path.read_text("utf-8"))
    }
    linked = {
        (path, str((path.parent / page).resolve().relative_to(ROOT)))
        for path in PAGES
        for page in re.findall(r"\]\(((?!https?:)[\w./-]+)", path.read_text("utf-8"))
    }
    assert len(named) > 20 and len(linked) > 50
    assert [(path.name, page) for path, page in sorted(named | linked) if not (ROOT / page).exists()] == []
