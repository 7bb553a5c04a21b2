"""Files of measured rows: one row a line, and what the rows rest on beside them, so that a run can be gone on with.

A part of the other scripts here.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tiered.models.locate import checkpoint_directory
from tiered.whole_file import write_then_rename


def weights_basis(model: str) -> dict[str, str]:
    """The model and a hash of its weights: rows of other weights are worth nothing."""
    weights = (checkpoint_directory(model) / "model.safetensors").read_bytes()
    return {"model": model, "weights_sha256": hashlib.sha256(weights).hexdigest()}


def measured_before(path: Path, basis: dict[str, Any]) -> dict[str, Any]:
    """What `path` holds, if it rests on `basis`; else no rows."""
    if path.exists():
        saved = json.loads(path.read_text())
        if all(saved.get(key) == value for key, value in basis.items()):
            return saved
    return {"rows": []}


def write_rows(path: Path, head: dict[str, Any], rows: list[dict[str, Any]], *, name: str = "rows") -> None:
    """`head` with `rows` under `name` behind it; one row a line, so that a difference between files can be read."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = json.dumps(head | {name: []}, indent=1).removesuffix("[]\n}") + f"[\n{lines}\n ]\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_then_rename(path, lambda part: part.write_text(text))
