"""What the tiers hold, as bars, and what moves between them, as a line of heights over the last forwards."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from tiered.core.byte_size import format_bytes
from tiered.core.events import Way
from tiered.observe.watch.frame import Frame, TierBytes
from tiered.observe.watch.looks import GROUPS, Pen

_WAYS = {Way.FETCH: "to device", Way.STORE: "to host", Way.LOAD: "from disk", Way.SPILL: "to disk"}
LABEL = 10  # cells
HISTORY = 24  # forwards whose copies are shown
_LEAST_BAR = 12  # cells


def tier_bars(frame: Frame, width: int, pen: Pen) -> Iterator[Text]:
    """A bar for each tier that holds anything or may: of its cap, or of its peak where it has none."""
    shown = [(tier, tier.cap or tier.peak) for tier in frame.tiers if tier.peak or tier.cap]
    for figures in (_held_of, _held):  # as much as leaves room for a bar
        told = [figures(tier, whole) for tier, whole in shown]
        cells = width - LABEL - 2 - max(map(len, told), default=0)
        if cells >= _LEAST_BAR:
            break
    for (tier, whole), text in zip(shown, told, strict=True):
        line = Text(f"{tier.tier.value:<{LABEL}}[", no_wrap=True)
        line.append_text(_bar(tier, whole, max(0, cells), pen))
        line.append(f"]{text}")
        yield line


def accounts(frame: Frame, width: int, pen: Pen) -> Iterator[Text]:
    """What the bars are made of, tier by tier."""
    for tier in frame.tiers:
        if not tier.held:
            continue
        items = [
            Text.assemble((pen.glyph(group.look), group.look.style), f" {group.look.name} {format_bytes(nbytes)}")
            for group in GROUPS
            if (nbytes := _bytes(tier, group.accounts))
        ]
        yield from flowing(f"{tier.tier.value:<{LABEL}}", items, width)


def copies(past: Sequence[Frame], width: int, pen: Pen) -> Iterator[Text]:
    """A line for every way that anything has gone; `past`: frames, the last one being shown."""
    frame = past[-1]
    for way, label in _WAYS.items():
        copied = frame.copies.get(way)
        if copied is None or not copied.total:
            continue
        sent = [earlier.copies[way].nbytes if way in earlier.copies else 0 for earlier in past[-HISTORY:]]
        rate = copied.bytes_per_second
        told = f"{format_bytes(copied.nbytes)} now"
        for more in (f" at {format_bytes(round(rate))}/s" if rate else "", f", {format_bytes(copied.total)} in all"):
            told += more if LABEL + _LEAST_BAR + 1 + len(told + more) <= width else ""
        line = Text(f"{label:<{LABEL}}", no_wrap=True)
        cells = max(0, min(HISTORY, width - LABEL - 1 - len(told)))
        line.append(_heights(sent[-cells:] if cells else [], pen).rjust(cells), "cyan")
        line.append(f" {told}")
        yield line


def flowing(label: str, items: Sequence[Text], width: int) -> Iterator[Text]:
    """`items` one behind the other, as many a line as fit, under one another behind `label`."""
    line = Text(label, no_wrap=True)
    for item in items:
        if line.cell_len > len(label) and line.cell_len + 2 + item.cell_len > width:
            yield line
            line = Text(" " * len(label), no_wrap=True)
        line.append("  " if line.cell_len > len(label) else "")
        line.append_text(item)
    yield line


def _held_of(tier: TierBytes, whole: int) -> str:
    return f" {format_bytes(tier.held)} of {format_bytes(whole)}" + ("" if tier.cap else " (peak)")


def _held(tier: TierBytes, whole: int) -> str:
    return f" {format_bytes(tier.held)}"


def _bar(tier: TierBytes, whole: int, cells: int, pen: Pen) -> Text:
    """Every group's share of `whole`, to the nearest cell of its end."""
    bar, filled, reached = Text(), 0, 0
    for group in GROUPS:
        reached += _bytes(tier, group.accounts)
        end = min(cells, round(reached / whole * cells))
        bar.append(pen.glyph(group.look) * (end - filled), group.look.style)
        filled = end
    bar.append(" " * (cells - filled))
    return bar


def _bytes(tier: TierBytes, accounts: Sequence) -> int:
    return sum(tier.accounts.get(account, 0) for account in accounts)


def _heights(values: Sequence[int], pen: Pen) -> str:
    """A bar for every value, of the largest; a space where nothing moved."""
    top = max(values, default=0)
    heights = pen.bars
    return "".join(heights[(value * len(heights) - 1) // top] if value else " " for value in values) if top else ""
