"""Books: a machine's rates of compute, reads and copies, measured or from its datasheet."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tiered.core.checks import check_integer, check_number, unknown_name
from tiered.kernels.row_code import WeightCode

# Shares of a datasheet's figures: an H200 reached 790 of 989 TFLOP/s in a product of large matrices, and 4.3 of
# 4.8 TB/s in a copy of its memory.
PRODUCTS_REACH, MEMORY_REACHES = 0.8, 0.9
# FlashAttention-2 on an A100, forwards and backwards: 0.5 to 0.73 (arXiv 2307.08691).
ATTENTION_REACHES = 0.5
# Reached bytes a second in one direction over 16 lanes, of nominal 31.5 and 63 · 10⁹ (vllm #42212, ktransformers).
PCIE_4, PCIE_5 = 25e9, 50e9
# Seconds of a layer whose kernels the host launches one by one. An estimate, not measured on a GPU: of 11 launches, 6
# are a library's at 10 µs, and 5 are Triton's at 70 µs, mostly Python.
LAUNCHED_LAYER = 4.1e-4
# Share of `flops_per_second` that a product of coded weights reaches. Estimates, not measured on a GPU, from counted
# cycles of the kernel that decodes and multiplies weights.
CODED_PRODUCTS: Mapping[WeightCode, float] = {
    WeightCode.FP8: 0.5,
    WeightCode.INT8: 0.5,
    WeightCode.INT4: 0.4,
    WeightCode.NVFP4: 0.3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The speed of a machine.

    Attributes:
        flops_per_second: FLOP/s of matrix products, in the machine's usual dtype for models.
        attention_flops_per_second: FLOP/s of attention over many keys.
        half_rows, attention_half_rows: rows at which either rate reaches half, apart from the limit of memory reads.
        bytes_per_second: bytes a second read from the device's memory.
        link_bytes_per_second: bytes a second copied from the host to the device.
        layer_seconds: least seconds of a layer without a program, for any number of rows.
        source: source of the figures.
        measured: True if the machine itself was measured; False for an estimate.
        multiprocessors: number of multiprocessors of a GPU; 0 for a CPU.
    """

    flops_per_second: float
    bytes_per_second: float
    attention_flops_per_second: float = float("inf")
    half_rows: float = 0.0
    attention_half_rows: float = 0.0
    link_bytes_per_second: float = float("inf")
    layer_seconds: float = 0.0
    source: str = ""
    measured: bool = False
    multiprocessors: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _gpu(source: str, *, tflops: float, gbytes: float, link: float, multiprocessors: int) -> Rates:
    return Rates(
        flops_per_second=PRODUCTS_REACH * 1e12 * tflops,
        bytes_per_second=MEMORY_REACHES * 1e9 * gbytes,
        attention_flops_per_second=ATTENTION_REACHES * 1e12 * tflops,
        link_bytes_per_second=link,
        layer_seconds=LAUNCHED_LAYER,
        source=source,
        multiprocessors=multiprocessors,
    )


# Products in bfloat16 with sums in float32, without sparsity.
DEVICES: Mapping[str, Rates] = {
    "rtx3090": _gpu("GA102 whitepaper", tflops=71.0, gbytes=936.0, link=PCIE_4, multiprocessors=82),
    "rtx4090": _gpu("Ada whitepaper", tflops=165.2, gbytes=1008.0, link=PCIE_4, multiprocessors=128),
    "rtx5090": _gpu("RTX Blackwell whitepaper", tflops=209.5, gbytes=1792.0, link=PCIE_5, multiprocessors=170),
    "l4": _gpu("L4 datasheet", tflops=121.0, gbytes=300.0, link=PCIE_4, multiprocessors=58),
    "l40s": _gpu("L40S datasheet", tflops=362.0, gbytes=864.0, link=PCIE_4, multiprocessors=142),
    "a100": _gpu("A100 80GB SXM datasheet", tflops=312.0, gbytes=2039.0, link=PCIE_4, multiprocessors=108),
    "h100": _gpu("H100 SXM datasheet", tflops=989.0, gbytes=3350.0, link=PCIE_5, multiprocessors=132),
    "h200": _gpu("H200 SXM datasheet", tflops=989.0, gbytes=4800.0, link=PCIE_5, multiprocessors=132),
}


def rates_of(device: str | Path) -> Rates:
    """The rates of a GPU by name, or from a file of `tiered rates --out`. Raises `TypeError` or `ValueError` for other
    values."""
    if not isinstance(device, str | Path):
        raise TypeError(f"device = {device!r}; the name of a device, or a file of rates, is allowed")
    name = str(device).lower().replace(" ", "").replace("-", "").removeprefix("nvidia").removeprefix("geforce")
    if name in DEVICES:
        return DEVICES[name]
    path = Path(device)
    if not path.is_file():
        raise ValueError(
            f"{unknown_name('device', str(device), ['auto', 'cpu', 'cuda', *DEVICES])}; or a file of rates"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["rates"]
        given = {each.name: found[each.name] for each in fields(Rates) if each.name in found}
        for figure in ("flops_per_second", "bytes_per_second", "link_bytes_per_second"):
            check_number(figure, given[figure], least=1.0)
        more = {"attention_flops_per_second": 1.0, "half_rows": 0.0, "attention_half_rows": 0.0, "layer_seconds": 0.0}
        for figure, least in more.items():
            check_number(figure, given.get(figure, least), least=least)
        check_integer("multiprocessors", given.get("multiprocessors", 0), least=0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"device = {str(device)!r} holds no rates; write the file by `tiered rates --out`: {error}"
        ) from error
    return Rates(**given)
