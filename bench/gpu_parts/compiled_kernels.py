"""What the compiler made of the Triton kernels that run meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recorded(kernels: list[dict[str, Any]]) -> Iterator[None]:
    """Add a row to `kernels` for every compiled kernel that Triton starts in the context, once each: its name, the
    registers and the spilled ones of a thread, bytes of shared memory, warps. None where kernels are interpreted."""
    from triton.runtime.jit import JITFunction

    started: dict[int, Any] = {}  # by identity
    run = JITFunction.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        started[id(kernel)] = kernel
        return kernel

    JITFunction.run = watched
    try:
        yield
    finally:
        JITFunction.run = run
        kernels += [resources(kernel) for kernel in started.values() if kernel is not None]


def resources(kernel: Any) -> dict[str, Any]:
    """Of a `CompiledKernel` that is loaded."""
    return {
        "name": kernel.metadata.name,
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }
