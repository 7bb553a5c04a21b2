"""Files of measured rows: one row a line, and what the rows rest on beside them, so that a run can be gone on with.

A part of the other scripts here.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tiered.core.whole_file import write_then_rename
from tiered.models.locate import checkpoint_directory


def weights_basis(model: str) -> dict[str, str]:
    """The model and a hash of its weights: rows of other weights are worth nothing."""
    weights = (checkpoint_directory(model) / "model.safetensors").read_bytes()
    return {"model": model, "weights_sha256": hashlib.sha256(weights).hexdigest()}


def measured_before(path: Path, basis: dict[str, Any]) -> dict[str, Any]:
    """What `path` holds, if it rests on `basis`; else no rows.

    Raises:
        ValueError: as `read_rows`.
    """
    if path.exists():
        saved = read_rows(path)
        if all(saved.get(key) == value for key, value in basis.items()):
            return saved
    return {"rows": []}


def read_rows(path: Path, *, name: str = "rows", kind: type = list) -> dict[str, Any]:
    """What `write_rows` has written, or another file of measurements with a `kind` of JSON under `name`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no JSON, or has no `kind` under `name`.
    """
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away, or measure into another file") from error
    if not isinstance(saved, dict) or not isinstance(saved.get(name), kind):
        raise ValueError(f"{path} holds no {kind.__name__} of {name!r}; move it away, or measure into another file")
    return saved


def write_rows(path: Path, head: dict[str, Any], rows: list[dict[str, Any]], *, name: str = "rows") -> None:
    """`head` with `rows` under `name` behind it; one row a line, so that a difference between files can be read."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = json.dumps(head | {name: []}, indent=1).removesuffix("[]\n}") + f"[\n{lines}\n ]\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_then_rename(path, lambda part: part.write_text(text))
