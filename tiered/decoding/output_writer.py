"""Writes the result of the denoising loop, its history, and the blocks for a streamer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tiered.core.canvas import Canvas, is_any
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.decoding.asking import Asking, read
from tiered.decoding.observers import Streamer
from tiered.decoding.rules.base import Candidates
from tiered.kernels.host_values import on_device
from tiered.models.base import DiffusionModel
from tiered.policies.base import StepKind
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(kw_only=True)
class GenerationState:
    """Answers, and the counts of the loop.

    Attributes:
        answers: final ids of every sequence of the call; answers of fewer blocks than others are padded.
        answers_read: `answers` on the host, once the call is over.
        lengths: tokens of each answer, without such padding.
        forwards: forwards of each sequence.
        steps_by_kind: number of steps of the batch, by kind.
        rows: rows of a sequence that each forward recomputed, averaged over layers.
        experts: experts that each forward picked, averaged over layers; 0 for a dense model.
        seconds, step_seconds: wall-clock seconds of the call, and of every forward with its commit.
        block_ends: number of forwards up to each block's end.
        updates: records of the policy's updates.
        history: answers before the first forward and after each that changed a token; empty if not requested.
    """

    answers: Int[Tensor, "batch answer"]
    answers_read: Int[Tensor, "batch answer"] = field(init=False)
    lengths: list[int]
    forwards: list[int]
    steps_by_kind: Counter[StepKind] = field(default_factory=Counter)
    rows: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    block_ends: list[int] = field(default_factory=list)
    updates: Sequence[GroupUpdate] = ()
    history: list[Int[Tensor, "batch answer"]] = field(default_factory=list)


class OutputWriter:
    """Copies a call's answers from its `canvas` to its `result`, to the history and to a streamer. The loop writes its
    counts to `result`. `ends`: tokens that end an answer. `stop_at_eos`: whether padding follows a sequence's end."""

    def __init__(
        self,
        canvas: Canvas,
        model: DiffusionModel,
        *,
        max_new_tokens: int,
        ends: tuple[int, ...],
        stop_at_eos: bool,
        output_history: bool,
        streamer: Streamer | None,
    ) -> None:
        self._columns = canvas.answers.clone()  # tokens of all blocks, by canvas column
        self._tails, self._counts = canvas.tails, canvas.tail_counts
        stops = canvas.answer_ends
        if model.shape.cuts_answers:
            stops = [min(stop, tail + max_new_tokens) for stop, tail in zip(stops, self._counts, strict=True)]
        self._stops = stops
        self._told = 0  # columns of answers sent to the streamer
        self.ends, self._pad = ends, model.pad_token_id
        lengths = [stop - tail for stop, tail in zip(stops, self._counts, strict=True)]
        answers = self._behind_prompts(self._columns, stops)
        self.result = GenerationState(answers=answers, lengths=lengths, forwards=[0] * canvas.batch)
        self.stop_at_eos = stop_at_eos
        self.canvas, self._streamer = canvas, streamer
        self._put_draft = getattr(streamer, "put_draft", None)
        self._put_open = getattr(streamer, "put_open", None)
        self._keeps_history = output_history
        if output_history:
            self.result.history.append(self._snapshot())

    @spanned(Op.PUBLISH)
    def step(
        self, start: int, stop: int, ended: list[bool], candidates: Candidates | None, *, final: bool = True
    ) -> None:
        """Publish a step's changes of the block from column `start` to `stop`. `candidates`: the block's draft; None if
        tokens stay open. `final`: whether fixed tokens stay fixed."""
        if not self._keeps_history and self._put_draft is None and self._put_open is None:
            return
        self.publish(start, stop, ended)
        if self._keeps_history and not torch.equal(state := self._snapshot(), self.result.history[-1]):
            self.result.history.append(state)
        if self._put_draft is not None:
            offset, places = self.canvas.prompt_length, self._places()
            draft = self._columns[:, start - offset : stop - offset].clone()
            if candidates is not None:
                draft[places] = candidates.tokens.where(candidates.pending, draft[places])
            self._put_draft(self._from_prompts(draft, start).cpu())
        if self._put_open is not None:
            offset, pending = self.canvas.prompt_length, self.canvas.pending(start, stop)
            columns = self._columns[:, start - offset : stop - offset]
            still = torch.zeros_like(columns, dtype=torch.bool)
            still[self._places()] = pending if final else True
            self._put_open(self._from_prompts(columns, start).cpu(), self._from_prompts(still, start).cpu())

    def block(self, start: int, stop: int, ended: list[bool], *, final: bool) -> "Asking[None]":
        """Publish a finished block; `final`: whether no later pass changes it."""
        self.publish(start, stop, ended)
        if self._streamer is None or not final:
            return
        # If answers begin in different columns of a block, only columns that the shortest answer has are sent.
        over = self.canvas.over((start - self.canvas.prompt_length) // self.canvas.block_length)
        whole = all(was or now for was, now in zip(ended, over, strict=True))
        last = stop - self.canvas.prompt_length - (min(self._counts) if whole else max(self._counts))
        done = yield from read(self.result.answers[:, :last])
        ends = is_any(done, self.ends)
        if self.stop_at_eos and ends.any(dim=1).all():
            last = int(ends.int().argmax(dim=1).max()) + 1
        self._streamer.put(done[:, self._told : last])
        self._told = last

    @spanned(Op.PUBLISH)
    def publish(self, start: int, stop: int, ended: list[bool]) -> None:
        """Update the result's columns of a block; `ended`: by place on the canvas."""
        canvas, answers = self.canvas, self._columns
        tokens, offset, places = canvas.tokens[:, start:stop].clone(), canvas.prompt_length, self._places()
        if self.stop_at_eos:
            over = on_device(ended, tokens.device)[:, None]
            ends = canvas.ends(start, stop, self.ends).int()
            tokens.masked_fill_(over & (ends.cumsum(dim=1) - ends > 0), self._pad)
            answers[places, stop - offset :] = answers[places, stop - offset :].masked_fill(over, self._pad)
        answers[places, start - offset : stop - offset] = tokens
        self.result.answers = self._behind_prompts(self._columns, self._stops)

    def _places(self) -> Int[Tensor, " sequences"]:
        """Rows of the canvas's sequences in the answers. A tensor, because indexing by a list waits for the device."""
        return on_device(self.canvas.numbers, self._columns.device)

    def _from_prompts(self, values: Shaped[Tensor, "batch block"], start: int) -> Shaped[Tensor, "batch columns"]:
        """The answers' tokens in the block at `start`: not those of prompts at the beginning of the first block,
        nor those of the last block behind the longest answer."""
        values = values[:, : max(self._stops) - (start - self.canvas.prompt_length)]
        if start != self.canvas.prompt_length:
            return values
        return self._behind_prompts(values, [values.shape[1]] * len(values))

    def _behind_prompts(
        self, columns: Shaped[Tensor, "batch columns"], stops: list[int]
    ) -> Shaped[Tensor, "batch answer"]:
        if self._tails is None:
            return columns
        longest = max(stop - tail for stop, tail in zip(stops, self._counts, strict=True))
        place = self._tails[:, None] + torch.arange(longest, device=columns.device)
        behind = place >= on_device(stops, columns.device)[:, None]
        return columns.gather(1, place.clamp_(max=columns.shape[1] - 1)).masked_fill_(behind, self._pad)

    def _snapshot(self) -> Int[Tensor, "batch answer"]:
        """A copy of the answers on the host, so that a history takes no device bytes."""
        return self.result.answers.to("cpu", copy=True)
