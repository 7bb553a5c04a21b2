"""The denoising loop, block after block: rows of the policy, forward, proposals, commit."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.core.errors import NonFiniteError
from tiered.core.ops import Op
from tiered.core.spans import span, spanned
from tiered.decoding.asking import Asking, next_pass, read
from tiered.decoding.attention_shift import AttentionShift
from tiered.decoding.guidance import Guidance
from tiered.decoding.not_finite import cause, first_broken
from tiered.decoding.observers import CallInspector, Inspector
from tiered.decoding.output_writer import GenerationState, OutputWriter
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import RewritingState
from tiered.decoding.token_sampler import TokenSampler
from tiered.forward.forward import AskedPass, Forward, Logits
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.models.logit_tiles import LogitTiles
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.polestar.policy import Drifting


class Denoiser:
    """One call's loop. Sequences that finish a block early wait for the others. Sequences that have ended leave at the
    block's end."""

    def __init__(
        self,
        forward: Forward,
        policy: PolicyState,
        rules: Sequence[CommitState],
        proposer: TokenSampler,
        publisher: OutputWriter,
        *,
        finishes_blocks: bool,
        guidance: Guidance | None,
        shift: AttentionShift | None,
        inspector: Inspector | None,
    ) -> None:
        """
        Args:
            rules: commit rule of each pass over the blocks. A second pass begins with every token open again.
            finishes_blocks: whether the block with an answer's end is finished before the answer is over.
            guidance: None for no guidance. Otherwise `forward` has twice the sequences, the second half with masked
                prompts.
            shift: attention shift that the rule compares; None for a rule without one.
        """
        self.canvas, self.forward, self.policy, self.rule = publisher.canvas, forward, policy, rules[0]
        self._model = forward.model
        self._proposer, self._publisher, self._guidance = proposer, publisher, guidance
        self._finishes_blocks = finishes_blocks
        self._rules, self._shift, self._inspector = rules, shift, inspector
        self._result = publisher.result
        self._ended = [False] * self.canvas.batch  # by place in the canvas
        forward.attention_probe = None if shift is None else shift.observe

    def run(self) -> GenerationState:
        """Denoise every block once with each rule."""
        steps = self.steps()
        try:
            asked = next_pass(steps)
            while True:
                asked = _answered(steps, *asked)
        except StopIteration as done:
            return done.value

    def steps(self) -> "Asking[GenerationState]":
        """`run` as a generator, for a caller that computes the forwards and reads the device. It yields each pass; the
        caller sends its logits, or throws its `ValueError`. It yields each tensor to read; the caller sends it from the
        host."""
        began = time.perf_counter()
        if isinstance(self._inspector, CallInspector):
            self._inspector.begin(self.canvas, self.forward, self.policy)
        for number, rule in enumerate(self._rules):
            self.rule = rule
            if number:
                self.canvas.reopen()
                self._ended = [False] * self.canvas.batch
            yield from self._denoise(final=rule is self._rules[-1])
        self._result.updates = self.policy.updates if isinstance(self.policy, Drifting) else ()
        self._result.seconds = time.perf_counter() - began
        self._result.answers_read = yield from read(self._result.answers)
        return self._result

    def _denoise(self, *, final: bool) -> "Asking[None]":
        for block in range(self.canvas.blocks):
            yield from self._denoise_block(block, final=final)
            self._ended = [was or over for was, over in zip(self._ended, self.canvas.over(block), strict=True)]
            self._result.block_ends.append(len(self._result.step_seconds))
            if all(self._ended):
                break
            if final:
                self._drop_ended()

    def _denoise_block(self, block: int, *, final: bool) -> "Asking[None]":
        begun, rewrites = any(self._result.forwards), isinstance(self.rule, RewritingState)
        more = {"guidance": self._guidance is not None, "rewrites": rewrites}
        step = Step.first(self.canvas, block, self._model.shape, begun=begun, **more)
        start, stop = step.start, step.stop
        for asked in self.policy.before_block(step):
            yield from self._write(step, asked)
        self.rule.begin_block(self.canvas.pending(start, stop))
        counts = self.canvas.open_columns(block)
        remaining = [0 if ended else count for count, ended in zip(counts, self._ended, strict=True)]
        while any(remaining):
            began = time.perf_counter()
            with span(Op.STEP):
                remaining = yield from self._step(step, remaining, final=final)
            self._result.step_seconds.append(time.perf_counter() - began)
            step = replace(step, number=step.number + 1, remasked=False)
        yield from self._publisher.block(start, stop, self._ended, final=final)

    def _write(self, step: Step, asked: Pass) -> "Asking[None]":
        began, result = time.perf_counter(), self._result
        with span(Op.STEP), span(Op.FORWARD, kind=asked.kind.value):
            if self._guidance is not None:
                asked = self._guidance.doubled(asked, self.canvas)
            yield self.forward, asked
        if self._inspector is not None:
            everyone = (True,) * self.canvas.batch
            forwards = tuple(result.forwards[number] for number in self.canvas.numbers)
            here = on_device(everyone, self.canvas.tokens.device)
            step = replace(step, forwards=forwards, active=everyone)
            self._inspector.after_forward(step, asked.kind, asked.ids, self.forward, here)
        result.steps_by_kind[asked.kind] += 1
        result.rows.append(self.forward.rows_computed)
        result.experts.append(self.forward.experts_picked)
        for number, pads in zip(self.canvas.numbers, self.canvas.pad_counts, strict=True):
            result.forwards[number] += pads < asked.rows.within.stop
        result.step_seconds.append(time.perf_counter() - began)

    def _step(self, step: Step, remaining: list[int], *, final: bool) -> "Asking[list[int]]":
        """One forward with its commit. Returns the number of pending rows of each sequence, 0 if it waits or is
        done."""
        canvas, result = self.canvas, self._result
        active = [count > 0 for count in remaining]
        here = on_device(active, canvas.tokens.device)
        pending = canvas.pending(step.start, step.stop) & here[:, None]
        forwards = tuple(result.forwards[number] for number in canvas.numbers)
        step = replace(step, forwards=forwards, active=tuple(active))
        step = replace(step, next_commits=self._proposer.draw_ranks(self.rule, step, pending))
        with span(Op.POLICY):
            asked = self.policy.rows(step)
            if isinstance(self.rule, RewritingState) and self.rule.soft is not None:
                asked = replace(asked, soft=self.rule.soft)
        if not all(active):
            asked = replace(asked, rows=asked.rows.only(here[:, None]))
        logits, output = (yield from self._logits(step, asked, here)), asked.rows[asked.output]
        candidates = self._proposer.candidates(self.rule, step, logits, output, pending, remaining)
        del logits  # other calls have their forwards before this call reads
        if self._shift is not None:
            candidates = replace(candidates, shift=self._shift.shift)
        committed = self._commit(step, candidates, here)
        with span(Op.POLICY):
            self.policy.observe(step, committed)
        result.steps_by_kind[asked.kind] += 1
        result.rows.append(self.forward.rows_computed)
        result.experts.append(self.forward.experts_picked)
        for number, is_active in zip(canvas.numbers, active, strict=True):
            result.forwards[number] += is_active
        left, ended, broken = yield from self._where_sequences_stand(step, candidates)
        if any(broken):
            raise self._not_finite(step, broken, self._first_broken(step))
        # If blocks are finished first, their ends are looked for afterwards.
        finishes, before = self._finishes_blocks, self._ended
        standing = zip(before, ended, left, strict=True)
        self._ended = [was or (now and not (finishes and count)) for was, now, count in standing]
        draft = None if isinstance(self.rule, RewritingState) else candidates
        self._publisher.step(step.start, step.stop, before if finishes else self._ended, draft, final=final)
        return [0 if done else count for count, done in zip(left, self._ended, strict=True)]

    def _logits(self, step: Step, asked: Pass, here: Bool[Tensor, " batch"]) -> "Asking[Logits | LogitTiles]":
        if self._shift is not None:
            # Rows of another block cannot be compared, and a refresh moves every row at once.
            refreshed = asked.refreshed or (asked.kind is StepKind.REFRESH,) * self.canvas.batch
            self._shift.begin_step(step.first_row, forget=[step.number == 0 or every for every in refreshed])
        with span(Op.FORWARD, kind=asked.kind.value):
            fed = asked if self._guidance is None else self._guidance.doubled(asked, self.canvas)
            try:
                logits = yield self.forward, fed
            except ValueError as error:  # clustering raises for rows that are not finite
                if (found := self._first_broken(step)) is None:
                    raise
                raise self._not_finite(step, step.active, found) from error
            if self._guidance is not None:
                logits = self._guidance.merge(logits, asked, (step.first_row, step.last_row))
            if self._inspector is not None:
                self._inspector.after_forward(step, asked.kind, fed.ids, self.forward, here)
        return logits

    @spanned(Op.COMMIT)
    def _commit(self, step: Step, candidates: Candidates, here: Bool[Tensor, " batch"]) -> Bool[Tensor, "batch block"]:
        canvas, start, stop = self.canvas, step.start, step.stop
        clock = on_device(step.forwards, here.device)
        chosen = self.rule.choose(candidates)
        if not isinstance(self.rule, RewritingState):
            canvas.commit(start, chosen, candidates.tokens, clock)
            return chosen
        changed = chosen & (candidates.tokens != canvas.tokens[:, start:stop])
        canvas.rewrite(start, chosen, candidates.tokens)
        final = (self.rule.finished(changed) & here)[:, None].expand_as(changed)
        canvas.commit(start, final, canvas.tokens[:, start:stop], clock)
        return changed

    def _where_sequences_stand(
        self, step: Step, candidates: Candidates
    ) -> "Asking[tuple[list[int], list[bool], list[bool]]]":
        """The number of pending rows of each sequence, whether it has ended, and whether its logits were not finite. A
        sequence has ended if an end-of-sequence token and all tokens before it are fixed. This is the only host
        synchronisation of a step."""
        assert candidates.broken is not None, "the proposer looks for it"
        with span(Op.COMMIT):
            pending = self.canvas.pending(step.start, step.stop)
            standing = [pending.sum(dim=1), candidates.broken.long()]
            if self._publisher.stop_at_eos:
                ends = self.canvas.ends(step.start, step.stop, self._publisher.ends)
                standing.append((ends.any(dim=1) & ~((ends.cumsum(dim=1) == 0) & pending).any(dim=1)).long())
            left, broken, *rest = (yield from read(torch.stack(standing))).tolist()
        ended = rest[0] if rest else [0] * len(left)
        return left, [bool(flag) for flag in ended], [bool(flag) for flag in broken]

    def _first_broken(self, step: Step) -> str | None:
        """The source of NaN or infinity over the canvas before this step. Overwrites the caches of the call."""
        canvas, clock = self.canvas, on_device(step.forwards, self.canvas.tokens.device)[:, None]
        if not isinstance(self.rule, RewritingState):
            canvas.tokens.masked_fill_(canvas.committed_at == clock, self._model.mask_token_id)
        ids = canvas.tokens if self._guidance is None else self._guidance.ids(canvas, None)
        return first_broken(self.forward, ids, slice(step.first_row, step.last_row), step.start)

    def _not_finite(self, step: Step, broken: Sequence[bool], found: str | None) -> NonFiniteError:
        self._publisher.publish(step.start, step.stop, self._ended)
        sequences = [number for number, is_broken in zip(self.canvas.numbers, broken, strict=True) if is_broken]
        dtype = next(self._model.parameters()).dtype
        what, hint = cause(found, dtype, None if self._guidance is None else self._guidance.scale)
        seen = f"seen in forward {len(self._result.step_seconds)} of the call, in sequences {sequences} of the batch. "
        return NonFiniteError(what, seen + hint, sequences, self._result.answers.cpu())

    def _drop_ended(self) -> None:
        places = [place for place, ended in enumerate(self._ended) if not ended]
        if len(places) == self.canvas.batch:
            return
        doubles = [self.canvas.batch + place for place in places] if self._guidance is not None else []
        self.forward.keep(places + doubles)
        for part in (self._guidance, self.canvas, self.policy, self.rule, self._shift, self._proposer):
            if part is not None:
                part.keep(places)
        self._ended = [False] * len(places)


def _answered(steps: "Asking[GenerationState]", forward: Forward, pass_: Pass) -> AskedPass:
    """The next pass of `steps`. This frame does not keep the logits of `pass_` alive meanwhile."""
    try:
        logits = forward.answer(pass_)
    except ValueError as error:
        return next_pass(steps, error)
    return next_pass(steps, logits)
