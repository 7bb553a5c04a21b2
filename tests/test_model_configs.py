"""config.json in each family: sizes, the table of weights, and values that are refused."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tiered.models.families import FAMILIES, family_of
from tiered.models.layout import KEYS, Layout, ModelConfig
from tiered.models.locate import read_config
from tiered.models.shape import ModelShape

LLADA: Mapping[str, Any] = {
    "model_type": "llada",
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "mlp_hidden_size": 48,
    "vocab_size": 64,
    "max_sequence_length": 128,
    "torch_dtype": "bfloat16",
    "mask_token_id": 63,
    "eos_token_id": 62,
    "pad_token_id": 62,
}
DREAM: Mapping[str, Any] = {
    "model_type": "Dream",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "mask_token_id": 63,
    "eos_token_id": 62,
    "pad_token_id": 62,
}
GIDD: Mapping[str, Any] = {
    "model_type": "gidd",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "mlp_bias": True,
    "noise_type": 1000.0,
    "torch_dtype": "float32",
}
INF, NAN = math.inf, math.nan
SDAR: Mapping[str, Any] = {
    "model_type": "sdar",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "mask_token_id": 63,
    "eos_token_id": 62,
}
NEMOTRON = SDAR | {"model_type": "nemotron_labs_diffusion"}
CONFIGS = {"llada": LLADA, "Dream": DREAM, "gidd": GIDD, "sdar": SDAR}


def read(config: Mapping[str, Any], **changes: Any) -> ModelConfig:
    """The config read of `config` with other values; `...` takes a key out."""
    changed = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return family_of(changed).read(changed)


def shape_of(config: Mapping[str, Any], **changes: Any) -> ModelShape:
    """The shape of `config` with other values; `...` takes a key out."""
    return read(config, **changes).shape


# The official names, with the tensors of layer 1 for all layers.
LAYER_TENSORS = {
    "llada": {
        "model.transformer.blocks.1.attn_norm.weight": (32,),
        "model.transformer.blocks.1.q_proj.weight": (32, 32),
        "model.transformer.blocks.1.k_proj.weight": (32, 32),
        "model.transformer.blocks.1.v_proj.weight": (32, 32),
        "model.transformer.blocks.1.attn_out.weight": (32, 32),
        "model.transformer.blocks.1.ff_norm.weight": (32,),
        "model.transformer.blocks.1.ff_proj.weight": (48, 32),
        "model.transformer.blocks.1.up_proj.weight": (48, 32),
        "model.transformer.blocks.1.ff_out.weight": (32, 48),
    },
    "Dream": {
        "model.layers.1.input_layernorm.weight": (32,),
        "model.layers.1.self_attn.q_proj.weight": (32, 32),
        "model.layers.1.self_attn.q_proj.bias": (32,),
        "model.layers.1.self_attn.k_proj.weight": (16, 32),
        "model.layers.1.self_attn.k_proj.bias": (16,),
        "model.layers.1.self_attn.v_proj.weight": (16, 32),
        "model.layers.1.self_attn.v_proj.bias": (16,),
        "model.layers.1.self_attn.o_proj.weight": (32, 32),
        "model.layers.1.post_attention_layernorm.weight": (32,),
        "model.layers.1.mlp.gate_proj.weight": (48, 32),
        "model.layers.1.mlp.up_proj.weight": (48, 32),
        "model.layers.1.mlp.down_proj.weight": (32, 48),
    },
    "gidd": {
        "model.layers.1.attn_layernorm.weight": (32,),
        "model.layers.1.self_attn.q_proj.weight": (32, 32),
        "model.layers.1.self_attn.k_proj.weight": (32, 32),
        "model.layers.1.self_attn.v_proj.weight": (32, 32),
        "model.layers.1.self_attn.o_proj.weight": (32, 32),
        "model.layers.1.self_attn.q_norm.weight": (32,),
        "model.layers.1.self_attn.k_norm.weight": (32,),
        "model.layers.1.self_attn.k_bias": (4, 8),
        "model.layers.1.self_attn.v_bias": (4, 8),
        "model.layers.1.mlp_layernorm.weight": (32,),
        "model.layers.1.mlp.up_proj.weight": (48, 32),
        "model.layers.1.mlp.up_proj.bias": (48,),
        "model.layers.1.mlp.down_proj.weight": (32, 48),
        "model.layers.1.mlp.down_proj.bias": (32,),
    },
    "sdar": {
        "model.layers.1.input_layernorm.weight": (32,),
        "model.layers.1.self_attn.q_proj.weight": (32, 32),
        "model.layers.1.self_attn.k_proj.weight": (16, 32),
        "model.layers.1.self_attn.v_proj.weight": (16, 32),
        "model.layers.1.self_attn.o_proj.weight": (32, 32),
        "model.layers.1.self_attn.q_norm.weight": (8,),
        "model.layers.1.self_attn.k_norm.weight": (8,),
        "model.layers.1.post_attention_layernorm.weight": (32,),
        "model.layers.1.mlp.gate_proj.weight": (48, 32),
        "model.layers.1.mlp.up_proj.weight": (48, 32),
        "model.layers.1.mlp.down_proj.weight": (32, 48),
    },
}
OTHER_TENSORS = {
    "llada": {
        "model.transformer.wte.weight": (64, 32),
        "model.transformer.ln_f.weight": (32,),
        "model.transformer.ff_out.weight": (64, 32),
    },
    "Dream": {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    },
    "gidd": {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    },
    "sdar": {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    },
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_tensor_has_its_official_name_and_shape(model_type: str):
    layer = LAYER_TENSORS[model_type]
    first = {name.replace(".1.", ".0."): shape for name, shape in layer.items()}
    assert shape_of(CONFIGS[model_type]).weight_shapes == OTHER_TENSORS[model_type] | layer | first


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llada", {"kv_heads": 4, "mlp_matrices": 2, "noise": "mask", "prediction_shift": 0, "dtype": "bfloat16"}),
        ("Dream", {"kv_heads": 2, "mlp_matrices": 2, "noise": "mask", "prediction_shift": 1, "dtype": "bfloat16"}),
        ("gidd", {"kv_heads": 4, "mlp_matrices": 1, "noise": "uniform", "prediction_shift": 0, "dtype": "float32"}),
        ("sdar", {"kv_heads": 2, "mlp_matrices": 2, "noise": "mask", "prediction_shift": 0, "dtype": "bfloat16"}),
    ],
)
def test_sizes_have_the_same_words_in_every_family(model_type: str, expected: dict[str, object]):
    shape = shape_of(CONFIGS[model_type])
    expected |= {"family": model_type.lower(), "layers": 2, "width": 32, "heads": 4, "head_dim": 8, "mlp_width": 48}
    expected |= {"vocab_size": 64, "max_context": 128}
    assert {name: getattr(shape, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (LLADA, {"n_kv_heads": 2}, {"kv_heads": 2}),
        (LLADA, {"multi_query_attention": True}, {"kv_heads": 1}),
        (LLADA, {"mlp_hidden_size": ...}, {"mlp_width": 128}),
        (LLADA, {"embedding_size": 72}, {"vocab_size": 72}),
        (LLADA, {"multi_query_attention": False, "n_kv_heads": 4}, {"kv_heads": 4}),
        (LLADA, {"torch_dtype": ...}, {"dtype": "float32"}),
        (DREAM, {"num_key_value_heads": ...}, {"kv_heads": 4}),
        (DREAM, {"torch_dtype": ..., "dtype": "torch.float16"}, {"dtype": "float16"}),
        (GIDD, {"noise_type": -1000.0}, {"noise": "mask"}),
        (GIDD, {"noise_type": 0.0}, {"noise": "mask"}),
        (GIDD, {"head_dim": ...}, {"head_dim": 8}),
        (SDAR, {}, {"sight": "blocks", "block_length": None, "heads_width": 32}),
        (SDAR, {"block_size": 4}, {"block_length": 4}),
        (SDAR, {"head_dim": 12}, {"head_dim": 12, "heads_width": 48, "kv_width": 24, "width": 32}),
    ],
)
def test_defaults_and_variants(config: Mapping[str, Any], changes: dict[str, Any], expected: dict[str, Any]):
    shape = shape_of(config, **changes)
    assert {name: getattr(shape, name) for name in expected} == expected


# Set, and still as good as absent: null, off, or what the forward does anyway.
INERT: Mapping[str, Any] = {
    "rope_scaling": {"rope_type": "default"},
    "rope_parameters": None,
    "rms_norm_eps": None,
    "quantization_config": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_mrope": False,
    "is_causal": False,
    "num_experts": 0,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False,
    "weight_tying": None,
    "attention_dropout": 0.1,
    "clip_qkv": None,
    "layer_types": ["full_attention", "full_attention"],
    **dict.fromkeys(("embedding_dropout", "init_std", "initializer_range", "residual_dropout"), 0.1),
    **dict.fromkeys(("flash_attention", "use_cache"), True),
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_switches_that_are_off_change_nothing(model_type: str):
    assert read(CONFIGS[model_type], **INERT) == read(CONFIGS[model_type])


@pytest.mark.parametrize("model_type", CONFIGS)
def test_newer_files_have_the_base_inside_rope_parameters(model_type: str):
    parameters = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    assert read(CONFIGS[model_type], rope_parameters=parameters).rotation.theta == 5e5


@pytest.mark.parametrize("config", [DREAM, SDAR])
def test_a_width_is_no_window_while_windows_are_off(config: Mapping[str, Any]):
    assert read(config, sliding_window=4096, use_sliding_window=False) == read(config)


def test_without_a_pad_token_padding_is_an_end():
    assert read(SDAR).pad_token_id == read(SDAR).eos_token_id == 62
    assert read(SDAR, pad_token_id=61).pad_token_id == 61


@pytest.mark.parametrize(
    ("own", "of_turns", "ends"),
    [
        (62, None, [62]),
        (62, {}, [62]),
        (62, {"eos_token_id": 62}, [62]),
        (62, {"eos_token_id": [60, 62, 61]}, [62, 60, 61]),
        ([62, 61], {"eos_token_id": 60}, [62, 61, 60]),
        (None, {"eos_token_id": [60, 61]}, [60, 61]),
    ],
)
@pytest.mark.parametrize("config", [DREAM, SDAR])
def test_ends_of_a_turn_stand_beside_the_config(
    config: Mapping[str, Any], own: Any, of_turns: dict[str, Any] | None, ends: list[int], tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": own}))
    if of_turns is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(of_turns))
    found = read(read_config(tmp_path))
    assert [found.eos_token_id, *found.more_ends] == ends


def in_every_family(changes: dict[str, Any], message: str) -> list[tuple[Mapping[str, Any], dict[str, Any], str]]:
    return [(config, changes, message) for config in CONFIGS.values()]


@pytest.mark.parametrize(
    ("config", "changes", "gone"),
    [
        (LLADA, {"weight_tying": True}, {"model.transformer.ff_out.weight"}),
        (DREAM, {"tie_word_embeddings": True}, {"lm_head.weight"}),
        (SDAR, {"tie_word_embeddings": True}, {"lm_head.weight"}),
        (GIDD, {"tie_word_embeddings": True}, {"lm_head.weight"}),
        (
            GIDD,
            {"attention_bias": False},
            {f"model.layers.{i}.self_attn.{name}_bias" for i in range(2) for name in "kv"},
        ),
        (
            GIDD,
            {"mlp_bias": ...},
            {f"model.layers.{i}.mlp.{name}_proj.bias" for i in range(2) for name in ("up", "down")},
        ),
        (GIDD, {"use_qk_norm": False}, {f"model.layers.{i}.self_attn.{n}_norm.weight" for i in range(2) for n in "qk"}),
    ],
)
def test_switches_take_tensors_away(config: Mapping[str, Any], changes: dict[str, Any], gone: set[str]):
    assert set(shape_of(config).weight_shapes) - set(shape_of(config, **changes).weight_shapes) == gone


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        *((LLADA, {key: ...}, f"lacks '{key}'") for key in ("d_model", "n_layers", "n_heads", "max_sequence_length")),
        *((DREAM, {key: ...}, f"lacks '{key}'") for key in ("hidden_size", "intermediate_size", "vocab_size")),
        *((GIDD, {key: ...}, f"lacks '{key}'") for key in ("num_hidden_layers", "max_position_embeddings")),
        (LLADA, {"n_layers": 0}, "n_layers = 0"),
        (LLADA, {"d_model": 30}, "d_model = 30 must be n_heads = 4 times an even head_dim, not 7"),
        (LLADA, {"n_kv_heads": 3}, "n_heads = 4 must be a multiple of n_kv_heads = 3"),
        (LLADA, {"block_type": "sequential", "alibi": True}, "alibi = True .*; block_type = 'sequential'"),
        (DREAM, {"hidden_size": "32"}, "hidden_size = '32'"),
        (DREAM, {"num_hidden_layers": True}, "num_hidden_layers = True"),
        (DREAM, {"hidden_size": 12}, "hidden_size = 12 must be num_attention_heads = 4 times an even head_dim, not 3"),
        (DREAM, {"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        (DREAM, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (DREAM, {"torch_dtype": "int8"}, "torch_dtype = 'int8'; allowed: float32, bfloat16, float16"),
        (GIDD, {"head_dim": 16}, "hidden_size = 32 must be num_attention_heads = 4 times an even head_dim, not 16"),
        (GIDD, {"hidden_size": 2, "head_dim": ...}, "hidden_size = 2 must be num_attention_heads = 4"),
        (GIDD, {"hidden_size": 12, "head_dim": ...}, "an even head_dim, not 3"),
        (GIDD, {"noise_type": "uniform"}, "noise_type = 'uniform'"),
        # Sizes that no model has, before anything grows with them.
        (LLADA, {"n_layers": 10**6}, "n_layers = 1000000; a positive integer up to 1024"),
        (DREAM, {"num_hidden_layers": 1025}, "num_hidden_layers = 1025"),
        (GIDD, {"num_hidden_layers": 1025}, "num_hidden_layers = 1025"),
        (LLADA, {"embedding_size": 1e30}, r"embedding_size = 1e\+30; a positive integer up to 16777216"),
        (LLADA, {"embedding_size": 10**30}, "embedding_size = 1000"),
        (LLADA, {"vocab_size": 10**12}, "vocab_size = 1000000000000"),
        (LLADA, {"vocab_size": 65, "embedding_size": 64}, "embedding_size = 64 must be at least vocab_size = 65"),
        (LLADA, {"mlp_hidden_size": ..., "mlp_ratio": 2**23}, "mlp_hidden_size = 268435456"),
        (DREAM, {"intermediate_size": 2**24 + 1}, "intermediate_size = 16777217"),
        (GIDD, {"max_position_embeddings": 10**9}, "max_position_embeddings = 1000000000"),
        # Switches of other models.
        *in_every_family({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        *in_every_family({"rope_scaling": {"type": "longrope"}}, "rope_scaling: unknown rope_type 'longrope'"),
        *in_every_family({"rope_scaling": {"type": "yarn"}}, "rope_scaling = .* lacks a factor"),
        *in_every_family({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5; a number from 1"),
        *in_every_family({"rope_scaling": {"type": "ntk", "factor": NAN}}, "factor = nan"),
        *in_every_family(
            {"rope_scaling": {"type": "ntk", "factor": 2**20}}, "128 positions times .* more than 16777216"
        ),
        *in_every_family({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, "mscale_all_dim go together"),
        *in_every_family({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, r"has \['mscale'\]"),
        *in_every_family({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1.0}}, "beta_fast = 1.0 must be"),
        *in_every_family(
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, r"rope_parameters = .*'factor'\]"
        ),
        (GIDD, {"rope_scaling": {"type": "yarn", "factor": 2}}, "learned keys of GIDD .*'linear' or 'ntk'"),
        *in_every_family({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq"),
        *((config, {"use_sliding_window": True}, r"= True \(allowed: False\)") for config in (LLADA, DREAM, GIDD)),
        (SDAR, {"use_sliding_window": True}, "use_sliding_window = True, but there is no sliding_window"),
        *in_every_family({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        *in_every_family({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        *in_every_family({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        *in_every_family({"num_experts": 64}, "num_experts = 64"),
        *in_every_family({"is_causal": True}, "is_causal = True"),
        *((config, {"sliding_window": 4096}, "sliding_window = 4096") for config in (LLADA, GIDD)),
        *((config, {"mlp_bias": True}, "mlp_bias = True") for config in (LLADA, DREAM)),
        *((SDAR, {"block_size": size}, f"block_size = {size}") for size in (0, -4, 4.0)),
        (SDAR, {"sliding_window": 0}, "sliding_window = 0; a positive integer"),
        (SDAR, {"use_qk_norm": False}, "use_qk_norm = False"),
        (SDAR, {"head_dim": 7}, "an even head_dim, not 7"),
        (SDAR, {"mask_token_id": ...}, "mask_token_id = 151669; a token id in"),
        *((config, {"use_qk_norm": True}, "use_qk_norm = True") for config in (LLADA, DREAM)),
        *((config, {"weight_tying": True}, "weight_tying = True") for config in (DREAM, GIDD)),
        (LLADA, {"attention_bias": True}, "attention_bias = True"),
        (LLADA, {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        (DREAM, {"attention_bias": False}, "attention_bias = False"),
        # Keys that the official forward of a family reads, with a value for which it computes something else.
        *(
            (LLADA, {key: value}, rf"forward does not implement settings of config.json: {key} = {value!r} \(allowed: ")
            for key, value in {
                "activation_type": "swiglu",
                "alibi": True,
                "attention_layer_norm": True,
                "bias_for_layer_norm": True,
                "block_group_size": 2,
                "block_type": "sequential",
                "include_bias": True,
                "include_qkv_bias": True,
                "input_emb_norm": True,
                "layer_norm_type": "gemma_rms",
                "layer_norm_with_affine": False,
                "rope": False,
                "rope_full_precision": False,
                "scale_logits": True,
            }.items()
        ),
        (LLADA, {"multi_query_attention": True, "n_kv_heads": 2}, "multi_query_attention = True means n_kv_heads = 1"),
        (
            LLADA,
            {"multi_query_attention": False, "n_kv_heads": 2},
            "multi_query_attention = False means n_kv_heads = 4",
        ),
        (SDAR, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        *((SDAR, {key: True}, f"{key} = True") for key in ("attention_bias", "mlp_bias")),
        (NEMOTRON, {"dlm_paradigm": "block_diff"}, "dlm_paradigm = 'block_diff'"),
        *in_every_family({"clip_qkv": 5}, r"clip_qkv = 5 \(allowed: null\)"),
        *in_every_family({"clip_qkv": 0}, r"clip_qkv = 0 \(allowed: null\)"),
        *in_every_family({"block_length": 0}, r"block_length = 0 \(allowed: null\)"),
        *((config, {"block_size": 32}, r"block_size = 32 \(allowed: null\)") for config in (LLADA, DREAM, GIDD)),
        *in_every_family({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        # The embedding may have more rows than there are tokens, none of which is a special one.
        *(
            (
                LLADA,
                {"vocab_size": 62, "embedding_size": 64, "mask_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
                | {key: 62},
                rf"{key} = 62; a token id in \[0, 62\)",
            )
            for key in ("mask_token_id", "eos_token_id", "pad_token_id")
        ),
        (LLADA, {"weight_tying": "false"}, "weight_tying = 'false'; true or false"),
        (DREAM, {"tie_word_embeddings": 0}, "tie_word_embeddings = 0; true or false"),
        # Numbers that float32 cannot compute with.
        *(
            row
            for key in ("rope_theta", "rms_norm_eps")
            for value in (INF, NAN, 0, -1.0, 1e39, 1e-300)
            for row in in_every_family({key: value}, f"{key} = {re.escape(repr(value))}; a positive number")
        ),
        *in_every_family({"rope_parameters": {"rope_theta": INF}}, "rope_theta = inf"),
        (GIDD, {"head_scaling": INF}, "head_scaling = inf"),
        (GIDD, {"attn_soft_cap": NAN}, "attn_soft_cap = nan"),
        (GIDD, {"noise_type": INF}, "noise_type = inf"),
        (GIDD, {"min_log_snr": -1e308}, r"min_log_snr = -1e\+308; a number from -30 to 30"),
        (GIDD, {"max_log_snr": 31}, "max_log_snr = 31"),
        # An answer could not end.
        *in_every_family({"mask_token_id": 5, "eos_token_id": 5}, "mask_token_id = 5 is the eos_token_id too"),
    ],
)
def test_a_bad_config_is_named(config: Mapping[str, Any], changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        shape_of(config, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "mask_id = None; a token id in"),
        ({"mask_id": 64}, "mask_id = 64; a token id in"),
        ({"mask_id": 62}, "mask_id = 62 is the eos_token_id too"),
    ],
)
def test_a_special_token_under_a_key_of_the_family(changes: dict[str, Any], message: str):
    layout = Layout(family="Other", allowed={}, keys={**KEYS, "mask_token_id": "mask_id"})
    config = {key: value for key, value in DREAM.items() if key != "mask_token_id"}
    assert layout.read(config | {"mask_id": 61})["mask_token_id"] == 61
    with pytest.raises(ValueError, match=message):
        layout.read(config | changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no model_type; allowed: llada, Dream, diffusion_gemma, gidd"),
        ({"model_type": "dream"}, "unknown model_type 'dream'; did you mean 'Dream'"),
        ({"model_type": "llama4"}, "unknown model_type 'llama4'"),
        ({"model_type": ["llada"]}, "unknown model_type"),
    ],
)
def test_a_foreign_model_type_is_named(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        family_of(config)


def test_a_loader_is_resolved_when_it_is_wanted():
    assert FAMILIES["llada"].resolve_loader().__name__ == "LLaDA"
