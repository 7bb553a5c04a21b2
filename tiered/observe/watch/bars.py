"""The canvas as a map of its columns, the tiers as bars, and copies between them as a line of heights."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from tiered.core.byte_size import format_bytes
from tiered.observe.watch.frame import Frame, State, TierBytes
from tiered.observe.watch.looks import COLUMNS, GROUPS, Group, Pen, main_state
from tiered.offload.lane import Lane

_WAYS = {Lane.FETCH: "to device", Lane.STORE: "to host", Lane.LOAD: "from disk", Lane.SPILL: "to disk"}
_BORDERS = ("", "|", "[", "]")
LABEL = 10  # cells
HISTORY = 24  # forwards whose copies are shown
_LEAST_BAR = 12  # cells


def columns_per_cell(frame: Frame, cells: int) -> int:
    """How many columns a cell stands for where a map has `cells`, borders included."""
    parts = [stop - first for first, stop in _parts(frame)]
    per_cell = 1
    while sum(-(-part // per_cell) for part in parts) + len(_BORDERS) > cells and per_cell < max(parts):
        per_cell += 1
    return per_cell


def column_map(frame: Frame, sequence: int, per_cell: int, width: int, pen: Pen) -> list[Text]:
    """`prompt|finished[block]future` of one sequence, in lines of `width` cells: one for every few columns, by what is
    true of most of them."""
    line = Text(no_wrap=True)
    blank = np.isin(frame.states[sequence], (State.PAD, State.END))
    for border, (start, stop) in zip(_BORDERS, _parts(frame), strict=True):
        line.append(border)
        for first in range(start, stop, per_cell):
            cell = slice(first, min(first + per_cell, stop))
            shown = [main_state(states) for states in frame.column_states[sequence, cell].tolist()]
            look = COLUMNS[max(COLUMNS, key=shown.count)]
            line.append(" " if blank[cell].all() else pen.glyph(look), look.style)
    return [line[start : start + width] for start in range(0, len(line), width)]


def _parts(frame: Frame) -> list[tuple[int, int]]:
    """Prompt, finished blocks, the current block, and what is behind it."""
    prompt, length = frame.answer[0], frame.tokens.shape[1]
    start, stop = frame.span
    return [(0, prompt), (prompt, start), (start, stop), (stop, length)]


def tier_bars(frame: Frame, width: int, pen: Pen) -> Iterator[Text]:
    """A bar for each tier that holds anything or may: of its cap, or of its peak where it has none."""
    shown = [(tier, tier.cap or tier.peak) for tier in frame.tiers if tier.peak or tier.cap]
    held = [f" {format_bytes(tier.held)}" for tier, _ in shown]
    told = [
        f"{text} of {format_bytes(whole)}" + ("" if tier.cap else " (peak)")
        for text, (tier, whole) in zip(held, shown, strict=True)
    ]
    room = width - LABEL - 2
    if room - max(map(len, told), default=0) < _LEAST_BAR:
        told = held
    cells = max(0, room - max(map(len, told), default=0))
    for (tier, whole), text in zip(shown, told, strict=True):
        line = Text(f"{tier.tier.value:<{LABEL}}[", no_wrap=True)
        yield line.append_text(_bar(tier, whole, cells, pen)).append(f"]{text}")


def _bar(tier: TierBytes, whole: int, cells: int, pen: Pen) -> Text:
    """Every group's share of `whole`, to the nearest cell of its end."""
    bar, filled, reached = Text(), 0, 0
    for group in GROUPS:
        reached += _bytes(tier, group)
        end = min(cells, round(reached / whole * cells))
        bar.append(pen.glyph(group.look) * (end - filled), group.look.style)
        filled = end
    return bar.append(" " * (cells - filled))


def _bytes(tier: TierBytes, group: Group) -> int:
    return sum(tier.accounts.get(account, 0) for account in group.accounts)


def accounts(frame: Frame, width: int, pen: Pen) -> Iterator[Text]:
    """What the bars are made of, tier by tier."""
    for tier in frame.tiers:
        items = [
            Text.assemble((pen.glyph(group.look), group.look.style), f" {group.look.name} {format_bytes(nbytes)}")
            for group in GROUPS
            if (nbytes := _bytes(tier, group))
        ]
        if items:
            yield from flowing(f"{tier.tier.value:<{LABEL}}", items, width)


def copies(past: Sequence[Frame], width: int, pen: Pen) -> Iterator[Text]:
    """A line for every way that anything has gone; `past`: frames, the last one being shown."""
    for way, label in _WAYS.items():
        copied = past[-1].copies.get(way)
        if copied is None or not copied.total:
            continue
        sent = [earlier.copies[way].nbytes if way in earlier.copies else 0 for earlier in past[-HISTORY:]]
        rate = copied.bytes_per_second
        told = f"{format_bytes(copied.nbytes)} now"
        for more in (f" at {format_bytes(round(rate))}/s" if rate else "", f", {format_bytes(copied.total)} in all"):
            told += more if LABEL + _LEAST_BAR + 1 + len(told + more) <= width else ""
        cells = max(0, min(HISTORY, width - LABEL - 1 - len(told)))
        line = Text(f"{label:<{LABEL}}", no_wrap=True)
        yield line.append(_heights(sent[-cells:] if cells else [], pen).rjust(cells), "cyan").append(f" {told}")


def _heights(values: Sequence[int], pen: Pen) -> str:
    """A bar for every value, of the largest; a space where nothing moved."""
    top, heights = max(values, default=0), pen.bars
    return "".join(heights[(value * len(heights) - 1) // top] if value else " " for value in values) if top else ""


def flowing(label: str, items: Sequence[Text], width: int) -> Iterator[Text]:
    """`items` one behind the other, as many a line as fit, under one another behind `label`."""
    line = Text(label, no_wrap=True)
    for item in items:
        if line.cell_len > len(label) and line.cell_len + 2 + item.cell_len > width:
            yield line
            line = Text(" " * len(label), no_wrap=True)
        line.append("  " if line.cell_len > len(label) else "").append_text(item)
    yield line
