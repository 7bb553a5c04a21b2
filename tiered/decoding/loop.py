"""The denoising loop: plan, forward, propose, commit, block after block."""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.core.errors import NonFiniteError
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.decoding.attention_drift import AttentionDrift
from tiered.decoding.denoised import Denoised
from tiered.decoding.first_broken import first_broken
from tiered.decoding.guidance import Guidance
from tiered.decoding.observers import CallInspector, Inspector, Listener
from tiered.decoding.proposer import Proposer
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import RewritingState
from tiered.decoding.sequence_noise import SequenceNoise
from tiered.forward.forward import Forward
from tiered.kernels.host_values import on_device
from tiered.policies.base import PassKind, PolicyState, Step, StepPlan


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
        proposer: Proposer,
        cfg_scale: float = 0.0,
        noise: SequenceNoise,
        correction: CommitState | None = None,
        drift: AttentionDrift | None = None,
        random_remasking: bool = False,
        stop_at_eos: bool = True,
        output_history: bool = False,
        listener: Listener | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        """With `cfg_scale` above 0, `forward` serves twice the sequences: the second half sees masked prompts. `drift`
        measures for a rule that needs it. `correction`: the rule of a second go over the blocks, with every token of
        the answer open again."""
        self.canvas, self.forward, self.policy, self.rule = canvas, forward, policy, rule
        self._model = forward.model
        self._proposer, self._noise, self._correction = proposer, noise, correction
        self._guidance = Guidance(cfg_scale, forward.model.mask_token_id) if cfg_scale else None
        self._random_remasking, self._stop_at_eos, self._output_history = random_remasking, stop_at_eos, output_history
        self._listener, self._inspector = listener, inspector
        self._drift = drift
        forward.attention_probe = None if drift is None else drift.observe
        self._pads: list[int] = canvas.pads.tolist()
        self._alive = list(range(canvas.batch))  # numbers, in the call, of the canvas's sequences
        self._ended = [False] * canvas.batch  # by place in the canvas

    def run(self) -> Denoised:
        """Denoise every block, and then correct every block where that is asked for."""
        self._result = Denoised(answers=self.canvas.answers.clone(), forwards=[0] * self.canvas.batch)
        if self._output_history:
            self._result.history.append(self._snapshot())
        if isinstance(self._inspector, CallInspector):
            self._inspector.begin(self.canvas, self.forward, self.policy)
        self._denoise(final=self._correction is None)
        if self._correction is not None:
            self.rule = self._correction
            self.canvas.reopen()
            self._ended = [False] * self.canvas.batch
            self._denoise(final=True)
        return self._result

    def _denoise(self, *, final: bool) -> None:
        """Every block in turn; `final`: what has ended is done, its sequence leaves, and listeners hear of it."""
        for block in range(self.canvas.blocks):
            self._denoise_block(block, final=final)
            self._result.block_ends.append(len(self._result.step_seconds))
            if all(self._ended):
                break
            if final:
                self._drop_ended()

    def _denoise_block(self, block: int, *, final: bool) -> None:
        start, stop = self.canvas.block_span(block)
        shape = self._model.shape
        step = Step(
            canvas=self.canvas, block=block, start=start, stop=stop, number=0,
            first_row=start - shape.prediction_shift, last_row=stop - shape.prediction_shift,
            forwards=(), active=(), guidance=self._guidance is not None,
            remasked=shape.noise_masked and any(self._result.forwards),
        )  # fmt: skip
        self.rule.begin_block(self.canvas.pending(start, stop))
        remaining = [0 if ended else stop - start for ended in self._ended]
        while any(remaining):
            began = time.perf_counter()
            with span(Op.STEP):
                remaining = self._step(step, remaining)
            self._result.step_seconds.append(time.perf_counter() - began)
            step = replace(step, number=step.number + 1, remasked=False)
        self._publish(start, stop)
        if self._listener is not None and final:
            offset = self.canvas.prompt_length
            self._listener.block(self._result.answers, start - offset, stop - offset)

    def _step(self, step: Step, remaining: list[int]) -> list[int]:
        """One forward with its commit; the pending rows that each sequence is left with (0: it waits, or is done)."""
        canvas, start, stop = self.canvas, step.start, step.stop
        active = [count > 0 for count in remaining]
        forwards = [self._result.forwards[number] for number in self._alive]
        here = on_device(active, canvas.tokens.device)
        pending = canvas.pending(start, stop) & here[:, None]
        scores = None
        if self._random_remasking:
            scores = self._noise.confidence(canvas.length, self._pads, start, stop, active)
        upcoming = None if scores is None else self._upcoming(step, scores, pending)
        step = replace(step, forwards=tuple(forwards), active=tuple(active), upcoming=upcoming)
        with span(Op.POLICY):
            plan = self.policy.plan(step)
        rows = plan.rows if all(active) else plan.rows.only(here)
        output = rows[plan.output]
        if self._drift is not None:
            # Another block's rows are of no use, and a refresh moves every row at once.
            refreshed = plan.refreshed or (plan.kind is PassKind.REFRESH,) * canvas.batch
            self._drift.begin_step(step.first_row, forget=[step.number == 0 or every for every in refreshed])
        with span(Op.FORWARD, kind=plan.kind.value):
            try:
                logits = self._logits(step, plan, rows, here)
            except ValueError as error:  # clustering and codecs refuse rows that are not finite
                if (found := self._first_broken(step)) is None:
                    raise
                raise self._not_finite(step, active, found) from error
        candidates = self._proposer.candidates(self.rule, step, logits, output, pending, remaining)
        if self._drift is not None:
            candidates = replace(candidates, drift=self._drift.drift)
        if scores is not None:
            candidates = replace(candidates, confidence=scores.masked_fill(~candidates.pending, -torch.inf))
        committed = self._commit(step, candidates, here)
        with span(Op.POLICY):
            self.policy.observe(step, committed)
        self._result.passes[plan.kind] += 1
        self._result.rows.append(self.forward.rows_computed)
        for place, is_active in enumerate(active):
            self._result.forwards[self._alive[place]] += is_active
        left, ended, broken = self._where_sequences_stand(start, stop, candidates)
        if any(broken):
            raise self._not_finite(step, broken, self._first_broken(step))
        self._ended = [was or now for was, now in zip(self._ended, ended, strict=True)]
        self._watch(step, candidates)
        return [0 if done else count for count, done in zip(left, self._ended, strict=True)]

    @spanned(Op.COMMIT)
    def _commit(self, step: Step, candidates: Candidates, here: Bool[Tensor, " batch"]) -> Bool[Tensor, "batch block"]:
        """Fix what the rule chooses, or rewrite it; the tokens of the block that this fixes or changes."""
        canvas, start, stop = self.canvas, step.start, step.stop
        clock = on_device(step.forwards, here.device)
        chosen = self.rule.choose(candidates)
        if not isinstance(self.rule, RewritingState):
            canvas.commit(start, chosen, candidates.tokens, clock)
            return chosen
        changed = chosen & (candidates.tokens != canvas.tokens[:, start:stop])
        canvas.rewrite(start, chosen, candidates.tokens)
        canvas.freeze(start, stop, self.rule.finished(changed) & here, clock)
        return changed

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
        logits = self.forward.logits(ids, fed, plan.output, plan.program, clean=step.start)
        if self._guidance is not None:
            logits = self._guidance.merge(logits, plan.guided, rows[plan.output], (step.first_row, step.last_row))
        if self._inspector is not None:
            self._inspector.after_forward(step, plan.kind, ids, self.forward, here)
        return logits

    @spanned(Op.COMMIT)
    def _where_sequences_stand(
        self, start: int, stop: int, candidates: Candidates
    ) -> tuple[list[int], list[bool], list[bool]]:
        """Pending rows of each sequence; whether it has ended: an end-of-sequence token is fixed and so is everything
        in front of it; and whether its logits were broken. The one host synchronisation of a step."""
        assert candidates.broken is not None, "the proposer looks"
        pending = self.canvas.pending(start, stop)
        left = pending.sum(dim=1)
        ended = torch.zeros_like(left, dtype=torch.bool)
        if self._stop_at_eos:
            ends = (self.canvas.tokens[:, start:stop] == self._model.eos_token_id) & ~pending
            ended = ends.any(dim=1) & ~((ends.cumsum(dim=1) == 0) & pending).any(dim=1)
        left, ended, broken = torch.stack([left, ended.to(left.dtype), candidates.broken.to(left.dtype)]).tolist()
        return left, [bool(flag) for flag in ended], [bool(flag) for flag in broken]

    def _first_broken(self, step: Step) -> str | None:
        """What makes NaN or infinity in a forward over the canvas as it was before this step. The call is over with it:
        its caches are overwritten."""
        canvas, clock = self.canvas, on_device(step.forwards, self.canvas.tokens.device)[:, None]
        if not isinstance(self.rule, RewritingState):
            canvas.tokens.masked_fill_(canvas.committed_at == clock, self._model.mask_token_id)
        ids = canvas.tokens if self._guidance is None else self._guidance.ids(canvas, None)
        return first_broken(self.forward, ids, slice(step.first_row, step.last_row), step.start)

    def _not_finite(self, step: Step, broken: Sequence[bool], found: str | None) -> NonFiniteError:
        """The error of this step, with all that was fixed before it; `broken`: which sequences went wrong."""
        self._publish(step.start, step.stop)
        sequences = [self._alive[place] for place, is_broken in enumerate(broken) if is_broken]
        hint = f"seen in forward {len(self._result.step_seconds)} of the call, in sequences {sequences} of the batch. "
        dtype = next(self._model.parameters()).dtype
        if found is None and self._guidance is not None:
            found = "the sum of guided logits"
            hint += f"Each of the two is finite: cfg_scale = {self._guidance.scale:g} is too large"
        elif found is None:
            found = "what the policy had cached"
            hint += "With all rows computed anew every layer is finite"
        elif dtype == torch.float16:
            hint += f"float16 ends at {torch.finfo(dtype).max:g}: dtype = 'bfloat16' or 'float32' goes further"
        else:
            hint += "A weight, or a number in config.json, is likely not what the model was trained with"
        return NonFiniteError(found, hint, sequences, self._result.answers.cpu())

    @spanned(Op.PUBLISH)
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
            if not isinstance(self.rule, RewritingState):
                fixed = draft[self._alive, first:last]
                draft[self._alive, first:last] = candidates.tokens.where(candidates.pending, fixed)
            self._listener.step(draft, first, last)

    def _snapshot(self) -> Int[Tensor, "batch answer"]:
        """A copy of the answers on the host: a history takes no room in the device tier."""
        return self._result.answers.to("cpu", copy=True)

    @spanned(Op.PUBLISH)
    def _publish(self, start: int, stop: int) -> None:
        """Bring the result's columns of a block up to date; behind a sequence's end comes padding."""
        tokens = self.canvas.tokens[:, start:stop].clone()
        offset = self.canvas.prompt_length
        if self._stop_at_eos:
            ended = on_device(self._ended, tokens.device)[:, None]
            ends = ((tokens == self._model.eos_token_id) & ~self.canvas.pending(start, stop)).int()
            behind = ended & (ends.cumsum(dim=1) - ends > 0)
            tokens.masked_fill_(behind, self._model.pad_token_id)
            rest = self._result.answers[self._alive, stop - offset :]
            self._result.answers[self._alive, stop - offset :] = rest.masked_fill(ended, self._model.pad_token_id)
        self._result.answers[self._alive, start - offset : stop - offset] = tokens

    def _drop_ended(self) -> None:
        """Let ended sequences leave; not all have."""
        places = [place for place, ended in enumerate(self._ended) if not ended]
        if len(places) < self.canvas.batch:
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
