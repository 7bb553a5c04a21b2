"""The view without a terminal: a line of `name=value` for every forward, to read along or to search later."""

import json
import sys
import time
from collections.abc import Iterator

from tiered.core.events import Way
from tiered.core.features import Place, Tier
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.token_lines import TokenWriter

_STATES = {"committed": State.FRESH, "rewritten": State.REVISED, "draft": State.DRAFT, "noise": State.NOISE}
_WAYS = {"to_device": Way.FETCH, "to_host": Way.STORE, "to_disk": Way.SPILL, "from_disk": Way.LOAD}


class PlainView:
    """Writes to stderr."""

    def __init__(self, writer: TokenWriter, *, slow: float = 0.0) -> None:
        """`slow`: seconds to wait behind every line."""
        self._writer, self._slow = writer, slow
        self._stream = sys.stderr
        self._last: Frame | None = None

    def show(self, frame: Frame) -> None:
        """A line, but for the canvas before the first forward."""
        self._last = frame
        if frame.forward >= 0:
            self._say("watch", *_fields(frame), f"text={self._texts(frame)}")
            time.sleep(self._slow)

    def give_up(self, error: Exception) -> None:
        """Say why no more lines come."""
        self._say(f"tiered: the view has ended: {type(error).__name__}: {error}")

    def close(self, *, finished: bool) -> None:
        """One more line where the call has finished."""
        if self._last is not None and finished:
            self._say("watch end", *_figures(self._last))

    def _say(self, *words: str) -> None:
        print(*words, file=self._stream, flush=True)

    def _texts(self, frame: Frame) -> str:
        """The current block of every sequence, as JSON."""
        texts = [self._writer.plain(frame, row, range(*frame.span)) for row in range(frame.batch)]
        return json.dumps(texts, ensure_ascii=self._writer.pen.plain)


def _fields(frame: Frame) -> Iterator[str]:
    yield f"forward={frame.forward + 1}"
    yield f"block={frame.block + 1}/{frame.blocks}"
    yield f"step={frame.step + 1}"
    yield f"kind={frame.kind}"
    yield f"active={sum(frame.active)}/{frame.batch}"
    for name, state in _STATES.items():
        yield f"{name}={frame.count(state)}"
    for place in (Place.RECOMPUTED, Place.FETCHED, Place.STORED, Place.STREAMED):
        assert place.name is not None, "one place has a name"
        yield f"{place.name.lower()}={frame.count_place(place)}"
    yield f"rows={int(frame.layers.sum())}"
    for tier in frame.tiers:
        yield f"{tier.tier.value}={tier.held}"
    for name, way in _WAYS.items():
        yield f"{name}={frame.copies[way].nbytes if way in frame.copies else 0}"
    yield f"tokens={sum(frame.settled)}"
    yield f"tokens_per_forward={frame.tokens_per_forward:.3f}"
    yield f"ms={1000 * frame.forward_seconds:.1f}"


def _figures(frame: Frame) -> Iterator[str]:
    yield f"forwards={frame.forward + 1}"
    yield f"tokens={sum(frame.settled)}"
    yield f"tokens_per_forward={frame.tokens_per_forward:.3f}"
    yield f"seconds={frame.seconds:.3f}"
    for tier in frame.tiers:
        yield f"{tier.tier.value}_peak={tier.peak}"
    for name, way in _WAYS.items():
        yield f"{name}={frame.copies[way].total if way in frame.copies else 0}"
    assert len(frame.tiers) == len(Tier), "a frame has every tier"
