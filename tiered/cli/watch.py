"""What shows a call under way on stderr: the live view (`--watch`), else a progress bar."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.runtime import Runtime


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Enter `--watch` and what goes with it."""
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the canvas, the caches and the tiers after every forward; without a terminal, a line each",
    )
    parser.add_argument(
        "--slow", type=float, metavar="SECONDS", help="with --watch: wait after every forward; its time counts"
    )
    parser.add_argument("--watch-svg", type=Path, metavar="FILE", help="with --watch: a picture of the best frame")


def check_watch_options(args: argparse.Namespace) -> None:
    """Raise `ValueError` where they do not go together, before anything is loaded."""
    if args.slow is not None and not (math.isfinite(args.slow) and args.slow >= 0):
        raise ValueError(f"--slow {args.slow}; seconds from 0 on are allowed")
    if not args.watch and (args.slow is not None or args.watch_svg is not None):
        raise ValueError("--slow and --watch-svg go with --watch")
    if args.watch_svg is not None and not args.watch_svg.absolute().parent.is_dir():
        raise ValueError(f"--watch-svg {args.watch_svg}: there is no folder {args.watch_svg.parent}")


@contextmanager
def shown(args: argparse.Namespace, runtime: "Runtime", options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of `Runtime.generate` that let a call be seen while the block lasts."""
    if not args.watch:
        from tiered.cli.progress import progress_bar

        with progress_bar(options.get("max_new_tokens", 128)) as streamer:
            yield {"streamer": streamer}
        return
    from tiered.observe.watch.live_view import LiveView
    from tiered.observe.watch.looks import Pen
    from tiered.observe.watch.picture import Painter
    from tiered.observe.watch.plain_view import PlainView
    from tiered.observe.watch.still import Still
    from tiered.observe.watch.token_lines import TokenWriter
    from tiered.observe.watch.watcher import Watcher
    from tiered.observe.watch.words import Words

    model, pen = runtime.model, Pen.of(sys.stderr.encoding or "")
    assert runtime.tokenizer is not None, "text goes in"
    writer = TokenWriter(Words(runtime.tokenizer), pen, model.mask_token_id, model.eos_token_id)
    painter = Painter(f"{runtime.name} · {runtime.policy.name}", writer, pen)
    slow = args.slow or 0.0
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    view = LiveView(painter, slow=slow) if terminal else PlainView(writer, slow=slow)
    still = Still(painter)

    def show(frame: Any) -> None:
        still.show(frame)
        view.show(frame)

    watcher = Watcher(runtime.ledger, show, view.give_up, stop_at_eos=options.get("stop_at_eos", True))
    finished = False
    try:
        yield {"streamer": watcher, "inspector": watcher}
        finished = True
    finally:
        view.close(finished=finished)
    if args.watch_svg is not None:
        try:
            still.write(args.watch_svg)
        except (OSError, ValueError) as error:  # the answers are worth more
            print(f"tiered: --watch-svg: {error}", file=sys.stderr)
