"""The dLLM-Cache policy against the authors' code, and against the paper's method written out in float64."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from baselines import parity
from drift_rules import drift_aware
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.core.canvas import Canvas
from tiered.core.features import Account, Tier
from tiered.core.rows import Rows
from tiered.decoding import token_sampler
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.models.llada import LLaDA
from tiered.policies.base import Step, StepKind
from tiered.policies.dllm_cache.policy import DLLMCache
from tiered.policies.dllm_cache.program import BranchStep
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
RECORDED: dict[str, Any] = json.loads((GOLDENS / "dllm_cache.json").read_text())
TENSORS = load_file(GOLDENS / "dllm_cache.safetensors")
CASES = [case for case, recorded in RECORDED.items() if isinstance(recorded, dict)]


@pytest.fixture(scope="module")
def tiny() -> Runtime:
    """Four heads, each with a key head of its own."""
    return tiered.from_pretrained(GOLDENS / "llada_tiny", policy="none", dtype="float32")


@pytest.fixture(scope="module")
def grouped() -> Runtime:
    """Four heads on two key heads."""
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", policy="none", dtype="float32")


@dataclass
class Chosen:
    """Columns that a pass has recomputed of the answer, and how many of them count, in order of layers and forwards."""

    layers: list[int] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    seen, original = Chosen(), BranchStep._farthest

    def noted(self: BranchStep, forward: Forward, layer: int, hidden: Tensor, counts: Sequence[int]) -> Rows:
        rows = original(self, forward, layer, hidden, counts)
        if not rows.count:
            return rows
        seen.layers.append(layer)
        seen.columns.append(rows.index.clone())
        seen.counts.append(list(counts))
        return rows

    monkeypatch.setattr(BranchStep, "_farthest", noted)
    return seen


# ---- the authors' code ----


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_the_official_code(tiny: Runtime, case: str, chosen: Chosen):
    recorded = RECORDED[case]
    prompt_interval, response_interval, ratio = recorded["Kp_Kr_rho_Kcfg"]
    prompt = TENSORS[f"{case}.prompt"].long()
    policy = parity.policy(
        "dllm_cache", prompt_interval=prompt_interval, response_interval=response_interval, update_ratio=ratio
    )
    out = tiny.with_policy(policy).generate(prompt, stop_at_eos=False, output_history=True, **recorded["gen"])
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), TENSORS[f"{case}.history"].int())
    assert torch.equal(out.sequences[:, prompt.shape[1] :].int(), TENSORS[f"{case}.final_gen_only"].int())
    if "n_forward" in recorded:
        assert out.num_forwards == recorded["n_forward"]
    if (rows := TENSORS.get(f"{case}.refresh_index_sorted")) is not None:
        assert chosen.layers == TENSORS[f"{case}.refresh_layer"].tolist()
        found = torch.cat(chosen.columns).sort(dim=1).values - prompt.shape[1]
        assert torch.equal(found.int(), rows.int())


def test_logits_of_the_official_code(tiny: Runtime):
    # Twelve forwards on given tokens through one cache, without tokens of a sampler.
    ids, logits = (TENSORS[f"forward_seq.Kp8_Kr4_rho0.25.{name}"] for name in ("input_ids", "gen_logits"))
    canvas = Canvas(ids[:1, :24].long(), torch.zeros(1), max_new_tokens=32, block_length=32, mask_token_id=511)
    policy = parity.policy("dllm_cache", prompt_interval=8, response_interval=4, update_ratio=0.25)
    state = policy.start()
    sizes = tiny._call.sizes(1, canvas.length, 32, answer=32)
    store = FeatureStore(sizes, policy.features(sizes.shape), tiny.device)
    forward = Forward(tiny.model, store, canvas.positions())
    for number, tokens in enumerate(ids.long()):
        canvas.tokens = tokens[None]
        step = Step(
            canvas=canvas, block=0, start=24, stop=56, number=number, first_row=24, last_row=56,
            forwards=(number,), active=(True,),
        )  # fmt: skip
        of_step = state.rows(step)
        found = forward.logits(of_step)
        torch.testing.assert_close(found[0], logits[number], atol=1e-3, rtol=1e-4)


# ---- the paper's method in float64 ----

STILL = 2**-10  # share of its length up to which a row has not moved


class Oracle:
    """One sequence without padding, every row of every layer computed afresh, and what is due written to the cache.

    The cache of a half (with guidance there are two) is a dict of [length, width] tensors by layer and name.
    """

    def __init__(self, model: LLaDA, policy: DLLMCache, prompt: int, answer: int, scale: float, shift: int = 0):
        self.model, self.policy, self.scale, self.shift = model, policy, scale, shift
        self.prompt, self.length = prompt, prompt + answer
        self.official = isinstance(policy, parity.OfficialDLLMCache)
        self.weights = {name: weight.double() for name, weight in model.named_parameters()}
        self.caches: tuple[dict, dict] = ({}, {})
        self.clocks = [0, 0]
        self.difference: Tensor | None = None
        self.gap = math.inf  # smallest distance between the last row that was chosen and the first that was not

    def step(self, ids: Tensor, block: tuple[int, int], begins: bool) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
        """Logits of the block's rows, and the chosen columns by layer and half, unless the answer is due."""
        policy, clock = self.policy, self.clocks[0]
        logits, chosen = self.half(ids, 0, block)
        if not self.scale:
            return logits[block[0] : block[1]], chosen
        if self.official:
            guided = clock % policy.guidance_interval == 0 or clock + 1 <= 5
        else:
            guided = clock % policy.guidance_interval == 0 or begins
        if guided:
            masked = ids.clone()
            masked[: self.prompt] = self.model.mask_token_id
            unconditional, of_second = self.half(masked, 1, block)
            self.difference, chosen = logits - unconditional, chosen | of_second
        assert self.difference is not None
        return (logits + self.scale * self.difference)[block[0] : block[1]], chosen

    def half(self, ids: Tensor, number: int, block: tuple[int, int]) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
        policy, cache, prompt = self.policy, self.caches[number], self.prompt
        clock, self.clocks[number] = self.clocks[number], self.clocks[number] + 1
        prompt_due, answer_due = (
            clock == 0 or (interval is not None and clock % interval == 0)
            for interval in (policy.prompt_interval, policy.response_interval)
        )
        count = math.floor((self.length - prompt) * policy.update_ratio)
        hidden, chosen = self.weights["wte.weight"][ids], {}
        for layer in range(self.model.shape.layers):
            normed = self.norm(hidden, f"blocks.{layer}.attn_norm")
            keys, values = self.project(normed, layer, "k_proj"), self.project(normed, layer, "v_proj")
            passed = self.official and layer > 0  # a row of the prompt, to the authors
            rows = list(range(prompt)) if prompt_due else list(range(block[0], prompt)) * (not passed)
            if answer_due or (self.official and layer == 0) or count == self.length - prompt:
                rows += range(prompt, self.length)
            elif count:
                columns = self.farthest(values[prompt:], cache[layer, "value"][prompt:], count, block, clock)
                if self.official:
                    cache[layer, "value"][prompt:] = values[prompt:]
                chosen[layer, number] = columns
                rows += columns.tolist()
            for name, now in (("key", keys), ("value", values)):
                cache.setdefault((layer, name), torch.full_like(now, torch.nan))[rows] = now[rows]
            queries = self.project(normed, layer, "q_proj")
            branch = self.attention(queries, cache[layer, "key"], cache[layer, "value"])
            branch = branch @ self.weights[f"blocks.{layer}.attn_out.weight"].T
            hidden = hidden + self.kept(cache, (layer, "attention"), branch, rows)
            normed = self.norm(hidden, f"blocks.{layer}.ff_norm")
            branch = F.silu(self.project(normed, layer, "ff_proj")) * self.project(normed, layer, "up_proj")
            branch = branch @ self.weights[f"blocks.{layer}.ff_out.weight"].T
            hidden = hidden + self.kept(cache, (layer, "mlp"), branch, rows)
        return self.norm(hidden, "ln_f") @ self.weights["ff_out.weight"].T, chosen

    def farthest(self, new: Tensor, cached: Tensor, count: int, block: tuple[int, int], clock: int) -> Tensor:
        """Columns of the `count` rows that have moved most. Of equal ones, those of the block come first, which take
        turns, then those behind it."""
        moved = (2 - 2 * F.cosine_similarity(new, cached, dim=-1)).clamp(min=0).sqrt()
        moved[moved <= STILL] = 0
        own = [column - self.prompt for column in range(*block) if column >= self.prompt]
        turn = clock * max(1, count - 1) % len(own)
        turns = own[turn:] + own[:turn] + [*range(own[-1] + 1, len(new))] + [*range(own[0])]
        order = sorted(turns, key=lambda row: -moved[row].item())
        if moved[order[count - 1]]:
            self.gap = min(self.gap, (moved[order[count - 1]] - moved[order[count]]).item())
        return torch.tensor(order[:count]) + self.prompt

    def kept(self, cache: dict, key: tuple[int, str], branch: Tensor, rows: list[int]) -> Tensor:
        """The cached branches, `rows` of them new. No step needs those of prompt rows that are not renewed."""
        cache.setdefault(key, torch.zeros_like(branch))[rows] = branch[rows]
        return cache[key]

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.model.config.norm_eps)
        return hidden * scale * self.weights[f"{name}.weight"]

    def project(self, normed: Tensor, layer: int, name: str) -> Tensor:
        return normed @ self.weights[f"blocks.{layer}.{name}.weight"].T

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keys are cached as they were projected, and rotated here."""
        width = self.model.shape.head_dim
        queries, keys = self.rotated(queries), self.rotated(keys)
        values = values.unflatten(1, (-1, width)).transpose(0, 1)
        shared = len(queries) // len(keys)
        keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
        weights = (queries @ keys.transpose(1, 2) / math.sqrt(width)).softmax(-1)
        return (weights @ values).transpose(0, 1).flatten(1)

    def rotated(self, flat: Tensor) -> Tensor:
        width = self.model.shape.head_dim
        heads = flat.unflatten(1, (-1, width)).transpose(0, 1)
        frequencies = self.model.config.rotation.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(len(flat), dtype=torch.float64)[:, None] * frequencies
        left, right = heads.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


SHORT: dict[str, Any] = {"prompt_interval": 6, "response_interval": 4}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all four cases": (SHORT, {}),
    "prompt and answer in turn": ({"prompt_interval": 3, "response_interval": 5, "update_ratio": 0.4}, {}),
    "never again": ({"prompt_interval": None, "response_interval": None}, {}),
    "prompt alone": ({"prompt_interval": 1, "response_interval": None}, {}),
    "answer alone": ({"prompt_interval": None, "response_interval": 1}, {}),
    "nothing between": ({**SHORT, "update_ratio": 0.0}, {}),
    "everything between": ({**SHORT, "update_ratio": 1.0}, {}),
    "parity": ({**SHORT, "official": True}, {}),
    "guided": (SHORT, {"cfg_scale": 0.7}),
    "guided at times": ({**SHORT, "guidance_interval": 3}, {"cfg_scale": 0.7}),
    "guided at times, as the authors": ({**SHORT, "guidance_interval": 6, "official": True}, {"cfg_scale": 0.7}),
    "an interval of guidance that is not there": ({**SHORT, "guidance_interval": 6, "official": True}, {}),
    "in parts": (SHORT, {"part": 5}),
    "in parts, guided": ({"prompt_interval": 3, "response_interval": 5}, {"part": 5, "cfg_scale": 0.7}),
    "in parts, parity": ({"prompt_interval": 3, "response_interval": 5, "official": True}, {"part": 5}),
    "shifted": (SHORT, {"shift": 1}),
    "shifted, parity": ({**SHORT, "official": True}, {"shift": 1}),
    "shifted, parity, guided between renewals": (
        {**SHORT, "official": True, "guidance_interval": 5},
        {"shift": 1, "cfg_scale": 0.7},
    ),
    "shifted, parity, guided at times": (
        {**SHORT, "official": True, "guidance_interval": 6},
        {"shift": 1, "cfg_scale": 0.7},
    ),
}


def made(options: dict[str, Any]) -> DLLMCache:
    """The policy with these options; "official": as the authors' code has it."""
    options = dict(options)
    policy = (parity.policy if options.pop("official", False) else make_policy)("dllm_cache", **options)
    assert isinstance(policy, DLLMCache)
    return policy


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_rows_of_the_method(grouped: Runtime, variant: str, chosen: Chosen, monkeypatch: pytest.MonkeyPatch):
    options, call = VARIANTS[variant]
    policy, call, seen = made(options), dict(call), []
    if part := call.pop("part", None):
        monkeypatch.setattr("tiered.forward.forward.part_rows", lambda batch: part)
    if shift := call.pop("shift", 0):
        monkeypatch.setattr(grouped.model, "shape", replace(grouped.model.shape, prediction_shift=shift))
    propose = token_sampler.propose
    monkeypatch.setattr(token_sampler, "propose", lambda block: (seen.append(block.logits.clone()), propose(block))[1])
    prompt, answer, block = 13, 24, 8
    ids = torch.randint(0, 480, (1, prompt), generator=torch.Generator().manual_seed(2))
    out = grouped.with_policy(policy).generate(
        ids, max_new_tokens=answer, block_length=block, stop_at_eos=False, output_history=True, **call
    )
    assert out.history is not None and len(seen) == answer
    assert isinstance(grouped.model, LLaDA)
    oracle = Oracle(grouped.model, policy, prompt, answer, call.get("cfg_scale", 0.0))
    rows = iter(zip(chosen.layers, chosen.columns, chosen.counts, strict=True))
    most = math.floor(answer * policy.update_ratio)
    for number, (canvas, logits) in enumerate(zip(out.history, seen, strict=False)):
        first = prompt + number // block * block - shift
        expected, columns = oracle.step(canvas[0], (first, first + block), number % block == 0)
        torch.testing.assert_close(logits[0].double(), expected, atol=2e-3, rtol=1e-4)
        for layer in sorted({layer for layer, _ in columns}):
            of_layer, found, counts = next(rows)
            assert of_layer == layer
            for half, (one, count) in enumerate(zip(found, counts, strict=True)):
                assert sorted(one[:count].tolist()) == sorted(columns.get((layer, half), one).tolist())
                assert count == (most if (layer, half) in columns else answer)
    assert next(rows, None) is None
    assert oracle.gap > 1e-5, oracle.gap


# ---- effects of the options ----

CALL: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False, "output_history": True}
PROMPT = torch.randint(0, 480, (1, 17), generator=torch.Generator().manual_seed(1))


def history(runtime: Runtime, policy: DLLMCache, **options: Any) -> Tensor:
    out = runtime.with_policy(policy).generate(PROMPT, **{**CALL, **options})
    assert out.history is not None
    return torch.stack(out.history)


def test_all_rows_between_are_a_renewal_of_the_answer(grouped: Runtime):
    every_step = history(grouped, DLLMCache(prompt_interval=5, response_interval=1))
    whole = history(grouped, DLLMCache(prompt_interval=5, response_interval=None, update_ratio=1.0))
    assert torch.equal(whole, every_step)


def test_passes_and_rows_are_counted(grouped: Runtime):
    options = {"prompt_interval": 6, "response_interval": 4, "update_ratio": 0.25}
    out = grouped.with_policy("dllm_cache", **options).generate(PROMPT, **CALL)
    # Forwards 0 and 12 renew everything; 6 and 18 the prompt; 4, 8, 16 and 20 the answer.
    assert out.steps_by_kind == {StepKind.REFRESH: 2, StepKind.UPDATE: 6, StepKind.STEP: 16}
    expected = [17 * (n % 6 == 0) + (24 if n % 4 == 0 else 6) for n in range(24)]
    assert out.rows_per_step == expected
    whole = grouped.with_policy(parity.policy("dllm_cache", **options)).generate(PROMPT, **CALL)
    assert whole.rows_per_step == [17 * (n % 6 == 0) + (24 if n % 4 == 0 else (24 + 3 * 6) / 4) for n in range(24)]


@pytest.mark.parametrize("new", [1, 3])
def test_a_block_may_have_one_token_predicted_by_the_row_in_front(new: int):
    dream = tiered.from_pretrained(GOLDENS.parent / "dream" / "dream_tiny", dtype="float32", policy="none")
    call: dict[str, Any] = {"max_new_tokens": new, "block_length": 1, "stop_at_eos": False}
    prompt = torch.arange(5, 12)[None]
    fresh = dream.with_policy("dllm_cache", prompt_interval=1, response_interval=1).generate(prompt, **call)
    assert torch.equal(fresh.sequences, dream.generate(prompt, **call).sequences)
    assert dream.with_policy("dllm_cache").generate(prompt, **call).num_forwards == new


def test_branches_are_kept_of_the_answer_alone(grouped: Runtime):
    shape, context = grouped.model.shape, PROMPT.shape[1] + CALL["max_new_tokens"]
    booked = grouped.with_policy("dllm_cache").generate(PROMPT, **CALL).memory.tiers[Tier.DEVICE].at_peak
    row = shape.layers * 4
    assert booked[Account.KEY] == booked[Account.VALUE] == row * context * shape.kv_width
    assert booked[Account.ATTN_OUT] == booked[Account.FFN_OUT] == row * CALL["max_new_tokens"] * shape.width


# ---- sequences with clocks of their own ----

UNEVEN = (17, 9, 12)
EARLY = drift_aware(confidence_threshold=0.3, early_threshold=0.25, drift_slope=0.1, drift_ceiling=9.0)
BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "threshold": ({}, {}),
    "factor": ({}, {"confidence_threshold": None, "factor": 1.0}),
    "nothing between": ({"update_ratio": 0.0}, {}),
    "parity": ({"official": True}, {}),
    "guided": ({}, {"cfg_scale": 0.7}),
    "guided at times": ({"guidance_interval": 3}, {"cfg_scale": 0.7}),
    "guided at times, parity": ({"guidance_interval": 7, "official": True}, {"cfg_scale": 0.7}),
    "drift-aware": ({}, {"confidence_threshold": None, "commit": EARLY}),
    "shifted, parity": ({"official": True}, {"shift": 1, "confidence_threshold": 0.6}),
    "shifted, parity, some end, guided": ({"official": True}, {"shift": 1, "stop_at_eos": True, "cfg_scale": 0.7}),
    "some end": ({}, {"stop_at_eos": True}),
    "some end, guided": ({}, {"stop_at_eos": True, "cfg_scale": 0.7, "confidence_threshold": 0.5}),
    "some end, guided at times": ({"guidance_interval": 3}, {"stop_at_eos": True, "cfg_scale": 0.7}),
}


@pytest.mark.parametrize("case", BATCHES)
def test_sequences_of_a_batch_keep_their_own_clocks(
    grouped: Runtime, case: str, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
):
    options, call = BATCHES[case]
    runtime = grouped.with_policy(made({"prompt_interval": 5, "response_interval": 3, **options}))
    call = {**CALL, "max_new_tokens": 32, "confidence_threshold": 0.3, **call}
    if shift := call.pop("shift", 0):
        monkeypatch.setattr(grouped.model, "shape", replace(grouped.model.shape, prediction_shift=shift))
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 480, (length,), generator=generator) for length in UNEVEN]
    if call["stop_at_eos"]:
        # The third token of the second sequence is its end.
        free = runtime.generate(prompts[1][None], **{**call, "stop_at_eos": False})
        monkeypatch.setattr(runtime.model, "eos_token_id", int(free.sequences[0, UNEVEN[1] + 2]))
    alone = [runtime.generate(prompt[None], **call) for prompt in prompts]
    chosen.counts.clear()
    longest = max(UNEVEN)
    ids, mask = torch.full((3, longest), 499), torch.zeros(3, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    out = runtime.generate(ids, attention_mask=mask, **call)
    for row, one in enumerate(alone):
        assert torch.equal(out.sequences[row, -32:], one.sequences[0, -32:])
    assert out.forwards == [one.num_forwards for one in alone]
    # Or there would be nothing to keep apart.
    assert any(len({count for count in counts if count}) > 1 for counts in chosen.counts) or case == "nothing between"
    assert len(set(out.forwards)) > 1
    if call["stop_at_eos"]:
        assert runtime.model.pad_token_id in out.sequences[:, -30:]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_interval": 0}, ValueError, "prompt_interval = 0"),
        ({"response_interval": 1.5}, TypeError, "response_interval = 1.5"),
        ({"update_ratio": 1.1}, ValueError, "update_ratio = 1.1"),
        ({"update_ratio": -0.1}, ValueError, "update_ratio = -0.1"),
        ({"guidance_interval": 0}, ValueError, "guidance_interval = 0"),
        ({"guidance_interval": None}, TypeError, "guidance_interval = None"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        DLLMCache(**options)
