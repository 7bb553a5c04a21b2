"""Training of the embedded model: batches, losses that fall, runs that go on, and exports that load."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.batches import (
    EOS_ID,
    MASK_ID,
    TOKENIZER,
    VOCABULARY,
    Batch,
    collate,
    encode,
)
from training.checkpoint import optimizer_tensors
from training.curriculum import FRESH_BOUNDS, FRESH_LEARNED, LIST_TASKS, LONG_STREAM, SHORT_TASKS, Curriculum
from training.export import export
from training.fresh_batches import SMALLEST, fresh_batch, fresh_task, keys_of, mask_as_decoded
from training.fresh_losses import fresh_losses
from training.in_blocks import forward_in_blocks
from training.long_batches import long_batch
from training.lookup_batches import REACH, lookup_batch, stretched
from training.loop import embedded_tokenizer, train, validate, validate_fresh
from training.losses import POINTER_HEADS, mean_cross_entropy, operand_losses, pointer_losses
from training.model import Tap, adopt, forward, new_model
from training.noise import TAIL_WEIGHT, Noised, mask, mask_in_blocks
from training.optimizer import DECAY_SHARE, WARMUP_STEPS, Muon, optimizers, set_rate
from training.settings import Settings
from training.short_batches import ShortBatches
from training.tasks import FRESH_TASKS, LONG_TASKS, TASKS, Example, split_of
from training.trainer import Trainer
from workloads.models import drawn

import tiered
from tiered.models.locate import read_config
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

SMALL = Settings(
    steps=6, grow=4, short_tokens=200, lookup_tokens=100, score_every=3, score_examples=1, save_every=2, report_every=2
)


@pytest.fixture
def config() -> dict[str, Any]:
    """The embedded model's own, with smaller matrices."""
    return read_config("embedded") | {"d_model": 24, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 24}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(stream: str, count: int) -> list[Batch]:
    """The first batches of a run whose curriculum is at its end."""
    last = Curriculum(list_high=16, lookup_high=300.0, stretch=1.0)
    short = ShortBatches(1, 800)
    make = {"short": lambda step: short.next(last), "long": lambda step: long_batch(1, step, last, 800)}
    make["lookup"] = lambda step: lookup_batch(1, step, last, 800)
    return [make[stream](step) for step in range(count)]


def masked(batch: Batch, first: int, last: int | None = None) -> Noised:
    """A batch with masks on columns `first` to `last` (exclusive) of its only row."""
    hidden = torch.zeros(batch.ids.shape, dtype=torch.bool)
    hidden[0, first:last] = True
    ids = batch.ids.masked_fill(hidden, MASK_ID)
    return Noised(ids=ids, hidden=hidden, asked=hidden, clean=batch.prompt, weight=hidden.float())


def drawn_examples(batch: Batch) -> list[Example]:
    """Prompts and answers of a batch, as text."""
    found = []
    for ids, prompt, answer in zip(batch.ids.tolist(), batch.prompt.tolist(), batch.answer.tolist(), strict=True):
        asked = TOKENIZER.decode(ids[1 : prompt - 1], skip_special_tokens=False)
        found.append(Example("", asked, TOKENIZER.decode(ids[prompt : prompt + answer], skip_special_tokens=False)))
        assert set(ids[prompt + answer :]) == {EOS_ID}
    return found


@pytest.mark.parametrize("stream", ["short", "long", "lookup"])
def test_batches_are_training_prompts_with_their_answers(stream: str):
    for batch in batches(stream, 4):
        for example in drawn_examples(batch):
            assert split_of(example.prompt) == "train"
            if example.prompt.startswith("sort: "):
                assert example.answer.split() == sorted(example.prompt.removeprefix("sort: ").split())
            if example.prompt.startswith("lookup "):
                assert all(pair in example.prompt for pair in example.answer.split())
            if stream == "long":
                assert example.answer.count(" ") >= 6 and not example.prompt.startswith("sort")


@pytest.mark.parametrize("stream", ["short", "long", "lookup"])
def test_masks_hide_answers_alone_and_weigh_hidden_tokens(stream: str):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.zeros(2)
    for batch in batches(stream, 6):
        noised = mask(batch, generator)
        weight, masks, place = noised.weight, noised.ids == MASK_ID, batch.places()
        assert torch.equal(masks, weight > 0)
        assert torch.equal(masks, noised.hidden) and torch.equal(masks, noised.asked)
        assert torch.equal(noised.clean, batch.prompt)
        assert torch.equal(noised.ids[~masks], batch.ids[~masks])
        assert not masks[place < 0].any()
        # The end itself is an answer's token; tokens that fill the canvas behind it weigh little.
        tail = masks & (place > batch.answer[:, None])
        answer = masks & (place >= 0) & ~tail
        scale = (batch.answer[:, None] + 1) ** 0.5
        assert (weight * scale)[answer].allclose(torch.tensor(1.0))
        assert (weight * scale)[tail].allclose(torch.tensor(TAIL_WEIGHT))
        inside = (place >= 0) & (place < batch.answer[:, None])
        hidden += torch.tensor([(masks & inside).sum(), inside.sum()])
    # Half of the tokens, or half of the values, which are two tokens in five.
    assert 0.2 < hidden[0] / hidden[1] < 0.7


def test_a_stretched_table_keeps_pairs_and_question_together():
    positions = stretched(random.Random(0), length=100, keep=48, reach=REACH, rows=50)
    steps = positions.diff(dim=1)
    assert (steps >= 1).all() and positions.max() < REACH
    gaps = (steps > 1).nonzero()[:, 1] + 1
    assert len(gaps) and set(((gaps - 2) % 5).tolist()) == {0}
    assert (steps[:, 100 - 48 :] == 1).all()


def test_pointers_point_at_the_wanted_digits():
    pairs = [encode(Example("lookup", "lookup AB=12 CD=34 EF=56 ? EF AB", "EF=56 AB=12"))]
    batch = collate(pairs, len(pairs[0][0]) + 12)
    prompt, length = int(batch.prompt[0]), batch.ids.shape[1]
    # Columns of the digits of EF and of AB: in the table, behind two tokens of frame, and in the answer.
    digits, slots = [15, 16, 5, 6], [prompt + 3, prompt + 4, prompt + 8, prompt + 9]
    assert [batch.ids[0, digit] for digit in digits] == [batch.ids[0, slot] for slot in slots]
    # A query at a slot that is the key of its digit: every head looks at its digit.
    queries, keys = torch.zeros(1, 4, length, length), 40 * length**0.5 * torch.eye(length).expand(1, 4, -1, -1)
    for slot, digit in zip(slots, digits, strict=True):
        queries[:, list(POINTER_HEADS), slot, digit] = 1
    # If a row holds the ids of its pair's letters, a probe that can read them finds the row's key.
    vocab, hidden = len(VOCABULARY), torch.zeros(1, length, 2 * len(VOCABULARY))
    for digit in [*range(2, 17), *range(prompt, prompt + 10)]:
        start = digit - (digit - 2) % 5 if digit < prompt else digit - (digit - prompt) % 5
        for letter in (0, 1):
            hidden[0, digit, letter * vocab + int(batch.ids[0, start + letter])] = 40.0
    probe = nn.Linear(2 * vocab, 2 * vocab)
    with torch.no_grad():
        probe.weight.copy_(torch.eye(2 * vocab))
        probe.bias.zero_()
    tap = Tap(hidden, queries, keys)
    losses = pointer_losses(batch, masked(batch, prompt), probe, tap)
    assert losses["look"] < 1e-3 and losses["know"] < 1e-3
    # A digit that is in sight is not asked for.
    assert pointer_losses(batch, masked(batch, length), probe, tap)["look"] == 0


def test_operands_are_asked_for_if_the_total_before_is_in_sight():
    pairs = [encode(Example("chain", "chain 40+3-5", "+3=43 -5=38"))]
    batch = collate(pairs, len(pairs[0][0]) + 12)
    prompt = int(batch.prompt[0])
    tap = Tap(torch.zeros(1, batch.ids.shape[1], 8), torch.empty(0), torch.empty(0))
    vocab = len(VOCABULARY)
    probe = nn.Linear(8, 4 * vocab)
    nn.init.zeros_(probe.bias)
    wanted = [" -", "5", "4", "3"]  # of the second total
    with torch.no_grad():
        for fact, token in enumerate(wanted):
            probe.bias[fact * vocab + VOCABULARY[token]] = 40.0
    second = masked(batch, prompt + 8, prompt + 10)
    assert operand_losses(batch, second, probe, tap)["operands"] < 1e-3
    # The first total still follows from the prompt, and the probe gives the operands of the second.
    assert operand_losses(batch, masked(batch, prompt), probe, tap)["operands"] > 10
    assert operand_losses(batch, masked(batch, prompt, prompt), probe, tap)["operands"] == 0
    # If noise cannot be seen, a total is asked for though it is in sight; the total before must be in sight.
    asked = torch.ones_like(second.hidden)
    assert operand_losses(batch, replace(second, asked=asked), probe, tap)["operands"] > 10
    one = replace(masked(batch, prompt + 3, prompt + 5), asked=second.hidden)
    assert operand_losses(batch, one, probe, tap)["operands"] == 0
    assert mean_cross_entropy(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)) == 0


# Prompt and answer; columns in which the answer's keys begin in the prompt, and that of the first key's last token.
POINTED = {
    "sort_marked": ("sort with + -: - Ada + Gus ? Ada + Ben", "+ Ben + Gus - Ada", [12, 8, 6], 13),
    "sort_numbers": ("sort with +: + Gus3 ? Ada7 + Ada9 + Ada8", "Ada8 Ada9 Gus3", [15, 12, 6], 16),
}


@pytest.mark.parametrize("task", POINTED)
def test_the_next_key_points_into_a_prompt_that_knows_the_printed_keys(task: str):
    asked, answer, columns, last = POINTED[task]
    pair = encode(Example(task, asked, answer))
    batch = collate([pair], len(pair[0]) + len(pair[1]) + 4)
    prompt, length = int(batch.prompt[0]), batch.ids.shape[1]
    queries, keys = torch.zeros(1, 4, length, length), 40 * length**0.5 * torch.eye(length).expand(1, 4, -1, -1)
    for number, column in enumerate(columns):
        for token in range(2):
            slot = prompt + 2 * number + token
            assert batch.ids[0, slot] == batch.ids[0, column + token]
            queries[:, list(POINTER_HEADS), slot, column + token] = 1
    tap = Tap(torch.full((1, length, 1), -40.0), queries, keys)
    tap.hidden[0, last] = 40.0
    probe = nn.Linear(1, 1)
    with torch.no_grad():
        probe.weight.fill_(1.0)
        probe.bias.zero_()
    # The first key is in sight, and the second is asked for.
    losses = fresh_losses(task, batch, masked(batch, prompt + 2), probe, tap)
    assert losses[f"spent {task}"] < 1e-3 and losses[f"point {task}"] < 1e-3
    # With nothing in sight no key is spent, and with all of it none is asked for.
    assert fresh_losses(task, batch, masked(batch, prompt), probe, tap)[f"spent {task}"] > 1
    assert fresh_losses(task, batch, masked(batch, length), probe, tap)[f"point {task}"] == 0


@pytest.mark.parametrize("task", FRESH_TASKS)
def test_masks_as_decoded_weigh_the_next_keys_and_the_rest_apart(task: str):
    grown = Curriculum(fresh_high=dict.fromkeys(FRESH_TASKS, 300.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        batch = fresh_batch(task, 1, step, grown, 1500)
        assert all(split_of(example.prompt) == "train" for example in drawn_examples(batch))
        # Every printed key has one entry.
        assert (keys_of(task, batch).same.sum(-1) == 1).all()
        noised, rest = mask_as_decoded(batch, generator)
        place = batch.places()
        assert not noised.hidden[place < 0].any() and torch.equal(noised.ids == MASK_ID, noised.hidden)
        assert torch.equal((noised.weight + rest) > 0, noised.hidden) and not ((noised.weight > 0) & (rest > 0)).any()
        # A key counts if it begins the answer, or if both tokens of the key before are in sight.
        for row, column in (noised.weight > 0).nonzero().tolist():
            start = column - int(place[row, column]) % 2
            assert place[row, column] <= batch.answer[row]
            assert place[row, start] == 0 or not noised.hidden[row, start - 2 : start].any()


@pytest.mark.parametrize("task", FRESH_TASKS)
def test_prompts_of_any_length_hold_the_entries_of_their_answers(task: str):
    for step in range(1000):
        high = SMALLEST + step / 10  # the shorter, the fewer entries are to spare
        batch = fresh_batch(task, 1, step, Curriculum(fresh_high=dict.fromkeys(FRESH_TASKS, high)), 1)
        assert int(batch.answer[0]) >= 4 and (keys_of(task, batch).same.sum(-1) == 1).all()


def test_prompts_of_fresh_tasks_grow_with_success_each_by_itself():
    start = Curriculum()
    one, other = FRESH_TASKS
    assert start.with_fresh(one, FRESH_LEARNED) == start
    grown = start.with_fresh(one, 0.0)
    assert grown.fresh_high[one] > FRESH_BOUNDS[0] == grown.fresh_high[other]
    assert replace(start, fresh_high={one: 2040.0}).with_fresh(one, 0.0).fresh_high == {one: 2048.0}
    lagging = replace(start, weights=dict.fromkeys(FRESH_TASKS, 0.0) | {other: 1.0})
    assert {fresh_task(1, step, start) for step in range(40)} == set(FRESH_TASKS)
    assert {fresh_task(1, step, lagging) for step in range(40)} == {other}


def test_a_third_batch_is_of_fresh_tasks(config: dict[str, Any], pool: ThreadPoolExecutor):
    settings = replace(SMALL, fresh_tokens=100)
    trainer = Trainer(config, settings)
    before = [parameter.detach().clone() for parameter in trainer._probes["fresh"].parameters()]
    for _ in range(2):
        trainer.step(pool)
    assert {name.split()[-1] for name in trainer.standing.losses} & set(FRESH_TASKS)
    assert not any(map(torch.equal, before, trainer._probes["fresh"].parameters()))
    with pytest.raises(ValueError, match="fresh_tokens"):
        Trainer(read_config("embedded-uniform"), settings)
    tokenizer = embedded_tokenizer(trainer.model.shape.max_context)
    scores = validate_fresh(trainer.average, tokenizer, examples=1, first=0, sizes=dict.fromkeys(FRESH_TASKS, 48.0))
    assert set(scores) == set(FRESH_TASKS)


def test_the_training_forward_is_the_runtimes():
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    batch = batches("short", 1)[0]
    ids = batch.ids
    model = new_model(read_config("embedded"), seed=0)
    model.load_state_dict(runtime.model.state_dict())
    hidden, tap = forward(model, ids, batch.positions, clean=batch.prompt, first=3, tap_layer=3)
    torch.testing.assert_close(model.logits(hidden), runtime.logits(ids)[:, 3:], atol=1e-4, rtol=1e-4)
    assert tap.queries.shape == tap.keys.shape == (*ids.shape[:1], 6, ids.shape[1], 32)
    assert hidden.requires_grad


def test_adopted_weights_give_the_same_logits_in_wider_layers():
    source, ids = tiered.from_pretrained("embedded", policy="none", device="cpu"), batches("short", 1)[0].ids
    model = new_model(read_config("embedded") | {"mlp_hidden_size": 400, "max_sequence_length": 64}, seed=0)
    adopt(model, source.model, ids)
    found = Runtime(model, policy=make_policy("none")).logits(ids)
    torch.testing.assert_close(found, source.logits(ids), atol=1e-4, rtol=1e-4)


def test_norms_of_heads_begin_at_the_scale_of_a_model_without():
    source, ids = tiered.from_pretrained("embedded", policy="none", device="cpu").model, batches("short", 1)[0].ids
    model = new_model(read_config("embedded-blocks"), seed=0)
    adopt(model, source, ids)
    normed, rotary = source.attention_norm(0, source.embed(ids)), source.rotary(torch.arange(ids.shape[1])[None])
    for of in (source.queries, source.keys):
        wanted = of(0, normed, rotary)
        found = getattr(model, of.__name__)(0, normed, rotary)
        assert found.square().mean().item() == pytest.approx(wanted.square().mean().item(), rel=1e-3)
        assert torch.cosine_similarity(found, wanted, dim=-1).min() > 0.999  # each head's own length is gone alone


def test_muon_is_torchs_in_float32():
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8, 16), (16, 8), (8, 8)]
    ours, theirs = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes]
        for _ in range(2)
    )
    before = [matrix.detach().clone() for matrix in ours]
    optimizer = Muon(ours, lr=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, momentum=0.95, weight_decay=0.03)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator)
        optimizer.step()
        reference.step()
    for a, b, old in zip(ours, theirs, before, strict=True):
        # Theirs is bfloat16: eight bits of mantissa, over five steps.
        assert (a - b).norm() < 0.03 * (b - old).norm()
    assert len(optimizer_tensors(optimizer)) == len(shapes)


def test_every_parameter_has_one_optimizer_and_the_rate_ends_at_zero(config: dict[str, Any]):
    model, probes = new_model(config, seed=0), nn.Linear(2, 2)
    made = optimizers(model, probes)
    held = [
        parameter for name in ("muon", "adam") for group in made[name].param_groups for parameter in group["params"]
    ]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    shares = [set_rate(made, step, 1000) for step in range(1001)]
    assert shares[0] == 1 / WARMUP_STEPS and shares[WARMUP_STEPS] == 1 and shares[1000] == 0
    assert shares[int(1000 * (1 - DECAY_SHARE / 2))] == pytest.approx(0.5)
    assert all(group["lr"] == 0 for group in made["muon"].param_groups)


def test_the_curriculum_widens_with_steps_and_with_success():
    start = Curriculum()
    assert start.advanced(0, 100, False) == start
    assert start.advanced(50, 100, False).list_high == 11
    assert start.advanced(1000, 100, False).list_high == 16
    assert start.advanced(0, 100, True).lookup_high > start.lookup_high
    assert replace(start, lookup_high=3967.0).advanced(0, 100, True).lookup_high == 3968
    # Answers grow beyond a block once lists have grown, and their tasks and questions with them.
    grown = start.advanced(100, 100, False)
    assert start.stretch == start.advanced(50, 100, False).stretch == 0 and grown.stretch == pytest.approx(0.01)
    last = replace(grown, stretch=0.999).advanced(300, 100, False)
    assert (last.stretch, last.long_size("long_chain"), last.asked_high) == (1, 24, 24)
    assert (start.long_size("long_chain"), start.asked_high) == (6, 8)
    followed = start.following(dict.fromkeys(TASKS, 1.0) | {"sort": 0.0})
    assert followed.weights["sort"] > followed.weights["copy"] > 0
    assert set(SHORT_TASKS) | {"lookup"} == set(TASKS) and set(LIST_TASKS) < set(SHORT_TASKS)
    assert set(LONG_STREAM) | {"long_lookup"} == set(LONG_TASKS) and followed.weights["long_copy"] == 1


@pytest.mark.long
def test_the_loss_falls(config: dict[str, Any], pool: ThreadPoolExecutor):
    trainer = Trainer(config, replace(SMALL, steps=60, grow=1000, short_tokens=300))
    trainer.curriculum = replace(trainer.curriculum, weights=dict.fromkeys(TASKS, 0.0) | {"copy": 1.0})
    held = ShortBatches(7, 400).next(trainer.curriculum)

    def loss() -> float:
        with torch.no_grad():
            return trainer.losses("short", held, torch.Generator().manual_seed(0))["short"].item()

    first = loss()
    for _ in range(40):
        trainer.step(pool)
    assert loss() < 0.9 * first
    assert trainer.standing.step == 40


def test_a_run_may_start_from_a_model_that_knows_one_block(config: dict[str, Any], pool: ThreadPoolExecutor):
    known, trainer = new_model(config, seed=5), Trainer(config, SMALL)
    trainer.start_from(known)
    for own in (trainer.model, trainer.average):
        assert all(map(torch.equal, own.parameters(), known.parameters()))
    assert (trainer.curriculum.list_high, trainer.curriculum.lookup_high) == (16, 512)
    trainer.step(pool)
    assert trainer.curriculum.stretch > 0
    trainer.step(pool)
    assert "long" in trainer.standing.losses


@pytest.mark.long
def test_validation_runs_the_runtime():
    model = new_model(read_config("embedded"), seed=0)
    model.load_state_dict(tiered.from_pretrained("embedded", device="cpu").model.state_dict())
    tokenizer = embedded_tokenizer(model.shape.max_context)
    scores = validate(model, tokenizer, examples=2, first=0, lookup=64)
    assert set(scores) == set(TASKS) | set(LONG_TASKS)
    # The shipped model misses some chains: one of two would do.
    assert all(scores[name] == 1 for name in TASKS if name != "chain")


def test_a_killed_run_goes_on_as_if_nothing_had_been(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def scores_of_a_step(*_: object, first: int, **__: object) -> dict[str, float]:
        return dict.fromkeys(TASKS, first / 10)

    monkeypatch.setattr("training.loop.validate", scores_of_a_step)
    lines: list[dict[str, Any]] = []
    whole = Trainer(config, SMALL)
    train(whole, tmp_path / "whole", log=lines.append)
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 6]
    assert set(lines[1]["exact match"]) == set(TASKS)

    class KilledError(Exception):
        pass

    def kill(step: int) -> None:
        # The last checkpoint is a step old, inside a pool of batches, and behind a validation.
        if step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        train(Trainer(config, SMALL), tmp_path / "cut", advance=kill)
    again = Trainer(config, SMALL)
    again.restore(tmp_path / "cut")
    assert again.standing.step == 4
    train(again, tmp_path / "cut")
    for one, other in ((whole.model, again.model), (whole.average, again.average)):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert whole.curriculum == again.curriculum
    assert replace(whole.standing, seconds=0) == replace(again.standing, seconds=0)


def test_an_export_loads(config: dict[str, Any], tmp_path: Path):
    trainer = Trainer(config, SMALL)
    nn.init.normal_(trainer.average.get_parameter("blocks.2.attn_out.weight"))
    export(trainer.average, config, tmp_path, {"seed": 1})
    runtime = tiered.from_pretrained(tmp_path, policy="none", device="cpu")
    assert all(map(torch.equal, trainer.average.parameters(), runtime.model.parameters()))
    chat = [{"role": "user", "content": "copy: Ada Ben Cleo Dan"}]
    assert runtime.generate(chat, max_new_tokens=8).text is not None
    assert json.loads((tmp_path / "training.json").read_text()) == {"seed": 1}
    assert json.loads((tmp_path / "config.json").read_text()) == config


@pytest.fixture
def in_blocks() -> dict[str, Any]:
    """The config of the model that sees blocks, with smaller matrices."""
    small = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    return read_config("embedded-blocks") | small | {"intermediate_size": 24}


@pytest.mark.parametrize("stream", ["short", "long", "lookup"])
def test_the_training_forward_in_blocks_is_the_runtimes(in_blocks: dict[str, Any], stream: str):
    (batch,), block = batches(stream, 1), 8
    model = new_model(in_blocks, seed=0)
    torch.manual_seed(0)
    drawn(model, 0.3)
    batch = replace(batch, positions=torch.arange(batch.ids.shape[1])[None])
    noised, first = mask(batch, torch.Generator().manual_seed(1)), int(batch.prompt.min())
    hidden, tap = forward_in_blocks(model, batch.ids, noised.ids, batch.positions, first=first, tap_layer=3)
    logits, runtime = model.logits(hidden), Runtime(model, policy=make_policy("none"))
    assert hidden.requires_grad and logits.shape[1] == batch.ids.shape[1] - first
    assert tap.hidden.shape[:2] == batch.ids.shape and tap.queries.shape == tap.keys.shape
    # A block under noise behind the text, as a step meets it.
    for start in range(first // block * block, batch.ids.shape[1], block):
        open_block = slice(start, start + block)
        ids = torch.cat([batch.ids[:, :start], noised.ids[:, open_block]], dim=1)
        expected = runtime.logits(ids)[:, max(start, first) :]
        found = logits[:, max(start - first, 0) : start + block - first]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_masks_in_blocks_hide_answers_alone():
    hidden = []
    for batch in batches("long", 4):
        noised = mask_in_blocks(batch, torch.Generator().manual_seed(0), block_length=8)
        assert torch.equal(noised.ids == MASK_ID, noised.hidden) and torch.equal(noised.hidden, noised.weight > 0)
        assert not noised.hidden[batch.places() < 0].any()
        hidden.append(noised.hidden[batch.places() >= 0].float().mean())
    assert 0.3 < torch.stack(hidden).mean() < 0.8


def test_a_model_that_sees_blocks_learns_and_loads(in_blocks: dict[str, Any], pool: ThreadPoolExecutor, tmp_path: Path):
    trainer = Trainer(in_blocks, SMALL)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    for _ in range(3):
        trainer.step(pool)
    assert all(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert {"short", "lookup", "look", "know"} <= set(trainer.standing.losses)
    scores = validate(trainer.average, embedded_tokenizer(1024), examples=1, first=0, lookup=64)
    assert set(scores) == set(TASKS) | set(LONG_TASKS)
    export(trainer.average, in_blocks, tmp_path, {"scores": scores})
    out = tiered.from_pretrained(tmp_path).generate([{"role": "user", "content": "copy: Ada Ben"}], max_new_tokens=8)
    assert out.text is not None and out.choice.policy.name == "block_causal"


def test_a_model_without_blocks_of_one_length_learns_none(in_blocks: dict[str, Any]):
    with pytest.raises(ValueError, match="has no block_size"):
        new_model({**in_blocks, "block_size": None}, seed=0)
