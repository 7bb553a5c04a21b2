"""The denoising loop: plan, forward, propose, commit, block after block."""

import time
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.commit.base import Candidates, CommitState
from tiered.decoding.attention_drift import AttentionDrift
from tiered.decoding.block_candidates import predicted_columns, spread
from tiered.decoding.canvas import Canvas
from tiered.decoding.guidance import Guidance
from tiered.decoding.sampling import SequenceNoise, propose
from tiered.features import Account
from tiered.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import PassKind, PolicyState, Step, StepPlan
from tiered.rows import Rows


@runtime_checkable
class Listener(Protocol):
    """Who watches a canvas; both calls get ids of the whole batch, answers only."""

    def step(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """A forward has ended; columns `start` to `stop` hold proposals where nothing is fixed yet."""

    def block(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """Columns `start` to `stop` are final."""


@runtime_checkable
class Inspector(Protocol):
    """Who looks into the caches of a call while it runs, for an analysis; changes nothing."""

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What it takes on the device at most, over a canvas of `length` columns; booked as long as the call lasts.
        With guidance `sequences` is twice the canvas's."""
        ...

    def after_forward(
        self,
        step: Step,
        kind: PassKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """A forward has ended, its commit has not begun. `ids` is what the forward read (with guidance, twice the
        canvas's sequences), `forward.store` what it left; `active` is False at sequences that wait for the others, of
        which it wrote nothing. All are valid during the call only."""


@dataclass(kw_only=True)
class Denoised:
    """What the loop leaves behind.

    Attributes:
        answers: final ids of every sequence of the call.
        forwards: forwards that each sequence took part in.
        passes: forwards of the batch by kind.
        rows: rows of each sequence that every forward recomputed, on average over layers.
        step_seconds: wall time of every forward with its commit.
        block_ends: number of forwards after which each block ended.
        history: answers before the first forward and after every one that changed something; empty if not asked for.
    """

    answers: Int[Tensor, "batch answer"]
    forwards: list[int]
    passes: Counter[PassKind] = field(default_factory=Counter)
    rows: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    block_ends: list[int] = field(default_factory=list)
    history: list[Int[Tensor, "batch answer"]] = field(default_factory=list)


class Denoiser:
    """One call's loop. Sequences that finish a block early wait for the others; sequences that have reached their end
    leave at the block's end."""

    def __init__(
        self,
        canvas: Canvas,
        forward: Forward,
        policy: PolicyState,
        rule: CommitState,
        *,
        temperature: float = 0.0,
        cfg_scale: float = 0.0,
        noise: SequenceNoise,
        drift: AttentionDrift | None = None,
        random_remasking: bool = False,
        stop_at_eos: bool = True,
        output_history: bool = False,
        listener: Listener | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        """With `cfg_scale` above 0, `forward` serves twice the sequences: the second half sees masked prompts. `drift`
        measures for a rule that needs it."""
        self.canvas, self.forward, self.policy, self.rule = canvas, forward, policy, rule
        self._model = forward.model
        self._temperature, self._noise = temperature, noise
        self._guidance = Guidance(cfg_scale, forward.model.mask_token_id) if cfg_scale else None
        self._random_remasking, self._stop_at_eos, self._output_history = random_remasking, stop_at_eos, output_history
        self._listener, self._inspector = listener, inspector
        self._drift = drift
        forward.attention_probe = None if drift is None else drift.observe
        self._pads: list[int] = canvas.pads.tolist()
        self._alive = list(range(canvas.batch))  # numbers, in the call, of the canvas's sequences
        self._ended = [False] * canvas.batch  # by place in the canvas

    def run(self) -> Denoised:
        """Denoise every block."""
        self._result = Denoised(answers=self.canvas.answers.clone(), forwards=[0] * self.canvas.batch)
        if self._output_history:
            self._result.history.append(self._snapshot())
        for block in range(self.canvas.blocks):
            self._denoise_block(block)
            self._result.block_ends.append(len(self._result.step_seconds))
            if not self._drop_ended():
                break
        return self._result

    def _denoise_block(self, block: int) -> None:
        start, stop = self.canvas.block_span(block)
        shift = self._model.shape.prediction_shift
        step = Step(
            canvas=self.canvas, block=block, start=start, stop=stop, number=0,
            first_row=start - shift, last_row=stop - shift, forwards=(), active=(), guidance=self._guidance is not None,
        )  # fmt: skip
        self.rule.begin_block(self.canvas.pending(start, stop))
        remaining = [stop - start] * self.canvas.batch
        while any(remaining):
            began = time.perf_counter()
            remaining = self._step(step, remaining)
            self._result.step_seconds.append(time.perf_counter() - began)
            step = replace(step, number=step.number + 1)
        self._publish(start, stop)
        if self._listener is not None:
            offset = self.canvas.prompt_length
            self._listener.block(self._result.answers, start - offset, stop - offset)

    def _step(self, step: Step, remaining: list[int]) -> list[int]:
        """One forward with its commit; the pending rows that each sequence is left with (0: it waits, or is done)."""
        canvas, start, stop = self.canvas, step.start, step.stop
        active = [count > 0 for count in remaining]
        forwards = [self._result.forwards[number] for number in self._alive]
        here = torch.tensor(active, device=canvas.tokens.device)
        pending = canvas.pending(start, stop) & here[:, None]
        scores = None
        if self._random_remasking:
            scores = self._noise.confidence(canvas.length, self._pads, start, stop, active)
        upcoming = None if scores is None else self._upcoming(step, scores, pending)
        step = replace(step, forwards=tuple(forwards), active=tuple(active), upcoming=upcoming)
        plan = self.policy.plan(step)
        rows = plan.rows if all(active) else plan.rows.only(here)
        output = rows[plan.output]
        if self._drift is not None:
            # Another block's rows are of no use, and a refresh moves every row at once.
            refreshed = plan.refreshed or (plan.kind is PassKind.REFRESH,) * canvas.batch
            self._drift.begin_step(step.first_row, forget=[step.number == 0 or every for every in refreshed])
        candidates = self._propose(step, self._logits(step, plan, rows, here), output, pending, remaining)
        if self._drift is not None:
            candidates = replace(candidates, drift=self._drift.drift)
        if scores is not None:
            candidates = replace(candidates, confidence=scores.masked_fill(~candidates.pending, -torch.inf))
        chosen = self.rule.choose(candidates)
        canvas.commit(start, chosen, candidates.tokens, torch.tensor(forwards, device=here.device))
        self.policy.observe(step, chosen)
        self._result.passes[plan.kind] += 1
        self._result.rows.append(self.forward.rows_computed)
        for place, is_active in enumerate(active):
            self._result.forwards[self._alive[place]] += is_active
        left, ended = self._where_sequences_stand(start, stop)
        self._ended = [was or now for was, now in zip(self._ended, ended, strict=True)]
        self._watch(step, candidates)
        return [0 if done else count for count, done in zip(left, self._ended, strict=True)]

    def _upcoming(
        self, step: Step, scores: Float[Tensor, "batch block"], pending: Bool[Tensor, "batch block"]
    ) -> Int[Tensor, "batch block"]:
        """What the rule will commit by `scores` that do not depend on the forward; see `Step.upcoming`."""
        confidence = scores.masked_fill(~pending, -torch.inf)
        tokens = self.canvas.tokens[:, step.start : step.stop]
        ahead = Candidates(tokens=tokens, confidence=confidence, pending=pending)
        # A copy of the rule looks ahead: its count of steps goes on with the real choice alone.
        return copy(self.rule).choose(ahead) * (ahead.ranks() + 1)

    def _logits(
        self, step: Step, plan: StepPlan, rows: Rows, here: Bool[Tensor, " batch"]
    ) -> Float[Tensor, "batch rows vocab"]:
        """Logits of the output rows of `plan`, guided; `rows`: its rows, invalid in sequences that wait."""
        if self._guidance is None:
            ids, fed = self.canvas.tokens, rows
        else:
            ids = self._guidance.ids(self.canvas, plan.guided)
            fed = self._guidance.rows(rows, plan.guided, ids.device)
        logits = self.forward.logits(ids, fed, plan.output, plan.program)
        if self._guidance is not None:
            logits = self._guidance.merge(logits, plan.guided, rows[plan.output], (step.first_row, step.last_row))
        if self._inspector is not None:
            self._inspector.after_forward(step, plan.kind, ids, self.forward, here)
        return logits

    def _propose(
        self,
        step: Step,
        logits: Float[Tensor, "batch rows vocab"],
        output: Rows,
        pending: Bool[Tensor, "batch block"],
        remaining: list[int],
    ) -> Candidates:
        """Candidates of the block; `logits` are those of the rows `output`."""
        predicted = predicted_columns(output, self._model.shape.prediction_shift, step.start, step.stop)
        if predicted is not None:
            columns, valid = predicted
            pending = pending.gather(1, columns) & valid
            if self._temperature:
                remaining = pending.sum(dim=1).tolist()
        candidates = propose(
            logits,
            pending,
            mask_token_id=self._model.mask_token_id,
            temperature=self._temperature,
            noise=self._noise,
            remaining=remaining,
        )
        return candidates if predicted is None else spread(candidates, *predicted, step.stop - step.start)

    def _where_sequences_stand(self, start: int, stop: int) -> tuple[list[int], list[bool]]:
        """Pending rows of each sequence, and whether it has ended: an end-of-sequence token is fixed and so is
        everything in front of it. The one host synchronisation of a step."""
        pending = self.canvas.pending(start, stop)
        left = pending.sum(dim=1)
        ended = torch.zeros_like(left, dtype=torch.bool)
        if self._stop_at_eos:
            ends = (self.canvas.tokens[:, start:stop] == self._model.eos_token_id) & ~pending
            ended = ends.any(dim=1) & ~((ends.cumsum(dim=1) == 0) & pending).any(dim=1)
        left_and_ended = torch.stack([left, ended.to(left.dtype)]).tolist()
        return left_and_ended[0], [bool(flag) for flag in left_and_ended[1]]

    def _watch(self, step: Step, candidates: Candidates) -> None:
        """Tell the history and the listener what the step has changed."""
        if not self._output_history and self._listener is None:
            return
        self._publish(step.start, step.stop)
        if self._output_history and not torch.equal(state := self._snapshot(), self._result.history[-1]):
            self._result.history.append(state)
        if self._listener is not None:
            draft = self._result.answers.clone()
            first, last = step.start - self.canvas.prompt_length, step.stop - self.canvas.prompt_length
            draft[self._alive, first:last] = candidates.tokens.where(candidates.pending, draft[self._alive, first:last])
            self._listener.step(draft, first, last)

    def _snapshot(self) -> Int[Tensor, "batch answer"]:
        """A copy of the answers on the host: a history takes no room in the device tier."""
        return self._result.answers.to("cpu", copy=True)

    def _publish(self, start: int, stop: int) -> None:
        """Bring the result's columns of a block up to date; behind a sequence's end comes padding."""
        tokens = self.canvas.tokens[:, start:stop].clone()
        offset = self.canvas.prompt_length
        if self._stop_at_eos:
            ended = torch.tensor(self._ended, device=tokens.device)[:, None]
            ends = ((tokens == self._model.eos_token_id) & ~self.canvas.pending(start, stop)).int()
            behind = ended & (ends.cumsum(dim=1) - ends > 0)
            tokens.masked_fill_(behind, self._model.pad_token_id)
            rest = self._result.answers[self._alive, stop - offset :]
            self._result.answers[self._alive, stop - offset :] = rest.masked_fill(ended, self._model.pad_token_id)
        self._result.answers[self._alive, start - offset : stop - offset] = tokens

    def _drop_ended(self) -> bool:
        """Let ended sequences leave; whether any is left."""
        places = [place for place, ended in enumerate(self._ended) if not ended]
        if places and len(places) < self.canvas.batch:
            doubles = [self.canvas.batch + place for place in places] if self._guidance is not None else []
            self.forward.keep(places + doubles)
            if self._guidance is not None:
                self._guidance.keep(places)
            self.canvas.keep(places)
            self.policy.keep(places)
            self.rule.keep(places)
            if self._drift is not None:
                self._drift.keep(places)
            self._noise.keep(places)
            self._alive = [self._alive[place] for place in places]
            self._pads = [self._pads[place] for place in places]
            self._ended = [False] * len(places)
        return bool(places)
