"""A call that is watched: live on a terminal, as lines without one, and its best frame as a picture in a file."""

import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tiered.core.features import ColumnState
from tiered.core.whole_file import write_then_rename
from tiered.observe.watch.bars import HISTORY
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.live_view import LiveView
from tiered.observe.watch.looks import Pen
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.tokens import TokenWriter, Words
from tiered.observe.watch.watcher import Watcher
from tiered.offload.lane import Lane
from tiered.runtime import Runtime

STILL_WIDTH = 100  # cells
_STATES = {"committed": State.FRESH, "rewritten": State.REVISED, "draft": State.DRAFT, "noise": State.NOISE}
_COLUMN_STATES = {
    "recomputed": ColumnState.RECOMPUTED,
    "fetched": ColumnState.FETCHED,
    "stored": ColumnState.STORED,
    "streamed": ColumnState.STREAMED,
}
_WAYS = {"to_device": Lane.FETCH, "to_host": Lane.STORE, "to_disk": Lane.SPILL, "from_disk": Lane.LOAD}


@contextmanager
def watching(
    runtime: Runtime, policy: str, *, stop_at_eos: bool = True, slow: float = 0.0, svg: Path | None = None
) -> Iterator[Watcher]:
    """The inspector and streamer of one call, which is seen on stderr while the block lasts: live on a terminal, else
    a line for every forward.

    Args:
        policy: that the call runs under.
        stop_at_eos: as in the call.
        slow: seconds that every frame stays at least.
        svg: file for a picture of the most telling frame. Where it cannot be written a note says so: the answers are
            worth more.
    """
    model, pen = runtime.model, Pen.of(sys.stderr.encoding or "")
    assert runtime.tokenizer is not None, "text goes in"
    writer = TokenWriter(Words(runtime.tokenizer), pen, model.mask_token_id, model.eos_token_id)
    painter = Painter(f"{runtime.name} · {policy}", writer, pen)
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    view = LiveView(painter, slow=slow) if terminal else PlainView(writer, slow=slow)
    still = Still(painter)

    def show(frame: Frame) -> None:
        still.show(frame)
        view.show(frame)

    finished = False
    try:
        yield Watcher(runtime.ledger, show, view.give_up, stop_at_eos=stop_at_eos)
        finished = True
    finally:
        view.close(finished=finished)
    if svg is not None:
        try:
            still.write(svg)
        except (OSError, ValueError) as error:
            print(f"tiered: --watch-svg: {error}", file=sys.stderr)


class PlainView:
    """The view without a terminal: a line of `name=value` for every forward, to read along or to search later."""

    def __init__(self, writer: TokenWriter, *, slow: float = 0.0) -> None:
        """`slow`: seconds to wait behind every line."""
        self._writer, self._slow = writer, slow
        self._stream = sys.stderr
        self._last: Frame | None = None

    def show(self, frame: Frame) -> None:
        """A line, but for the canvas before the first forward."""
        self._last = frame
        if frame.forward >= 0:
            # The current block of every sequence.
            texts = [self._writer.plain(frame, row, range(*frame.span)) for row in range(frame.batch)]
            figures = (*_of_forward(frame), ("text", json.dumps(texts, ensure_ascii=self._writer.pen.plain)))
            self._say("watch", *(f"{name}={figure}" for name, figure in figures))
            time.sleep(self._slow)

    def give_up(self, error: Exception) -> None:
        """Say why no more lines come."""
        self._say(f"tiered: the view has ended: {type(error).__name__}: {error}")

    def close(self, *, finished: bool) -> None:
        """One more line where the call has finished."""
        if self._last is not None and finished:
            self._say("watch end", *(f"{name}={figure}" for name, figure in _of_call(self._last)))

    def _say(self, *words: str) -> None:
        print(*words, file=self._stream, flush=True)


def _of_forward(frame: Frame) -> Iterator[tuple[str, object]]:
    yield "forward", frame.forward + 1
    yield "block", f"{frame.block + 1}/{frame.blocks}"
    yield from {"step": frame.step + 1, "kind": frame.kind, "active": f"{sum(frame.active)}/{frame.batch}"}.items()
    yield from ((name, frame.count(state)) for name, state in _STATES.items())
    yield from ((name, frame.count_columns(state)) for name, state in _COLUMN_STATES.items())
    yield "rows", int(frame.layers.sum())
    yield from ((tier.tier.value, tier.held) for tier in frame.tiers)
    yield from ((name, frame.copies[way].nbytes if way in frame.copies else 0) for name, way in _WAYS.items())
    yield from _tokens(frame)
    yield "ms", f"{1000 * frame.forward_seconds:.1f}"


def _of_call(frame: Frame) -> Iterator[tuple[str, object]]:
    yield "forwards", frame.forward + 1
    yield from _tokens(frame)
    yield "seconds", f"{frame.seconds:.3f}"
    yield from ((f"{tier.tier.value}_peak", tier.peak) for tier in frame.tiers)
    yield from ((name, frame.copies[way].total if way in frame.copies else 0) for name, way in _WAYS.items())


def _tokens(frame: Frame) -> Iterator[tuple[str, object]]:
    yield "tokens", sum(frame.settled)
    yield "tokens_per_forward", f"{frame.tokens_per_forward:.3f}"


class Still:
    """The picture in a file, of the frame that shows most: clusters on their way, rewritten tokens, an answer that is
    half done."""

    def __init__(self, painter: Painter) -> None:
        self._painter = painter
        self._past: list[Frame] = []
        self._best: tuple[Frame, ...] = ()
        self._score: tuple[float, ...] = ()

    def show(self, frame: Frame) -> None:
        """A frame more to choose from."""
        self._past = [*self._past, frame][-HISTORY:]
        score = _score(frame)
        if score > self._score:
            self._best, self._score = tuple(self._past), score

    def write(self, path: Path) -> None:
        """Write the picture. Without the fonts that it would fetch from the network: a viewer's own do as well.

        Raises:
            OSError: the file cannot be written.
            ValueError: there has been no frame.
        """
        if not self._best:
            raise ValueError("no forward, so no picture")
        console = Console(
            file=io.StringIO(), record=True, width=STILL_WIDTH, highlight=False, no_color=False,
            color_system="truecolor", force_terminal=True,
        )  # fmt: skip
        console.print(*self._painter.picture(self._best, STILL_WIDTH), sep="\n", soft_wrap=True)
        svg = console.export_svg(title="tiered generate --watch")
        svg = re.sub(r"\s*@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
        write_then_rename(path, lambda part: part.write_text(svg, encoding="utf-8"))


def _score(frame: Frame) -> tuple[float, ...]:
    answer = frame.batch * (frame.answer[1] - frame.answer[0])
    fetched, rewritten = frame.count_columns(ColumnState.FETCHED), frame.count(State.REVISED)
    drafts = frame.count(State.DRAFT) / (frame.batch * (frame.span[1] - frame.span[0]))
    return float(fetched > 0), float(rewritten > 0), drafts / 2 - abs(sum(frame.settled) / answer - 0.5)
