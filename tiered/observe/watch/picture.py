"""The live view, by rich: the canvas, the tiers as bars, and a line of copies."""

import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tiered.core.byte_size import format_bytes
from tiered.core.features import Account, ColumnState
from tiered.core.whole_file import write_then_rename
from tiered.observe.watch.frame import LINE_BREAK, Frame, TokenState, Words
from tiered.offload.lane import Lane

STILL_WIDTH, FRAMES_PER_SECOND = 100, 12  # cells; at most
_LABEL, _BAR = 8, 32  # cells
_STATES = {
    TokenState.NOISE: ("bright_black", "noise"),
    TokenState.DRAFT: ("italic cyan", "draft"),
    TokenState.FRESH: ("bold green", "committed now"),
    TokenState.REVISED: ("bold yellow", "rewritten now"),
}
# A cell of the map stands for several columns and shows the first of these states that any of them has.
_COLUMNS = {
    ColumnState.FETCHED: ("▲", "bold red", "fetched and recomputed"),
    ColumnState.RECOMPUTED: ("■", "green", "recomputed"),
    ColumnState.STORED: ("▂", "blue", "hidden rows in host"),
    ColumnState.STREAMED: ("≈", "magenta", "streamed"),
    ColumnState.DEVICE: ("·", "bright_black", "device only"),
}
_ACCOUNTS = {
    "weights": ("blue", {Account.WEIGHTS}),
    "keys, values": ("green", {Account.KEY, Account.VALUE}),
    "hidden": ("magenta", {Account.HIDDEN}),
    "branches": ("yellow", {Account.ATTN_OUT, Account.FFN_OUT}),
    "centroids": ("red", {Account.CENTROIDS}),
    "staging": ("cyan", {Account.STAGING}),
    "steps": ("white", {Account.LOGITS, Account.ACTIVATIONS, Account.LIBRARIES}),
    "spare": ("bright_black", {Account.SPARE}),
}
_LANES = {Lane.FETCH: "to device", Lane.STORE: "to host", Lane.LOAD: "from disk", Lane.SAVE: "to disk"}


class Painter:
    """Draws the frames of one call. `title`: names of model and policy."""

    def __init__(self, title: str, words: Words) -> None:
        self._title, self._words = title, words

    def picture(self, frame: Frame, width: int, height: int | None = None) -> Text:
        """`frame` in at most `height` lines of at most `width` cells; None for no limit of lines. If the height is too
        small, answers get fewer lines, then fewer sequences are shown."""
        step = f"forward {frame.forward + 1} ({frame.kind})" if frame.kind else "before the first forward"
        block = f"block {frame.block + 1}/{frame.blocks}" + " (correcting)" * frame.correcting
        rate = f"{frame.settled.sum() / (frame.seconds or 1):.1f} tokens/s"
        items = [self._title, step, block, f"{frame.tokens_per_forward:.2f} tokens/forward", rate]
        head = _flow([Text(item) for item in (*items, f"{frame.seconds:.1f} s")], width)
        lines = [Text(line.plain, "bold") for line in head]
        below = [line for items in (*_tiers(frame), *_lines(frame)) for line in _flow(items, width)]
        shown, rows = len(frame.tokens), None
        if height is not None:
            room = max(3, height // 2, height - len(lines) - len(below))
            shown = min(shown, room // 3)
            rows = room // shown - 2
        for sequence in range(shown):
            end = np.flatnonzero(frame.states[sequence] == TokenState.PROMPT)[-width:]
            prompt = self._text(frame, sequence, end).plain
            answer = self._answer(frame, sequence, width, rows)
            lines += [Text(prompt.replace("\n", "")[-width:], "bright_black"), *answer, _map(frame, sequence, width)]
        lines = [*lines, *below][:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True).join(lines)

    def write_svg(self, path: Path, frame: Frame) -> None:
        """Write the picture of `frame` to a file, without fonts that a viewer would download. Raises `OSError`."""
        look: Any = {"color_system": "truecolor", "no_color": False, "force_terminal": True}
        console = Console(file=io.StringIO(), record=True, width=STILL_WIDTH, **look)
        console.print(self.picture(frame, STILL_WIDTH))
        svg = console.export_svg(title="tiered generate --watch")
        svg = re.sub(r"\s*@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
        write_then_rename(path, lambda part: part.write_text(svg, encoding="utf-8"))

    def _answer(self, frame: Frame, sequence: int, width: int, rows: int | None) -> list[Text]:
        # In `rows` lines, up to the current block or further.
        columns = np.arange(frame.tokens.shape[1])
        answer = (columns >= frame.answer[0]) & (columns < frame.answer[1]) & (frame.states[sequence] < TokenState.END)
        lines = list(self._text(frame, sequence, answer).wrap(Console(width=width, file=io.StringIO()), width))
        if rows is None or len(lines) <= rows:
            return lines
        letters, end = _letters(self._text(frame, sequence, answer & (columns < frame.span[1]))), 0
        while letters > 0:
            letters, end = letters - _letters(lines[end]), end + 1
        end = max(rows, end)
        return lines[end - rows : end]

    def _text(self, frame: Frame, sequence: int, columns: np.ndarray) -> Text:
        text = Text()
        for token, state in zip(frame.tokens[sequence, columns], frame.states[sequence, columns], strict=True):
            style, _ = _STATES.get(state, ("", ""))
            text.append(self._words[int(token)].replace(LINE_BREAK, f"{LINE_BREAK}\n"), style)
        return text


def _letters(text: Text) -> int:
    return len("".join(text.plain.split()))  # lines lose spaces at their ends


def _map(frame: Frame, sequence: int, width: int) -> Text:
    per_cell, text = -(-frame.tokens.shape[1] // width), Text()
    for first in range(0, frame.tokens.shape[1], per_cell):
        cell = slice(first, first + per_cell)
        states = int(np.bitwise_or.reduce(frame.column_states[sequence, cell]))
        glyph, style, _ = next(look for state, look in _COLUMNS.items() if states & state or not state)
        blank = np.isin(frame.states[sequence, cell], (TokenState.PAD, TokenState.END)).all()
        current = first < frame.span[1] and first + per_cell > frame.span[0]
        text.append(" " if blank else glyph, style + " underline" * current)
    return text


def _tiers(frame: Frame) -> Iterator[list[Text]]:
    for tier, of in frame.tiers.items():
        if whole := of.cap or of.peak:
            cap, bar, items, reached = "" if of.cap else " (peak)", Text(), list[Text](), 0
            for name, (style, accounts) in _ACCOUNTS.items():
                if nbytes := sum(frame.accounts[tier].get(account, 0) for account in accounts):
                    reached += nbytes
                    bar.append("█" * (round(_BAR * reached / whole) - len(bar)), style)
                    items.append(Text(f"{name} {format_bytes(nbytes)}", style))
            bar.append("░" * (_BAR - len(bar)), "bright_black")
            told = Text(f"{format_bytes(of.current)} of {format_bytes(whole)}{cap}")
            yield [Text(f"{tier:<{_LABEL}}").append_text(bar), told, *items]


def _lines(frame: Frame) -> Iterator[list[Text]]:
    label = "{:<6}".format
    moved = [(lane, name) for lane, name in _LANES.items() if frame.moved_in_all.get(lane)]
    moves = (
        f"{name} {format_bytes(frame.moved[lane])} ({format_bytes(frame.moved_in_all[lane])} in all)"
        for lane, name in moved
    )
    yield [Text(label("moves")), *(map(Text, moves) if moved else [Text("nothing")])]
    yield [Text(label("tokens")), *(Text(f"{frame.count(of)} {name}", style) for of, (style, name) in _STATES.items())]
    columns = ((f"{glyph} {frame.count(of)}" if of else glyph, *look) for of, (glyph, *look) in _COLUMNS.items())
    yield [Text(label("caches")), *(Text(f"{count} {name}", style) for count, style, name in columns)]


def _flow(items: list[Text], width: int) -> list[Text]:
    """`items` in lines of at most `width` cells; lines after the first are indented."""
    lines = [items[0]]
    for item in items[1:]:
        if lines[-1].cell_len + 2 + item.cell_len > width:
            lines.append(Text(" " * (_LABEL - 2)))
        lines[-1].append("  ").append_text(item)
    return lines


class LiveView:
    """The latest frame on a terminal, below text printed meanwhile. A thread of rich draws it, so a slow terminal
    delays no forward."""

    def __init__(self, painter: Painter, slow: float) -> None:
        self._painter, self._slow, self._over = painter, slow, False
        self._frame: Frame | None = None
        self._error: Exception | None = None
        self._console = Console(file=sys.stderr, highlight=False)
        how: Any = {"refresh_per_second": FRAMES_PER_SECOND, "redirect_stdout": False}
        self._live = Live(console=self._console, get_renderable=self._draw, **how)

    def show(self, frame: Frame) -> None:
        """Make `frame` the next to draw. Raises the error of an earlier drawing."""
        self._frame = frame
        self._live.start(refresh=True)
        time.sleep(self._slow)
        if self._error is not None:
            raise self._error

    def close(self) -> Exception | None:
        """Leave the last frame on the terminal, in full. Returns the error of a drawing; None for no error."""
        if self._over:
            return None
        self._over = True
        self._live.stop()
        return self._error

    def _draw(self) -> Text:
        width, height = self._console.size
        try:
            if self._frame is not None and self._error is None:
                return self._painter.picture(self._frame, width, None if self._over else height - 1)
        except Exception as error:
            self._error = error
        return Text()
