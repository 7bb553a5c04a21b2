"""What each file may import and touch, read from its syntax tree."""

import ast
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room → the rooms it may import. One way only, so that each can be read, tested and replaced without those above it.
MAY_IMPORT = {
    "bench": {"tiered", "clustering", "offload", "kernels"},
    "tiered": {"tiered", "clustering", "offload", "kernels"},
    "clustering": {"clustering", "kernels"},
    "offload": {"offload", "kernels"},
    "kernels": {"kernels"},
}
FILES = {room: sorted((ROOT / room).rglob("*.py")) for room in MAY_IMPORT}
# No tensors, so that a plan costs no import of torch and a state machine can check them.
BOOKS = [
    "tiered/budget.py",
    "tiered/byte_size.py",
    "tiered/errors.py",
    "tiered/features.py",
    "tiered/ledger.py",
    "tiered/memory_report.py",
    "tiered/names.py",
    "tiered/hidden/members.py",
    "tiered/hidden/options.py",
    "tiered/hidden/update_log.py",
    "tiered/models/shape.py",
    "tiered/models/*_config.py",
    "tiered/paging/page_book.py",
    "tiered/paging/pages.py",
    "tiered/planning/*.py",
    "tiered/tiers/events.py",
    "tiered/tiers/eviction.py",
    "tiered/tiers/record.py",
    "tiered/tiers/record_book.py",
    "tiered/tiers/stats.py",
    "tiered/tracing/chrome_trace.py",
    "tiered/tracing/op_times.py",
    "tiered/tracing/ops.py",
    "tiered/tracing/recorder.py",
    "tiered/tracing/spans.py",
    "tiered/tracing/trace_report.py",
    "offload/codec_bytes.py",
    "offload/ring_books.py",
    "offload/slabs.py",
    "clustering/allocation.py",
    "clustering/pieces.py",
    "kernels/byte_segments.py",
    "kernels/record_layout.py",
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


def upward(names: Iterable[str], room: str) -> list[str]:
    """Those of the imported `names` that a file of `room` must not import."""
    wrong = []
    for name in names:
        first, second, *_ = [*name.split("."), ""]
        if first in ("tests", *MAY_IMPORT) and first != "tiered":
            wrong.append(name)  # our folders have no name outside `tiered`; bench/ and tests/ are for nobody
        elif first == "tiered" and (second if second in MAY_IMPORT else "tiered") not in MAY_IMPORT[room]:
            wrong.append(name)
    return wrong


def accelerators(tree: ast.AST) -> list[str]:
    """What `tree` uses of torch.cuda, cupy and triton."""
    found = [name for name in imports(ast.walk(tree), "") if f"{name}.".startswith(("cupy.", "triton.", "torch.cuda."))]
    return found + [ast.unparse(node) for node in ast.walk(tree) if is_attribute(node, "torch", "cuda")]


def unsafe(tree: ast.AST) -> list[str]:
    """What in `tree` could run code that comes with a checkpoint."""
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


def tensors_behind(path: Path, via: tuple[str, ...] = ()) -> str | None:
    """How importing `path` brings a tensor library, as "a > b > torch"; None where it brings none."""
    via = (*via, module_name(path))
    for name in imports(run_on_import(parsed(path)), package_of(path)):
        if name.split(".")[0] in TENSORS:
            return " > ".join([*via, name])
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name and name not in via and (found := tensors_behind(MODULES[name], via)):
            return found
    return None


def offenders(room: str, check: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """What `check` finds in the files of `room`."""
    return {str(path.relative_to(ROOT)): found for path in FILES[room] if (found := check(parsed(path)))}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_nothing_imports_upward(room: str):
    wrong = {module_name(path): upward(imports(ast.walk(parsed(path)), package_of(path)), room) for path in FILES[room]}
    assert not {name: found for name, found in wrong.items() if found}


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
    ("room", "package", "source", "wrong"),
    [
        ("kernels", "tiered.kernels", "from tiered.offload import ring", ["tiered.offload.ring"]),
        ("kernels", "tiered.kernels", "from ..offload import ring", ["tiered.offload.ring"]),
        ("kernels", "tiered.kernels", "from .. import ledger", ["tiered.ledger"]),
        ("kernels", "tiered.kernels", "from .rows import f\nimport torch", []),
        ("offload", "tiered.offload", "import tiered.ledger", ["tiered.ledger"]),
        ("offload", "tiered.offload", "import tiered.clustering.layout", ["tiered.clustering.layout"]),
        ("clustering", "tiered.clustering", "def f():\n    import tiered", ["tiered"]),
        ("clustering", "tiered.clustering", "import tiered.kernels.assign", []),
        ("tiered", "tiered.models", "from . import shape\nfrom ..offload.arena import Arena", []),
        ("tiered", "tiered", "import kernels.assign", ["kernels.assign"]),
        ("tiered", "tiered", "from bench import demo", ["bench.demo"]),
        ("bench", "bench", "import tiered\nfrom tiered.kernels import x", []),
        ("bench", "bench", "import offload\nimport tests.x", ["offload", "tests.x"]),
    ],
)
def test_upward_imports_are_seen(room: str, package: str, source: str, wrong: list[str]):
    assert upward(imports(ast.walk(ast.parse(source)), package), room) == wrong


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
    assert (tensors_behind(ROOT / "tiered/forward.py") or "").startswith("tiered.forward > torch")


def test_what_runs_on_import():
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
