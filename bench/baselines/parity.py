"""Policies and commit rules that repeat departures of the authors' code from its paper, token for token.

`policy` and `rule` take the names and options of the library. docs/authors-code.md lists the departures. Names without
one are the library's own. `dream_sequence` keeps keys although their rows predict, which no policy can.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.buffers import Buffer
from tiered.core.canvas import PROMPT
from tiered.core.checks import unknown_name
from tiered.core.features import Account, Feature
from tiered.core.rows import Rows
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.registry import make_commit_rule
from tiered.decoding.rules.rewriting import Adaptive, MostWanted
from tiered.decoding.rules.threshold import AtLeast, Threshold
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.kernels.host_values import on_device
from tiered.models.attention import Limits
from tiered.models.base import DiffusionModel
from tiered.policies.base import Needs, Policy, PolicyState, Step, StepKind
from tiered.policies.dllm_cache.policy import Clocks, DLLMCache
from tiered.policies.dllm_cache.program import BranchStep, BranchWork, distances
from tiered.policies.registry import make_policy, with_options
from tiered.policies.row_schedule import SCHEDULES, RowSchedule, ScheduledRows, clock

ShiftCaching = Literal["un", "un_right", "right"]


def policy(name: str, **options: Any) -> Policy:
    """The policy `name` as its authors' code has it. Raises what `make_policy` raises."""
    kinds = {"fast_dllm_prefix": OfficialBlocks, "fast_dllm_dual": OfficialBlocks}
    kinds |= {"dkv_decode": OfficialDKV, "dkv_pd": OfficialDKV, "dkv_greedy": OfficialDKV}
    if name == "dllm_cache":
        return with_options(OfficialDLLMCache, name, {}, options)
    if name not in kinds:
        return make_policy(name, **options)
    row = SCHEDULES[name]
    return with_options(partial(kinds[name], name=name, rows=row.rows), name, {**row.fixed, **row.options}, options)


def rule(name: str, **options: Any) -> CommitRule:
    """The commit rule `name` as its authors' code has it. Raises what `make_commit_rule` raises."""
    kinds: Mapping[str, type[CommitRule]] = {"threshold": Capped, "adaptive": Endless}
    return kinds[name](**options) if name in kinds else make_commit_rule(name, **options)


# ---- Fast-dLLM on Dream (commit 2a2de8c) ----


@dataclass(frozen=True, kw_only=True)
class OfficialBlocks(RowSchedule):
    """See `_FirstTokenAlone`."""

    def start(self) -> PolicyState:
        return _FirstTokenAlone(super().start())


class _FirstTokenAlone(PolicyState):
    """If predictions are shifted, the step that begins a block gives the logits of the row in front of it alone. So it
    commits the block's first token, however unsure. Other steps leave that row out."""

    def __init__(self, plain: PolicyState) -> None:
        self._plain = plain

    def rows(self, step: Step) -> Pass:
        row = step.first_row
        if row == step.start:
            return self._plain.rows(step)
        # A rule may leave the first token open, and no step without the row in front predicts it.
        alone = step.number == 0 or bool(step.canvas.pending(step.start, step.start + 1).any())
        of_step = self._plain.rows(replace(step, number=0) if alone else step)
        first, stop = of_step.rows.within.start, of_step.rows.within.stop
        if alone:
            columns = [row, *range(first, row), *range(step.start, stop)]
            return self._apart(step, columns, 1, of_step.kind)
        if of_step.kind is StepKind.STEP:
            return self._apart(step, [*range(step.start, stop)], step.stop - step.start, of_step.kind)
        return of_step

    def _apart(self, step: Step, columns: list[int], output: int, kind: StepKind) -> Pass:
        """The first `output` of `columns` have logits, which are not the span that a step needs."""
        index = on_device(columns, step.canvas.tokens.device).expand(step.canvas.batch, -1)
        return step.of_rows(Rows.at(index), slice(0, output), kind)


@dataclass(frozen=True, kw_only=True)
class Capped(Threshold):
    """Fast-dLLM on Dream without a cache. A step fixes at most n / steps of a block's n tokens, and as many as earlier
    steps left over. Once the steps are over, a step fixes as many as pass."""

    by_time: ClassVar[bool] = True

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Shared(self.confidence_threshold, steps_per_block)


class _Shared(AtLeast):
    def __init__(self, bound: float, steps: int) -> None:
        super().__init__(bound)
        self._steps = steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._count = self._left = pending.sum(dim=1, keepdim=True)
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        due = self._count * min(self._step, self._steps) // self._steps
        allowed = (due - (self._count - self._left)).clamp(min=1)
        chosen = super().choose(candidates) & (candidates.ranks() < allowed)
        self._left = self._left - chosen.sum(dim=1, keepdim=True)
        return chosen


# ---- GIDD (commit 6525e88) ----


@dataclass(frozen=True, kw_only=True)
class Endless(Adaptive):
    """If masks alone are the noise and all are gone, the code goes on. It rewrites the tokens that `torch.topk` finds
    among NaNs."""

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Endless(self, steps_per_block)


class _Endless(MostWanted):
    def urgency(self, gain: Float[Tensor, "batch rows"], noise: Tensor) -> Float[Tensor, "batch rows"]:
        return gain

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        count = min(self._tokens, candidates.confidence.shape[1])
        chosen = torch.zeros_like(candidates.pending)
        # In float32, as there: if all are NaN, the choice of `topk` depends on the dtype.
        return chosen.scatter_(1, candidates.confidence.float().topk(count, dim=-1).indices, True)

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        settled = ~changed.any(dim=1)
        if self._step >= self._steps:
            return torch.ones_like(settled)
        return settled if self._settles else torch.zeros_like(settled)


# ---- dKV-Cache (commit 49a76fcc) ----


@dataclass(frozen=True, kw_only=True)
class OfficialDKV(RowSchedule):
    """`dkv_decode` and `dkv_greedy` count intervals within each block. A block of `dkv_decode` begins with two full
    steps; with shifted predictions, one.

    Attributes:
        shift_caching: token whose commit lets a row be kept, if predictions are shifted. "un": the token that the row
            predicts, though its own may be a mask. "un_right": both tokens. For the last row see `_OfficialRows`.
    """

    shift_caching: ShiftCaching = "un_right"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift_caching not in get_args(ShiftCaching):
            raise unknown_name("shift_caching", str(self.shift_caching), get_args(ShiftCaching))
        if self.shift_caching == "right":
            raise ValueError(
                "shift_caching = 'right': the authors' code answers with id 0 what a kept row predicts, which "
                "`dream_sequence` decodes; 'un' and 'un_right' are allowed"
            )

    @property
    def defaults(self) -> Mapping[str, Any]:
        shift = {} if self.name == "dkv_greedy" else {"shift_caching": "un_right"}
        return {**super().defaults, **shift}

    def start(self) -> PolicyState:
        by_block = self if self.name == "dkv_pd" else replace(self, refresh_blocks=1)
        return _OfficialRows(by_block, self.shift_caching, full_steps=2 if self.name == "dkv_decode" else 0)


class _OfficialRows(ScheduledRows):
    """With "un" the canvas's last row counts as one that predicts the first token, except in a sequence's first
    forwards. With "un_right" it is open if the row in front of it is.

    `full_steps`: steps at a block's beginning that recompute every row.
    """

    def __init__(self, schedule: RowSchedule, shift_caching: ShiftCaching, full_steps: int) -> None:
        super().__init__(schedule)
        self._shift_caching, self._full_steps = shift_caching, full_steps

    def due(self, step: Step) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        full = step.first_row == step.start and step.number < self._full_steps
        return (step.active, step.active) if full else super().due(step)

    def undecided(self, step: Step, delay: int) -> Bool[Tensor, "batch length"]:
        dates = step.canvas.committed_at
        own = (dates >= clock(step) - delay) & (dates != PROMPT)
        shift = step.start - step.first_row
        if not shift:
            return own
        predicted = torch.cat([own[:, shift:], own[:, -shift:]], dim=1)
        if self._shift_caching == "un":
            predicted[:, -shift:] &= clock(step) <= delay
            return predicted
        rows = own | predicted
        rows[:, -shift:] = rows[:, -2 * shift : -shift]
        return rows

    def around(self, step: Step, fresh: Bool[Tensor, "batch length"], window: int) -> Bool[Tensor, "batch length"]:
        """Rows that are committed next, `fresh`, and `window` rows around each of the former in turn. Such a row was a
        mask before that commit, and no other token has taken it. The search goes outwards, in turn on the left and on
        the right. It walks over tokens on the host."""
        assert step.next_commits is not None, "known before the step"
        length, taken = step.canvas.length, fresh.clone()
        taken[:, step.start : step.stop] |= step.next_commits > 0
        masked, chosen = (step.canvas.pending(0, length) | fresh).tolist(), taken.tolist()
        for masks, rows, turns in zip(masked, chosen, step.next_commits.tolist(), strict=True):
            in_turn = sorted((turn, step.start + column) for column, turn in enumerate(turns) if turn)
            for _, center in in_turn:
                found, distance = 0, 1
                while found < window and distance < length:
                    for column in (center - distance, center + distance):
                        if found < window and 0 <= column < length and masks[column] and not rows[column]:
                            rows[column] = True
                            found += 1
                    distance += 1
        return on_device(chosen, fresh.device)


def dream_sequence(
    model: DiffusionModel,
    prompt: Int[Tensor, "1 prompt"],
    *,
    shift_caching: ShiftCaching,
    steps: int,
    max_new_tokens: int,
    cache_steps: int,
    eps: float = 1e-3,
) -> tuple[Int[Tensor, "states 1 length"], list[int]]:
    """Decode by dKV-Cache's Dream code (`cache_type="decoded"`, `alg="maskgit_plus"`): the canvas after each step, and
    the number of rows that the step recomputed.

    A token whose row is kept has no logits. Its confidence is NaN, which `torch.topk` takes for the largest, and its
    id is 0. That happens with `shift_caching="right"`, which keeps a row once its own token is committed.
    """
    ids = torch.cat([prompt, prompt.new_full((1, max_new_tokens), model.mask_token_id)], dim=1)
    length, times = ids.shape[1], torch.linspace(1, eps, steps + 1)
    empty = (1, model.shape.kv_heads, length, model.shape.head_dim)
    buffer = [(torch.zeros(empty), torch.zeros(empty)) for _ in range(model.shape.layers)]
    fixed = ids[0] != model.mask_token_id
    kept, latest = None, torch.cat([fixed[1:], fixed[-1:]])
    states, counts = [], []
    for number in range(steps):
        kept = None if number % cache_steps == 0 else kept
        rows = torch.arange(length) if kept is None else (~kept).nonzero()[:, 0]
        logits = torch.full((length, model.shape.vocab_size), -torch.inf)
        logits[rows] = logits_of(model, ids, rows, buffer)[0]
        confidence, tokens = torch.cat([logits[:1], logits[:-1]]).softmax(dim=-1).max(dim=-1)
        masked = ids[0] == model.mask_token_id
        share = 1 - times[number + 1] / times[number] if number < steps - 1 else 1
        chosen = confidence.where(masked, -torch.inf).topk(int(masked.sum() * share)).indices
        ids[0, chosen] = tokens[chosen]
        fixed = ids[0] != model.mask_token_id
        kept, both = latest, fixed[:-1] & fixed[1:]
        latest = {"un": fixed.roll(-1), "un_right": torch.cat([both, both[-1:]]), "right": fixed}[shift_caching]
        states.append(ids.clone())
        counts.append(len(rows))
    return torch.stack(states), counts


def logits_of(
    model: DiffusionModel, ids: Int[Tensor, "1 length"], rows: Int[Tensor, " rows"], buffer: list[tuple[Tensor, Tensor]]
) -> Float[Tensor, "1 rows vocab"]:
    """Logits of `rows`. Each layer's keys and values are kept in `buffer` [1, heads, length, head_dim], a cache without
    the library's stores and programs."""
    hidden, rotary = model.embed(ids[:, rows]), model.rotary(rows[None])
    for layer, kept in enumerate(buffer):
        normed = model.attention_norm(layer, hidden)
        for whole, part in zip(kept, model.keys_values(layer, normed, rotary), strict=True):
            whole[:, :, rows] = part
        mixed = model.attend(layer, model.queries(layer, normed, rotary), *kept, Limits())
        hidden = hidden + model.attention_out(layer, mixed)
        hidden = hidden + model.feed_forward(layer, hidden)
    return model.logits(hidden)


# ---- dLLM-Cache (commit 17235bff) ----

_GUIDED_AT_FIRST = 5  # forwards that are guided whatever the interval


@dataclass(frozen=True, kw_only=True)
class OfficialDLLMCache(DLLMCache):
    """Values of all rows replace the cached ones wherever they are compared. The first layer renews the whole answer.
    Guidance is computed in the first five forwards, but not for a new block. If predictions are shifted, the row that
    predicts the answer's first token is as old as the prompt."""

    def needs(self, sizes: CallShape) -> Needs:
        needs = super().needs(sizes)
        # Kept tensors of the row in front of the answer, if it predicts, and tensors that they are made of.
        rows = (4, sizes.sequences, sizes.shape.prediction_shift, sizes.shape.width)
        edge = Buffer("row in front of the answer", Account.ACTIVATIONS, rows, sizes.dtype)
        # The difference that guidance makes outlives its block, so it is of the whole answer.
        logit_rows = sizes.context if needs.skips_guidance else None
        return replace(needs, buffers=lambda: [*needs.buffers(), edge], logit_rows=logit_rows)

    def start(self) -> PolicyState:
        return _OfficialClocks(self)


class _OfficialClocks(Clocks):
    def __init__(self, of: DLLMCache) -> None:
        super().__init__(of)
        self._edge: PromptEdge | None = None

    def rows(self, step: Step) -> Pass:
        of_step = super().rows(step)
        if not any(of_step.guided or ()):
            return of_step
        # Later blocks will read the difference that guidance makes here.
        first = self.untouched(step) - of_step.rows.within.start
        return replace(of_step, output=slice(first, first + step.canvas.length - step.canvas.prompt_length))

    def keep(self, sequences: list[int]) -> None:
        if self._edge is not None:
            self._edge.keep(sequences, len(self._guided))
        super().keep(sequences)

    def untouched(self, step: Step) -> int:
        return step.canvas.prompt_length - (step.start - step.first_row)

    def program(self, work: BranchWork, step: Step) -> BranchStep:
        shift = step.start - step.first_row
        if shift and self._edge is None:
            self._edge = PromptEdge(shift)
        answer = step.canvas.prompt_length, step.canvas.length
        return _OfficialStep(work, answer, (step.first_row, step.last_row), self._edge)

    def guides(self, step: Step) -> list[bool]:
        super().guides(step)
        interval = self._policy.guidance_interval
        return [
            step.guidance and part and (clock < _GUIDED_AT_FIRST or clock % interval == 0)
            for part, clock in zip(step.active, step.forwards, strict=True)
        ]


class PromptEdge:
    """The prompt's last row between renewals of the prompt, if it predicts the answer's first token.

    To the authors it is a row of the prompt. From one renewal to the next only its first layer is computed afresh. All
    other layers add the sum that they added last, which this class keeps.

    `rows`: number of such rows, 1 for every family with shifted predictions so far.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._added: Float[Tensor, "batch rows width"] | None = None
        self._entered: Float[Tensor, "batch rows width"] | None = None

    def enter(self, hidden: Float[Tensor, "batch rows width"]) -> None:
        """The first layer has left `hidden` at the row."""
        self._entered = hidden.clone()

    def leave(self, hidden: Float[Tensor, "batch rows width"], renewed: Bool[Tensor, " batch"]) -> None:
        """The last layer has left `hidden`, which stays if the prompt is `renewed`, else is overwritten. The batch may
        be the first sequences alone of an earlier batch."""
        assert self._entered is not None, "the first layer is in front of the last"
        added = hidden - self._entered
        if self._added is None:
            self._added = added
        kept = self._added[: len(hidden)]
        kept.copy_(added.where(renewed[:, None, None], kept))
        hidden.copy_(self._entered.add_(kept))
        self._entered = None

    def keep(self, sequences: list[int], batch: int) -> None:
        """Go on with these sequences of a batch of `batch` alone (ascending), and with their second canvases."""
        if self._added is not None:
            firsts = range(0, len(self._added), batch)
            self._added = self._added[[first + number for first in firsts for number in sequences]]


class _OfficialStep(BranchStep):
    def __init__(
        self, work: BranchWork, answer: tuple[int, int], block: tuple[int, int], edge: PromptEdge | None
    ) -> None:
        super().__init__(work, answer, block)
        self._edge = edge

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        pass_ = super().__call__(forward, layer, pass_)
        if self._edge is not None:
            self._pass_over(self._edge, pass_.hidden, layer, forward.model.shape.layers - 1)
        return pass_

    def counts(self, layer: int) -> list[int]:
        answer = self._stop - self._start
        return [answer if whole else 0 for whole in self._here] if layer == 0 else self._rows

    def moved(
        self, forward: Forward, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]
    ) -> Float32[Tensor, "batch rows"]:
        values = forward.model.values(layer, forward.model.attention_norm(layer, hidden))
        moved = distances(values, forward.store.rows(Feature.VALUE, layer, rows))
        forward.store.write(Feature.VALUE, layer, rows, values)
        return moved

    def _pass_over(self, edge: PromptEdge, hidden: Float[Tensor, "batch rows width"], layer: int, last: int) -> None:
        """Let rows in front of the answer leave no trace behind the first layer if the prompt is not due."""
        rows = hidden[:, self._head - edge.rows : self._head]
        due = on_device([prompt for prompt, _ in self._work.due[: len(hidden)]], hidden.device)
        if layer == 0:
            edge.enter(rows)
            columns = self._span.index
            passed = ~due[:, None] & (columns < self._start)
            self._span = replace(self._span, valid=~passed if self._span.valid is None else self._span.valid & ~passed)
        if layer == last:
            edge.leave(rows, due)
