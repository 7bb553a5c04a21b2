"""`--policy` and `--policy-option`, the same in every command that takes a policy."""

import argparse
import json
from typing import Any

from tiered.policies import DEFAULT_POLICY


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Enter both options."""
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="caching policy (default: %(default)s)")
    parser.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=VALUE", help="option of the policy; repeatable"
    )


def policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `--policy-option` gave, by name: values as JSON reads them, everything else as the text it is.

    Raises:
        ValueError: an option without a value.
    """
    options: dict[str, Any] = {}
    for text in args.policy_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--policy-option {text!r}; NAME=VALUE is allowed")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
