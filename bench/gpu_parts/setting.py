"""The device and the size of a GPU day, and columns that its rows have in common."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting of every part.

    Attributes:
        device: torch's name of the device.
        tiny: sizes of a rehearsal, which a CPU goes through in a minute; its figures mean nothing.
        seed: seed of all draws.
        stem: beginning of the paths of files that are no rows, such as a trace; None to write none.
    """

    device: str
    tiny: bool
    seed: int
    stem: str | None = None

    @property
    def on(self) -> torch.device:
        """The device."""
        return torch.device(self.device)


def checked(*faults: str | None) -> dict[str, Any]:
    """The columns of a row with its verdict: `ok`, and `why` if there are `faults`."""
    why = "; ".join(filter(None, faults))
    return {"ok": False, "why": why} if why else {"ok": True}


def skipped(why: str) -> dict[str, Any]:
    """The row of a case that cannot be measured on this machine."""
    return {"status": "skipped", "why": why}
