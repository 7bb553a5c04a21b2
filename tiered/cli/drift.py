"""`tiered drift`: how far a policy's caches are from an uncached pass, while prompts are answered."""

import argparse

from tiered.cli.measurement import add_measurement, print_measurement

DESCRIPTION = """Answer prompts as `tiered generate` does, and compare the keys and values that the policy's cache holds
after every forward with those of an uncached pass over the same tokens: 1 - cos by layer and region of the canvas."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Enter the command."""
    parser = subparsers.add_parser(
        "drift", help="how far a policy's caches are from an uncached pass", description=DESCRIPTION
    )
    add_measurement(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table of means by layer."""

    def measure():
        from tiered.observe.analysis.token_drift import measure_token_drift

        return measure_token_drift

    return print_measurement(args, measure)
