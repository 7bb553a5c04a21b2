"""The rows of a sweep: one task of one run of one point. Their columns, types, and what no measurement can say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered.core.extras import Extra

with Extra("bench"):
    import pyarrow as pa
    import pyarrow.parquet as pq

STATUSES = ("ok", "refused", "failed")


@dataclass(frozen=True, slots=True)
class Column:
    """Name and type. `null`: "never", "always" allowed, or only in rows that are not "ok" ("figure")."""

    name: str
    type: type
    null: str = "never"


# `clusters` is null where a policy has none and where it is "auto"; the other options where the policy has none.
COLUMNS: tuple[Column, ...] = (
    Column("point", str),
    Column("run", int),
    Column("status", str),
    Column("why", str, "always"),
    Column("model", str),
    Column("policy", str),
    Column("policy_options", str),
    Column("clusters", int, "always"),
    Column("top_m", int, "always"),
    Column("update_threshold", int, "always"),
    Column("codec", str, "always"),
    Column("context", int),
    Column("batch", int),
    Column("budget", str, "always"),
    Column("budget_bytes", int, "always"),
    Column("confidence", float, "always"),
    Column("task", str),
    Column("examples", int, "figure"),
    Column("correct", int, "figure"),
    Column("exact_match", float, "figure"),
    Column("nfe", float, "figure"),
    Column("tokens_per_forward", float, "figure"),
    Column("tokens_per_second", float, "figure"),
    Column("ms_per_forward", float, "figure"),
    Column("first_block_ms", float, "figure"),
    Column("updates", int, "figure"),
    Column("device_bytes", int, "figure"),
    Column("host_bytes", int, "figure"),
    Column("to_device_bytes", int, "figure"),
    Column("to_host_bytes", int, "figure"),
    Column("copy_ms", float, "figure"),
    Column("hidden_ms", float, "figure"),
    Column("exposed_ms", float, "figure"),
    Column("seconds", float, "figure"),
)
FIGURES: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.null == "figure")
# Columns that a clock gives: two runs of one point differ in them, and in nothing else but `run`.
TIMED: tuple[str, ...] = (
    "tokens_per_second",
    "ms_per_forward",
    "first_block_ms",
    "copy_ms",
    "hidden_ms",
    "exposed_ms",
    "seconds",
)
_MOST = 2**63
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}
SCHEMA = pa.schema([pa.field(each.name, _ARROW[each.type], nullable=each.null != "never") for each in COLUMNS])


def fault(row: Any) -> str | None:
    """What is wrong with a row: a missing or mistyped column, or a figure that cannot be; None where nothing is."""
    if not isinstance(row, Mapping):
        return f"a {type(row).__name__} in place of a row"
    names = [column.name for column in COLUMNS]
    if lacking := [name for name in names if name not in row]:
        return f"no column {', '.join(lacking)}"
    if beyond := [str(name) for name in row if name not in names]:
        return f"unknown column {', '.join(beyond)}"
    for column in COLUMNS:
        value = row[column.name]
        if value is None:
            if column.null == "never" or (column.null == "figure" and row["status"] == "ok"):
                return f"{column.name} is null"
        elif type(value) is not column.type:
            return f"{column.name} = {value!r} is no {column.type.__name__}"
        elif column.type is not str and not 0 <= value < _MOST:  # nor is NaN
            return f"{column.name} = {value}"
        elif column.type is str and value.encode(errors="ignore").decode() != value:
            return f"{column.name} = {value!r} is no text"
    return _contradiction(row)


def _contradiction(row: Mapping[str, Any]) -> str | None:
    if row["status"] not in STATUSES:
        return f"status = {row['status']!r}; allowed: {', '.join(STATUSES)}"
    if row["status"] != "ok":
        if given := [name for name in FIGURES if row[name] is not None]:
            return f"{row['status']}, yet it has {', '.join(given)}"
        return None if row["why"] else f"{row['status']} without a why"
    if row["correct"] > row["examples"] or not row["examples"]:
        return f"{row['correct']} of {row['examples']} examples"
    if abs(row["exact_match"] - row["correct"] / row["examples"]) > 1e-6:
        return f"exact_match = {row['exact_match']}, but {row['correct']} of {row['examples']} are correct"
    return None


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`rows` as they are, in their order."""
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA), path)


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, not yet looked at one by one.

    Raises:
        ValueError: no Parquet, or a column that is missing or of another type.
    """
    try:
        # Not through a memory map or a dataset: one file, read as it is.
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"no Parquet: {str(error).splitlines()[0]}") from error
    for field in SCHEMA:
        if field.name not in table.column_names:
            raise ValueError(f"no column {field.name}")
        if (found := table.schema.field(field.name).type) != field.type:
            raise ValueError(f"column {field.name} is {found}, not {field.type}")
    return table.select(SCHEMA.names).to_pylist()
