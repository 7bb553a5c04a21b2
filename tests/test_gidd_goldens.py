"""The official GIDD's logits and token sequences, on the tiny checkpoint of tests/goldens, for both kinds of noise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import parity
from safetensors.torch import load_file
from workloads.input_rows import hidden_states

import tiered
from tiered.core.rows import Rows
from tiered.decoding.rules import rewriting
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.parts import CanvasLimits
from tiered.forward.passes import Pass
from tiered.models.gidd import Gidd
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "gidd"
LOGITS = load_file(GOLDENS / "logits.safetensors")
RECORDED: dict[str, Any] = {
    name: case for name, case in json.loads((GOLDENS / "sampling.json").read_text()).items() if isinstance(case, dict)
}
SEQUENCES = load_file(GOLDENS / "sampling.safetensors")
ADAPTIVE = [name for name in RECORDED if "adaptive" in name]
ANCESTRAL = "gidd_tiny_unif.ancestral_t0_seed0_b16_s24_len32"
CONTEXT = 96


@pytest.fixture(scope="module")
def runtimes(masked_gidd: Callable[..., Path]) -> dict[str, Runtime]:
    """The checkpoint as it is, and with `noise_type` turned from uniform noise to masks."""
    return {
        name: tiered.from_pretrained(folder, policy="none", dtype="float32")
        for name, folder in (("gidd_tiny_unif", GOLDENS / "gidd_tiny_unif"), ("gidd_tiny_mask", masked_gidd()))
    }


def options(name: str) -> dict[str, Any]:
    """Options that a user would paste. Under masks the rule repeats the official code, which goes on after the last
    mask."""
    given = dict(RECORDED[name]["kwargs"])
    if "mask." not in name:
        return given
    method = {key: given.pop(key) for key in ("tokens_per_step", "noise_schedule") if key in given}
    assert given.pop("sampling_method") == "adaptive"
    given["max_new_tokens"], given["block_steps"] = given.pop("max_length"), given.pop("steps")
    return given | {"commit": parity.rule("adaptive", **method)}


@pytest.mark.parametrize("policy", ["none", "uniform_prefix", "dkv_prefill"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_sequences(runtimes: dict[str, Runtime], name: str, policy: str):
    # Caches of what stands in front of the block are exact under the noise mask.
    recorded, prompt = RECORDED[name], SEQUENCES[f"{name}.prompt"].long()
    length, final = prompt.shape[1], SEQUENCES[f"{name}.final"].long()
    out = (
        runtimes[name.split(".")[0]]
        .with_policy(policy)
        .generate(
            prompt,
            prior=SEQUENCES[f"{name}.prior"].long()[:, length:],
            trailing_noise=CONTEXT - final.shape[1],
            stop_at_eos=False,
            output_history=True,
            **options(name),
        )
    )
    assert out.history is not None
    # The first recorded state is the prior without the prompt.
    expected = SEQUENCES[f"{name}.history"].long()[1:, :, : final.shape[1]]
    assert torch.equal(torch.stack(out.history), expected)
    assert torch.equal(out.sequences, final)
    # There the prefix of each block goes through a forward of its own.
    steps = recorded["kwargs"]["steps"]
    fed = recorded["fwd_seq_lens"]
    blocks = [fed[first : first + steps + 1] for first in range(0, len(fed), steps + 1)]
    assert out.num_forwards == recorded["n_forward"] - len(blocks)
    if policy == "uniform_prefix":
        assert out.rows_per_step == [row for block in blocks for row in (block[0] + block[1], *block[2:])]


def test_ancestral_sequence(runtimes: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch):
    # The official code draws from torch's default stream: the prior first, then all rows of a step together.
    def from_default_stream(weights: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.multinomial(weights, num_samples=1)[:, 0]

    monkeypatch.setattr(rewriting, "draw", from_default_stream)
    prompt, final = SEQUENCES[f"{ANCESTRAL}.prompt"].long(), SEQUENCES[f"{ANCESTRAL}.final"].long()
    prior = SEQUENCES[f"{ANCESTRAL}.prior"].long()
    torch.manual_seed(0)
    torch.rand(prior.shape)
    assert torch.equal(torch.randint(0, 512, prior.shape), prior)
    out = runtimes["gidd_tiny_unif"].generate(
        prompt,
        prior=prior[:, prompt.shape[1] :],
        trailing_noise=CONTEXT - final.shape[1],
        stop_at_eos=False,
        output_history=True,
        seed=0,  # without one, the call would take it from the default stream
        **RECORDED[ANCESTRAL]["kwargs"],
    )
    assert out.history is not None
    expected = SEQUENCES[f"{ANCESTRAL}.history"].long()[1:, :, : final.shape[1]]
    assert torch.equal(torch.stack(out.history), expected)


def forward(runtime: Runtime, positions: torch.Tensor, key_mask: torch.Tensor | None = None) -> Forward:
    batch, length = key_mask.shape if key_mask is not None else (1, positions.shape[1])
    sizes, features = runtime._call.sizes(batch, length, length), runtime.policy.features(runtime.model.shape)
    store = FeatureStore(sizes, features, runtime.device)
    return Forward(runtime.model, store, positions, CanvasLimits(runtime.model.shape, length, key_mask=key_mask))


def test_logits_of_clean_and_noisy_rows(runtimes: dict[str, Runtime]):
    ids, mask = (LOGITS[f"clean_prefix_mask.{name}"] for name in ("input_ids", "attention_mask"))
    length = ids.shape[1]
    clean = int((~mask[0].bool()).any(dim=-1).sum())
    assert clean == 24
    runtime = runtimes["gidd_tiny_unif"]
    expected = LOGITS["clean_prefix_mask.logits"]
    noisy = torch.arange(length)[None] >= clean
    torch.testing.assert_close(runtime.logits(ids.long(), noise_mask=noisy), expected, atol=5e-4, rtol=0)
    states = hidden_states(runtime, ids.long(), noise_mask=noisy)
    for layer, state in enumerate(states):
        torch.testing.assert_close(state, LOGITS[f"clean_prefix_mask.hidden.{layer}"], atol=5e-4, rtol=0)
    # Rows in any order, and a border by sequence.
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))[None]
    for border in (clean, torch.tensor([clean])):
        pass_over = forward(runtime, torch.arange(length)[None])
        logits = pass_over.logits(Pass(ids.long(), Rows.at(order), slice(0, length), final=border))
        torch.testing.assert_close(logits, expected[:, order[0]], atol=5e-4, rtol=0)


def test_logits_beside_padding(runtimes: dict[str, Runtime]):
    # The bias token is not rotated, so answers depend on where positions begin: there they count the padding, here a
    # padded prompt is what it would be alone.
    ids, mask = LOGITS["pad_mask_2d.input_ids"].long(), LOGITS["pad_mask_2d.attention_mask"].bool()
    length, expected = ids.shape[1], LOGITS["pad_mask_2d.logits"]
    runtime = runtimes["gidd_tiny_unif"]
    padded = forward(runtime, torch.arange(length)[None], mask)
    logits = padded.logits(Pass(ids, padded.rows, slice(0, length)))
    torch.testing.assert_close(logits[mask], expected[mask], atol=5e-4, rtol=0)
    torch.testing.assert_close(runtime.logits(ids, mask)[1], expected[1], atol=5e-4, rtol=0)
    alone = runtime.logits(ids[:1, mask[0]])
    torch.testing.assert_close(runtime.logits(ids, mask)[0, mask[0]], alone[0], atol=1e-4, rtol=0)
    assert (logits[0, mask[0]] - alone[0]).abs().max() > 1e-2


def test_the_family_is_read_as_its_config_says(runtimes: dict[str, Runtime]):
    model = runtimes["gidd_tiny_unif"].model
    assert isinstance(model, Gidd) and model.shape.sink_tokens == 1 and model.shape.soft_cap == 30.0
    assert model.shape.sight == "noise" and model.shape.noise == "uniform"
    assert runtimes["gidd_tiny_mask"].model.shape.noise == "mask"
