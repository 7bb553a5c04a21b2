"""Dream from a checkpoint: every layout and dtype, a tied head, the biases, and values that config.json must not
have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from official_names import official
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.kernels.projection import joined_bias
from tiered.models.dream import Dream, read_dream_config
from tiered.models.presets import read_preset

TINY = Path(__file__).parent / "goldens" / "dream" / "dream_tiny"
CONFIG: Mapping[str, Any] = json.loads((TINY / "config.json").read_text())
WEIGHTS: Mapping[str, Tensor] = load_file(TINY / "model.safetensors")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(40).view(2, 20)


def loaded(directory: Path, **arguments: Any) -> Dream:
    model = tiered.from_pretrained(directory, **arguments).model
    assert isinstance(model, Dream)
    return model


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("wanted", ["auto", "bfloat16", "float32"])
def test_layouts_and_dtypes(write_checkpoint: Callable[..., Path], shards: int, stored: str, wanted: str):
    weights = {name: weight.to(getattr(torch, stored)) for name, weight in WEIGHTS.items()}
    directory = write_checkpoint({**CONFIG, "torch_dtype": stored}, weights, shards=shards)
    model = loaded(directory, dtype=wanted)
    dtype = getattr(torch, stored if wanted == "auto" else wanted)
    names = model.shape.weight_shapes
    assert names.keys() == WEIGHTS.keys()
    for name in names:
        found = official(model, name)
        assert found.dtype == dtype and torch.equal(found, weights[name].to(dtype))
    assert (model.mask_token_id, model.eos_token_id, model.pad_token_id) == (511, 500, 500)


def test_a_tied_head_is_the_embedding(write_checkpoint: Callable[..., Path]):
    spelled_out = {**WEIGHTS, HEAD: WEIGHTS[EMBEDDING].clone()}
    tied = {name: weight for name, weight in WEIGHTS.items() if name != HEAD}
    runtimes = [
        tiered.from_pretrained(write_checkpoint(CONFIG, spelled_out)),
        tiered.from_pretrained(write_checkpoint({**CONFIG, "tie_word_embeddings": True}, tied)),
    ]
    assert torch.equal(*(runtime.logits(IDS) for runtime in runtimes))
    sizes = [runtime.ledger.report().peak_device_bytes for runtime in runtimes]
    assert sizes[0] - sizes[1] == 2 * 512 * 128


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_every_bias_counts(write_checkpoint: Callable[..., Path], projection: str):
    # The random checkpoint's biases are large enough to be seen.
    name = f"model.layers.2.self_attn.{projection}.bias"
    without = {**WEIGHTS, name: torch.zeros_like(WEIGHTS[name])}
    whole, lacking = (
        tiered.from_pretrained(write_checkpoint(CONFIG, weights), dtype="float32").logits(IDS)
        for weights in (WEIGHTS, without)
    )
    assert (whole - lacking).abs().max() > 1e-2


def test_biases_of_a_layer_lie_one_behind_the_other(write_checkpoint: Callable[..., Path]):
    """One addition takes those of queries, keys and values."""
    for block in tiered.from_pretrained(write_checkpoint(CONFIG, WEIGHTS), dtype="float32").model.blocks:
        biases = [block.q_proj.bias, block.k_proj.bias, block.v_proj.bias]
        whole = joined_bias(biases)
        assert whole is not None and torch.equal(whole, torch.cat(biases))
        assert joined_bias(biases[::-1]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ...}, r"mask_token_id = None; a token id in \[0, 512\) is allowed"),
        ({"mask_token_id": 512}, "mask_token_id = 512"),
        ({"eos_token_id": [[500]]}, r"eos_token_id = \[500\]"),
        ({"pad_token_id": True}, "pad_token_id = True"),
        ({"rope_theta": "1e6"}, "rope_theta = '1e6'; a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    ],
)
def test_a_bad_config_is_named(changes: dict[str, Any], message: str):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        read_dream_config(config)


def test_defaults_of_a_config():
    config = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rms_norm_eps")}
    read = read_dream_config(config)
    assert (read.rotation.theta, read.norm_eps, read.head_tied) == (10000.0, 1e-6, False)


def test_the_released_config():
    read = read_dream_config(read_preset("dream-7b"))
    assert (read.rotation.theta, read.norm_eps, read.head_tied) == (1e6, 1e-6, False)
    assert (read.mask_token_id, read.eos_token_id, read.pad_token_id) == (151666, 151643, 151643)
