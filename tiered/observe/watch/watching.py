"""The view of a call: live on a terminal, as lines elsewhere, and its most telling frame as a picture file."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiered.core.features import ColumnState
from tiered.observe.watch.frame import Frame, TokenState, Words
from tiered.observe.watch.watcher import Watcher
from tiered.offload.lane import Lane
from tiered.runtime import Runtime

_COUNTS = {
    "committed": TokenState.FRESH,
    "rewritten": TokenState.REVISED,
    "draft": TokenState.DRAFT,
    "noise": TokenState.NOISE,
    "recomputed": ColumnState.RECOMPUTED,
    "fetched": ColumnState.FETCHED,
    "stored": ColumnState.STORED,
    "streamed": ColumnState.STREAMED,
}
_LANES = {"to_device": Lane.FETCH, "to_host": Lane.STORE, "to_disk": Lane.SAVE, "from_disk": Lane.LOAD}


@contextmanager
def watching(
    runtime: Runtime, policy: str, *, terminal: bool, stop_at_eos: bool, slow: float, svg: Path | None
) -> Iterator[Watcher]:
    """The inspector and streamer that show one call on stderr: live on a `terminal`, else as lines. `slow`: least
    seconds of a frame. `svg`: file for a picture; None for none."""
    assert runtime.tokenizer is not None, "text goes in"
    words = Words(runtime.tokenizer, runtime.model.mask_token_id, runtime.model.ends)
    view: Any = PlainView(words, slow)
    painter, best = None, list[Frame]()
    if terminal or svg is not None:
        from tiered.observe.watch.picture import LiveView, Painter

        painter = Painter(f"{runtime.name} · {policy}", words)
        view = LiveView(painter, slow) if terminal else view

    def telling(frame: Frame) -> tuple[int, ...]:  # clusters fetched, tokens rewritten, then settled tokens and drafts
        both = int(frame.settled.sum()) * frame.count(TokenState.DRAFT)
        return frame.count(ColumnState.FETCHED) > 0, frame.count(TokenState.REVISED) > 0, both

    def show(frame: Frame) -> None:
        best[:] = [max([*best, frame], key=telling)]
        view.show(frame)

    def end(error: Exception | None = None) -> None:
        last = view.close()
        if (error := error or last) is not None:
            print(f"tiered: the view has ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    try:
        yield Watcher(runtime.ledger, show, end, stop_at_eos=stop_at_eos)
    finally:
        end()
    if svg is not None and painter is not None and best:
        try:
            painter.write_svg(svg, best[0])
        except OSError as error:
            print(f"tiered: --watch-svg: {error}", file=sys.stderr)


class PlainView:
    """The view without a terminal: a line of `name=value` for every forward."""

    def __init__(self, words: Words, slow: float) -> None:
        self._words, self._slow, self._stream = words, slow, sys.stderr

    def show(self, frame: Frame) -> None:
        """Print a line, except for the canvas before the first forward."""
        if frame.forward < 0:
            return
        start, stop = frame.span
        blocks = zip(frame.tokens[:, start:stop], frame.states[:, start:stop] != TokenState.END, strict=True)
        texts = ["".join(self._words[token] for token in tokens[shown].tolist()) for tokens, shown in blocks]
        utf = (self._stream.encoding or "").lower().startswith("utf")
        figures = {
            "forward": frame.forward + 1,
            "block": f"{frame.block + 1}/{frame.blocks}",
            "step": frame.step + 1,
            "kind": frame.kind,
            "active": f"{frame.active.sum()}/{len(frame.tokens)}",
            **{name: frame.count(state) for name, state in _COUNTS.items()},
            "rows": frame.layers.sum(),
            **{tier.value: report.current for tier, report in frame.tiers.items()},
            **{name: frame.moved.get(lane, 0) for name, lane in _LANES.items()},
            "tokens": frame.settled.sum(),
            "tokens_per_forward": f"{frame.tokens_per_forward:.3f}",
            "ms": f"{1000 * frame.forward_seconds:.1f}",
            "seconds": f"{frame.seconds:.3f}",
            "text": json.dumps(texts, ensure_ascii=not utf),
        }
        print("watch", *(f"{name}={figure}" for name, figure in figures.items()), file=self._stream, flush=True)
        time.sleep(self._slow)

    def close(self) -> None:
        """Do nothing: each line is complete."""
