"""`tiered rates`: how fast this machine is, for `tiered plan --device FILE`."""

import argparse
import json
from pathlib import Path

from tiered.cli.printing import add_json, print_result

DESCRIPTION = """Measure this machine's rates of matrix products, of its memory and of the link to the host, and the
time of the smallest layer. `tiered plan --device FILE` estimates the time of calls from them."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("rates", help="how fast this machine is", description=DESCRIPTION)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (CUDA if there is any)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: bfloat16 on CUDA)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from tiered.core.whole_file import check_new_file, write_then_rename
    from tiered.models.shape import named_dtype
    from tiered.offload.device import pick_device
    from tiered.planning.machine_rates import machine_rates

    if args.out is not None:
        check_new_file("--out", args.out)
    device = pick_device(args.device)
    dtype = named_dtype(args.dtype, "float32" if device.type == "cpu" else "bfloat16")
    rates = machine_rates(device, getattr(torch, dtype))
    record = {"rates": rates.as_dict(), "torch": torch.__version__}
    text = (
        f"{rates.source}: {rates.flops_per_second / 1e9:,.1f} GFLOP/s, {rates.bytes_per_second / 1e9:,.1f} GB/s, "
        f"{rates.link_bytes_per_second / 1e9:,.1f} GB/s from the host, a layer {1e6 * rates.layer_seconds:,.0f} us"
    )
    print_result(args, text, record)
    if args.out is not None:  # after the figures, which are not lost if the disk is full
        write_then_rename(args.out, lambda part: part.write_text(json.dumps(record, indent=1) + "\n"))
    return 0
