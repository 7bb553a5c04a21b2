"""The exact cache of finished blocks: logits and answers as without it, its forwards and bytes; and answers whose
blocks count from each prompt's first token."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import NEMOTRON, SDAR, batch, prompt
from official_names import official
from torch import Tensor
from training.tasks import sample, score
from workloads.staleness import StalenessInspector
from workloads.step_drift import StepDriftInspector

import tiered
from tiered.core.errors import NonFiniteError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.observers import Inspector
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.evaluation.likelihood import Likelihood
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.row_code import RowCode
from tiered.models.base import DiffusionModel
from tiered.observe.watch.watcher import Watcher
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.block_causal import BlockCausal
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def make(random_model: Callable[[Mapping[str, Any]], DiffusionModel]) -> Callable[..., Runtime]:
    def runtime(policy: str = "auto", memory: Any = None, options: Mapping[str, Any] | None = None, **config: Any):
        ledger = None if memory is None else Ledger(memory)
        made = make_policy(policy, **(options or {}))
        return Runtime(random_model({**SDAR, **config}), policy=made, ledger=ledger, name="small")

    return runtime


@pytest.fixture(scope="module")
def runtime(make: Callable[..., Runtime]) -> Runtime:
    return make()


class Steps(Inspector):
    """The sequences of each step, and their logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        logits = Forward.logits

        def noted(forward: Forward, pass_: Pass) -> Tensor:
            found = logits(forward, pass_)
            self.logits += [found.clone()] if found.shape[1] else []
            return found

        monkeypatch.setattr(Forward, "logits", noted)

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        if kind in (StepKind.STEP, StepKind.REFRESH):
            self.logits[-1] = self.logits[-1][active]


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("block", [1, 4, 6, 16])
def test_the_exact_cache_gives_the_logits_of_the_uncached_model(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, block: int, left: bool
):
    ids, mask = batch(left=left)
    call: dict[str, Any] = {"max_new_tokens": 14, "block_length": block, "block_steps": 2, "stop_at_eos": False}
    steps = Steps(monkeypatch)
    cached = runtime.generate(ids, attention_mask=mask, inspector=steps, **call)
    found, steps.logits = steps.logits, []
    plain = runtime.with_policy("none").generate(ids, attention_mask=mask, inspector=steps, **call)
    assert cached.choice.policy.name == "block_causal"
    assert torch.equal(cached.sequences, plain.sequences)
    assert len(found) == plain.num_forwards
    for of_cache, expected in zip(found, steps.logits, strict=True):
        torch.testing.assert_close(of_cache, expected, atol=1e-5, rtol=1e-5)


class Apart(PolicyState):
    """Writes a finished block in a forward of its own, in front of the next block's steps."""

    def __init__(self, plain: PolicyState) -> None:
        self._plain = plain

    def before_block(self, step: Step) -> Iterator[Pass]:
        yield from self._plain.before_block(step)
        if step.block:
            yield step.written(2 * step.start - step.stop, step.start, StepKind.COMMIT)

    def rows(self, step: Step) -> Pass:
        return self._plain.rows(replace(step, block=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenApart(BlockCausal):
    def start(self) -> PolicyState:
        return Apart(BlockCausal.start(self))


# With blocks of as many rows as go in `ONE_ORDER`, also two blocks of two sequences.
MODELS: dict[str, tuple[str | dict[str, Any], int]] = {
    "SDAR": (SDAR, 4),
    "Nemotron-Labs": (NEMOTRON, 4),
    "LLaDA2": ("llada2/llada2_tiny", 16),
    "DiffusionGemma": ("diffusion_gemma/dgemma_tiny", 16),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("kv", [None, RowCode.FP8, RowCode.NVFP4], ids=["raw", "fp8", "nvfp4"])
@pytest.mark.parametrize("family", MODELS)
def test_a_finished_block_is_written_with_a_step_bit_for_bit(
    random_model: Callable[[Mapping[str, Any]], DiffusionModel],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kv: RowCode | None,
    left: bool,
):
    (given, block), outputs, output = MODELS[family], list[Tensor](), Forward.output

    def noted(forward: Forward, pass_: Pass) -> Tensor:
        outputs.append(output(forward, pass_))
        return outputs[-1]

    monkeypatch.setattr(Forward, "output", noted)
    model = tiered.from_pretrained(GOLDENS / given).model if isinstance(given, str) else random_model(given)
    runtime = Runtime(model, policy=BlockCausal(), kv=kv)
    ids, mask = batch((29, 40), left=left)
    call: dict[str, Any] = {"attention_mask": mask, "stop_at_eos": False, "seed": 0}
    call |= {"max_new_tokens": 3 * block, "block_length": block, "block_steps": 2}
    together = runtime.generate(ids, **call)
    found = [each for each in outputs if each.shape[1]]
    outputs.clear()
    apart = runtime.with_policy(WrittenApart()).generate(ids, **call)
    expected = [each for each in outputs if each.shape[1]]
    assert torch.equal(together.sequences, apart.sequences)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    commits = together.steps_by_kind["commit"]
    assert commits == apart.steps_by_kind["commit"] == apart.num_forwards - together.num_forwards >= 2


def test_a_prompt_is_written_in_chunks(runtime: Runtime):
    ids = prompt(90)
    call: dict[str, Any] = {"max_new_tokens": 6, "block_length": 4, "stop_at_eos": False}
    whole = runtime.generate(ids, **call)
    parts = runtime.with_policy("block_causal", prefill_rows=24).generate(ids, **call)
    assert torch.equal(whole.sequences, parts.sequences)
    assert whole.rows_per_step[:2] == [88, 4] and parts.rows_per_step[:5] == [24, 24, 24, 16, 4]
    # As many of each sequence as are allowed together, in whole blocks, and one at the least.
    two = runtime.with_policy("block_causal", prefill_rows=24).generate(ids.repeat(2, 1), **call)
    assert two.rows_per_step[0] == 12 and torch.equal(two.sequences[1], whole.sequences[0])
    assert runtime.with_policy("block_causal", prefill_rows=1).generate(ids, **call).rows_per_step[0] == 4


@pytest.mark.parametrize("policy", ["block_causal", "none"])
def test_a_call_takes_the_planned_bytes(make: Callable[..., Runtime], policy: str):
    ids, (context, answer) = prompt(700), (720, 24)
    planned = tiered.plan(
        SDAR, context=context, max_new_tokens=answer, policy=policy, block_length=4, dtype="float32"
    ).tiers[Tier.DEVICE]
    out = make(policy).generate(ids[:, :696], max_new_tokens=answer, block_length=4)
    weights = planned.accounts[Account.WEIGHTS]
    assert planned.total - weights == out.memory.peak_device_bytes
    if policy == "block_causal":  # the hidden states of a chunk, not of the prompt
        rows, width = BlockCausal().prefill_rows, SDAR["hidden_size"]
        plain = tiered.plan(
            SDAR, context=context, max_new_tokens=answer, policy="block_causal", block_length=4, prefill_rows=720
        ).tiers[Tier.DEVICE]
        assert plain.total - planned.total == (696 - rows) * width * 4


def test_a_budget_changes_no_token(make: Callable[..., Runtime]):
    ids, mask = batch((180, 150))
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "block_length": 4, "output_history": True}
    free = make(num_hidden_layers=6)
    out = free.generate(ids, **call)
    device = out.memory.peak_device_bytes - 150_000
    budget = tiered.MemoryBudget(device=device, host="64MiB")
    short = make(memory=budget, num_hidden_layers=6)
    streamed = short.generate(ids, **call)
    assert streamed.tiers is not None and streamed.memory.peak_device_bytes <= device
    assert out.history is not None and streamed.history is not None
    assert torch.equal(torch.stack(out.history), torch.stack(streamed.history))


def test_answers_end_with_their_last_block(runtime: Runtime):
    ids, mask = batch((8, 11, 13))
    out = runtime.generate(ids, attention_mask=mask, max_new_tokens=6, block_length=4, stop_at_eos=False)
    # 8 + 6 → 16, 11 + 6 → 20, 13 + 6 → 20: answers of 8, 9 and 7 tokens, and padding up to the longest.
    answers = out.sequences[:, ids.shape[1] :]
    assert answers.shape[1] == 9
    assert (answers.flip(1) == 125).long().cumprod(1).sum(1).tolist() == [1, 0, 2]
    assert out.timings.tokens == 24


def test_blocks_of_a_prompt_count_from_its_first_token(runtime: Runtime):
    # The prompt's last token shares its block with three of the answer.
    ids = prompt(9)
    out = runtime.generate(ids, max_new_tokens=3, block_length=4, stop_at_eos=False, output_history=True)
    assert out.rows_per_step == [8, 4, 4, 4] and out.sequences.shape[1] == 12
    moved = runtime.generate(ids[:, 1:], max_new_tokens=3, block_length=4, stop_at_eos=False)
    assert moved.rows_per_step[0] == 8 and moved.sequences.shape[1] == 12


def test_a_model_that_predicts_masks_leaves_none(make: Callable[..., Runtime]):
    runtime = make()
    head = official(runtime.model, "lm_head.weight")
    head[:] = 0.0
    logits = runtime.model.logits
    mask = runtime.model.mask_token_id

    def masks(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        found[..., mask] = 50.0
        return found

    runtime.model.logits = masks  # type: ignore[method-assign]
    rules: list[dict[str, Any]] = [{}, {"threshold": 0.5}, {"commit": "sequential"}, {"block_steps": 3}]
    for rule in rules:
        out = runtime.generate(prompt(9), max_new_tokens=10, block_length=4, stop_at_eos=False, **rule)
        assert not (out.sequences == mask).any()
        assert out.num_forwards <= 2 + 3 + 2 + 4 + 4 + 4


@pytest.mark.parametrize(("token", "tokens"), [(126, 0), (7, 10)])
def test_an_end_in_the_prompt_ends_no_answer(make: Callable[..., Runtime], token: int, tokens: int):
    runtime = make()
    ids = prompt(10)
    ids[0, 3] = ids[0, 8] = ids[0, 9] = 126
    logits = runtime.model.logits

    def always(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        found[..., token] = 100.0
        return found

    runtime.model.logits = always  # type: ignore[method-assign]
    out = runtime.generate(ids, max_new_tokens=10, block_length=4)
    assert out.timings.tokens == tokens
    assert torch.equal(out.sequences[:, :10], ids)
    # If an answer may not end before so many tokens, they come all the same.
    longer = runtime.generate(ids, max_new_tokens=10, block_length=4, min_new_tokens=5)
    assert (longer.sequences[0, 10:15] != 126).all()
    assert (longer.sequences[0, 15] == 126) == (token == 126)


def test_an_answer_may_end_within_its_block(runtime: Runtime):
    ids = prompt(10)
    call: dict[str, Any] = {"max_new_tokens": 14, "block_length": 8, "output_history": True}
    whole = runtime.generate(ids, **call, stop_at_eos=False)
    end = whole.sequences[0, 13].item()  # of the first block, of which six tokens are of the answer
    late = runtime.generate(ids, **call, eos_id=end)
    early = runtime.generate(ids, **call, eos_id=end, eos_early_stop=True)
    assert torch.equal(early.sequences, late.sequences[:, : early.sequences.shape[1]])
    assert early.num_forwards <= late.num_forwards < whole.num_forwards
    assert runtime.generate(ids, **call, eos_id=end, eos_early_stop=False).num_forwards == late.num_forwards


def test_other_tokens_may_end_an_answer(runtime: Runtime):
    ids = prompt(10)
    whole = runtime.generate(ids, max_new_tokens=14, block_length=4, stop_at_eos=False)
    answer = whole.sequences[0, 10:].tolist()
    end = answer[5]
    first = answer.index(end)
    for given in ([end, 2], f"{end},2"):
        out = runtime.generate(ids, max_new_tokens=14, block_length=4, stopping_criteria_idx=given)
        assert out.sequences[0, 10 : 11 + first].tolist() == answer[: first + 1]
        assert (out.sequences[0, 11 + first :] == 125).all() and out.timings.tokens == first
        assert out.num_forwards < whole.num_forwards
    longer = runtime.generate(ids, max_new_tokens=14, block_length=4, stop_tokens=[end], min_new_tokens=first + 1)
    assert end not in longer.sequences[0, 10 : 11 + first].tolist()


class Listener:
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.drafts: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.pieces.append(value)

    def put_draft(self, value: Tensor) -> None:
        self.drafts.append(value)

    def end(self) -> None:
        self.pieces.append(torch.zeros(0))


@pytest.mark.parametrize("lengths", [(10,), (8, 11, 13)])
def test_a_streamer_gets_every_token_once(runtime: Runtime, lengths: tuple[int, ...]):
    (ids, mask), listener = batch(lengths), Listener()
    out = runtime.generate(
        ids, attention_mask=mask, max_new_tokens=10, block_length=4, stop_at_eos=False, streamer=listener
    )
    prompt, *pieces, _ = listener.pieces
    assert torch.equal(prompt, ids)
    assert torch.equal(torch.cat(pieces, dim=1), out.sequences[:, ids.shape[1] :])
    assert len(listener.drafts) == out.num_forwards - out.steps_by_kind["prefill"]
    if len(lengths) == 1:  # two tokens of the first block are the prompt's
        assert [draft.shape[1] for draft in listener.drafts] == [2] * 2 + [4] * 8


def test_a_layer_that_is_not_finite_is_named(make: Callable[..., Runtime]):
    runtime = make(options={"prefill_rows": 8}, policy="block_causal")
    official(runtime.model, "model.layers.1.self_attn.v_proj.weight")[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="layer 1"):
        runtime.generate(prompt(30), max_new_tokens=8, block_length=4)


@pytest.mark.parametrize("policy", sorted({*policies_for("canvas")} - {*policies_for("blocks")}))
def test_policies_that_approximate_are_refused_by_name(runtime: Runtime, policy: str):
    with pytest.raises(ValueError, match=f"policy '{policy}' .*allowed: auto, none, block_causal"):
        runtime.with_policy(policy).generate(prompt(), block_length=4)


def test_the_exact_cache_is_for_no_canvas():
    with tiered.from_pretrained("embedded", policy="block_causal") as embedded:
        with pytest.raises(ValueError, match=r"'block_causal' keeps .* allowed: auto, none, fast_dllm_prefix"):
            embedded.generate("sort: Ada Ben", max_new_tokens=8)
        with pytest.raises(ValueError, match="'joint_threshold' is for block-causal models, but rows of"):
            embedded.with_policy("none").generate(
                "sort: Ada Ben", max_new_tokens=8, threshold=0.5, editing_threshold=0.5
            )
        with pytest.raises(ValueError, match="block_length = 4, but rows of 'embedded' see the whole canvas"):
            embedded.logits(torch.ones(1, 8, dtype=torch.long), block_length=4)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {}, "config.json of 'small' has no block_size: give block_length"),
        ({"block_size": 4}, {"block_length": 8}, "block_length = 8; 'small' was made for blocks of 4"),
        ({}, {"block_length": 0}, "block_length = 0"),
        ({}, {"block_length": 4, "trailing_noise": 4}, "trailing_noise = 4, but rows of 'small' see nothing"),
        ({}, {"block_length": 4, "correction_steps": 2}, "correction_steps = 2"),
        ({}, {"block_length": 4, "commit": "adaptive"}, "rule 'adaptive' is for GIDD's noise"),
        ({}, {"block_length": 4, "commit": DriftAware(early_threshold=0.5)}, "'drift_aware' compares attention"),
        ({}, {"block_length": 4, "remasking_strategy": "entropy_bounded"}, "unknown commit rule 'entropy_bounded'"),
        ({}, {"block_length": 4, "denoising_steps": 0}, "block_steps = 0"),
        ({}, {"block_length": 4, "minimal_topk": 0}, "minimal_topk = 0"),
        ({}, {"block_length": 4, "threshold": 0.5, "editing_threshold": 1.5}, "editing_threshold = 1.5"),
        ({}, {"block_length": 4, "editing_threshold": 0.5, "commit": "joint_threshold"}, "takes confidence_threshold"),
        (
            {},
            {"block_length": 4, "threshold": 0.5, "editing_threshold": 0.5, "num_to_transfer": 0},
            "num_to_transfer = 0",
        ),
        (
            {},
            {"block_length": 4, "threshold": 0.5, "editing_threshold": 0.5, "max_post_steps": -1},
            "max_post_steps = -1",
        ),
        ({}, {"block_length": 4, "steps": 2, "denoising_steps": 3}, "denoising_steps = 3 contradicts steps = 2;"),
        ({}, {"block_length": 4, "stop_tokens": [128]}, r"stop_tokens \[128\]: ids in \[0, 128\)"),
        ({}, {"block_length": 4, "stop_tokens": [-1]}, "stop_tokens = -1"),
        ({}, {"block_length": 4, "max_new_tokens": 2048}, "2048 .*make 2080 positions"),
    ],
)
def test_a_bad_call_is_named(
    make: Callable[..., Runtime], config: dict[str, Any], options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        make(**config).generate(prompt(), **options)


def test_steps_of_options_made_before_are_those_of_an_answer(runtime: Runtime):
    with pytest.raises(ValueError, match="steps = 64 counts the forwards of a whole answer; pass 'small' block_steps"):
        runtime.generate(prompt(), generation_config=tiered.GenerationOptions(steps=64), block_length=4)


def test_the_checkpoint_s_block_length_needs_no_option(make: Callable[..., Runtime]):
    out = make(block_size=4).generate(prompt(8), max_new_tokens=8, stop_at_eos=False)
    assert out.rows_per_step[:2] == [8, 4]
    assert tiered.plan({**SDAR, "block_size": 4}, context=64).sizes.block_length == 4


def test_inspectors_and_likelihoods_of_whole_canvases_are_refused_by_name(runtime: Runtime):
    for inspector in (StepDriftInspector(), StalenessInspector()):
        with pytest.raises(ValueError, match="rows of 'sdar' see blocks"):
            runtime.generate(prompt(), block_length=4, inspector=inspector)
    with pytest.raises(NotImplementedError, match=r"'small' \(sdar\) is block-causal: tasks that generate"):
        Likelihood(runtime).score([1, 2], [3])


def test_the_live_view_shows_every_step(runtime: Runtime):
    frames: list[Any] = []
    errors: list[Exception] = []
    watcher = Watcher(runtime.ledger, frames.append, errors.append, stop_at_eos=False)
    ids, mask = batch((18, 9))
    call: dict[str, Any] = {"max_new_tokens": 6, "block_length": 4, "stop_at_eos": False}
    out = runtime.generate(ids, attention_mask=mask, inspector=watcher, streamer=watcher, **call)
    assert not errors and [frame.forward for frame in frames] == [-1, *range(1, out.num_forwards)]


@pytest.mark.parametrize("rule", [pytest.param({}, marks=pytest.mark.long), {"confidence_threshold": 0.9}], ids=str)
def test_the_embedded_model_is_right_and_its_cache_changes_no_token(rule: dict[str, Any]):
    runtime = tiered.from_pretrained("embedded-blocks")
    examples = [sample(task, "test", 0) for task in ("copy", "reverse", "remove", "lookup")]
    asked = [[{"role": "user", "content": example.prompt}] for example in examples]
    out = runtime.generate(asked, max_new_tokens=32, **rule)
    assert out.text is not None and out.steps_by_kind["prefill"] and out.steps_by_kind["commit"]
    assert all(score(example, text) for example, text in zip(examples, out.text, strict=True))
    assert torch.equal(runtime.with_policy("none").generate(asked, max_new_tokens=32, **rule).sequences, out.sequences)
