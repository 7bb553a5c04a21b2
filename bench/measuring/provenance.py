"""The origin of a measurement: the device's name, the versions, the revision and the command line.

Every file of measurements has it. It names no machine, no user and no path outside the repository.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    return {
        "command": command_line(sys.argv),
        "revision": revision(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command as typed in the repository's root, with paths relative to it. An absolute path outside is cut to its
    name."""

    def relative(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        path = Path(value)
        if not path.is_absolute():
            return argument
        return option + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)

    return shlex.join(["python", *map(relative, arguments)])


def revision() -> str | None:
    """The commit of the checkout, with "+changes" if the working tree differs; None outside a repository."""

    def git(*arguments: str) -> str | None:
        # git may trust a checkout of another user for this command alone, because it only reads.
        command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", "HEAD")
    return commit if commit is None else commit + ("+changes" if git("status", "--porcelain") else "")


def processor() -> str:
    """The CPU's name, and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
