"""A progress bar on stderr while a canvas is denoised; silent where stderr is no terminal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from tiered.options import GenerationOptions


class _Bar:
    """A streamer that moves a bar: a little with every forward, a block's length with every block."""

    def __init__(self, progress: Progress, tokens: int) -> None:
        self._progress = progress
        self._bar = progress.add_task("denoising", total=tokens, forwards=0)
        self._forwards = 0
        self._prompts_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompts_seen:
            self._progress.advance(self._bar, value.shape[1])
        self._prompts_seen = True

    def put_draft(self, value: Tensor) -> None:
        self._forwards += 1
        self._progress.update(self._bar, forwards=self._forwards)

    def end(self) -> None:
        # Answers that end early leave blocks undone.
        self._progress.update(self._bar, completed=self._progress.tasks[0].total)


@contextmanager
def progress_bar(options: Mapping[str, Any]) -> Iterator[_Bar | None]:
    """A streamer for an answer under `options` of `generate`; None without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens, {task.fields[forwards]} forwards"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, options.get("max_new_tokens", GenerationOptions().max_new_tokens))
