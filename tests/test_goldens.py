"""The official implementations' logits and token sequences, on the tiny checkpoints of tests/goldens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiered
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LOGITS = load_file(GOLDENS / "logits.safetensors")
POLICY_OF = {
    "generate": "none",
    "generate_with_prefix_cache": "fast_dllm_prefix",
    "generate_with_dual_cache": "fast_dllm_dual",
}
SAMPLERS = {name: json.loads((GOLDENS / f"{name}.json").read_text()) for name in ("mlgsai", "fd2a")}
SEQUENCES = {name: load_file(GOLDENS / f"{name}.safetensors") for name in SAMPLERS}
# Gumbel noise is drawn here for the rows that need it, there for every position: the random stream cannot agree.
CASES = [(sampler, case) for sampler, cases in SAMPLERS.items() for case in cases if "temp" not in case]


@pytest.fixture(scope="module")
def runtimes() -> dict[str, Runtime]:
    return {
        name: tiered.from_pretrained(GOLDENS / name, policy="none", dtype="float32")
        for name in ("llada_tiny", "llada_tiny_gqa")
    }


@pytest.mark.parametrize("case", ["noMask", "promptPlusMask", "batch2scattered", "leftPad", "long96"])
def test_logits(runtimes: dict[str, Runtime], case: str):
    mask = LOGITS.get(f"{case}.attention_mask")
    logits = runtimes["llada_tiny"].logits(LOGITS[f"{case}.input_ids"], mask)
    rows = torch.ones(logits.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(logits[rows], LOGITS[f"{case}.logits"][rows], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize(("sampler", "case"), CASES, ids=[f"{sampler}-{case}" for sampler, case in CASES])
def test_sequences(runtimes: dict[str, Runtime], sampler: str, case: str):
    recorded, tensors = SAMPLERS[sampler][case], SEQUENCES[sampler]
    options = dict(recorded["kwargs"])
    if (seed := options.pop("_seed", 0 if "seed0" in case else None)) is not None:
        options["seed"] = seed
    out = (
        runtimes[case.split(".")[0]]
        .with_policy(POLICY_OF[recorded["fn"]])
        .generate(
            tensors[f"{case}.prompt"].long(),
            attention_mask=tensors.get(f"{case}.attention_mask"),
            stop_at_eos=False,
            output_history=True,
            **options,
        )
    )
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), tensors[f"{case}.history"].int())
    assert torch.equal(out.sequences, tensors[f"{case}.final"].long())
    assert out.num_forwards == recorded["n_forward"]
    # Guidance feeds its two canvases in one forward here, and in one doubled batch there.
    assert out.rows_per_step == recorded["fwd_seq_lens"]
