"""Every Triton kernel compiles ahead of time, none spills unawares, and each has a reference.

tests/compilations lists the specialisations. In short, one of each kernel for the H100; in long, all of them for every
architecture.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiered.kernels.choice import for_device

TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "kernels"

# Runs where TRITON_INTERPRET is unset: the interpreter's kernels cannot be compiled. Prints errors by name.
COMPILE = """
import importlib.util, json, re, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# They vary from layer to layer: where one is 1, or a multiple of 16, Triton would compile a kernel anew.
COUNTS = {"span", "splits", "sums"}
# Of one program.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def copied_in_loops(ptx, threads):
    # Bytes that go to shared memory past the registers in loops, one turn of each.
    lines = ptx.splitlines()
    labels = {line.split(":")[0].strip(): at for at, line in enumerate(lines) if re.match(r"\\s*\\$\\w+:", line)}
    jumps = ((at, re.search(r"\\bbra(?:\\.uni)?\\s+(\\$\\w+)", line)) for at, line in enumerate(lines))
    loops = [range(labels[jump[1]], at) for at, jump in jumps if jump and labels[jump[1]] < at]
    found = ((at, re.search(r"cp\\.async\\.c[ag]\\.[^,]*,[^,]*, (\\w+)", line)) for at, line in enumerate(lines))
    return threads * sum(int(copy[1], 0) for at, copy in found if copy and any(at in loop for loop in loops))


failures, compiled = {}, 0
architecture, every, paths = json.loads(sys.argv[1])
for path in map(Path, paths):
    spec = importlib.util.spec_from_file_location(f"compiled.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not module.COMPILATIONS:
            raise ValueError("COMPILATIONS is empty")
    except Exception as error:
        failures[path.stem] = repr(error)
        continue
    of_kernel = {wanted.kernel: (i, wanted) for i, wanted in reversed(list(enumerate(module.COMPILATIONS)))}
    chosen = enumerate(module.COMPILATIONS) if every else of_kernel.values()
    for i, wanted in chosen:
        name = f"{path.stem}.{wanted.kernel.__name__}[{i}] for sm_{architecture}"
        try:
            special = [of.name for of in wanted.kernel.params if of.name in COUNTS and not of.do_not_specialize]
            if special:
                raise ValueError(f"specialised by {special}, which do_not_specialize has to name")
            source = ASTSource(wanted.kernel, wanted.signature, dict(wanted.constexprs), wanted.attributes)
            options = {"num_warps": wanted.num_warps, "num_stages": wanted.num_stages}
            options["enable_fp_fusion"] = wanted.fp_fusion
            if not wanted.spills:
                options["ptx_options"] = "--warn-on-spills --warning-as-error"
            binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            if binary.metadata.shared > (allowed := SHARED_BYTES[architecture]):
                raise ValueError(f"{binary.metadata.shared} bytes of shared memory; {allowed} are allowed")
            if (copied := copied_in_loops(binary.asm["ptx"], 32 * wanted.num_warps)) < wanted.copied:
                raise ValueError(f"its loops copy {copied} bytes past the registers; {wanted.copied} are needed")
            loads = len(re.findall(r"\\bld\\.global[.\\w:]*\\.[bsu]8\\b", binary.asm["ptx"]))
            if loads > wanted.byte_loads:
                raise ValueError(f"it loads {loads} times one byte; {wanted.byte_loads} are allowed")
            compiled += 1
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"failures": failures, "compiled": compiled}))
"""

KERNEL = """
import triton
import triton.language as tl
from specialisation import Compilation

OUTSIDE = 1.0

@triton.jit
def kernel(source, target):
    at = tl.arange(0, 128)
    {body}

COMPILATIONS = {compilations}
"""
POINTERS = {"source": "*u8", "target": "*fp32"}
ONCE = f"(Compilation(kernel=kernel, types={POINTERS}),)"
COPY = "tl.store(target + at, tl.load(source + at).to(tl.float32))"
# Constructs that the interpreter runs or never sees, and sm_90 refuses.
REFUSED = {
    "e2m1_conversion": "x = tl.load(source + at).to(tl.int16)\n    "
    'asm: tl.constexpr = "{ .reg .b8 x; cvt.u8.u16 x, $1; cvt.rn.f16x2.e2m1x2 $0, x; }"\n    '
    'tl.store(target + at, tl.inline_asm_elementwise(asm, "=r,h", [x], tl.int32, True, 1).to(tl.float32))',
    "range_of_48": "tl.store(target + tl.arange(0, 48), 0.0)",
    "product_of_8": "tl.store(target + tl.arange(0, 8)[:, None] + tl.arange(0, 8), "
    "tl.dot(tl.zeros([8, 8], tl.float32), tl.zeros([8, 8], tl.float32)))",
    "global_of_the_module": "tl.store(target + at, OUTSIDE)",
    "spills": "many = tl.arange(0, 65536)\n    x = tl.load(target + many)\n    tl.store(target + many, x * tl.sum(x))",
    "shared_memory": "inner = tl.arange(0, 2048)\n    out = tl.arange(0, 16)\n    "
    "x = tl.load(target + out[:, None] * 2048 + inner)\n    y = tl.load(target + inner[:, None] * 16 + out)\n    "
    "tl.store(target + out[:, None] * 16 + out, tl.dot(x, y))",
}

SOURCES = {name: KERNEL.format(body=body, compilations=ONCE) for name, body in REFUSED.items()} | {
    "empty": KERNEL.format(body=COPY, compilations="()"),
    "unlisted": KERNEL.format(body=COPY, compilations="()").replace("COMPILATIONS", "OTHER"),
    "bytes": KERNEL.format(body=COPY, compilations=ONCE),
    "good": KERNEL.format(body=COPY, compilations=f"({ONCE[1:-2].removesuffix(')')}, byte_loads=1),)"),
}
SOURCES["counts"] = SOURCES["good"].replace("kernel(source, target)", "kernel(source, target, splits)")
SOURCES["counts"] = SOURCES["counts"].replace("'target': '*fp32'", "'target': '*fp32', 'splits': 'i32'")
SOURCES["shared_memory"] = SOURCES["shared_memory"].replace("kernel=kernel,", "kernel=kernel, spills=True,")


def ops() -> list[Path]:
    """The files of kernels/ that launch a Triton kernel: they import triton or `launch`, and some function of theirs is
    not `triton.jit`. An error in another file's function shows in the kernels that use it."""
    return [path for path in sorted(KERNELS.glob("*.py")) if not path.stem.endswith("_ref") and is_op(parsed(path))]


def listed() -> list[Path]:
    """The module of each op's specialisations."""
    return [TESTS / "compilations" / path.name for path in ops()]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_op(tree: ast.Module) -> bool:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorated = [any("triton.jit" in ast.unparse(mark) for mark in function.decorator_list) for function in functions]
    names = set(imported(tree))
    launches = "tiered.kernels.launch.launch" in names or any(name.split(".")[0] == "triton" for name in names)
    return launches and not all(decorated)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def compile_ahead(paths: list[Path], cache: Path, *, architecture: int = 90, every: bool = False) -> dict:
    """Errors of failed compilations by name, and the number of the others. The modules at `paths` list them. Unless
    `every` is set, the first one of each kernel is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(TESTS / "compilations"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    asked = json.dumps([architecture, every, [str(path) for path in paths]])
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, asked],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def triton_is_installed():
    pytest.importorskip("triton")


def test_the_modules_are_found():
    named = {"scatter_rows", "block_attention", "decode_rows", "weight_product"}
    assert named <= {path.stem for path in ops()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import triton\n@triton.jit\ndef _f(): ...\ndef f(): _f[1,]()", True),
        ("from triton import language\ndef f(): ...", True),
        ("def f():\n    import triton", True),
        ("import triton\n@triton.jit\ndef a_part(): ...", False),
        ("import torch, tritonic\ndef f(): ...", False),
        ("from tiered.kernels.launch import launch\ndef f(): launch()", True),
        ("from tiered.kernels.launch import PROGRAMS\ndef f(): ...", False),
    ],
)
def test_files_that_launch_kernels_are_found(source: str, expected: bool):
    assert is_op(ast.parse(source)) == expected


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Of all kernels and of sources that cannot be compiled, in one process."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("refused")
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return compile_ahead([*listed(), *sorted(folder.glob("*.py"))], folder / "cache")


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(outcome: dict):
    failures = {name: why for name, why in outcome["failures"].items() if name.split(".")[0] not in SOURCES}
    assert not failures, json.dumps(failures, indent=1)
    assert outcome["compiled"] > len(ops())  # and the good one


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_reported(outcome: dict):
    assert {name.split(".")[0] for name in outcome["failures"]} == SOURCES.keys() - {"good"}
    for name, reason in {
        "e2m1_conversion": "not supported on .target 'sm_90a'",
        "global_of_the_module": "OUTSIDE",
        "shared_memory": "bytes of shared memory",
        "spills": "Registers are spilled",
        "bytes": "it loads 1 times one byte; 0 are allowed",
        "counts": "specialised by ['splits']",
    }.items():
        assert reason in outcome["failures"][f"{name}.kernel[0] for sm_90"]


@pytest.mark.long
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_every_specialisation_compiles(architecture: int, tmp_path: Path):
    outcome = compile_ahead(listed(), tmp_path, architecture=architecture, every=True)
    assert not outcome["failures"], json.dumps(outcome["failures"], indent=1)


@pytest.mark.parametrize("stem", [path.stem for path in ops()])
def test_the_kernel_stands_in_for_a_reference_with_its_signature(stem: str):
    kernel = getattr(importlib.import_module(f"tiered.kernels.{stem}"), stem)
    reference = getattr(importlib.import_module(f"tiered.kernels.{stem}_ref"), stem)
    assert inspect.isfunction(kernel) and kernel is not reference
    assert for_device(reference, torch.device("cuda")) is kernel
    assert for_device(reference, torch.device("cpu")) is reference
    assert str(inspect.signature(kernel)) == str(inspect.signature(reference))
