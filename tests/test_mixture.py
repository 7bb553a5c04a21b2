"""Mixtures of experts: picks of a router, rows that depend on no other, and checkpoints that do not fit."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from official_names import official
from quantised_weights import LAYOUTS
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiered
from tiered.core.features import Account, Tier
from tiered.decoding.observers import CallInspector
from tiered.forward.forward import Forward
from tiered.kernels.row_code import WeightCode
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import Checkpoint
from tiered.models.families import family_of
from tiered.models.mixture import MixtureModel
from tiered.models.router import Router
from tiered.models.weight_form import WeightForm, weight_bytes
from tiered.offload.errors import TransferError
from tiered.offload.lane import Lane
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GEMMA_CONFIG = Path(__file__).parent / "goldens" / "diffusion_gemma" / "dgemma_tiny" / "config.json"
TOKENS = {"mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125}
LLADA_MOE: dict[str, Any] = {
    **TOKENS,
    "model_type": "lladamoe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "expert_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "shared_expert_intermediate_size": 16,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_enable_expert_bias": True,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}
LLADA2: dict[str, Any] = {
    **TOKENS,
    "model_type": "llada2_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}
SDAR_MOE: dict[str, Any] = {
    **TOKENS,
    "model_type": "sdar_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}
GEMMA: dict[str, Any] = json.loads(GEMMA_CONFIG.read_text())
CONFIGS: dict[str, dict[str, Any]] = {"llada-moe": LLADA_MOE, "llada2": LLADA2, "sdar-moe": SDAR_MOE}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


# ---- routers ----


def by_hand(router: Router, logits: Tensor, bias: Tensor | None) -> dict[int, float]:
    """The weight of each picked expert of one row, by the words of the papers."""
    scores = (logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()).tolist()
    ranked = scores if bias is None else [score + added for score, added in zip(scores, bias.tolist(), strict=True)]
    each = len(scores) // router.groups
    groups = [range(first, first + each) for first in range(0, len(scores), each)]
    best = sorted(groups, key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:2]))
    open_to = [e for group in best[: router.kept_groups] for e in group]
    chosen = sorted(sorted(open_to, key=lambda expert: -ranked[expert])[: router.picked])
    weights = [(ranked if router.weighs_bias else scores)[expert] for expert in chosen]
    total = sum(weights) if router.normalised else 1.0
    return {e: weight / total * router.scale for e, weight in zip(chosen, weights, strict=True)}


ROUTERS = {
    "LLaDA2": Router(score="sigmoid", picked=4, groups=4, kept_groups=2, normalised=True, scale=2.5),
    "LLaDA-MoE": Router(score="softmax", picked=3, weighs_bias=True),
    "SDAR-MoE": Router(score="softmax", picked=3, normalised=True),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_picks_as_the_papers_say(name: str, biased: bool):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    picks = ROUTERS[name].check(16).pick(logits.clone(), bias)
    for row in range(40):
        expected = by_hand(ROUTERS[name], logits[row], bias)
        assert picks.experts[row].tolist() == [*expected]
        torch.testing.assert_close(picks.weights[row], torch.tensor([*expected.values()]))


@pytest.mark.parametrize(
    ("changes", "experts", "message"),
    [
        ({}, 3, "num_experts = 3 is fewer than num_experts_per_tok = 4"),
        ({"groups": 3}, 16, "n_group = 3 does not divide num_experts = 16"),
        ({"groups": 2, "kept_groups": 3}, 16, "topk_group = 3 is more than n_group = 2"),
        ({"groups": 8, "kept_groups": 1}, 16, "num_experts_per_tok = 4, but topk_group = 1 groups have 2 experts"),
        ({"groups": 16, "kept_groups": 8}, 16, "n_group = 16 leaves groups with one of num_experts = 16"),
    ],
)
def test_numbers_of_a_router_that_do_not_fit_are_named(changes: dict[str, Any], experts: int, message: str):
    with pytest.raises(ValueError, match=message):
        Router(score="sigmoid", picked=4, **changes).check(experts)


# ---- rows ----


@pytest.mark.parametrize("code", [None, WeightCode.INT4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_depends_on_no_other(
    write_checkpoint: Callable[..., Any],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    config: dict[str, Any],
    dtype: str,
    code: WeightCode | None,
):
    directory = write_checkpoint(config, random_weights(config))
    model = tiered.from_pretrained(directory, dtype=dtype, weights=code or "raw").model
    assert isinstance(model, MixtureModel)
    generator, layer = torch.Generator().manual_seed(3), model.shape.recorded[-1]
    rows = torch.randn(300, 32, generator=generator).to(getattr(torch, dtype))
    order = torch.randperm(300, generator=generator)

    def mixed(some: Tensor) -> Tensor:
        return model.routed(layer, some[None], some[None], some[None])[0]

    whole = mixed(rows)
    assert torch.equal(mixed(rows[order]), whole[order])
    for size in (1, 7, 40, 150):
        assert torch.equal(torch.cat([mixed(part) for part in rows.split(size)]), whole)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_the_sum_of_a_row_is_that_of_its_experts(
    random_model: Callable[[Mapping[str, Any]], Any], implementation: str, monkeypatch: pytest.MonkeyPatch
):
    if implementation == "triton":
        pytest.importorskip("triton")
        from tiered.kernels import expert_outputs

        kernel = lambda reference, _: getattr(expert_outputs, reference.__name__)  # noqa: E731
        monkeypatch.setattr("tiered.models.mixture.for_device", kernel)
    model = random_model(LLADA_MOE)
    hidden = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(4))
    normed = model.blocks[1].ff_norm(hidden)

    def answer(expert: str, rows: Tensor) -> Tensor:
        gate, up, down = (
            official(model, f"model.layers.1.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T

    picks = model.picks(1, normed.flatten(0, 1))
    expected = answer("shared_expert", normed)
    for row, (experts, weights) in enumerate(zip(picks.experts.tolist(), picks.weights.tolist(), strict=True)):
        at = row // 21, row % 21
        for expert, weight in zip(experts, weights, strict=True):
            expected[at] += weight * answer(f"mlp.experts.{expert}", normed[at])
    torch.testing.assert_close(model.feed_forward(1, hidden), expected, atol=1e-4, rtol=1e-4)


def test_picked_experts_are_reported(random_model: Callable[[Mapping[str, Any]], DiffusionModel]):
    seen: list[tuple[int, Tensor]] = []

    class Picks(CallInspector):
        def begin(self, canvas: object, forward: Forward, policy: object) -> None:
            forward.router_probe = lambda layer, experts, picked: seen.append((layer, experts))

    runtime = Runtime(random_model(LLADA_MOE), policy=make_policy("none"))
    ids = torch.arange(3, 23)[None]
    out = runtime.generate(ids, max_new_tokens=8, steps=2, stop_at_eos=False, inspector=Picks())
    assert [layer for layer, _ in seen] == [1, 2, 1, 2]
    assert [tuple(experts.shape) for _, experts in seen] == [(28, 2), (8, 2)] * 2
    counts = [len(experts.unique()) for _, experts in seen]
    assert out.experts_per_step == [sum(counts[:2]) / 2, sum(counts[2:]) / 2]
    assert out.as_dict()["experts_per_step"] == out.experts_per_step
    assert tiered.from_pretrained("embedded").generate("sort: Ben Ada", max_new_tokens=8).experts_per_step == []


# ---- checkpoints ----


def stacked(weights: Mapping[str, Tensor], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """`weights` with the experts of a layer in one tensor: by its name, what each expert has in it."""
    alone = {name: weight for name, weight in weights.items() if ".experts." not in name}
    layers = sorted({name.partition(".experts.")[0] for name in weights} - {*weights})
    for layer in layers:
        for name, parts in kinds.items():
            experts = [
                torch.cat([weights[f"{layer}.experts.{number}.{part}.weight"] for part in parts])
                for number in range(sum(f"{layer}.experts.{n}.{parts[0]}.weight" in weights for n in range(64)))
            ]
            alone[f"{layer}.experts.{name}"] = torch.stack(experts)
    return alone


STACKS: dict[str, dict[str, tuple[str, ...]]] = {
    "two": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "three": {f"{name}_proj.weight": (f"{name}_proj",) for name in ("gate", "up", "down")},
}


@pytest.mark.parametrize("stack", STACKS)
def test_experts_may_come_in_stacks(
    write_checkpoint: Callable[..., Any],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    config: dict[str, Any],
    stack: str,
):
    weights = random_weights(config)
    together = write_checkpoint(config, stacked(weights, STACKS[stack]))
    alone, runtime = tiered.from_pretrained(write_checkpoint(config, weights)), tiered.from_pretrained(together)
    for (name, one), (_, other) in zip(alone.model.named_parameters(), runtime.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    blocks: dict[str, Any] = {"block_length": 16} if runtime.model.shape.block_causal else {}
    whole = tiered.plan(together, context=64, policy="none", **blocks).tiers[Tier.DEVICE].total
    # Layers from the checkpoint's own file, for which the host has no room.
    tight = tiered.MemoryBudget(device=whole - 1, host=1 << 20)
    with tiered.from_pretrained(together, memory=tight, policy="none") as streamed:
        ids = torch.arange(3, 51)[None]
        assert torch.equal(streamed.logits(ids, **blocks), alone.logits(ids, **blocks))


def test_experts_may_be_quantised_already(
    write_checkpoint: Callable[..., Any],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    config: dict[str, Any],
):
    family, weights = family_of(config), random_weights(config)
    read = family.read(config)
    coded = [name for name, own in read.parameter_names.items() if read.shape.is_matrix(own)]
    files, values = dict(weights), dict(weights)
    for name in coded:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        files[name], files[f"{name}_scale"] = (weights[name] / scale).round().to(torch.int8), scale
        values[name] = files[name] * scale
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    method = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"weights": scheme}},
    }
    directory = write_checkpoint({**config, "quantization_config": method}, files)
    runtime, ids = tiered.from_pretrained(directory), torch.arange(3, 51)[None]
    blocks: dict[str, Any] = {"block_length": 16} if read.shape.block_causal else {}
    expected = tiered.from_pretrained(write_checkpoint(config, values)).logits(ids, **blocks)
    torch.testing.assert_close(runtime.logits(ids, **blocks), expected, atol=1e-3, rtol=1e-3)
    assert tiered.plan(directory, context=64, policy="none", **blocks).sizes.weights == WeightForm(WeightCode.INT8)


# By writer: a config, the matrices of layers that are coded, and the layout of a coded one.
PARTLY: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "ModelOpt's recipe for DiffusionGemma": (GEMMA, (".experts.",), "ModelOpt NVFP4"),
    "llm-compressor's FP8 of DiffusionGemma": (GEMMA, (".experts.", ".self_attn.", ".mlp."), "FP8 by channel"),
    "llm-compressor's NVFP4 of DiffusionGemma": (GEMMA, (".experts.", ".mlp."), "NVFP4"),
    "AWQ of DiffusionGemma": (GEMMA, (".experts.", ".self_attn."), "INT4, scales in float16"),
    "ModelOpt, LLaDA2": (LLADA2, (".experts.", ".shared_experts.", "layers.0.mlp.up_proj"), "ModelOpt FP8"),
    "llm-compressor, LLaDA2": (LLADA2, (".experts.", ".shared_experts.", ".mlp.", ".attention."), "NVFP4"),
    "experts of SDAR-MoE": (SDAR_MOE, (".experts.",), "INT8 by channel"),
}


@pytest.mark.parametrize("case", PARTLY)
def test_matrices_beside_quantised_experts_may_be_raw(
    write_checkpoint: Callable[..., Any],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    case: str,
):
    config, parts, layout = PARTLY[case]
    quantization, writer, code = LAYOUTS[layout]
    # More bytes than a call, in whole groups of 16.
    sizes: dict[str, Any] = {"num_experts": 24 if config is GEMMA else 64, "moe_intermediate_size": 32}
    config = {**config, "text_config": config["text_config"] | sizes} if config is GEMMA else {**config, **sizes}
    read, weights = family_of(config).read(config), random_weights(config)
    files, values, raw = dict(weights), dict(weights), set[str]()
    for name, own in read.parameter_names.items():
        if read.shape.is_matrix(own) and any(part in name for part in parts):
            written, _, values[name] = writer(files.pop(name))
            files |= {name.removesuffix(".weight") + end: tensor.contiguous() for end, tensor in written.items()}
        elif read.shape.is_matrix(own):
            raw.add(own)
    form = WeightForm(code, raw=frozenset(raw))
    directory = write_checkpoint({**config, "quantization_config": quantization}, files)
    gemma = "text_config" in config
    blocks: dict[str, Any] = {} if gemma else {"block_length": 16}
    ids, call = torch.arange(3, 51)[None], {"max_new_tokens": 16, "stop_at_eos": False, "seed": 3, **blocks}
    call |= {"block_steps": 2} if gemma else {}
    plan = tiered.plan(directory, context=96, **blocks)
    assert plan.sizes.weights == form and str(form) == (f"{code}, {len(raw)} matrices raw" if raw else code)
    with tiered.from_pretrained(directory) as runtime:
        of_values = tiered.from_pretrained(write_checkpoint(config, values))
        logits = runtime.logits(ids, **blocks)
        torch.testing.assert_close(logits, of_values.logits(ids, **blocks), atol=2e-3, rtol=2e-3)
        held = runtime.ledger.held(Tier.DEVICE, Account.WEIGHTS)
        own = runtime.generate(ids, **call)
    assert held == weight_bytes(read.shape, "float32", form)
    with tiered.from_pretrained(directory, memory=held) as streamed:  # which a call needs a part of
        assert torch.equal(streamed.logits(ids, **blocks), logits)
        out = streamed.generate(ids, **call)
    assert torch.equal(out.sequences, own.sequences)
    assert out.weights is not None and out.weights.ways[Lane.FETCH].nbytes > 0
    with pytest.raises(ValueError, match=f"weights = 'int4', but the checkpoint has them in {form}"):
        tiered.from_pretrained(directory, weights="int4")
    expert = next(name for name, own in read.parameter_names.items() if read.shape.place_of(own))
    for end in writer(weights[expert])[0]:
        del files[expert.removesuffix(".weight") + end]
    files[expert] = weights[expert]
    count = sum(1 for own in read.parameter_names.values() if read.shape.place_of(own))
    with pytest.raises(ValueError, match=f"holds {count - 1} of {count} matrices of experts in {code}"):
        tiered.from_pretrained(write_checkpoint({**config, "quantization_config": quantization}, files))


def stack_of(layer: int, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"model.layers.{layer}.mlp.experts.{name}": torch.zeros(shape, dtype=dtype)}


EXPERTS = "model.layers.2.mlp.experts"
# Of a mixture with its experts one by one: a config, tensors that are there besides, and names of those that are not.
DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...], str]] = {
    "one is missing": (
        LLADA_MOE, {}, (f"{EXPERTS}.5.up_proj.weight",), rf"1 missing: {EXPERTS}.5.up_proj.weight"
    ),
    "a whole expert is missing": (
        LLADA2, {}, tuple(f"{EXPERTS}.7.{name}_proj.weight" for name in ("gate", "up", "down")),
        rf"3 missing: {EXPERTS}.7.gate_proj.weight, {EXPERTS}.7.up_proj.weight, {EXPERTS}.7.down_proj.weight",
    ),
    "a stack beside them": (
        LLADA_MOE, stack_of(2, "down_proj", 6, 32, 24), (), rf"6 weights are there both .* {EXPERTS}.0.down_proj.weight"
    ),
    "two stacks of one kind": (
        SDAR_MOE, stack_of(2, "gate_up_proj", 7, 48, 32) | stack_of(2, "up_proj", 7, 24, 32),
        tuple(f"{EXPERTS}.{number}.{name}_proj.weight" for number in range(7) for name in ("gate", "up")),
        rf"7 weights are there both .* {EXPERTS}.0.up_proj.weight",
    ),
    "a stack of too few": (
        LLADA2, stack_of(2, "down_proj", 7, 32, 24), tuple(f"{EXPERTS}.{n}.down_proj.weight" for n in range(8)),
        rf"1 missing: {EXPERTS}.7.down_proj.weight",
    ),
    "a stack of too many": (
        LLADA2, stack_of(2, "down_proj", 9, 32, 24), tuple(f"{EXPERTS}.{n}.down_proj.weight" for n in range(8)),
        rf"1 unexpected: {EXPERTS}.8.down_proj.weight",
    ),
    "a stack [experts, inner, out]": (
        LLADA2, stack_of(2, "down_proj", 8, 24, 32), tuple(f"{EXPERTS}.{n}.down_proj.weight" for n in range(8)),
        rf"8 of another shape: {EXPERTS}.0.down_proj.weight \[24, 32\] instead of \[32, 24\]",
    ),
    "a stack in codes": (
        LLADA2, stack_of(2, "gate_up_proj", 8, 48, 32, dtype=torch.int8), (),
        rf"{EXPERTS}.gate_up_proj is a stack of experts in I8; codes are read one by one",
    ),
    "one too many": (
        LLADA_MOE, stack_of(1, "6.up_proj.weight", 24, 32), (),
        r"1 unexpected: model.layers.1.mlp.experts.6.up_proj.weight",
    ),
    "an expert of another width": (
        SDAR_MOE, stack_of(2, "6.up_proj.weight", 25, 32), (),
        rf"1 of another shape: {EXPERTS}.6.up_proj.weight \[25, 32\] instead of \[24, 32\]",
    ),
    "a longer bias": (
        LLADA_MOE, {"model.layers.1.mlp.expert_bias": torch.zeros(7)}, (), r"mlp.expert_bias \[7\] instead of \[6\]"
    ),
    "a bias of two dimensions": (
        LLADA2, {"model.layers.1.mlp.gate.expert_bias": torch.zeros(8, 1)}, (),
        r"mlp.gate.expert_bias \[8, 1\] instead of \[8\]",
    ),
    "no bias": (
        LLADA2, {}, ("model.layers.1.mlp.gate.expert_bias",), r"1 missing: model.layers.1.mlp.gate.expert_bias"
    ),
    "a bias that its family lacks": (
        SDAR_MOE, {"model.layers.2.mlp.gate.e_score_correction_bias": torch.zeros(7)}, (),
        r"1 unexpected: model.layers.2.mlp.gate.e_score_correction_bias",
    ),
    "scales of more experts": (
        GEMMA, {"model.decoder.layers.1.router.per_expert_scale": torch.zeros(9)}, (),
        r"router.per_expert_scale \[9\] instead of \[8\]",
    ),
    "a router for fewer": (
        SDAR_MOE, {"model.layers.2.mlp.gate.weight": torch.zeros(6, 32)}, (),
        r"gate.weight \[6, 32\] instead of \[7, 32\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_weights_that_do_not_fit_are_named(
    write_checkpoint: Callable[..., Any],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    damage: str,
):
    """Before any weight is read."""
    config, besides, absent, message = DAMAGED[damage]
    weights = {name: weight for name, weight in random_weights(config).items() if name not in absent}
    assert len(weights) == len(random_weights(config)) - len(absent)
    directory = write_checkpoint(config, weights | besides)
    with pytest.raises(ValueError, match=message):
        Checkpoint(directory, family_of(config).shape(config), config)
    with pytest.raises(ValueError, match=message):
        tiered.from_pretrained(directory)


def test_a_weight_in_two_files_is_named(
    write_checkpoint: Callable[..., Any], random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]]
):
    weights = random_weights(LLADA2)
    directory = write_checkpoint(LLADA2, weights, shards=2)
    first, second = sorted(directory.glob("*.safetensors"))
    held = load_file(second)
    save_file(held | {name: weights[name] for name in [*load_file(first)][-1:]}, second)
    with pytest.raises(ValueError, match=rf"weight .* is in two files: {first.name} and {second.name}"):
        tiered.from_pretrained(directory)


def test_experts_whose_file_changes_are_named(
    write_checkpoint: Callable[..., Any], random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]]
):
    config = {**LLADA2, "num_experts": 64, "torch_dtype": "float32"}
    directory = write_checkpoint(config, random_weights(config))
    file = directory / "model.safetensors"
    # They pick other experts.
    prompts = torch.randint(3, 120, (3, 1, 48), generator=torch.Generator().manual_seed(1))
    call: dict[str, Any] = {"max_new_tokens": 16, "block_length": 16, "stop_at_eos": False}
    with tiered.from_pretrained(directory) as resident:
        expected = [resident.generate(prompt, **call).sequences for prompt in prompts]
        weights = resident.ledger.held(Tier.DEVICE)
    # Few slots, and a host that most experts have no room on.
    memory = tiered.MemoryBudget(device=weights // 2, host=64 << 10)
    with tiered.from_pretrained(directory, memory=memory) as runtime:
        assert torch.equal(runtime.generate(prompts[0], **call).sequences, expected[0])
        # Another file takes its name: the first one stays open.
        kept = file.rename(directory / "kept")
        shutil.copy(kept, file)
        out = runtime.generate(prompts[1], **call)
        assert torch.equal(out.sequences, expected[1]) and runtime.ledger.moved[Tier.DISK, Tier.HOST]
        with kept.open("r+b") as written:
            written.seek(-4, os.SEEK_END)
            written.write(bytes(4))
        for prompt in prompts[[2, 0]]:
            with pytest.raises(TransferError, match=f"{file} has changed since it was loaded: load it again"):
                runtime.generate(prompt, **call)
            runtime.ledger.check_integrity()
    with tiered.from_pretrained(directory, memory=memory) as again:
        assert torch.equal(again.generate(prompts[2], **call).sequences, expected[2])


def test_the_share_that_turns_may_be_inside_rope_parameters():
    inside = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    for changes in (inside, inside | {"partial_rotary_factor": None}):
        assert family_of(LLADA2).read(LLADA2 | changes) == family_of(LLADA2).read(LLADA2)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLADA2,
            {"num_experts": 2, "n_group": 1, "topk_group": 1},
            "num_experts = 2 is fewer than num_experts_per_tok",
        ),
        (LLADA2, {"n_group": 3}, "n_group = 3 does not divide num_experts = 8"),
        (LLADA2, {"topk_group": 5}, "topk_group = 5 is more than n_group = 4"),
        (LLADA2, {"topk_group": 1}, "num_experts_per_tok = 3, but topk_group = 1 groups have 2 experts"),
        *((LLADA2, {key: None}, f"lacks '{key}'") for key in ("n_group", "topk_group", "partial_rotary_factor")),
        *((LLADA2, {key: None}, f"lacks '{key}'") for key in ("num_shared_experts", "first_k_dense_replace")),
        (LLADA2, {"first_k_dense_replace": 3}, "num_hidden_layers = 3, none of which has a mixture"),
        (LLADA2, {"first_k_dense_replace": -1}, "first_k_dense_replace = -1; an integer from 0 on"),
        (LLADA2, {"num_shared_experts": 0.5}, "num_shared_experts = 0.5"),
        (LLADA2, {"expert_capacity": 4}, r"expert_capacity = 4 \(allowed: null\)"),
        (LLADA2, {"score_function": "softmax"}, "score_function = 'softmax'"),
        (LLADA2, {"use_qkv_bias": True}, "use_qkv_bias = True"),
        (LLADA2, {"partial_rotary_factor": 0.3}, "partial_rotary_factor = 0.3 of a head of 12"),
        (LLADA2, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.5, but 0.25 in rope"),
        (SDAR_MOE, {"num_experts": 2}, "num_experts = 2 is fewer than num_experts_per_tok = 3"),
        (SDAR_MOE, {"mlp_only_layers": 1}, "mlp_only_layers = 1; a list of layers"),
        (SDAR_MOE, {"decoder_sparse_step": 4}, "num_hidden_layers = 3, none of which has a mixture"),
    ],
)
def test_a_config_that_sees_blocks_and_does_not_fit_is_named(
    config: dict[str, Any], changes: dict[str, Any], message: str
):
    changed = {**config, **changes}
    with pytest.raises(ValueError, match=message):
        family_of(changed).read(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 1}, "num_experts = 1 is fewer than num_experts_per_tok = 2"),
        ({"num_experts": 0}, "num_experts = 0; a positive integer"),
        ({"num_experts": None}, "lacks 'num_experts'"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok = '2'"),
        ({"expert_intermediate_size": None}, "lacks 'expert_intermediate_size'"),
        ({"moe_layer_freq": [0, 0, 0]}, "num_hidden_layers = 3, none of which has a mixture"),
        ({"moe_layer_freq": [1, 1]}, r"moe_layer_freq = \[1, 1\]; 0 or 1 for each of 3 layers"),
        ({"moe_layer_freq": [1, 2, 1]}, "moe_layer_freq"),
        ({"dense_intermediate_size": None}, "lacks 'intermediate_size'"),
        ({"router_num_group": 2}, r"router_num_group = 2 \(allowed: null\)"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function = 'sigmoid'"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"qk_layernorm": False}, "qk_layernorm = False"),
    ],
)
def test_a_config_of_llada_moe_that_does_not_fit_is_named(changes: dict[str, Any], message: str):
    config = {**LLADA_MOE, **changes}
    with pytest.raises(ValueError, match=message):
        family_of(config).read(config)


def test_the_first_of_them_has_the_name_of_llada():
    assert family_of({**LLADA_MOE, "model_type": "llada"}).name == "LLaDA-MoE"
