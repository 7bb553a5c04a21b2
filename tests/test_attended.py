"""`attended`: a step renews the rows that the answer looked at most in the last step, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from four_blocks import BLOCK, BLOCKS, PROMPT, alone, answered, runtime
from torch import Tensor
from training import tasks

import tiered
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.policies.attended import Attended
from tiered.policies.registry import make_policy

ROWS = 5


@pytest.mark.parametrize("refresh_blocks", [1, 2])
@pytest.mark.parametrize(("family", "shift"), [("llada", 0), ("dream", 1)])
def test_a_step_has_its_block_and_as_many_rows_as_asked(family: str, shift: int, refresh_blocks: int):
    policy = Attended(attended_rows=ROWS, refresh_blocks=refresh_blocks)
    out, expected = answered(family, policy, steps=3 * BLOCKS), []
    for block in range(BLOCKS):
        begins = PROMPT + BLOCK * BLOCKS if block % refresh_blocks == 0 else shift + 2 * BLOCK + ROWS
        expected += [begins, *[shift + BLOCK + ROWS] * 2]
    assert [*out.rows_per_step] == expected
    refreshes = BLOCKS // refresh_blocks
    assert out.steps_by_kind == {"refresh": refreshes, "update": 3 * BLOCKS - refreshes}


def test_under_a_noise_mask_every_block_begins_with_a_refresh():
    out = answered("gidd", Attended(attended_rows=ROWS), block_steps=4)
    assert out.steps_by_kind == {"refresh": BLOCKS, "update": 3 * BLOCKS}


def test_renewed_rows_have_most_attention_from_pending_rows(monkeypatch: pytest.MonkeyPatch):
    """In each step, by float64 maps of the last layer in the step before."""
    model, masses, passes = runtime("llada").model, list[Tensor](), list[set[int]]()
    attend = Forward.attended

    def watched(forward: Forward, layer: int, rows: Rows, queries: Tensor) -> Tensor:
        if layer == 0:
            passes.append({*rows.index[0].tolist()})
        if layer == model.shape.layers - 1:
            keys = forward.keys(layer).repeat_interleave(model.shape.heads // model.shape.kv_heads, dim=1)
            maps = (queries.double() @ keys.double().mT / queries.shape[-1] ** 0.5).softmax(-1)[0]
            columns = rows.index[0]
            pending = (forward.ids[0, columns] == model.mask_token_id) & (columns >= PROMPT)
            masses.append(maps[:, pending].sum(dim=(0, 1)))
        return attend(forward, layer, rows, queries)

    monkeypatch.setattr(Forward, "attended", watched)
    answered("llada", Attended(attended_rows=ROWS), max_new_tokens=BLOCK)
    assert len(passes) == BLOCK
    for mass, rows in zip(masses[:-1], passes[1:], strict=True):
        assert rows - {*range(PROMPT, PROMPT + BLOCK)} == {*mass[:PROMPT].topk(ROWS).indices.tolist()}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llada", {"confidence_threshold": 0.6}),
        ("llada", {"confidence_threshold": 0.6, "cfg_scale": 0.5}),
        ("dream", {"confidence_threshold": 0.6}),
        ("gidd", {"block_steps": 5, "seed": 3}),
    ],
)
def test_a_batch_answers_as_its_prompts_alone(family: str, options: dict[str, Any]):
    policy = Attended(attended_rows=ROWS)
    together = answered(family, policy, slice(0, 3), **options)
    stale = answered(family, make_policy("fast_dllm_dual", refresh_blocks=4), slice(0, 3), **options)
    assert not torch.equal(together.sequences, stale.sequences), "the rows change nothing"
    for number in range(3):
        assert torch.equal(together.sequences[number], alone(family, policy, number, **options).sequences[0])


def test_it_sorts_lists_that_a_frozen_prompt_does_not():
    """Lists to sort: the dual cache gets a fourth of them right, `none` nearly all."""
    asked = [tasks.sample("sort", "validation", number) for number in range(24)]
    own = tiered.from_pretrained("embedded", policy="none", device="cpu")

    def right(policy: str, **options: Any) -> int:
        chats = [[{"role": "user", "content": each.prompt}] for each in asked]
        texts = own.with_policy(policy, **options).generate(chats, max_new_tokens=32, block_length=8).text
        assert texts is not None
        return sum(tasks.score(each, text) for each, text in zip(asked, texts, strict=True))

    exact, stale, found = right("none"), right("fast_dllm_dual"), right("attended", attended_rows=16)
    assert exact >= 20 and stale <= exact - 8 and found >= exact - 1, (exact, stale, found)
