"""`tiered regions`: which rows move from step to step, and where the current block's attention goes."""

import argparse

from tiered.cli.measurement import add_measurement, print_measurement

DESCRIPTION = """Answer prompts as `tiered generate` does, and measure the uncached model at every step, by layer and
region of the canvas: how far keys and values have moved since the step before (1 - cos), and how much of the current
block's attention falls on the region. The policy, 'none' unless one is given, decides the tokens alone."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Enter the command."""
    parser = subparsers.add_parser(
        "regions", help="drift from step to step and attention, by region of the canvas", description=DESCRIPTION
    )
    add_measurement(parser)
    parser.set_defaults(run=run, policy="none")


def run(args: argparse.Namespace) -> int:
    """Print both tables of means by layer."""

    def measure():
        from tiered.observe.analysis.regions_report import measure_regions

        return measure_regions

    return print_measurement(args, measure)
