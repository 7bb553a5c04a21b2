"""Requests that may share a call, put together and answered with as few calls as their number allows."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.checks import check_integer
from tiered.core.errors import TierCapacityError
from tiered.evaluation.gen_kwargs import RequestSettings

logger = logging.getLogger(__name__)

AUTO_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its place in the list, its prompt's ids, and how it is answered."""

    index: int
    ids: list[int]
    settings: RequestSettings


Answer = Callable[[list[Job], int], Int[Tensor, "batch columns"]]


def parse_batch_size(batch_size: int | str, max_batch_size: int | None) -> tuple[int, bool]:
    """Sequences of a call, and whether fewer will do where memory is short ("auto", "auto:N").

    Raises:
        TypeError, ValueError: anything but that or a positive number.
    """
    if isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto":
        size, auto = AUTO_BATCH_SIZE if max_batch_size is None else max_batch_size, True
    else:
        text = isinstance(batch_size, str) and batch_size.isdecimal()
        size, auto = int(batch_size) if text else batch_size, False
    if isinstance(size, str):
        raise ValueError(f"batch_size = {size!r}; a positive int or 'auto' is allowed")
    check_integer("max_batch_size" if auto else "batch_size", size, least=1)
    return size, auto


def answer_in_batches(jobs: Sequence[Job], size: int, answer: Answer, *, auto: bool) -> Iterator[tuple[Job, list[int]]]:
    """Every job with the ids of its canvas, in the order in which they are done.

    Jobs of one `RequestSettings.key` go together, longest prompts first: the call that takes most memory comes first,
    and little is padded.

    Args:
        jobs: in the order of the requests.
        size: jobs of a batch, at most.
        answer: ids behind the prompts of a batch, whose first job is the n-th to be done (from 0).
        auto: where memory is short, go on with half as many.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.settings.key, []).append(job)
    done = 0
    for group in groups.values():
        group.sort(key=lambda job: -len(job.ids))
        at = 0
        while at < len(group):
            batch = group[at : at + size]
            try:
                answers = answer(batch, done).tolist()
            except (TierCapacityError, torch.OutOfMemoryError) as error:
                if not auto or len(batch) == 1:
                    raise
                size = len(batch) // 2
                logger.info("%d sequences do not fit: going on with %d. %s", len(batch), size, error)
                continue
            yield from zip(batch, answers, strict=True)
            at, done = at + len(batch), done + len(batch)
