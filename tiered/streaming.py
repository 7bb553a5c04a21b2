"""Feeding a streamer in the shape of transformers' `TextDiffusionStreamer` while the canvas is denoised."""

from typing import Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor


@runtime_checkable
class Streamer(Protocol):
    """Ids come as CPU tensors [batch, n]. A `put_draft` method is called too, where there is one."""

    def put(self, value: Tensor) -> None:
        """The prompts first, then every block once it is final, up to where the last of its sequences ends."""

    def end(self) -> None:
        """Nothing more comes."""


class StreamerListener:
    """Tells `streamer` of drafts (the block with proposals where nothing is fixed) and of final blocks."""

    def __init__(self, streamer: Streamer, end: int | None) -> None:
        """`end`: the token that ends an answer; None: nothing does. Raises `TypeError` for what is no streamer."""
        if not isinstance(streamer, Streamer):
            raise TypeError(f"a streamer has the methods put and end (and may have put_draft), not {streamer!r}")
        self._streamer, self._end = streamer, end
        self._put_draft = getattr(streamer, "put_draft", None)

    def prompts(self, ids: Int[Tensor, "batch length"]) -> None:
        """The call begins."""
        self._streamer.put(ids.cpu())

    def step(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """See `tiered.decoding.loop.Listener`."""
        if self._put_draft is not None:
            self._put_draft(answers[:, start:stop].cpu())

    def block(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """See `tiered.decoding.loop.Listener`."""
        done = answers[:, :stop].cpu()
        if self._end is not None:
            ends = done == self._end
            if ends.any(dim=1).all():
                stop = int(ends.int().argmax(dim=1).max()) + 1
        self._streamer.put(done[:, start:stop])

    def end(self) -> None:
        """The call is over."""
        self._streamer.end()
