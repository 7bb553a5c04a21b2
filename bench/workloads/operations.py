"""The time of a call by operation, beside the floor of its sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

from measuring.worker import refusing

from tiered.core.rates import Rates
from tiered.core.spans import recording
from tiered.forward.forward_work import ForwardWork, forward_work
from tiered.offload.device import synchronize
from tiered.planning.machine_rates import machine_rates
from tiered.runtime import Runtime
from workloads.subjects import loaded, prompts, variant_named
from workloads.timing import Timing

OF = ("op",)
TIMED = (
    *("ms", "share", "plain_ms", "wall_ms", "covered", "gflop_per_second", "gb_per_second"),
    *("step_floor_ms", "refresh_floor_ms"),
)


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each operation. `settings` has those of a model, "dtype", "policy" (a variant's name), "positions"
    (prompt and answer), "batch", "answer", "block" (tokens) and "steps" (forwards)."""
    variant, answer = variant_named(settings["policy"]), settings["answer"]
    call = variant.call(answer=answer, block=settings["block"]) | {"steps": settings["steps"], "stop_at_eos": False}
    with refusing():
        runtime = loaded(settings, paths, settings["positions"]).with_policy(variant.make())
        asked = prompts(settings, settings["positions"] - answer, settings["batch"])
        runtime.generate(asked, **call)  # pays for thread pools and workspaces
        plain = runtime.generate(asked, **call).timings.total
    device = runtime.device
    # On CUDA a range ends when the device is done with it, so that its time is its own.
    timing = Timing() if device.type == "cpu" else Timing(lambda: synchronize(device))
    with recording(timing):
        out = runtime.generate(asked, **call)
    wall, times = 1e3 * out.timings.total, timing.by_op()
    of_call = {"plain_ms": 1e3 * plain, "wall_ms": wall, "covered": sum(ns for ns, _ in times.values()) / 1e6 / wall}
    of_call |= {"forwards": out.num_forwards} | card(runtime, settings, out.sequences.shape[1])
    for op, (ns, count) in times.items():
        yield of_call | {"op": op.value, "ms": ns / 1e6, "share": ns / 1e6 / wall, "count": count}


def floor(work: ForwardWork, rates: Rates) -> float:
    """Lower bound in seconds: of its arithmetic or of its reads, whichever takes longer."""
    return max(work.flops / rates.flops_per_second, work.read_bytes / rates.bytes_per_second)


def card(runtime: Runtime, settings: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """FLOPs and bytes of a plain step over one block and of a refresh, and the least time that they take here."""
    rates = machine_rates(runtime.device, runtime.dtype)
    found = {"gflop_per_second": rates.flops_per_second / 1e9, "gb_per_second": rates.bytes_per_second / 1e9}
    sizes = {"batch": settings["batch"], "context": positions, "dtype": settings["dtype"]}
    for name, rows in (("step", settings["block"]), ("refresh", positions)):
        own = forward_work(runtime.model.shape, rows=rows, output_rows=settings["block"], **sizes)
        found |= {f"{name}_gflop": own.flops / 1e9, f"{name}_floor_ms": 1e3 * floor(own, rates)}
        found["read_bytes"] = own.read_bytes
    return found
