"""A frame as lines that fit a terminal: what matters least goes first where it is too small."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from tiered.core.features import Place
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.looks import PLACES, STATES, Pen
from tiered.observe.watch.place_map import columns_per_cell, place_map
from tiered.observe.watch.tier_lines import LABEL, accounts, copies, flowing, tier_bars
from tiered.observe.watch.token_lines import TokenLine, TokenWriter

_LEAST_WIDTH = 20
_MAP_LINES, _TALL = 4, 30
# What goes, in this order, where there is no room for all.
_OPTIONAL = ("legend", "accounts", "glyphs", "counts", "copies", "prompts", "bars", "maps")


@dataclass(slots=True)
class _Parts:
    """The parts of a picture, by sequence where they are of one."""

    head: list[Text]
    prompts: list[Text] = field(default_factory=list)
    answers: list[list[TokenLine]] = field(default_factory=list)
    maps: list[list[Text]] = field(default_factory=list)
    counts: list[Text] = field(default_factory=list)
    bars: list[Text] = field(default_factory=list)
    copies: list[Text] = field(default_factory=list)
    accounts: list[Text] = field(default_factory=list)
    legend: list[Text] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Painter:
    """Makes pictures of the frames of one call. `title` says what is run."""

    title: str
    writer: TokenWriter
    pen: Pen

    def picture(self, past: Sequence[Frame], width: int, height: int | None = None) -> list[Text]:
        """The last frame of `past`, in lines of at most `width` cells, at most `height` of them (None: as many as it
        takes). The frames before it are what copies are compared with."""
        width = max(_LEAST_WIDTH, width)
        frame, pen = past[-1], self.pen
        sequences = range(frame.batch)
        # A map of several lines tells columns apart, where there is a single one and room for it.
        map_lines = _MAP_LINES if frame.batch == 1 and (height is None or height >= _TALL) else 1
        per_cell = columns_per_cell(frame, map_lines * (width - LABEL))
        parts = _Parts(
            head=[*self._head(frame, width)],
            prompts=[_labelled("prompt", self.writer.prompt(frame, row, width - LABEL))[0] for row in sequences],
            answers=[self.writer.answer(frame, row, width) for row in sequences],
            maps=[_labelled("canvas", *place_map(frame, row, per_cell, width - LABEL, pen)) for row in sequences],
            counts=[*self._counts(frame, per_cell, width)],
            bars=[*tier_bars(frame, width, pen)],
            copies=[*copies(past, width, pen)],
            accounts=[*accounts(frame, width, pen)],
            legend=[*self._legend(frame, width)],
        )
        lines = self._fitted(parts, width, height)
        for line in lines:
            line.truncate(width, overflow="crop")
        return lines

    def _head(self, frame: Frame, width: int) -> Iterator[Text]:
        go = " (correcting)" if frame.correcting else ""
        where = f"block {frame.block + 1}/{frame.blocks}{go}"
        what = f"forward {frame.forward + 1} {frame.kind}" if frame.kind else "before the first forward"
        rates = f"{frame.tokens_per_forward:.2f} tokens/forward  {frame.tokens_per_second:.1f} tokens/s"
        minutes, seconds = divmod(frame.seconds, 60)
        clock = f"{int(minutes):02}:{seconds:04.1f}"
        items = [Text(self.title, "bold"), Text(where), Text(what, "bold"), Text(rates), Text(clock)]
        yield from flowing("", items, width)

    def _counts(self, frame: Frame, per_cell: int, width: int) -> Iterator[Text]:
        items: list[Text] = []
        for place, look in PLACES.items():
            if not (count := frame.count_place(place)):
                continue
            told = f"{count} {look.name}"
            if place is Place.RECOMPUTED:
                told += f" (in {frame.layers.sum() / count:.1f} layers)"
            items.append(Text(told, look.style))
        edits = frame.count(State.REVISED)
        if edits:
            items.append(Text(f"{edits} {STATES[State.REVISED].name}", STATES[State.REVISED].style))
        if again := int((frame.edits > 1).sum()):
            items.append(Text(f"{again} more than once so far", STATES[State.REVISED].style))
        items.append(Text(f"1 cell = {per_cell} column{'s' * (per_cell > 1)}", "bright_black"))
        yield from flowing(" " * LABEL, items, width)

    def _legend(self, frame: Frame, width: int) -> Iterator[Text]:
        shown = [State.NOISE, State.DRAFT, State.FRESH, State.REVISED, State.FIXED]
        tokens = [
            Text(f"{self.pen.glyph(STATES[state])} {STATES[state].name}".strip(), STATES[state].style)
            for state in shown
        ]
        yield from flowing(f"{'tokens':<{LABEL}}", tokens, width)
        places = [Text(f"{self.pen.glyph(look)} {look.name}", look.style) for look in PLACES.values()]
        yield from flowing(f"{'state':<{LABEL}}", places, width)

    def _fitted(self, parts: _Parts, width: int, height: int | None) -> list[Text]:
        """All lines, less what does not fit."""
        left_out: set[str] = set()
        batch, rule = len(parts.answers), Text(self.pen.rule * width, "bright_black")
        shown = batch

        def assembled(rows: int | None) -> list[Text]:
            lines = [*parts.head, rule.copy()]
            for number in range(shown):
                if "prompts" not in left_out:
                    lines.append(parts.prompts[number])
                for line in _window(parts.answers[number], rows):
                    lines.append(line.tokens)
                    if "glyphs" not in left_out:
                        lines.append(line.glyphs)
                if "maps" not in left_out:
                    lines += parts.maps[number]
            if shown < batch:
                lines.append(Text(f"{self.pen.dots} and {batch - shown} more sequences", "bright_black"))
            for name in ("counts", "bars", "copies", "accounts", "legend"):
                if name not in left_out:
                    lines += [rule.copy()] * (name in ("bars", "legend")) + getattr(parts, name)
            return lines

        if height is None:
            return assembled(None)
        # First what goes with it: an answer of which only a line is left needs the room more than a legend does.
        wanted = sum(min(len(lines), 4) for lines in parts.answers)
        for name in _OPTIONAL:
            doubled = 1 if "glyphs" in left_out else 2
            if len(assembled(1)) + doubled * (wanted - batch) <= height:
                break
            left_out.add(name)
        while shown > 1 and len(assembled(1)) > height:
            shown -= 1
        rows = 1
        while rows < max(map(len, parts.answers)) and len(assembled(rows + 1)) <= height:
            rows += 1
        lines = assembled(rows)
        if len(lines) <= height:
            return lines
        # Not even the least: where the call is, and what it writes.
        return [parts.head[0], *(line.tokens for line in _window(parts.answers[0], max(1, height - 1)))][:height]


def _labelled(label: str, *lines: Text) -> list[Text]:
    labels = [label, *[""] * (len(lines) - 1)]
    return [Text(f"{name:<{LABEL}}", no_wrap=True).append_text(line) for name, line in zip(labels, lines, strict=True)]


def _window(lines: list[TokenLine], count: int | None) -> list[TokenLine]:
    """`count` of the lines (None: all), around those of the current block."""
    if count is None or len(lines) <= count:
        return lines
    current = [number for number, line in enumerate(lines) if line.current] or [len(lines) - 1]
    middle = (current[0] + current[-1]) // 2
    first = min(max(0, middle - count // 2), len(lines) - count)
    return lines[first : first + count]
