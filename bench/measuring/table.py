"""Rows as one Parquet table: a column for every name that a row has, typed by its values, JSON if no type fits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring.point import Row
from tiered.core.extras import needing

with needing("bench"):
    import pyarrow as pa
    import pyarrow.parquet as pq

_JSON = {b"json": b"1"}
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write `rows` in their order, with null for missing values. `about`, plain types for JSON, becomes metadata."""
    fields, columns = [], []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        kind = float if kinds == {int, float} else next(iter(kinds)) if len(kinds) == 1 else None
        if kind in _TYPES:
            fields.append(pa.field(name, _TYPES[kind]))
            columns.append(pa.array(values, _TYPES[kind], from_pandas=False))
        else:
            text = [None if value is None else json.dumps(value) for value in values]
            fields.append(pa.field(name, pa.string(), metadata=_JSON))
            columns.append(pa.array(text, pa.string()))
    schema = pa.schema(fields, metadata={"about": json.dumps(about)})
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path)


def read_table(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of `write_table`, without null values, and `about`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not from `write_table`.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such file", str(path))
    try:
        table = pq.ParquetFile(path).read()
        about = json.loads(table.schema.metadata[b"about"])
        texts = [field.name for field in table.schema if (field.metadata or {}).get(b"json")]
        rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
        for row in rows:
            row |= {name: json.loads(row[name]) for name in texts if name in row}
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of measurements: {str(error).splitlines()[0]}") from error
    return rows, about
