"""Flags that several commands share: memory, policy, and the form of the model. The help needs no torch."""

import argparse
import json
from typing import Any

from tiered.policies import DEFAULT_POLICY

_OF_LOADING = ("policy", "dtype", "device", "weights", "kv", "rope_theta", "rope_scaling")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", metavar="SIZE", help="cap of the device tier, such as 22.5GiB on a card of 24 GiB")
    below = parser.add_argument_group("memory below the device")
    below.add_argument("--host-memory", metavar="SIZE", help="cap of the host tier (pinned memory)")
    below.add_argument(
        "--disk-memory", metavar="SIZE", help="size of the disk tier, for coded weights; needs --disk-path"
    )
    below.add_argument("--disk-path", metavar="PATH", help="existing folder of the disk tier")


def add_model_options(
    parser: argparse.ArgumentParser, *, device: str = "cpu, cuda, cuda:N or auto (CUDA if there is any)"
) -> None:
    """Add the flags of the device and of the model's form. `device`: help of `--device`."""
    parser.add_argument("--device", default="auto", help=device)
    parser.add_argument(
        "--weights",
        default="raw",
        help="code of weights: raw, int8, fp8, nvfp4 or int4, with or without +head (default: %(default)s)",
    )
    form = parser.add_argument_group("form of the model")
    form.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the checkpoint's)")
    form.add_argument("--kv", default="raw", help="code of keys and values: raw, fp8 or nvfp4 (default: %(default)s)")
    form.add_argument(
        "--rope-scaling",
        metavar="KIND:FACTOR",
        help="scaling of the rotation for contexts past the trained one: linear:F, ntk:F, yarn:F",
    )
    form.add_argument("--rope-theta", type=float, metavar="BASE", help="base of the rotation (default: the config's)")


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of memory, policy and model as arguments of `from_pretrained` and `plan`, without the policy's options.
    Raises `ValueError` and `TypeError` as `MemoryBudget`."""
    from tiered.core.budget import MemoryBudget

    memory = MemoryBudget(device=args.memory, host=args.host_memory, disk=args.disk_memory, disk_path=args.disk_path)
    return {"memory": memory, **{name: getattr(args, name) for name in _OF_LOADING}}


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="caching policy (default: %(default)s)")
    parser.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=VALUE", help="option of the policy; repeatable"
    )


def policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of `--policy-option` by name, read as JSON; a value that is not JSON is text. Raises `ValueError` for
    an option without a value."""
    options: dict[str, Any] = {}
    for text in args.policy_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--policy-option {text!r}; NAME=VALUE is allowed")
        if name in ("memory", *_OF_LOADING):
            raise ValueError(f"--policy-option {text!r} is no option of a policy; use --{name.replace('_', '-')}")
        try:
            options[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            options[name] = value
    return options
