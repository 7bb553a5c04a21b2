"""Every Triton kernel compiles ahead of time for the H100, none spills unawares, and each has a reference."""

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

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# Runs where TRITON_INTERPRET is unset: the interpreter's kernels cannot be compiled. Prints what went wrong, by name.
COMPILE = """
import importlib.util, json, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = 227 * 1024  # of one program on sm_90
failures, compiled = {}, 0
for path in map(Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"compiled.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not module.COMPILATIONS:
            raise ValueError("COMPILATIONS is empty")
    except Exception as error:
        failures[path.stem] = repr(error)
        continue
    for i, wanted in enumerate(module.COMPILATIONS):
        name = f"{path.stem}.{wanted.kernel.__name__}[{i}]"
        try:
            source = ASTSource(fn=wanted.kernel, signature=dict(wanted.signature), constexprs=dict(wanted.constexprs))
            options = {"num_warps": wanted.num_warps, "enable_fp_fusion": wanted.fp_fusion}
            if not wanted.spills:
                options["ptx_options"] = "--warn-on-spills --warning-as-error"
            binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            if binary.metadata.shared > SHARED_BYTES:
                raise ValueError(f"{binary.metadata.shared} bytes of shared memory; {SHARED_BYTES} are allowed")
            compiled += 1
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"failures": failures, "compiled": compiled}))
"""

KERNEL = """
import triton
import triton.language as tl
from tiered.kernels.compilation import Compilation

OUTSIDE = 1.0

@triton.jit
def kernel(source, target):
    at = tl.arange(0, 128)
    {body}

COMPILATIONS = {compilations}
"""
POINTERS = {"source": "*u8", "target": "*fp32"}
ONCE = f"(Compilation(kernel=kernel, signature={POINTERS}),)"
COPY = "tl.store(target + at, tl.load(source + at).to(tl.float32))"
# What the interpreter runs, or never sees, and sm_90 refuses: each by the construct.
REFUSED = {
    "e2m1_conversion": "x = tl.load(source + at).to(tl.int16)\n    "
    'asm: tl.constexpr = "{ .reg .b8 x; cvt.u8.u16 x, $1; cvt.rn.f16x2.e2m1x2 $0, x; }"\n    '
    'tl.store(target + at, tl.inline_asm_elementwise(asm, "=r,h", [x], tl.int32, True, 1).to(tl.float32))',
    "range_of_48": "tl.store(target + tl.arange(0, 48), 0.0)",
    "product_of_8": "tl.store(target + tl.arange(0, 8)[:, None] + tl.arange(0, 8), "
    "tl.dot(tl.zeros([8, 8], tl.float32), tl.zeros([8, 8], tl.float32)))",
    "global_of_the_module": "tl.store(target + at, OUTSIDE)",
    "spills": "many = tl.arange(0, 32)[:, None] * 4096 + tl.arange(0, 4096)\n    "
    "tl.store(target + tl.max(many, 0), tl.sum(tl.load(target + many) * tl.load(target + 2 * many), 0))",
    "shared_memory": "inner = tl.arange(0, 1024)\n    out = tl.arange(0, 64)\n    "
    "x = tl.load(target + out[:, None] * 1024 + inner)\n    y = tl.load(target + inner[:, None] * 64 + out)\n    "
    "tl.store(target + out[:, None] * 64 + out, tl.dot(x, y))",
}


def ops() -> list[Path]:
    """The files of kernels/ that launch a Triton kernel: they import triton, and not all their functions are compiled
    into somebody else's kernel. Whatever a helper of them all gets wrong shows in the kernels that it is a part of."""
    return [path for path in sorted(KERNELS.glob("*.py")) if not path.stem.endswith("_ref") and is_op(parsed(path))]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_op(tree: ast.Module) -> bool:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorated = [any("triton.jit" in ast.unparse(mark) for mark in function.decorator_list) for function in functions]
    return any(name.split(".")[0] == "triton" for name in imported(tree)) and not all(decorated)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def compile_ahead(paths: list[Path], cache: Path) -> dict:
    """What failed of all compilations that the modules at `paths` list, by name, and how many did not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, paths)],
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
    assert {"scatter_rows", "proxy_attention", "proxy_drift", "gather_copy"} <= {path.stem for path in ops()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import triton\n@triton.jit\ndef _f(): ...\ndef f(): _f[1,]()", True),
        ("from triton import language\ndef f(): ...", True),
        ("def f():\n    import triton", True),
        ("import triton\n@triton.jit\ndef a_part(): ...", False),
        ("import torch, tritonic\ndef f(): ...", False),
    ],
)
def test_an_op_is_told_from_its_parts(source: str, expected: bool):
    assert is_op(ast.parse(source)) == expected


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path: Path):
    outcome = compile_ahead(ops(), tmp_path)
    assert not outcome["failures"], json.dumps(outcome["failures"], indent=1)
    assert outcome["compiled"] >= len(ops())


@pytest.mark.slow
def test_what_does_not_compile_is_reported(tmp_path: Path):
    sources = {name: KERNEL.format(body=body, compilations=ONCE) for name, body in REFUSED.items()}
    sources["shared_memory"] = sources["shared_memory"].replace("kernel=kernel,", "kernel=kernel, spills=True,")
    sources["empty"] = KERNEL.format(body=COPY, compilations="()")
    sources["unlisted"] = KERNEL.format(body=COPY, compilations="()").replace("COMPILATIONS", "OTHER")
    sources["good"] = KERNEL.format(body=COPY, compilations=ONCE)
    paths = [tmp_path / f"{name}.py" for name in sources]
    for path in paths:
        path.write_text(sources[path.stem], encoding="utf-8")
    outcome = compile_ahead(paths, tmp_path / "cache")
    assert {name.split(".")[0] for name in outcome["failures"]} == sources.keys() - {"good"}
    assert outcome["compiled"] == 1
    for name, reason in {
        "e2m1_conversion.kernel[0]": "not supported on .target 'sm_90a'",
        "global_of_the_module.kernel[0]": "OUTSIDE",
        "shared_memory.kernel[0]": "bytes of shared memory",
        "spills.kernel[0]": "Registers are spilled",
    }.items():
        assert reason in outcome["failures"][name]


@pytest.mark.parametrize("stem", [path.stem for path in ops()])
def test_the_reference_has_the_same_signature(stem: str):
    kernel = getattr(importlib.import_module(f"tiered.kernels.{stem}"), stem)
    reference = getattr(importlib.import_module(f"tiered.kernels.{stem}_ref"), stem)
    assert inspect.isfunction(kernel) and kernel is not reference
    assert str(inspect.signature(kernel)) == str(inspect.signature(reference))
