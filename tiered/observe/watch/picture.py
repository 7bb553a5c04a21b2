"""A frame as lines that fit a terminal: what matters least goes first where it is too small."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tiered.core.features import ColumnState
from tiered.observe.watch.bars import LABEL, accounts, column_map, columns_per_cell, copies, flowing, tier_bars
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.looks import COLUMNS, STATES, Pen
from tiered.observe.watch.tokens import TokenLine, TokenWriter

_LEAST_WIDTH = 20
_MAP_LINES, _TALL = 4, 30
# What goes, in this order, where there is no room for all.
_OPTIONAL = ("legend", "accounts", "glyphs", "counts", "copies", "prompts", "bars", "maps")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a picture: of each sequence, and below them those of the call by name."""

    head: list[Text]
    prompts: list[Text]
    answers: list[list[TokenLine]]
    maps: list[list[Text]]
    below: dict[str, list[Text]]


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
            maps=[_labelled("canvas", *column_map(frame, row, per_cell, width - LABEL, pen)) for row in sequences],
            below={
                "counts": [*self._counts(frame, per_cell, width)],
                "bars": [*tier_bars(frame, width, pen)],
                "copies": [*copies(past, width, pen)],
                "accounts": [*accounts(frame, width, pen)],
                "legend": [*self._legend(width)],
            },
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
        for state, look in COLUMNS.items():
            if count := frame.count_columns(state):
                in_layers = f" (in {frame.layers.sum() / count:.1f} layers)" * (state is ColumnState.RECOMPUTED)
                items.append(Text(f"{count} {look.name}{in_layers}", look.style))
        if edits := frame.count(State.REVISED):
            items.append(Text(f"{edits} {STATES[State.REVISED].name}", STATES[State.REVISED].style))
        if again := int((frame.edits > 1).sum()):
            items.append(Text(f"{again} more than once so far", STATES[State.REVISED].style))
        items.append(Text(f"1 cell = {per_cell} column{'s' * (per_cell > 1)}", "bright_black"))
        yield from flowing(" " * LABEL, items, width)

    def _legend(self, width: int) -> Iterator[Text]:
        tokens = [STATES[state] for state in (State.NOISE, State.DRAFT, State.FRESH, State.REVISED, State.FIXED)]
        for label, looks in (("tokens", tokens), ("state", COLUMNS.values())):
            items = [Text(f"{self.pen.glyph(look)} {look.name}".strip(), look.style) for look in looks]
            yield from flowing(f"{label:<{LABEL}}", items, width)

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
            for name, part in parts.below.items():
                if name not in left_out:
                    lines += [rule.copy()] * (name in ("bars", "legend")) + part
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
