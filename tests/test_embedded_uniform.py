"""Training on uniform noise: its batches, its forward beside the runtime's, and runs that go on."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.attention import trained_attention
from training.batches import MASK_ID, Batch, collate, encode
from training.export import export
from training.loop import train
from training.model import forward, new_model
from training.noise import BLOCK_LENGTHS, BLOCK_SHARE, BLOCK_START, TAIL_WEIGHT, exchange
from training.optimizer import optimizers
from training.settings import Settings
from training.short_batches import ShortBatches
from training.tasks import TASKS, Example
from training.tokenizer import vocabulary
from training.trainer import Trainer

import tiered
from tiered.core.features import Feature
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.models.gidd import Gidd
from tiered.models.locate import read_config

VOCAB = len(vocabulary())
SMALL = Settings(
    steps=4, grow=4, short_tokens=200, lookup_tokens=100, score_every=99, score_examples=1, save_every=2, report_every=2
)


@pytest.fixture
def config() -> dict[str, Any]:
    """The uniform model's own, with smaller matrices."""
    return read_config("embedded-uniform") | {"hidden_size": 32, "head_dim": 8, "intermediate_size": 24}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one_answer(names: int, canvas: int, rows: int) -> Batch:
    """`rows` times the same list of so many names, in a canvas."""
    text = " ".join(["Ada", "Ben", "Cleo", "Dan"] * names)
    text = " ".join(text.split()[:names])
    pair = encode(Example("copy", f"copy: {text}", text))
    return collate([pair] * rows, len(pair[0]) + canvas)


def random_gidd(config: dict[str, Any]) -> Gidd:
    """Weights far from their start, where branches and sinks are zero."""
    model = new_model(config, seed=0)
    assert isinstance(model, Gidd)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_noise_is_any_token_but_the_mask():
    batch = one_answer(20, 64, 2000)
    noised = exchange(batch, torch.Generator().manual_seed(0), vocab_size=VOCAB)
    place = batch.places()
    assert torch.equal(noised.ids[~noised.hidden], batch.ids[~noised.hidden])
    assert not noised.hidden[place < 0].any() and not noised.asked[place < 0].any()
    drawn = torch.bincount(noised.ids[noised.hidden], minlength=VOCAB).double()
    assert len(drawn) == VOCAB and drawn[MASK_ID] == 0
    # All others alike: the chi-squared statistic of 110 classes has mean 109 and deviation 15.
    expected = drawn.sum() / (VOCAB - 1)
    statistic = ((drawn - expected) ** 2 / expected).sum() - expected  # the mask's class does not count
    assert expected > 100 and abs(statistic - 109) < 75


def test_levels_spread_over_the_whole_range():
    batch = one_answer(20, 21, 4000)
    noised = exchange(batch, torch.Generator().manual_seed(0), vocab_size=VOCAB)
    inside = (batch.places() >= 0) & (batch.places() < batch.answer[:, None])
    # Rows without a border: a share of noise alone, and of the others as many at every level.
    whole = noised.clean == batch.prompt
    share = ((noised.hidden & inside).sum(1) / inside.sum(1))[whole]
    assert share.min() == 0
    assert 0.15 < (share == 1).float().mean() < 0.3
    counts = torch.histc(share[share < 1], bins=4, min=0, max=1) / len(share)
    assert counts.min() > 0.1 and counts.max() < 0.35


def test_borders_leave_final_tokens_in_front_and_noise_behind_the_block():
    batch = one_answer(20, 64, 4000)
    noised = exchange(batch, torch.Generator().manual_seed(0), vocab_size=VOCAB)
    place, border = batch.places(), (noised.clean - batch.prompt)[:, None]
    # Every block that has a token of the answer or its end, and no other.
    assert set(border.flatten().tolist()) == {0, 8, 16} and BLOCK_START == 8
    assert 0.6 * BLOCK_SHARE < (border > 0).float().mean() < 0.75 * BLOCK_SHARE
    assert torch.equal(noised.asked, place >= border)
    assert torch.equal(noised.ids[place < border], batch.ids[place < border])
    behind = place >= border + max(BLOCK_LENGTHS)
    rows = border[:, 0] > 0
    assert noised.hidden[behind & rows[:, None]].all()
    # Directly behind a block of 8 half of the rows are noise alone, and the others as inside of it.
    second = (place >= border + 8) & (place < border + 16) & rows[:, None]
    first = (place >= border) & (place < border + 8) & rows[:, None]
    inside, after = (noised.hidden[columns].float().mean() for columns in (first, second))
    assert inside + 0.1 < after < 0.9


def test_every_open_token_is_asked_for():
    batch = one_answer(5, 12, 50)
    noised = exchange(batch, torch.Generator().manual_seed(0), vocab_size=VOCAB)
    assert (noised.asked & ~noised.hidden).any(), "the model cannot know which tokens noise has left alone"
    tail = batch.places() > batch.answer[:, None]
    expected = torch.where(tail, TAIL_WEIGHT, 1.0) * noised.asked / 6**0.5
    torch.testing.assert_close(noised.weight, expected)


def test_the_training_forward_is_the_runtimes():
    model = random_gidd(read_config("embedded-uniform"))
    batch = ShortBatches(1, 800).next(Trainer(read_config("embedded-uniform"), SMALL).curriculum)
    ids, length = batch.ids, batch.ids.shape[1]
    shape = model.shape
    for clean in (batch.prompt, torch.zeros_like(batch.prompt), torch.full_like(batch.prompt, length)):
        first = 3
        hidden, tap = forward(model, ids, batch.positions, clean=clean, first=first, tap_layer=3)
        assert hidden.requires_grad
        assert tap.queries.shape == tap.keys.shape == (len(ids), shape.heads, length, shape.head_dim)
        sizes = CallShape(shape=shape, batch=len(ids), context=length, block_length=length, dtype="float32")
        store = FeatureStore(sizes, {Feature.KEY: 1, Feature.VALUE: 1}, torch.device("cpu"))
        with torch.no_grad():
            whole = Forward(model, store, batch.positions)
            expected = whole.logits(Pass(ids, whole.rows, slice(0, length), final=clean))
        torch.testing.assert_close(model.logits(hidden), expected[:, first:], atol=1e-4, rtol=1e-4)


def test_attention_gives_the_gradients_of_its_arithmetic():
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.double).requires_grad_()

    queries, keys, values = drawn(2, 3, 4, 6), drawn(2, 3, 5, 6), drawn(2, 3, 5, 6)
    sink_keys, sink_values = drawn(3, 1, 6), drawn(3, 1, 6)
    unseen = torch.rand(2, 4, 5, generator=generator) < 0.4
    unseen[0, 0] = True  # the sink alone
    inputs = (queries, keys, values, sink_keys, sink_values)

    def trained(*given: torch.Tensor) -> torch.Tensor:
        return trained_attention(*given[:3], soft_cap=2.0, sinks=(given[3], given[4]), unseen=unseen)

    def plain(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, sink_k, sink_v = given
        scores = torch.einsum("bhrd,bhnd->bhrn", q, k) / 6**0.5
        sink = torch.einsum("bhrd,hsd->bhrs", q, sink_k) / 6**0.5
        scores = 2 * torch.cat([sink, scores], -1).div(2).tanh()
        hidden = torch.cat([unseen.new_zeros(2, 4, 1), unseen], -1)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = weights @ torch.cat([sink_v.expand(2, -1, -1, -1), v], 2)
        return mixed.transpose(1, 2).flatten(2)

    torch.testing.assert_close(trained(*inputs), plain(*inputs))
    weights = torch.randn(2, 4, 18, generator=generator, dtype=torch.double)
    ours, theirs = (torch.autograd.grad((function(*inputs) * weights).sum(), inputs) for function in (trained, plain))
    torch.testing.assert_close(ours, theirs)


def test_muon_gets_the_matrices_of_layers_and_nothing_else(config: dict[str, Any]):
    model = new_model(config, seed=0)
    made = optimizers(model, torch.nn.Linear(2, 2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adam = (
        [names[id(p)] for group in made[name].param_groups for p in group["params"]] for name in ("muon", "adam")
    )
    assert {name.split(".", 2)[2] for name in muon} == {
        *(f"{part}_proj.weight" for part in ("q", "k", "v", "up")),
        *(f"{part}_out.weight" for part in ("attn", "ff")),
    }
    assert sorted(muon + adam) == sorted(names.values())


def test_other_families_are_not_trained():
    with pytest.raises(ValueError, match="'dream'"):
        new_model(read_config("dream-7b") | {"hidden_size": 56, "intermediate_size": 8, "vocab_size": 152000}, seed=0)


def test_a_killed_run_goes_on_and_its_export_loads(config: dict[str, Any], tmp_path: Path):
    class KilledError(Exception):
        pass

    def kill(step: int) -> None:
        if step == 3:
            raise KilledError

    def scores(*_: object, **__: object) -> dict[str, float]:
        return dict.fromkeys(("copy", "sort"), 0.0)

    settings = replace(SMALL, steps=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.loop.validate", scores)
        whole = Trainer(config, settings)
        train(whole, tmp_path / "whole")
        with pytest.raises(KilledError):
            train(Trainer(config, settings), tmp_path / "cut", advance=kill)
        again = Trainer(config, settings)
        again.restore(tmp_path / "cut")
        assert again.standing.step == 2
        train(again, tmp_path / "cut")
    for one, other in ((whole.model, again.model), (whole.average, again.average)):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert replace(whole.standing, seconds=0) == replace(again.standing, seconds=0)

    export(again.average, config, tmp_path / "model", {"seed": 1})
    runtime = tiered.from_pretrained(tmp_path / "model", policy="none", device="cpu")
    assert runtime.model.shape.noise == "uniform"
    assert all(map(torch.equal, again.average.parameters(), runtime.model.parameters()))
    assert runtime.generate([{"role": "user", "content": "copy: Ada Ben"}], max_new_tokens=8).text is not None
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == config


@pytest.mark.long
def test_the_loss_falls(config: dict[str, Any]):
    trainer = Trainer(config, replace(SMALL, steps=60, grow=1000, short_tokens=300))
    trainer.curriculum = replace(trainer.curriculum, weights=dict.fromkeys(TASKS, 0.0) | {"copy": 1.0})
    held = ShortBatches(7, 400).next(trainer.curriculum)

    def loss() -> float:
        with torch.no_grad():
            return trainer.losses("short", held, torch.Generator().manual_seed(0))["short"].item()

    first = loss()
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(40):
            trainer.step(pool)
    assert loss() < 0.95 * first
