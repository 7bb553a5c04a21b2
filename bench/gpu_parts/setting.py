"""Where a GPU day runs, and at what size."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every part is told.

    Attributes:
        device: torch's name of it.
        tiny: sizes of a rehearsal, which a CPU goes through in a minute; what it measures is worth nothing.
        seed: of everything that is drawn.
        folder: where files go that are no rows, such as a trace.
    """

    device: str
    tiny: bool
    seed: int
    folder: str

    @property
    def on(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    @property
    def files(self) -> Path:
        """The folder."""
        return Path(self.folder)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON; `Setting(**…)` is the way back."""
        return asdict(self)
