"""Progress of a call on stderr: the live view (`--watch`), or a progress bar."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.call import of_prompts
from tiered.core.extras import needing
from tiered.core.whole_file import check_new_file

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

    from tiered.runtime import Runtime


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the canvas, the caches and the tiers after every forward; without a terminal, print a line for each",
    )
    watch = parser.add_argument_group("with --watch")
    watch.add_argument(
        "--slow", type=float, metavar="SECONDS", help="wait after every forward; the rates shown exclude the wait"
    )
    watch.add_argument("--watch-svg", type=Path, metavar="FILE", help="write a picture of the best frame")


def check_watch_options(args: argparse.Namespace) -> None:
    """Check the options before anything is loaded. Raises `ValueError` if they conflict, and `MissingPackageError` if a
    terminal or a picture needs the extra `watch`, which is not installed."""
    if args.slow is not None and not (math.isfinite(args.slow) and args.slow >= 0):
        raise ValueError(f"--slow {args.slow}; seconds from 0 on are allowed")
    if not args.watch and (args.slow is not None or args.watch_svg is not None):
        raise ValueError("--slow and --watch-svg need --watch")
    if args.watch_svg is not None:
        check_new_file("--watch-svg", args.watch_svg)
    if args.watch and (args.watch_svg is not None or _on_terminal()):
        with needing("watch"):
            import rich.live  # noqa: F401


def _on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


@contextmanager
def shown(
    args: argparse.Namespace, runtime: "Runtime", prompts: list[str], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The arguments of `Runtime.generate` that show a call while the block lasts."""
    if args.watch:
        from tiered.observe.watch.watching import watching

        stop = options.get("stop_at_eos", True)
        policy = runtime.choose(prompts, **of_prompts(args), **options).policy.name
        how = {"terminal": _on_terminal(), "stop_at_eos": stop, "slow": args.slow or 0.0, "svg": args.watch_svg}
        with watching(runtime, policy, **how) as watcher:
            yield {"streamer": watcher, "inspector": watcher}
    else:
        with progress_bar(options) as streamer:
            yield {"streamer": streamer}


class _Bar:
    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar, self._forwards, self._prompts_seen = bar, 0, False

    def put(self, value: "Tensor") -> None:
        if self._prompts_seen:
            self._bar.update(value.shape[1])
        self._prompts_seen = True

    def put_draft(self, value: "Tensor") -> None:
        self._forwards += 1
        self._bar.set_postfix(forwards=self._forwards)

    def end(self) -> None: ...


@contextmanager
def progress_bar(options: Mapping[str, Any]) -> Iterator[_Bar | None]:
    """A streamer that shows an answer under `options` of `generate` as a bar on stderr; None without a terminal."""
    from tqdm import tqdm

    from tiered.options import GenerationOptions

    tokens = options.get("max_new_tokens", GenerationOptions().max_new_tokens)
    with tqdm(desc="denoising", total=tokens, unit=" tokens", leave=False, disable=None, dynamic_ncols=True) as bar:
        yield None if bar.disable else _Bar(bar)
