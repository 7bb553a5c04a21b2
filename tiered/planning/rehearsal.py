"""A call without its model: the rows that a policy asks for, forward after forward, where so many tokens are sure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tiered.core.canvas import Canvas
from tiered.forward.sizes import CallSizes
from tiered.policies.base import Policy, Step, StepKind

_MASK = 1  # an id that is no prompt's
ANSWER_BLOCKS = 8  # where the answer's length is not told
MOST_BLOCKS = 32  # of an answer, that are gone through: what comes later is like them


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One forward.

    Attributes:
        block: number of the block it is in.
        kind: what it is for.
        rows: of a sequence, on average over layers.
        compared: rows beside these that are compared with what is stored, and left.
        fetched: bytes, beside layers that are streamed.
    """

    block: int
    kind: StepKind
    rows: float
    compared: float = 0.0
    fetched: float = 0.0


def rehearse(policy: Policy, sizes: CallSizes, *, tokens_per_forward: int) -> Iterator[Rehearsed]:
    """The forwards of a call of `sizes` of one sequence, as the decoding loop would ask for them. The first pending
    tokens of a block are committed first, `tokens_per_forward` of them in each.

    Where rows depend on what the model says (`Policy.layer_rows`), they are what the policy expects.
    """
    shape, block = sizes.shape, sizes.block_length
    answer = answer_of(sizes)
    canvas = Canvas(
        # Where blocks count from a prompt's first token, of its whole blocks.
        torch.zeros(
            1, prompt_of(sizes) // block * block if shape.block_causal else prompt_of(sizes), dtype=torch.int64
        ),
        torch.zeros(1, dtype=torch.int64),
        max_new_tokens=answer,
        block_length=block,
        mask_token_id=_MASK,
    )
    state, forwards = policy.rehearsal(), 0
    for number in range(min(canvas.blocks, MOST_BLOCKS)):
        start, stop = canvas.block_span(number)
        step = Step(
            canvas=canvas, block=number, start=start, stop=stop, number=0,
            first_row=start - shape.prediction_shift, last_row=stop - shape.prediction_shift,
            forwards=(), active=(True,), guidance=sizes.guidance,
            remasked=shape.noise_masked and forwards > 0, rewrites=shape.noise != "mask",
        )  # fmt: skip
        for asked in state.before_block(step):
            yield Rehearsed(number, asked.kind, asked.rows.count)
            forwards += 1
        while (pending := canvas.pending(start, stop)).any():
            chosen = pending & (pending.cumsum(1) <= tokens_per_forward)
            ranks = (pending.cumsum(1) * chosen) if policy.needs_order() else None
            step = replace(step, forwards=(forwards,), upcoming=ranks)
            asked = state.rows(step)
            yield Rehearsed(
                number, asked.kind, policy.layer_rows(asked, sizes), policy.compared_rows(asked, sizes),
                policy.fetched_bytes(asked, sizes),
            )  # fmt: skip
            clock = torch.tensor([forwards])
            canvas.commit(start, chosen, torch.zeros_like(canvas.tokens[:, start:stop]), clock)
            state.observe(step, chosen)
            step, forwards = replace(step, number=step.number + 1, remasked=False), forwards + 1


def prompt_of(sizes: CallSizes) -> int:
    """Tokens of the longest prompt."""
    return sizes.context - answer_of(sizes)


def answer_of(sizes: CallSizes) -> int:
    """Positions of the answer; where nobody has said, those of `ANSWER_BLOCKS` blocks, or what a prompt leaves."""
    if sizes.answer is not None:
        return sizes.answer
    return sizes.block_length * max(1, min(ANSWER_BLOCKS, sizes.context // sizes.block_length - 1))
