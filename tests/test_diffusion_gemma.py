"""DiffusionGemma against official code: logits around its window, canvases by recorded draws, and rows of a context."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations
from official_names import official
from replaying import changes
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.buffers import account_bytes
from tiered.core.errors import NonFiniteError
from tiered.core.features import Account, Feature, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.asking import next_pass
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.tiled_sums import TiledSums
from tiered.forward.forward import AskedPass
from tiered.forward.sizes import CallShape, feature_buffers, kv_code
from tiered.kernels.row_code import RowCode
from tiered.models import checkpoint
from tiered.models.base import DiffusionModel
from tiered.models.families import family_of
from tiered.models.logit_tiles import LogitTiles
from tiered.models.presets import read_preset
from tiered.models.weight_form import WeightForm
from tiered.policies.base import StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "diffusion_gemma"
CONFIG: dict[str, Any] = json.loads((GOLDENS / "dgemma_tiny" / "config.json").read_text())
LOGITS: dict[str, dict[str, Any]] = json.loads((GOLDENS / "logits.json").read_text())
SAMPLING: dict[str, dict[str, Any]] = json.loads((GOLDENS / "sampling.json").read_text())
TENSORS = load_file(GOLDENS / "logits.safetensors") | load_file(GOLDENS / "sampling.safetensors")
POLICIES = ["block_causal", "none"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "dgemma_tiny")


def recorded(case: str, name: str) -> Tensor:
    return TENSORS[f"{case}.{name}"].long()


def mask_of(case: str, ids: Tensor) -> Tensor:
    return TENSORS.get(f"{case}.attention_mask", torch.ones_like(ids)).long()


@contextmanager
def first_step(runtime: Runtime, ids: Tensor, *, seed: int = 0, **call: Any) -> Iterator[AskedPass]:
    """The forward of a call's first step, behind the forwards over the prompt."""
    with torch.no_grad(), runtime.begin(runtime.prepare(ids, seed=seed, **call)) as (denoiser, _):
        steps = denoiser.steps()
        forward, pass_ = next_pass(steps)
        while pass_.kind is StepKind.PREFILL:
            forward, pass_ = next_pass(steps, forward.logits(pass_))
        yield forward, pass_


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", LOGITS)
def test_logits(runtime: Runtime, case: str, policy: str):
    ids = recorded(case, "input_ids")
    call = {"attention_mask": mask_of(case, ids), "prior": recorded(case, "canvas"), "max_new_tokens": 16}
    close: dict[str, Any] = {"atol": 5e-4, "rtol": 1e-4}
    with first_step(runtime.with_policy(policy), ids, **call) as (forward, pass_):
        own = TENSORS[f"{case}.logits"]
        torch.testing.assert_close(forward.logits(pass_), own, **close)
        soft = runtime.model.soft_tokens((own / 0.7).softmax(-1))
        conditioned = forward.logits(replace(pass_, soft=soft))
        torch.testing.assert_close(conditioned, TENSORS[f"{case}.logits_selfcond"], **close)
        if (one := TENSORS.get(f"{case}.logits_selfcond_row0")) is not None:
            soft[1:] = 0
            torch.testing.assert_close(forward.logits(replace(pass_, soft=soft)), one, **close)


@pytest.mark.parametrize("case", LOGITS)
def test_stored_rows_of_a_context(runtime: Runtime, case: str):
    ids, mask = recorded(case, "input_ids"), mask_of(case, recorded(case, "input_ids"))
    canvas = recorded(case, "canvas")
    with first_step(runtime, ids, attention_mask=mask, prior=canvas, max_new_tokens=16) as (forward, pass_):
        forward.logits(pass_)
        for layer, name in ((0, "sliding_attention"), (5, "full_attention")):
            count = LOGITS[case]["kv_lengths"][name]
            first = ids.shape[1] - count - forward.store.kept(layer).start
            there = mask[:, -count:, None].bool()
            values = forward.store.view(Feature.VALUE, layer)[:, :, first : first + count]
            official = TENSORS[f"{case}.v.{layer}"]
            torch.testing.assert_close(values.where(there[:, None], 0), official.where(there[:, None], 0))
            if bool(mask.all()):  # official keys count the positions of padding too
                keys = forward.keys(layer)[:, :, first : first + count]
                torch.testing.assert_close(keys, TENSORS[f"{case}.k.{layer}"])


def replay(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded tokens in place of random numbers, as `Generators` draws them."""
    sampled, noise, canvases = (recorded(case, name) for name in ("sampled", "random", "canvas_index"))

    class Recorded:
        def __init__(self, seed: int, batch: int, device: torch.device) -> None:
            self.numbers, self.block = list(range(batch)), -1

        def keep(self, sequences: list[int]) -> None:
            self.numbers = [self.numbers[sequence] for sequence in sequences]

        def of_block(self) -> "Recorded":
            self.block += 1
            self.step, self.drawn = int((canvases < self.block).sum()), dict[int, int]()
            return self

        def gumbel(self, sequence: int, rows: int, vocab: int) -> Tensor:
            """The recorded token's number is largest, in the tile that has it."""
            begin = self.drawn[sequence] = self.drawn.get(sequence, 0)
            self.drawn[sequence] += vocab
            wanted = sampled[self.step, self.numbers[sequence]][:, None] - begin
            return (wanted == torch.arange(vocab)).double().mul_(1e12)

        def tokens(self, columns: int, vocab: int) -> Tensor:
            self.step += 1
            self.drawn = {}
            return noise[self.step - 1, self.numbers]

    monkeypatch.setattr("tiered.denoising.Generators", Recorded)


@pytest.mark.parametrize(("policy", "tile"), [("block_causal", 8192), ("block_causal", 100), ("none", 512)])
@pytest.mark.parametrize("case", SAMPLING)
def test_sequences(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, case: str, policy: str, tile: int):
    replay(case, monkeypatch)
    monkeypatch.setattr("tiered.models.shape.VOCABULARY_TILE", tile)
    options: dict[str, Any] = dict(SAMPLING[case]["kwargs"])
    ends = options.pop("eos_token_id", None)
    options.pop("pad_token_id", None)
    ids, final = recorded(case, "prompt"), recorded(case, "final")
    prior = recorded(case, "init").transpose(0, 1).flatten(1)
    call = {"attention_mask": mask_of(case, ids), "stop_tokens": ends, "stop_at_eos": ends is not None, "seed": 0}
    out = runtime.with_policy(policy).generate(ids, prior=prior, output_history=True, **call, **options)
    assert torch.equal(out.sequences, final)
    taken = sum(out.steps_by_kind.get(kind, 0) for kind in ("step", "commit", "refresh"))
    assert taken == SAMPLING[case]["decoder_forwards"]
    if ends is None:  # every canvas on the way: a step begins with the canvas that the last one left
        begun, answer = recorded(case, "canvas_in"), final[:, ids.shape[1] :]
        columns = [16 * number for number in recorded(case, "canvas_index").tolist()]
        pairs = zip(columns, begun, strict=True)
        states = [torch.cat([answer[:, :at], canvas, prior[:, at + 16 :]], dim=1) for at, canvas in pairs]
        history = [state[:, ids.shape[1] :] for state in out.history or []]
        assert torch.equal(torch.stack(history), changes([*states, answer]))


@pytest.mark.parametrize("canvas", [3, 16, 20])
@pytest.mark.parametrize("kv", ["raw", "fp8"])
def test_windows_move_without_a_trace(canvas: int, kv: str):
    # Canvases shorter than the window, which moves by pieces, and longer ones; prompts in parts shorter than it.
    runtime = tiered.from_pretrained(GOLDENS / "dgemma_tiny", policy="none", kv=kv)
    kept = runtime.with_policy("block_causal", prefill_rows=8)
    call: dict[str, Any] = {"max_new_tokens": 5 * canvas, "block_length": canvas, "block_steps": 2, "seed": 2}

    def same(seed: int) -> bool:
        ids = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(seed))
        own, kept_own = (each.generate(ids, stop_at_eos=False, **call).sequences for each in (runtime, kept))
        return torch.equal(own, kept_own)

    # In a code a last bit of a sum decides between two values, once in twenty prompts, and they lie far apart.
    assert any(same(seed) for seed in range(3 if kv == "fp8" else 1))
    ids = torch.randint(0, 500, (2, 40))
    with first_step(kept, ids, **call) as (forward, _):
        columns = [forward.store.kept(layer).stop - forward.store.kept(layer).start for layer in range(6)]
    assert columns == 5 * [11 + 2 * canvas] + [40 + 5 * canvas]


def test_its_global_layers_are_streamed(random_model: Callable[[Mapping[str, Any]], DiffusionModel]):
    text = CONFIG["text_config"] | {
        "num_hidden_layers": 8,
        "layer_types": 2 * [*3 * ["sliding_attention"], "full_attention"],
        "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("3", "7")},
    }
    model = random_model(CONFIG | {"text_config": text})
    ids = torch.randint(0, 500, (1, 400), generator=torch.Generator().manual_seed(2))
    call: dict[str, Any] = {"max_new_tokens": 32, "block_steps": 3, "seed": 3, "stop_at_eos": False}
    policy = make_policy("block_causal", prefill_rows=64)
    free = Runtime(model, policy=policy)
    own = free.generate(ids, **call)
    budget = own.memory.peak_device_bytes - 50_000
    tight = Runtime(model, policy=policy, ledger=Ledger(MemoryBudget.of(budget))).generate(ids, **call)
    assert torch.equal(tight.sequences, own.sequences)
    assert tight.memory.peak_device_bytes <= budget
    assert tight.memory.tiers[Tier.HOST].at_peak[Account.VALUE] > 0
    assert not tight.memory.tiers[Tier.HOST].at_peak.get(Account.KEY)  # made of values
    shape = model.shape
    windows = 6 * (16 * 2) * (11 + 64)  # rows of the window and of a part of the prompt
    booked = own.memory.tiers[Tier.DEVICE].at_peak
    assert booked[Account.KEY] == 4 * windows
    assert booked[Account.VALUE] == 4 * (windows + 2 * 32 * (400 + 32))
    assert shape.kv_elements == 2 * 6 * 32 + 2 * 32


def test_keys_of_values_are_its_keys(runtime: Runtime):
    model, normed = runtime.model, torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(7))
    rotary = model.rotary(torch.arange(40)[None], True)
    made = model.keys_of_values(5, model.values(5, normed), rotary)
    assert 0 < made.cos.shape[3] < 16 and bool((model.blocks[5].k_norm.weight != 1).any())
    assert torch.equal(made.values(), model.keys(5, normed, rotary))
    assert torch.equal(made[1:, :, 7:30].values(), made.values()[1:, :, 7:30])


@pytest.mark.parametrize("kv", [None, *RowCode])
def test_layers_without_a_window_keep_half_as_much(kv: RowCode | None):
    shape = family_of(read_preset("diffusion-gemma")).shape(read_preset("diffusion-gemma"))
    sizes = CallShape(shape=shape, batch=1, context=65536, block_length=256, dtype="bfloat16", kv=kv)
    (_, keys), (_, values) = feature_buffers(sizes, make_policy("block_causal").features(shape)).values()
    row = 2 * 512 if kv is None else kv.row_bytes(512)
    assert (keys.nbytes, values.nbytes) == (0, 5 * 65536 * 2 * row)  # of five layers, two heads
    assert tiered.plan("diffusion-gemma", context=4096, kv=kv or "raw").kv_bytes_per_token == 5 * 2 * row


def test_codes_whose_groups_cross_the_middle_of_its_heads():
    heads = {"per_layer_config": {"5": {"head_dim": 48}}}
    config = CONFIG | {"text_config": CONFIG["text_config"] | {"head_dim": 32} | heads}
    with pytest.raises(ValueError, match="halves of heads have 24"):
        kv_code("nvfp4", family_of(config).shape(config))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("policy", "kv"), [("block_causal", None), ("block_causal", RowCode.FP8), ("none", None)])
@pytest.mark.parametrize(
    ("length", "changes"),
    [
        *((length, {}) for length in (8, 100, 900)),
        *((length, {"vocab_size": 4096}) for length in (8, 900)),
        *((length, {"hidden_size": 256, "intermediate_size": 512}) for length in (8, 900)),
    ],
)
def test_a_call_allocates_what_it_books(
    random_model: Callable[[Mapping[str, Any]], DiffusionModel],
    length: int,
    policy: str,
    kv: RowCode | None,
    changes: dict[str, int],
):
    model = random_model(CONFIG | {"text_config": CONFIG["text_config"] | changes})
    runtime = Runtime(model, policy=make_policy(policy), kv=kv)
    call: dict[str, Any] = {"max_new_tokens": 32, "block_steps": 2, "seed": 3, "stop_at_eos": False}
    with Allocations() as allocated:
        out = runtime.generate(torch.arange(2 * length).view(2, -1) % 500, **call)
    least = 0.5 if kv is None else 0.4
    assert least * out.memory.peak_device_bytes <= allocated.peak <= out.memory.peak_device_bytes


def open_tiles(model: DiffusionModel, hidden: Tensor, seed: int) -> OpenBlock:
    pending = torch.ones(hidden.shape[:2], dtype=torch.bool)
    return OpenBlock(
        logits=LogitTiles.of(model, hidden.clone()), tokens=pending.long(), pending=pending,
        remaining=[hidden.shape[1]] * len(hidden), mask_token_id=0, streams=Generators(seed, len(hidden), CPU),
    )  # fmt: skip


@pytest.mark.parametrize("tile", [1, 77, 512])
def test_sums_over_tiles(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tile: int):
    monkeypatch.setattr("tiered.models.shape.VOCABULARY_TILE", tile)
    model, hidden = runtime.model, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4))
    logits = model.logits(hidden).double() / 0.3
    found = TiledSums.of(block := open_tiles(model, hidden, 0), 0.3)
    chances = logits.softmax(-1)
    torch.testing.assert_close(
        found.entropy.double(), -(chances * logits.log_softmax(-1)).sum(-1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(found.soft, model.soft_tokens(chances.float()), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(block.top.double(), logits.amax(-1) * 0.3, atol=1e-3, rtol=1e-5)
    assert torch.equal(found.likeliest, logits.argmax(-1))


def test_draws_over_tiles_have_their_chances(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.models.shape.VOCABULARY_TILE", 60)
    model, count = runtime.model, 20_000
    hidden = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(6)).expand(1, count, 64)
    drawn = TiledSums.of(open_tiles(model, hidden, 3), 8.0).drawn[0]
    expected = count * (model.logits(hidden[:, :1])[0, 0] / 8.0).softmax(-1)
    often = expected > 40
    seen = drawn.bincount(minlength=512)[often]
    assert int(often.sum()) > 50
    # Of so many tokens one in a thousand lies more than 3.3 standard deviations off; none lies 5 off.
    assert ((seen - expected[often]) / expected[often].sqrt()).abs().max() < 5


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("weights", ["raw", "int4+head"])
@pytest.mark.parametrize(("noise", "sampled"), [("random", True), ("mask", False), ("mask", True)])
def test_logits_of_the_released_head_are_never_whole(noise: str, sampled: bool, rows: int, weights: str):
    """Nor would they be under rules for masks, which read no sums."""
    shape = replace(family_of(read_preset("diffusion-gemma")).shape(read_preset("diffusion-gemma")), noise=noise)
    sizes = CallShape(
        shape=shape, batch=1, context=4096, block_length=rows, dtype="bfloat16", weights=WeightForm.of(weights),
        sampled=sampled,
    )  # fmt: skip
    booked = account_bytes(make_policy("block_causal").buffers(sizes))[Account.LOGITS]
    assert booked <= (64 << 20) < 256 * 262144 * 4


def test_numbers_that_are_not_finite_are_named(random_model: Callable[[Mapping[str, Any]], DiffusionModel]):
    model = random_model(CONFIG)
    model.blocks[2].shared_out.weight.fill_(float("inf"))
    runtime = Runtime(model, policy=make_policy("block_causal"))
    with pytest.raises(NonFiniteError, match="layer 2"):
        runtime.generate(torch.arange(20)[None], max_new_tokens=16, seed=1)


def test_an_end_may_be_kept_away(runtime: Runtime):
    call: dict[str, Any] = {"max_new_tokens": 16, "block_steps": 4, "seed": 5}
    free = runtime.generate(torch.arange(9)[None], stop_at_eos=False, **call).sequences[0, 9:]
    ends = free[:3].tolist()
    held = runtime.generate(torch.arange(9)[None], stop_tokens=ends, min_new_tokens=16, **call).sequences[0, 9:]
    assert not {*ends} & {*held.tolist()}


@pytest.mark.parametrize("weights", ["int8", "int8+head", "nvfp4+head"])
def test_codes_of_its_weights(runtime: Runtime, weights: str):
    # A coded embedding is decoded by parts, for tokens and for mean embeddings.
    coded = tiered.from_pretrained(GOLDENS / "dgemma_tiny", weights=weights)
    chances = torch.randn(1, 16, 512, generator=torch.Generator().manual_seed(3)).softmax(-1)
    table: Any = coded.model.wte.weight
    values = table.values() if weights.endswith("+head") else table
    torch.testing.assert_close(coded.model.soft_tokens(chances), 8 * chances @ values)
    call: dict[str, Any] = {"max_new_tokens": 32, "block_steps": 3, "seed": 5, "stop_at_eos": False}
    ids = torch.arange(30)[None]
    own = coded.with_policy("none").generate(ids, **call).sequences
    assert torch.equal(coded.generate(ids, **call).sequences, own)


def test_a_file_larger_than_memory_is_opened_once(
    write_checkpoint: Callable[..., Path],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
):
    """A released checkpoint is one file of 27 GB, which some systems refuse to map as a whole."""
    weights = random_weights(CONFIG)
    file = write_checkpoint(CONFIG, weights) / "model.safetensors"
    stored = file.read_bytes()
    length = 8 + int.from_bytes(stored[:8], "little")
    images = {
        "dtype": "U8",
        "shape": [1 << 40],
        "data_offsets": [len(stored) - length, len(stored) - length + (1 << 40)],
    }
    header = json.dumps(json.loads(stored[8:length]) | {"model.encoder.vision_tower.x": images}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as rewritten:
        rewritten.write(len(header).to_bytes(8, "little") + header + stored[length:])
        rewritten.truncate(rewritten.tell() + (1 << 40))  # without bytes on the disk
    opened = list[Path]()

    def opening(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(checkpoint, "safe_open", opening)
    model: Any = tiered.from_pretrained(file.parent).model
    assert opened == [file]
    assert all(torch.equal(official(model, name), weight) for name, weight in weights.items())


@pytest.mark.parametrize("heads", [None, {"head_dim": 32, "num_key_value_heads": 1}])
def test_layers_with_numbers_of_two_digits(heads: dict[str, int] | None):
    """transformers writes "05" and "11", and of released models nothing."""
    by_layer = None if heads is None else {"05": heads, "11": heads}
    changes = {"num_hidden_layers": 12, "layer_types": None, "per_layer_config": by_layer, "global_head_dim": 32}
    changes |= {"num_global_key_value_heads": 1}
    config = CONFIG | {"text_config": CONFIG["text_config"] | changes}
    shape = family_of(config).shape(config)
    assert shape.global_heads == (1, 32) and [*filter(shape.is_global, range(12))] == [5, 11]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config = None"),
        ({"rope_theta": 5e5}, "is not stretched"),
        ({"layer_types": ["full_attention"]}, "one for each of 6 layers"),
        ({"per_layer_config": {"0": {"head_dim": 8}, "5": {"head_dim": 32}}}, "one for all layers of 'full_attention'"),
        ({"per_layer_config": {"5": {"rope_theta": 1e4}}}, r"per_layer_config has \['rope_theta'\]"),
        *(
            ({"per_layer_config": {"5": {"head_dim": 32}, key: {"head_dim": 32}}}, rf"the keys \['5', '{key}'\]")
            for key in ("05", "all", "6", "-1")
        ),
        ({"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "3 key heads of 16 elements"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"top_k_experts": 9}, "fewer than num_experts_per_tok = 9"),
    ],
)
def test_a_config_that_cannot_be_read(changes: dict[str, Any], message: str):
    own = {key: value for key, value in changes.items() if key in ("text_config", "rope_theta")}
    config = CONFIG | {"text_config": CONFIG["text_config"] | changes} | own
    with pytest.raises(ValueError, match=message):
        family_of(config).shape(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_bound": 0.0}, "entropy_bound = 0"),
        ({"t_max": 0}, "t_max = 0"),
        ({"t_min": -1.0}, "t_min = -1"),
        ({"stability_threshold": -1}, "stability_threshold"),
        ({"commit": "quota"}, "random noise"),
        ({"correction_steps": 2}, "random tokens"),
        ({"policy": "fast_dllm_dual"}, "block_causal"),
        ({"cfg_scale": 1.0}, "no token for"),
    ],
)
def test_calls_that_it_refuses(runtime: Runtime, options: dict[str, Any], message: str):
    policy = options.pop("policy", "none")
    with pytest.raises(ValueError, match=message):
        runtime.with_policy(policy).generate(torch.arange(8)[None], max_new_tokens=16, **options)
