"""`--memory` and its like, the same in every command that takes a budget."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.core.budget import MemoryBudget


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Enter a cap for each tier."""
    parser.add_argument("--memory", metavar="SIZE", help="cap of the device tier, such as 22.5GiB on a card of 24 GiB")
    below = parser.add_argument_group("memory below the device")
    below.add_argument("--host-memory", metavar="SIZE", help="cap of the host tier (pinned memory)")
    below.add_argument("--disk-memory", metavar="SIZE", help="size of the disk tier; needs --disk-path")
    below.add_argument("--disk-path", metavar="PATH", help="existing folder that the disk tier takes its room from")


def memory_budget(args: argparse.Namespace) -> "MemoryBudget":
    """The budget that they give.

    Raises:
        ValueError, TypeError: see `MemoryBudget`.
    """
    from tiered.core.budget import MemoryBudget

    return MemoryBudget(device=args.memory, host=args.host_memory, disk=args.disk_memory, disk_path=args.disk_path)
