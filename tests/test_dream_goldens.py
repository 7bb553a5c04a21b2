"""Dream against official code: logits, `diffusion_generate`, and the caches of three groups of authors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import parity
from replaying import changes
from safetensors.torch import load_file
from torch import Tensor
from workloads.input_rows import hidden_states

import tiered
from tiered.decoding import sampling
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules import timestep
from tiered.decoding.rules.base import Candidates
from tiered.decoding.rules.registry import make_commit_rule
from tiered.output import GenerationOutput
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "dream"
LOGITS = load_file(GOLDENS / "logits.safetensors")
PARTS = ("sampling", "dkv_cache", "dllm_cache", "fast_dllm")
RECORDED: dict[str, dict[str, dict[str, Any]]] = {
    part: json.loads((GOLDENS / f"{part}.json").read_text()) for part in PARTS
}
SEQUENCES = {part: load_file(GOLDENS / f"{part}.safetensors") for part in PARTS}
# Cases with draws come out if numbers are drawn from torch's stream as in the official code: `test_drawn_sequences`.
CASES = [(part, case) for part, cases in RECORDED.items() for case in cases if "seed0" not in case]
DKV_CACHE = {"decoded": "dkv_decode", "prefill": "dkv_prefill", "pd": "dkv_pd"}


@pytest.fixture(scope="module")
def runtimes() -> dict[str, Runtime]:
    return {
        name: tiered.from_pretrained(GOLDENS / name, policy="none", dtype="float32")
        for name in ("dream_tiny", "dream_tiny7")
    }


@pytest.mark.parametrize("case", ["noMask", "promptPlusMask", "leftPad"])
def test_logits(runtimes: dict[str, Runtime], case: str):
    ids = LOGITS[f"dream_tiny.{case}.input_ids"].long()
    mask = LOGITS.get(f"dream_tiny.{case}.attention_mask_2d")
    logits, rows = runtimes["dream_tiny"].logits(ids, mask), (torch.ones_like(ids) if mask is None else mask).bool()
    torch.testing.assert_close(logits[rows], LOGITS[f"dream_tiny.{case}.logits"][rows], atol=5e-4, rtol=1e-4)


def test_hidden_states(runtimes: dict[str, Runtime]):
    states = hidden_states(runtimes["dream_tiny"], LOGITS["dream_tiny.promptPlusMask.input_ids"].long())
    assert len(states) == 4
    for layer, state in enumerate(states):
        expected = LOGITS[f"dream_tiny.promptPlusMask.hidden.{layer}"]
        torch.testing.assert_close(state, expected, atol=5e-4, rtol=1e-4)


def policy_of(part: str, case: str, recorded: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The policy that a recorded case ran under; its arguments leave `options`."""
    if part == "dkv_cache":
        used, kind, interval, shift = (
            options.pop(name, None) for name in ("use_cache", "cache_type", "cache_steps", "shift_type")
        )
        if not used:
            return "none", {}
        official = {"refresh_interval": interval, "shift_caching": shift}
        return DKV_CACHE[kind], {} if kind == "prefill" else official
    if part == "dllm_cache":
        names = ("prompt_interval", "response_interval", "update_ratio")
        return "dllm_cache", dict(zip(names, recorded["Kp_Kr_rho_Kcfg"], strict=True))
    if part == "fast_dllm":
        options.pop("block", None)
        dual = options.pop("dual_cache", None)
        if dual is not None:
            return ("fast_dllm_dual" if dual else "fast_dllm_prefix"), {}
    return "none", {}


def generate(
    runtimes: dict[str, Runtime], part: str, case: str, *, as_authors: bool = True, **changed: Any
) -> tuple[GenerationOutput, dict[str, Any]]:
    """The recorded call of `case`, with other options of its policy or, if not `as_authors`, under the library's own
    policy and rule; and what was recorded."""
    recorded, tensors = RECORDED[part][case], SEQUENCES[part]
    options = dict(recorded["gen"] if part == "dllm_cache" else recorded["kwargs"])
    policy, policy_options = policy_of(part, case, recorded, options)
    if policy == "none" and "threshold" in options:
        make_rule = parity.rule if as_authors else make_commit_rule
        options["commit"] = make_rule("threshold", confidence_threshold=options.pop("threshold"))
        del options["alg"]
    if not as_authors:
        policy_options.pop("shift_caching", None)
    make = parity.policy if as_authors else make_policy
    out = (
        runtimes[case.split(".")[0]]
        .with_policy(make(policy, **{**policy_options, **changed}))
        .generate(
            tensors[f"{case}.prompt"].long(),
            attention_mask=tensors.get(f"{case}.attention_mask"),
            stop_at_eos=False,
            output_history=True,
            **options,
        )
    )
    return out, recorded


@pytest.mark.parametrize(("part", "case"), CASES, ids=[f"{part}-{case}" for part, case in CASES])
def test_sequences(runtimes: dict[str, Runtime], part: str, case: str):
    out, recorded = generate(runtimes, part, case)
    tensors = SEQUENCES[part]
    prompt, states = tensors[f"{case}.prompt"], list(tensors[f"{case}.history"])
    # Recorded after each step, with a change or without one, and mostly without the first canvas.
    first = torch.cat([prompt, prompt.new_full((len(prompt), states[0].shape[1] - prompt.shape[1]), 511)], dim=1)
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), changes([first, *states]))
    assert torch.equal(out.sequences.int(), tensors[f"{case}.final"])
    # One state a step, if the first is not among them.
    assert out.num_forwards == recorded.get("n_forward", len(states))
    if "fwd_seq_lens" in recorded:
        assert out.rows_per_step == recorded["fwd_seq_lens"]


def test_drawn_sequences(runtimes: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch):
    # Here every sequence has streams of its own; there one stream serves the batch, and is read by `multinomial`.
    def drawn_tokens(block: OpenBlock, least: Tensor | None, sequence: int, rows: Tensor) -> Tensor:
        allowed, temperature = block.whole[sequence, rows], block.sampling.temperature
        if least is not None:
            allowed = allowed.masked_fill(allowed < least[sequence, rows][:, None], -torch.inf)
        return torch.multinomial((allowed / temperature).softmax(-1), 1, replacement=True)[:, 0]

    def drawn_columns(self: Any, candidates: Candidates) -> Candidates:
        # The official call names as many columns as the step fixes; the order in which they come ranks them here.
        count = int((self._masks.float() * self._shares[self._step - 1]).long())
        chances = torch.zeros(1, 56)
        chances[:, 24:] = (candidates.confidence.float() / self._temperature).softmax(-1)
        named = torch.multinomial(chances, count)[0] - 24 if count else []
        ranked = torch.full_like(candidates.confidence, -torch.inf)
        ranked[0, named] = 1.0
        return replace(candidates, confidence=ranked)

    monkeypatch.setattr(sampling, "_draw", drawn_tokens)
    monkeypatch.setattr(timestep._Shares, "_rank", drawn_columns)
    drawn = [case for case in RECORDED["sampling"] if "seed0" in case]
    assert len(drawn) == 2
    for case in drawn:
        tensors, options = SEQUENCES["sampling"], RECORDED["sampling"][case]["kwargs"]
        torch.manual_seed(0)
        out = runtimes["dream_tiny"].generate(
            tensors[f"{case}.prompt"].long(), stop_at_eos=False, output_history=True, seed=0, **options
        )
        assert out.history is not None
        assert torch.equal(torch.stack(out.history[1:]).int(), changes(list(tensors[f"{case}.history"]))), case


@pytest.mark.parametrize(
    ("part", "case", "changed"),
    [
        # Reasons for each piece of `parity`: without it, the recorded tokens do not come out.
        ("dkv_cache", "dream_tiny.decode_s32_r8_un", {"as_authors": False}),
        ("dkv_cache", "dream_tiny.decode_s32_r8_un", {"shift_caching": "un_right"}),
        ("dkv_cache", "dream_tiny.decode_s32_r4_un_right", {"as_authors": False}),
        ("dkv_cache", "dream_tiny.pd_s32_r8_un", {"as_authors": False}),
        ("dkv_cache", "dream_tiny.pd_s16_r4_un_right", {"as_authors": False}),
        ("dllm_cache", "dream_tiny7.Kp8_Kr4_rho0.25_entropy_s16", {"as_authors": False}),
        ("fast_dllm", "dream_tiny.fastdllm.dual_thr0.9_b8", {"as_authors": False}),
        ("fast_dllm", "dream_tiny.fastdllm.prefix_entropy_b8_s32", {"as_authors": False}),
        ("fast_dllm", "dream_tiny.fastdllm.nocache_confthr0.5_s8", {"as_authors": False}),
    ],
)
def test_parity_makes_a_difference(runtimes: dict[str, Runtime], part: str, case: str, changed: dict[str, Any]):
    out, recorded = generate(runtimes, part, case, **changed)
    same_tokens = torch.equal(out.sequences.int(), SEQUENCES[part][f"{case}.final"])
    assert not (same_tokens and out.rows_per_step == recorded.get("fwd_seq_lens", out.rows_per_step))


DECODED = [
    case
    for case, recorded in RECORDED["dkv_cache"].items()
    if recorded["kwargs"].get("cache_type") == "decoded" and recorded["kwargs"]["alg"] == "maskgit_plus"
]


def decoded(runtimes: dict[str, Runtime], case: str, **changed: Any) -> tuple[Tensor, list[int]]:
    """`dream_sequence` with the recorded arguments of `case`, and others."""
    kwargs = RECORDED["dkv_cache"][case]["kwargs"]
    names = {"cache_steps": "cache_steps", "shift_type": "shift_caching"}
    options = {names.get(name, name): kwargs[name] for name in ("steps", "max_new_tokens", "eps", *names)}
    model = runtimes["dream_tiny"].model
    return parity.dream_sequence(model, SEQUENCES["dkv_cache"][f"{case}.prompt"].long(), **(options | changed))


@pytest.mark.parametrize("case", DECODED)
def test_the_decoder_of_kept_rows_is_that_of_the_recorded_runs(runtimes: dict[str, Runtime], case: str):
    states, counts = decoded(runtimes, case)
    assert torch.equal(states.int(), SEQUENCES["dkv_cache"][f"{case}.history"])
    assert counts == RECORDED["dkv_cache"][case]["fwd_seq_lens"]


def test_a_row_that_is_kept_although_it_predicts_gives_id_0(runtimes: dict[str, Runtime]):
    states, counts = decoded(runtimes, "dream_tiny.decode_s32_r8_un", shift_caching="right")
    assert counts[:4] == [56, 33, 32, 31] and counts[8] == 56
    assert 0 in states[-1, 0, 24:].tolist()


@pytest.mark.parametrize("policy", ["none", "fast_dllm_prefix", "fast_dllm_dual"])
def test_a_block_s_first_token_is_a_candidate_like_others(runtimes: dict[str, Runtime], policy: str):
    case = "dream_tiny.fastdllm.dual_thr0.9_b8"
    prompt = SEQUENCES["fast_dllm"][f"{case}.prompt"].long()
    out = runtimes["dream_tiny"].with_policy(policy).generate(
        prompt, max_new_tokens=32, block_length=8, stop_at_eos=False, output_history=True
    )  # fmt: skip
    assert out.history is not None
    fixed = [
        int((now != before).nonzero()[0, 1]) - 24 for before, now in zip(out.history, out.history[1:], strict=False)
    ]
    assert sorted(fixed) == list(range(32))
    first_of_blocks = [column % 8 for column in fixed[::8]]
    assert any(first_of_blocks), first_of_blocks
    # The row in front of the block, and all rows of the block, whose tokens change: its last row too.
    kept = {"none": 56, "fast_dllm_dual": 9, "fast_dllm_prefix": 33}[policy]
    assert out.rows_per_step[1] == kept
