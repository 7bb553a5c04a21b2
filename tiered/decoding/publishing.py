"""What the denoising loop leaves behind, and what a streamer and the history are told while it runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.decoding.observers import Streamer
from tiered.decoding.rules.base import Candidates
from tiered.kernels.host_values import on_device
from tiered.models.base import DiffusionModel
from tiered.policies.base import StepKind
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(kw_only=True)
class Denoised:
    """Answers, and the counts of the loop.

    Attributes:
        answers: final ids of every sequence of the call.
        forwards: forwards that each sequence took part in.
        passes: forwards of the batch by kind.
        rows: rows of each sequence that every forward recomputed, on average over layers.
        seconds: wall time of all of it.
        step_seconds: wall time of every forward with its commit.
        block_ends: number of forwards after which each block ended.
        updates: what the policy's updates did.
        history: answers before the first forward and after every one that changed something; empty if not asked for.
    """

    answers: Int[Tensor, "batch answer"]
    forwards: list[int]
    passes: Counter[StepKind] = field(default_factory=Counter)
    rows: list[float] = field(default_factory=list)
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    block_ends: list[int] = field(default_factory=list)
    updates: Sequence[GroupUpdate] = ()
    history: list[Int[Tensor, "batch answer"]] = field(default_factory=list)


class Publisher:
    """Brings the answers of a call up to date with its canvas, and tells the history and a streamer of them.

    Attributes:
        result: answers so far; the loop counts in it.
        stop_at_eos: behind a sequence's end comes padding.
    """

    def __init__(
        self,
        canvas: Canvas,
        model: DiffusionModel,
        *,
        stop_at_eos: bool = True,
        output_history: bool = False,
        streamer: Streamer | None = None,
    ) -> None:
        self.result = Denoised(answers=canvas.answers.clone(), forwards=[0] * canvas.batch)
        self.stop_at_eos = stop_at_eos
        self._canvas, self._streamer = canvas, streamer
        self._put_draft = getattr(streamer, "put_draft", None)
        self._put_open = getattr(streamer, "put_open", None)
        self._eos, self._pad = model.eos_token_id, model.pad_token_id
        self._keeps_history = output_history
        if output_history:
            self.result.history.append(self._snapshot())

    @spanned(Op.PUBLISH)
    def step(
        self, start: int, stop: int, ended: list[bool], candidates: Candidates | None, *, final: bool = True
    ) -> None:
        """Tell what a step has changed in the block from column `start` to `stop`; `candidates`, where tokens are fixed
        once for all, are its draft. `final`: what is fixed stays so."""
        if not self._keeps_history and self._put_draft is None and self._put_open is None:
            return
        self.publish(start, stop, ended)
        if self._keeps_history and not torch.equal(state := self._snapshot(), self.result.history[-1]):
            self.result.history.append(state)
        if self._put_draft is not None:
            offset, numbers = self._canvas.prompt_length, self._canvas.numbers
            draft = self.result.answers[:, start - offset : stop - offset].clone()
            if candidates is not None:
                draft[numbers] = candidates.tokens.where(candidates.pending, draft[numbers])
            self._put_draft(draft.cpu())
        if self._put_open is not None:
            pending = self._canvas.pending(start, stop)
            still = torch.zeros(len(self.result.answers), stop - start, dtype=torch.bool)
            still[self._canvas.numbers] = pending.cpu() if final else True
            first = start - self._canvas.prompt_length
            self._put_open(self.result.answers[:, first : first + stop - start].cpu(), still)

    def block(self, start: int, stop: int, ended: list[bool], *, final: bool) -> None:
        """A block is over; with `final` it stays as it is."""
        self.publish(start, stop, ended)
        if self._streamer is None or not final:
            return
        first, last = start - self._canvas.prompt_length, stop - self._canvas.prompt_length
        done = self.result.answers[:, :last].cpu()
        ends = done == self._eos
        if self.stop_at_eos and ends.any(dim=1).all():
            last = int(ends.int().argmax(dim=1).max()) + 1
        self._streamer.put(done[:, first:last])

    @spanned(Op.PUBLISH)
    def publish(self, start: int, stop: int, ended: list[bool]) -> None:
        """Bring the result's columns of a block up to date; `ended`: by place in the canvas."""
        canvas, answers = self._canvas, self.result.answers
        tokens, offset = canvas.tokens[:, start:stop].clone(), canvas.prompt_length
        if self.stop_at_eos:
            over = on_device(ended, tokens.device)[:, None]
            ends = ((tokens == self._eos) & ~canvas.pending(start, stop)).int()
            tokens.masked_fill_(over & (ends.cumsum(dim=1) - ends > 0), self._pad)
            rest = answers[canvas.numbers, stop - offset :]
            answers[canvas.numbers, stop - offset :] = rest.masked_fill(over, self._pad)
        answers[canvas.numbers, start - offset : stop - offset] = tokens

    def _snapshot(self) -> Int[Tensor, "batch answer"]:
        """A copy of the answers on the host: a history takes no room in the device tier."""
        return self.result.answers.to("cpu", copy=True)
