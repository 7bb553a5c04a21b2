"""README.md and docs/: samples run, command lines name what exists, links lead somewhere, and pages are short. And the
English of docstrings."""

import ast
import importlib
import importlib.util
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import site_pages
from cards import pages

import tiered
from tiered.cli.main import build_parser, main
from tiered.models.locate import EMBEDDED_MODELS
from tiered.options import OPTION_NAMES
from tiered.policies.registry import POLICIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in [*pages(), ROOT / "CONTRIBUTING.md"]
}
with (ROOT / "pyproject.toml").open("rb") as file:
    PROJECT = tomllib.load(file)["project"]

# Samples that are not run, which pages call "python sketch", by the beginning of their first line, with the reason.
SKETCHES = {
    "class RowCode(Code)": "one line of a class that has more",
    "COMPILATIONS =": "compiles a kernel that does not exist",
    "import lm_eval": "downloads the harness's task; tests/test_evaluation_tasks.py has tasks of ours",
    "llada = tiered.from_pretrained(": "needs weights; tests/test_goldens.py has tiny ones",
    "sdar = tiered.from_pretrained(": "needs weights; tests/test_sdar_goldens.py has tiny ones",
    "llada2 = tiered.from_pretrained(": "needs weights; tests/test_mixture_goldens.py has tiny ones",
    "gemma = tiered.from_pretrained(": "needs weights; tests/test_diffusion_gemma.py has tiny ones",
    "client = openai.OpenAI(": "needs a server; tests/test_server.py starts one",
    "import ray": "needs a cluster; tests/test_ray.py starts one",
    "from ray import serve": "needs a cluster; tests/test_ray.py starts one",
}
# Lines of the first page that are parsed and not run, with the reason.
PARSED = {"tiered serve embedded --port 8000": "it serves until a signal comes; tests/test_server.py"}
# Words of a sentence, at most; pages with longer sentences, and with words for persons, and how many. May only fall.
LONGEST = 30
LONG = {"docs/embedded-model.md": 10, "docs/polestar.md": 3}
PERSONS = {"docs/embedded-model.md": 2}  # they are persons
ROOMS = ["api", "bench", *sorted(f.name for f in (ROOT / "tiered").iterdir() if f.is_dir() and "__" not in f.name)]
BANNED = r"^(?:[\w*, ]+: )?(?:what|whoever|who|those|where)\b(?!:)|\b(?:hangs? on|but for|told|hears?)\b|\bNone:"
# Modules whose names the samples of a page use without importing them, and code that runs after its samples.
MODULES = {
    "docs/adding.md": (
        "tiered.models.layout", "tiered.models.dream", "tiered.decoding.rules.threshold", "tiered.policies.base",
        "tiered.policies.row_schedule",
    )
}  # fmt: skip
THEN = {
    "docs/adding.md": """
runtime.with_policy(SpacedSuffix(suffix_interval=2)).generate(prompt, max_new_tokens=16, block_length=8)
runtime.generate(prompt, max_new_tokens=16, commit=Capped(most_per_step=2))
"""
}


class Block(NamedTuple):
    """A fenced or indented block of a page, and the line in front of its text."""

    text: str
    line: int
    kind: str


def blocks(page: str) -> Iterator[Block]:
    """An indented block is of kind "python" if it is Python, any other is of kind "sh"."""
    text = PAGES[page]
    for found in re.finditer(
        r"^```(?P<kind>[^\n]*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n|\n(?= {4}))+)",
        text,
        re.M | re.S,
    ):
        line = text[: found.start()].count("\n")
        if found["fenced"] is not None:
            yield Block(found["fenced"], line + 1, found["kind"])
        else:
            block = textwrap.dedent(found["indented"])
            yield Block(block, line, "python" if is_python(block) else "sh")


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def lines(page: str) -> Iterator[list[str]]:
    """The words of each command of a page."""
    for block in blocks(page):
        if block.kind == "sh":
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                for part in line.split(" && "):
                    if words := shlex.split(part, comments=True):
                        yield words


def test_every_sketch_has_a_reason():
    sketches = [block for page in PAGES for block in blocks(page) if block.kind == "python sketch"]
    assert len(sketches) == len(SKETCHES) and all(is_python(block.text) for block in sketches)
    assert all(any(block.text.startswith(head) for block in sketches) for head in SKETCHES)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.kind == "python" for block in blocks(page))])
def test_samples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """All samples of a page run in order, in one namespace. If a `print` has a comment, it prints that line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    names: dict[str, Any] = {"__name__": page, "tiered": tiered, "path": EMBEDDED_MODELS["embedded"]}
    if page != "README.md":
        prompts = ["sort: Nora Ben Ivan Cleo Hana Uma Tara Max Eva Pia Lena Gus", "reverse: Ada Ben Cleo"]
        names |= {"runtime": tiered.from_pretrained("embedded"), "prompt": prompts[0], "prompts": prompts}
    for module in MODULES.get(page, ()):
        names |= {name: value for name, value in vars(importlib.import_module(module)).items() if name[:2] != "__"}
    for block in blocks(page):
        if block.kind == "python":
            exec(compile("\n" * block.line + block.text, ROOT / page, "exec"), names)
            told = re.findall(r"^print\(.*\)  # (.+)$", block.text, re.M)
            printed = capsys.readouterr().out.splitlines()
            assert [line for line in printed if line in told] == told, printed
    exec(THEN.get(page, ""), names)


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_name_what_exists(page: str):
    parser, makefile = build_parser(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", makefile, re.M)
    for words in lines(page):
        match words:
            case ["tiered", *arguments]:
                parser.parse_args(arguments)
            case ["make", target, *_]:
                assert target in targets
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module)
            case ["python", script, *_] if script != "-c":
                assert (ROOT / script).is_file()
            case ["pip", "install", "torch", "--index-url", index]:
                assert f"TORCH_INDEX ?= {index}" in makefile
            case ["pip", "install", what]:
                assert re.fullmatch(r"\.(\[\w+\])?", what)
            case _:
                assert page != "README.md", words
    extras = re.findall(r"'\.\[([\w,]+)\]'", PAGES[page])
    assert {name for names in extras for name in names.split(",")} <= set(PROJECT["optional-dependencies"])


def test_command_lines_of_the_first_page_run(capsys: pytest.CaptureFixture[str]):
    ours = [words for words in lines("README.md") if words[0] == "tiered"]
    assert set(PARSED) < {shlex.join(words) for words in ours}
    for words in ours:
        if shlex.join(words) not in PARSED:
            assert main(words[1:]) == 0, capsys.readouterr().err


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        name, _, part = target.partition("#")
        file = ((ROOT / page).parent / name if name else ROOT / page).resolve()
        made = site_pages.PAGES.get(file.relative_to(ROOT / "docs").as_posix()) if "docs" in file.parts else None
        assert made or file.exists(), target
        if part:
            text = made() if made else file.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, re.M)
            assert part in [anchor(heading) for heading in headings], target


def test_the_citation_is_of_this_version():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def by_hand(page: str) -> str:
    """The text of a page without the tables that studies put there."""
    return re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", PAGES[page], flags=re.S)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str):
    words = 700 if page == "README.md" else 2500
    assert len(by_hand(page).split()) <= words


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's text, without code, tables and headings. Text in backticks counts as one word."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^(?:\||#|    |!\[).*$", "", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        yield from re.split(r"(?<=[.!?])(?:\*\*|\")?\s+(?=\S)", re.sub(r"`[^`]*`", "code", words))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_no_object_is_a_person(page: str):
    found = list(sentences(by_hand(page)))
    long = [sentence for sentence in found if len(sentence.split()) > LONGEST]
    assert len(long) <= LONG.get(page, 0), long
    persons = [s for s in found if re.search(r"\b(?:nobody|somebody|anybody|whoever|hangs? on)\b", s, re.I)]
    assert len(persons) <= PERSONS.get(page, 0), persons


def docstrings(room: str) -> Iterator[str]:
    """Docstrings as text of a page: without indented examples, and with a paragraph for each argument."""
    pattern = {"api": "tiered/*.py", "bench": "bench/**/*.py"}.get(room, f"tiered/{room}/**/*.py")
    for node in (node for file in ROOT.glob(pattern) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = re.sub(r"\n\n(?: +[^\n]*\n?)+", "\n\n", ast.get_docstring(node) or "")
            yield re.sub(r"\n +", "\n", re.sub(r"\n +(?=[\w*][\w*, ]*: )", "\n\n", text))


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_are_plain(room: str):
    found = [sentence for text in docstrings(room) for sentence in sentences(text)]
    bad = [s for s in found if len(s.split()) > LONGEST or re.search(BANNED, s, re.I)]
    assert not bad


def test_every_page_is_in_the_navigation():
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    docs = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert sorted(nav) == sorted(docs | set(site_pages.PAGES))


def test_pages_are_made_of_the_code():
    made = {name: make() for name, make in site_pages.PAGES.items()}
    assert all(f"| `{name}` |" in made["reference/options.md"] for name in OPTION_NAMES)
    assert all(f"### {name}\n" in made["reference/options.md"] for name, make in POLICIES.items() if make().defaults)
    assert all(f"`--{flag}`" in made["reference/cli.md"] for flag in ("memory", "max-new-tokens", "port", "context"))
    assert "| `tiered_moved_bytes_total` | counter | `source`, `destination` |" in made["reference/metrics.md"]
    assert "object at 0x" not in "".join(made.values())


def test_links_of_the_site():
    source = ROOT / "docs" / "measurements" / "x.md"
    text = "[a](../tiers.md#limits) ![b](../../bench/results/report/fastest.svg) [c](../../bench/report.py) [d](#e)"
    assert site_pages.turned(text, Path("measurements"), source) == (
        "[a](../tiers.md#limits) ![b](../pictures/fastest.svg) c [d](#e)"
    )
    readme = site_pages.turned("[a](docs/tiers.md) [b](CONTRIBUTING.md)", Path("."), ROOT / "README.md")
    assert readme == "[a](tiers.md) [b](contributing.md)"
