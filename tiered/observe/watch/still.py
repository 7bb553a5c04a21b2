"""One frame of a call as a picture in a file: the most telling one, as SVG."""

import io
import re
from pathlib import Path

from rich.console import Console

from tiered.core.features import Place
from tiered.core.whole_file import write_then_rename
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.tier_lines import HISTORY

WIDTH = 100  # cells


class Still:
    """Keeps the frame that shows most: clusters on their way, rewritten tokens, an answer that is half done."""

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
            file=io.StringIO(),
            record=True,
            width=WIDTH,
            highlight=False,
            no_color=False,
            color_system="truecolor",
            force_terminal=True,
        )
        console.print(*self._painter.picture(self._best, WIDTH), sep="\n", soft_wrap=True)
        svg = re.sub(
            r"\s*@font-face\s*\{.*?\}", "", console.export_svg(title="tiered generate --watch"), flags=re.DOTALL
        )
        write_then_rename(path, lambda part: part.write_text(svg, encoding="utf-8"))


def _score(frame: Frame) -> tuple[float, ...]:
    answer = frame.batch * (frame.answer[1] - frame.answer[0])
    fetched, rewritten = frame.count_place(Place.FETCHED), frame.count(State.REVISED)
    drafts = frame.count(State.DRAFT) / (frame.batch * (frame.span[1] - frame.span[0]))
    return float(fetched > 0), float(rewritten > 0), drafts / 2 - abs(sum(frame.settled) / answer - 0.5)
