"""A progress bar on stderr while a canvas is denoised; none without a terminal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm import tqdm

from tiered.options import GenerationOptions


class _Bar:
    """A streamer that moves a bar by every block."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar, self._forwards, self._prompts_seen = bar, 0, False

    def put(self, value: Tensor) -> None:
        if self._prompts_seen:
            self._bar.update(value.shape[1])
        self._prompts_seen = True

    def put_draft(self, value: Tensor) -> None:
        self._forwards += 1
        self._bar.set_postfix(forwards=self._forwards)

    def end(self) -> None: ...


@contextmanager
def progress_bar(options: Mapping[str, Any]) -> Iterator[_Bar | None]:
    """A streamer for an answer under `options` of `generate`; None without a terminal."""
    tokens = options.get("max_new_tokens", GenerationOptions().max_new_tokens)
    with tqdm(desc="denoising", total=tokens, unit=" tokens", leave=False, disable=None, dynamic_ncols=True) as bar:
        yield None if bar.disable else _Bar(bar)
