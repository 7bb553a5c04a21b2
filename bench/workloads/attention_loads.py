"""Loads from global memory, by width, in the compiled attention kernel that reads keys and values in codes.

A process of its own compiles it ahead of time, for one architecture and without a GPU, because a process whose Triton
interprets compiles nothing. Instructions of the PTX count once, however often they run: loads of a thread, and copies
to shared memory past the registers.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from measuring.provenance import ROOT

ARCHITECTURE = 90
_VECTOR = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.[^,]*,[^,]*, (\w+)")


def measure() -> list[dict[str, Any]]:
    """For each code of keys and values {"code", "byte_loads", "load", "copy"}: loads of one byte, and numbers of loads
    and copies by their bytes. Raises `OSError` with the compiler's last line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "tests" / "compilations", ROOT / "bench", ROOT)))
    done = subprocess.run([sys.executable, "-P", __file__], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["the compiler ended without a word"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def by_width(ptx: str) -> dict[str, dict[str, int]]:
    """The number of instructions by bytes: of a "load" of a thread, and of a "copy" to shared memory."""
    loads = Counter(int(vector or 1) * int(bits) // 8 for vector, bits in _VECTOR.findall(ptx))
    copies = Counter(int(nbytes, 0) for nbytes in _COPY.findall(ptx))
    return {name: {str(size): of[size] for size in sorted(of)} for name, of in (("load", loads), ("copy", copies))}


def main() -> None:
    """Compile, and print the rows as JSON. Imports stay here, because the process that asks may not compile."""
    import triton
    from block_attention import COMPILATIONS  # pyright: ignore
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tiered.kernels.attention_parts import CODES

    rows = []
    for code, number in CODES.items():
        # For heads of 128 elements, a block's rows, and columns without a mask, whose flags are bytes as well.
        one = next(
            each
            for each in COMPILATIONS
            if "FORM" in each.constexprs
            and (each.constexprs["FORM"].code, each.constexprs["FORM"].head_dim) == (number, 128)
            and not each.constexprs["MASKED"]
        )
        source = ASTSource(one.kernel, one.signature, dict(one.constexprs), one.attributes)
        options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
        found = by_width(triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options).asm["ptx"])
        rows.append({"code": code or "raw", "byte_loads": found["load"].get("1", 0), **found})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
