"""Imports and calls that each file may have, read from its syntax tree."""

import ast
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The rooms from top to bottom. A file imports from its own room and from rooms below it, so that each can be read,
# tested and replaced without those above it. `tiered/*.py` are one room, the API.
ORDER = [
    *("bench", "cli", "evaluation", "ray", "serving", "observe", "api", "planning", "decoding", "policies", "forward"),
    *("tiers", "models", "embedded", "core", "clustering", "offload", "kernels"),
]
TOP = ["tiered", "clustering", "offload", "kernels"]
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ["bench", *TOP]}
# No tensors, so that a state machine can check them, and a command line tells its options at once.
BOOKS = [
    "tiered/core/budget.py",
    "tiered/core/byte_size.py",
    "tiered/core/errors.py",
    "tiered/core/features.py",
    "tiered/core/ledger.py",
    "tiered/core/memory_report.py",
    "tiered/policies/polestar/members.py",
    "tiered/policies/polestar/update_log.py",
    "tiered/models/shape.py",
    "tiered/models/config_fields.py",
    "tiered/models/layout.py",
    "tiered/models/rotation.py",
    "tiered/forward/chunks.py",
    "tiered/forward/stream_bytes.py",
    "tiered/planning/streamed_layers.py",
    "tiered/core/events.py",
    "tiered/tiers/parts.py",
    "tiered/tiers/record_bytes.py",
    "tiered/tiers/stats.py",
    "tiered/core/ops.py",
    "tiered/core/spans.py",
    "kernels/row_code.py",
    "offload/codec_bytes.py",
    "offload/copy_segments.py",
    "offload/lane.py",
    "offload/size_class.py",
    "clustering/allocation.py",
    "kernels/row_code.py",
]
TENSORS = {"torch", "transformers", "safetensors", "cupy", "triton"}


def module_name(path: Path) -> str:
    """The name that `path` is imported under: `kernels/x.py` is `tiered.kernels.x`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in ("tiered", "bench") else ("tiered", *parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for paths in FILES.values() for path in paths}


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    """Dotted names that `nodes`, code of `package`, import: `from a.b import c` is `a.b.c`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
            start = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str:
    """The package that relative imports in `path` start from."""
    return module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in `node` that importing it runs: not those inside functions or for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_on_import(child)


def room_of(name: str) -> str:
    """The room that the module `name` is in; "" if it is no module of ours."""
    first, second, third, *_ = [*name.split("."), "", ""]
    if first != "tiered":
        return first if first == "bench" else ""
    if second == "__main__":
        return "cli"
    return second if third or second in ORDER else "api"


def module_behind(name: str) -> str:
    """The module of ours that `name`, perhaps something in it, comes from; "" if it is not ours."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def upward(names: Iterable[str], importer: str) -> list[str]:
    """The imported `names` that the module `importer` must not import."""
    wrong = []
    for name in names:
        if name.split(".")[0] in ("bench", "tests", *TOP[1:]):
            wrong.append(name)  # our folders have no name outside `tiered`; no room may import bench/ and tests/
        elif (room := room_of(module_behind(name))) and ORDER.index(room) < ORDER.index(room_of(importer)):
            wrong.append(name)
    return wrong


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of two or more nodes of which each leads to every other."""

    def reach(start: str) -> set[str]:
        seen, ahead = set[str](), [start]
        while ahead:
            for other in arrows.get(ahead.pop(), set()) - seen:
                seen.add(other)
                ahead.append(other)
        return seen

    reached = {node: reach(node) for node in arrows}
    groups = {
        tuple(sorted(other for other in seen if node in reached.get(other, ()))) for node, seen in reached.items()
    }
    return sorted([*group] for group in groups if len(group) > 1)


def accelerators(tree: ast.AST) -> list[str]:
    """Uses of torch.cuda, cupy and triton in `tree`."""
    found = [name for name in imports(ast.walk(tree), "") if f"{name}.".startswith(("cupy.", "triton.", "torch.cuda."))]
    return found + [ast.unparse(node) for node in ast.walk(tree) if is_attribute(node, "torch", "cuda")]


def unsafe(tree: ast.AST) -> list[str]:
    """Code in `tree` that could run code of a checkpoint."""
    picklers = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    found = [name for name in imports(ast.walk(tree), "") if name.split(".")[0] in picklers or name == "torch.load"]
    for node in ast.walk(tree):
        if is_attribute(node, "torch", "load") or (
            isinstance(node, ast.keyword)
            and node.arg in ("trust_remote_code", "allow_pickle")
            and ast.unparse(node.value) != "False"
        ):
            found.append(ast.unparse(node))
    return found


def is_attribute(node: ast.AST, owner: str, name: str) -> bool:
    """Whether `node` reads `owner.name`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    )


@cache
def imported_with(path: Path) -> list[str]:
    """Dotted names that importing `path` imports at once."""
    return [*imports(run_on_import(parsed(path)), package_of(path))]


def tensors_behind(path: Path) -> str | None:
    """How importing `path` brings a tensor library, as "a > b > torch", by the fewest files. If it brings none, the
    result is None."""
    ways, seen = [[module_name(path)]], {module_name(path)}
    for way in ways:
        for name in imported_with(MODULES[way[-1]]):
            if name.split(".")[0] in TENSORS:
                return " > ".join([*way, name])
            if (name := module_behind(name)) and name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return None


def offenders(room: str, check: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """Findings of `check` in the files of `room`."""
    return {str(path.relative_to(ROOT)): found for path in FILES[room] if (found := check(parsed(path)))}


@pytest.mark.parametrize("folder", FILES)
def test_imports_run_down_the_order_of_rooms(folder: str):
    # Imports for the type checker alone and imports inside functions count as well.
    wrong = {
        name: upward(imports(ast.walk(parsed(path)), package_of(path)), name)
        for name, path in MODULES.items()
        if path in FILES[folder]
    }
    assert not {name: found for name, found in wrong.items() if found}


def test_no_files_form_a_circle():
    arrows = {
        name: {module_behind(one) for one in imports(ast.walk(parsed(path)), package_of(path))} - {"", name, "tiered"}
        for name, path in MODULES.items()
    }
    assert not circles(arrows)


def test_every_room_is_in_the_order():
    assert {room_of(name) for name in MODULES} == {*ORDER}


@pytest.mark.parametrize("room", ["tiered", "clustering"])
def test_only_offload_and_kernels_touch_the_accelerator(room: str):
    assert not offenders(room, accelerators)


@pytest.mark.parametrize("room", ["tiered", "clustering", "offload", "kernels"])
def test_no_code_comes_with_a_checkpoint(room: str):
    assert not offenders(room, unsafe)


@pytest.mark.parametrize("pattern", BOOKS)
def test_books_load_no_tensors(pattern: str):
    books = sorted(ROOT.glob(pattern))
    assert books, f"no file is named {pattern}"
    assert not [way for book in books if (way := tensors_behind(book))]


@pytest.mark.parametrize(
    ("importer", "source", "wrong"),
    [
        ("tiered.kernels.launch", "from tiered.offload import ring", ["tiered.offload.ring"]),
        ("tiered.kernels.launch", "from ..offload import ring", ["tiered.offload.ring"]),
        ("tiered.kernels.launch", "from .. import core", ["tiered.core"]),
        ("tiered.kernels.launch", "from .choice import f\nimport torch", []),
        ("tiered.offload.ring", "import tiered.clustering.tiles", ["tiered.clustering.tiles"]),
        ("tiered.clustering.tiles", "import tiered.kernels.choice\nfrom tiered.offload import ring", []),
        ("tiered.models.base", "from . import shape\nfrom ..offload.ring import Ring", []),
        (
            "tiered.policies.base",
            "if TYPE_CHECKING:\n    from tiered.runtime import Runtime",
            ["tiered.runtime.Runtime"],
        ),
        ("tiered.forward.forward", "def f():\n    from tiered.policies import base", ["tiered.policies.base"]),
        ("tiered.runtime", "import tiered.policies.base, tiered.loading\nimport tiered.cli.main", ["tiered.cli.main"]),
        ("tiered.runtime", "import kernels.assign\nfrom bench import demo", ["kernels.assign", "bench.demo"]),
        ("bench.demo", "import tiered\nfrom tiered.cli import main\nimport offload, tests.x", ["offload", "tests.x"]),
    ],
)
def test_upward_imports_are_seen(importer: str, source: str, wrong: list[str]):
    package = importer.rpartition(".")[0]
    assert upward(imports(ast.walk(ast.parse(source)), package), importer) == wrong


def test_circles_are_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    "source",
    [
        *("torch.cuda.Stream()", "import torch.cuda", "from torch import cuda", "from torch.cuda import Event"),
        *("import cupy as cp", "def f():\n    import triton.language as tl"),
    ],
)
def test_accelerators_are_seen(source: str):
    assert accelerators(ast.parse(source))
    assert not accelerators(ast.parse("import cupyx_like, tritonic\ntorch.cpu.Stream()\nx.cuda()"))


@pytest.mark.parametrize(
    "source",
    [
        *("torch.load(path)", "from torch import load", "import pickle", "from pickle import loads"),
        *("load(x, trust_remote_code=True)", "load(x, trust_remote_code=flag)", "np.load(x, allow_pickle=True)"),
    ],
)
def test_unsafe_loading_is_seen(source: str):
    assert unsafe(ast.parse(source))
    assert not unsafe(ast.parse("json.load(file)\nload(x, trust_remote_code=False)"))


def test_the_way_to_a_tensor_library_is_named():
    assert (tensors_behind(ROOT / "tiered/forward/forward.py") or "").startswith("tiered.forward.forward > torch")


def test_nodes_that_run_on_import():
    source = """
        import a
        if TYPE_CHECKING:
            import for_the_checker
        def f():
            import late
        class C:
            import b
            def g(self):
                import late
        try:
            import c
        except ImportError:
            pass
    """
    tree = ast.parse(textwrap.dedent(source))
    assert sorted(imports(run_on_import(tree), "")) == ["a", "b", "c"]
