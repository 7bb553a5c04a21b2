"""The canvas: positions, pending columns, and the columns that a commit changes."""

import torch

from tiered.core.canvas import PENDING, PROMPT, Canvas

MASK = 9


def canvas(*, pads: tuple[int, ...] = (0, 2)) -> Canvas:
    """Prompts of at most 3 tokens (a mask token among them), answers of 3 blocks of 2."""
    prompts = torch.tensor([[1, MASK, 3], [8, 8, 6]])
    return Canvas(prompts, torch.tensor(pads), max_new_tokens=6, block_length=2, mask_token_id=MASK)


def test_a_canvas_begins_masked():
    new = canvas()
    assert (new.batch, new.length, new.prompt_length, new.blocks) == (2, 9, 3, 3)
    assert new.tokens.tolist() == [[1, MASK, 3] + [MASK] * 6, [8, 8, 6] + [MASK] * 6]
    assert new.committed_at.tolist() == [[PROMPT] * 3 + [PENDING] * 6] * 2
    assert [new.block_span(block) for block in range(3)] == [(3, 5), (5, 7), (7, 9)]
    assert torch.equal(new.answers, new.tokens[:, 3:])


def test_a_mask_token_in_a_prompt_is_not_pending():
    assert not canvas().pending(0, 3).any()
    assert canvas().pending(2, 5).tolist() == [[False, True, True]] * 2


def test_padding_moves_positions_and_hides_keys():
    padded = canvas()
    assert padded.padded
    assert padded.positions().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 2, 3, 4, 5, 6]]
    mask = padded.key_mask()
    assert mask is not None and mask.tolist() == [[True] * 9, [False] * 2 + [True] * 7]


def test_without_padding_sequences_share_positions():
    plain = canvas(pads=(0, 0))
    assert not plain.padded
    assert plain.positions().tolist() == [list(range(9))]
    assert plain.key_mask() is None


def test_a_commit_writes_chosen_columns_alone():
    new = canvas()
    before = new.tokens.clone()
    chosen = torch.tensor([[True, False], [False, True]])
    new.commit(5, chosen, torch.tensor([[4, 5], [6, 7]]), forwards=torch.tensor([11, 12]))
    assert new.tokens[:, 5:7].tolist() == [[4, MASK], [MASK, 7]]
    assert new.committed_at[:, 5:7].tolist() == [[11, PENDING], [PENDING, 12]]
    assert torch.equal(new.pending(5, 7), ~chosen)
    outside = torch.tensor([0, 1, 2, 3, 4, 7, 8])
    assert torch.equal(new.tokens[:, outside], before[:, outside])
    assert new.committed_at[:, outside].tolist() == [[PROMPT] * 3 + [PENDING] * 4] * 2


def test_a_second_commit_keeps_the_first():
    new = canvas()
    for forward, row in enumerate([[True, False], [False, True]]):
        new.commit(3, torch.tensor([row] * 2), torch.full((2, 2), forward), torch.full((2,), forward))
    assert new.tokens[:, 3:5].tolist() == new.committed_at[:, 3:5].tolist() == [[0, 1]] * 2


def test_prompts_are_the_callers():
    prompts = torch.tensor([[1, 2, 3]])
    new = Canvas(prompts, torch.tensor([0]), max_new_tokens=2, block_length=2, mask_token_id=MASK)
    new.tokens.zero_()
    assert prompts.tolist() == [[1, 2, 3]]


def test_kept_sequences():
    new = canvas()
    new.commit(3, torch.tensor([[True, True], [True, False]]), torch.tensor([[4, 4], [5, 5]]), torch.tensor([0, 0]))
    mask = new.key_mask()
    assert mask is not None
    before = [new.tokens, new.committed_at, new.pads, new.positions(), mask]
    new.keep([1])
    mask = new.key_mask()
    assert mask is not None and new.batch == 1
    after = [new.tokens, new.committed_at, new.pads, new.positions(), mask]
    assert all(torch.equal(old[[1]], kept) for old, kept in zip(before, after, strict=True))
