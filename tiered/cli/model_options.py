"""`--dtype`, `--device`, `--weights`, `--kv` and how positions are rotated: the same wherever a model is taken."""

import argparse
from typing import Any

NAMES = ("dtype", "device", "weights", "kv", "rope_theta", "rope_scaling")


def add_model_options(
    parser: argparse.ArgumentParser, *, device: str = "cpu, cuda, cuda:N or auto (what is here)"
) -> None:
    """Enter them. `device`: help of `--device`."""
    parser.add_argument("--device", default="auto", help=device)
    parser.add_argument(
        "--weights",
        default="raw",
        help="how weights are kept: raw, int8, fp8, nvfp4, int4, with +head or without (default: %(default)s)",
    )
    form = parser.add_argument_group("form of the model")
    form.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the checkpoint's)")
    form.add_argument(
        "--kv", default="raw", help="how keys and values are kept: raw, fp8 or nvfp4 (default: %(default)s)"
    )
    form.add_argument(
        "--rope-scaling",
        metavar="KIND:FACTOR",
        help="how the model's rotation is stretched past the positions that it was trained on: linear:F, ntk:F, yarn:F",
    )
    form.add_argument("--rope-theta", type=float, metavar="BASE", help="another base of the rotation")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """What they give, as arguments of `from_pretrained` and of `plan`."""
    return {name: getattr(args, name) for name in NAMES}
