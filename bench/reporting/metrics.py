"""The figures of a sweep's point: how each is made from the rows of a run, named and written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reporting.wording import byte_unit, nbytes, percent, plain

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure.

    Attributes:
        name: of the field, and of the figure's files.
        noun: in a sentence.
        unit: behind the figures of a table's head.
        of: the figure of one run, from its rows; None where they have none.
        show: writes it.
        cell: writes it where there is little room, given the largest figure, whose unit all have.
        unit_of: that unit, given the largest figure.
        ramp: its colours.
        least: the range of colours is never smaller than this share of the largest figure: noise stays pale.
        ratio: whether changes are told as ratios.
    """

    name: str
    noun: str
    unit: str
    of: Callable[[list[Row]], float | None]
    show: Callable[[float | None], str]
    cell: Callable[[float, float], str]
    unit_of: Callable[[float], str]
    ramp: str
    least: float
    ratio: bool = True


def accuracy(rows: list[Row]) -> float | None:
    """Right answers of all that were asked."""
    asked = sum(row["examples"] for row in rows)
    return sum(row["correct"] for row in rows) / asked if asked else None


def tokens_per_second(rows: list[Row]) -> float | None:
    """All tokens over all seconds; the mean of the rows where a row has no seconds."""
    rows = [row for row in rows if row["tokens_per_second"] is not None]
    if not rows:
        return None
    seconds = sum(row["seconds"] or 0 for row in rows)
    if seconds and all(row["seconds"] for row in rows):
        return sum(row["tokens_per_second"] * row["seconds"] for row in rows) / seconds
    return sum(row["tokens_per_second"] for row in rows) / len(rows)


def device_bytes(rows: list[Row]) -> float | None:
    """The peak of the hungriest task."""
    return max((row["device_bytes"] for row in rows if row["device_bytes"] is not None), default=None)


def moved_per_forward(rows: list[Row]) -> float | None:
    """Bytes to the device over forwards."""
    counted = [(row["to_device_bytes"], forwards(row)) for row in rows if row["to_device_bytes"] is not None]
    total = sum(number for _, number in counted if number)
    return sum(moved for moved, number in counted if number) / total if total else None


def forwards(row: Row) -> float | None:
    """Of all calls of a row. With more than one sequence a call it is a lower bound: a call goes on for its slowest."""
    if row["nfe"] is None or not row["examples"]:
        return None
    return row["nfe"] * -(-row["examples"] // row["batch"])


def in_unit(size: float, most: float) -> str:
    """`size` in the unit of `most`."""
    return plain(size / byte_unit(most)[0])


METRICS = (
    Metric(
        name="accuracy",
        noun="accuracy",
        unit="right answers",
        of=accuracy,
        show=percent,
        cell=lambda share, most: percent(share)[:-2],
        unit_of=lambda most: "right answers in per cent",
        ramp="accuracy",
        least=0.1,
        ratio=False,
    ),
    Metric(
        name="tokens_per_second",
        noun="speed",
        unit="tokens/s",
        of=tokens_per_second,
        show=lambda speed: f"{plain(speed)}\N{NO-BREAK SPACE}tokens/s",
        cell=lambda speed, most: plain(speed),
        unit_of=lambda most: "tokens/s",
        ramp="speed",
        least=0.25,
    ),
    Metric(
        name="device_bytes",
        noun="device memory",
        unit="peak on the device",
        of=device_bytes,
        show=nbytes,
        cell=in_unit,
        unit_of=lambda most: f"{byte_unit(most)[1]} on the device at the peak",
        ramp="device-use",
        least=0.1,
    ),
    Metric(
        name="moved",
        noun="traffic to the device",
        unit="a forward",
        of=moved_per_forward,
        show=nbytes,
        cell=in_unit,
        unit_of=lambda most: f"{byte_unit(most)[1]} a forward",
        ramp="moved",
        least=0.25,
    ),
)
