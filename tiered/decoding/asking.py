"""Forwards and host reads that a call's loop asks its caller for, which may share both between calls."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from tiered.forward.forward import AskedPass, Logits
from tiered.models.logit_tiles import LogitTiles

T = TypeVar("T")
Answer = Logits | LogitTiles
# It yields a pass and receives its logits, or yields a tensor of integers and receives that tensor on the host.
Asking = Generator[AskedPass | Tensor, Answer, T]


def read(values: Int64[Tensor, "..."]) -> "Asking[Tensor]":
    """`values` on the host, by a read of the caller."""
    found = yield values
    assert isinstance(found, Tensor), "a tensor is read as one"
    return found


def go_on(steps: "Asking[T]", answer: Answer | ValueError | None = None) -> AskedPass | Tensor:
    """Send `answer` to `steps`, or throw it if it is an error; None begins. Returns the next pass or tensor. Raises
    `StopIteration` at the end."""
    if isinstance(answer, ValueError):
        return steps.throw(answer)
    return next(steps) if answer is None else steps.send(answer)


def next_pass(steps: "Asking[T]", answer: Answer | ValueError | None = None) -> AskedPass:
    """`go_on` up to a pass, for a call by itself: each tensor before it is read at once."""
    asked = go_on(steps, answer)
    while isinstance(asked, Tensor):
        asked = steps.send(asked.cpu())
    return asked


def read_together(asked: Sequence[Int64[Tensor, "..."]]) -> list[Tensor]:
    """Tensors of one device on the host, by one read."""
    parts = torch.cat([each.flatten() for each in asked]).cpu().split([each.numel() for each in asked])
    return [part.view(each.shape) for part, each in zip(parts, asked, strict=True)]
