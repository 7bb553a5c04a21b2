"""Where a GPU day runs, and at what size; and what its rows have in common."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every part is told.

    Attributes:
        device: torch's name of it.
        tiny: sizes of a rehearsal, which a CPU goes through in a minute; what it measures is worth nothing.
        seed: of everything that is drawn.
        stem: what the paths of files that are no rows, such as a trace, begin with; None: nothing is written.
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
    """The part of a row that says whether what was looked at was right: `ok`, with `why` where there are `faults`."""
    why = "; ".join(filter(None, faults))
    return {"ok": False, "why": why} if why else {"ok": True}


def skipped(why: str) -> dict[str, Any]:
    """The row of what cannot be measured on this machine."""
    return {"status": "skipped", "why": why}
