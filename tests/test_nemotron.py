"""Nemotron-Labs against transformers' Ministral 3 with a mask of its own. A context is causal, and a block sees itself:
logits, and every step of an answer."""

from typing import Any

import pytest
import torch
from block_models import NEMOTRON, ROPE, batch, ministral3, prompt, prompts
from torch import Tensor
from transformers.models.ministral3 import Ministral3ForCausalLM

import tiered
from tiered.models.families import family_of
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from tiered.serving.scheduler import Scheduler


@pytest.fixture(scope="module")
def runtime(random_model: Any) -> Runtime:
    return Runtime(random_model(NEMOTRON), policy=make_policy("auto"), name="small")


@pytest.fixture(scope="module")
def oracle(random_weights: Any) -> Ministral3ForCausalLM:
    return ministral3(NEMOTRON, random_weights(NEMOTRON))


def official(oracle: Ministral3ForCausalLM, ids: Tensor, clean: int) -> Tensor:
    """Logits where tokens in front of `clean` see those in front of them, and all others to the end of the sequence."""
    row, column = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
    sees = (column <= row) | (row >= clean)
    mask = torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(~sees, -torch.inf)[None, None]
    with torch.no_grad():
        return oracle(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("length", [3, 16, 27, 40])
def test_logits(runtime: Runtime, oracle: Ministral3ForCausalLM, length: int):
    # All in front of the last block is final, unless a mask says otherwise.
    ids = prompt(length)
    last = (length - 1) // 4 * 4
    torch.testing.assert_close(runtime.logits(ids), official(oracle, ids, last), atol=1e-4, rtol=1e-4)
    causal = runtime.logits(ids, noise_mask=torch.zeros_like(ids))
    torch.testing.assert_close(causal, official(oracle, ids, length), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_from_the_first_token(runtime: Runtime, side: str):
    ids, pads = prompt(27), torch.full((1, 6), 5)
    ones, none = torch.ones_like(ids), torch.zeros_like(pads)
    padded = torch.cat([pads, ids] if side == "left" else [ids, pads], dim=1)
    mask = torch.cat([none, ones] if side == "left" else [ones, none], dim=1)
    torch.testing.assert_close(runtime.logits(padded, mask)[mask.bool()], runtime.logits(ids)[0], atol=1e-4, rtol=1e-4)


def denoised(oracle: Ministral3ForCausalLM, ids: Tensor, new: int, edges: str) -> list[Tensor]:
    """The canvas after each forward that fixes the surest token, without a cache."""
    block, mask, length = 4, 100, ids.shape[1]
    first = length // block * block if edges == "sequence" else length
    total = first + -(-(length + new - first) // block) * block
    canvas = torch.full((1, total), mask)
    canvas[:, :length] = ids
    states = [canvas.clone()]
    for start in range(first, total, block):
        while (canvas[0, start : start + block] == mask).any():
            logits = official(oracle, canvas[:, : start + block], start)[0, start:]
            logits[:, mask] = -torch.inf
            shares, tokens = logits.softmax(-1).max(-1)
            open_rows = canvas[0, start : start + block] == mask
            surest = int(shares.where(open_rows, -1.0).argmax())
            canvas[0, start + surest] = tokens[surest]
            states.append(canvas.clone())
    return states


@pytest.mark.parametrize("edges", ["sequence", "prompt"])
@pytest.mark.parametrize("policy", ["auto", "none"])
def test_every_step_is_that_of_the_uncached_model(
    runtime: Runtime, oracle: Ministral3ForCausalLM, policy: str, edges: str
):
    ids, new = prompt(22), 9
    out = runtime.with_policy(policy).generate(
        ids, max_new_tokens=new, stop_at_eos=False, output_history=True, block_edges=edges
    )
    assert out.history is not None
    # The tokens that were asked for come back; tokens behind them in their block do not.
    assert out.sequences.shape[1] == 22 + new
    expected = [state[:, : 22 + new] for state in denoised(oracle, ids, new, edges)]
    changed = [state for state, before in zip(expected[1:], expected, strict=False) if not torch.equal(state, before)]
    assert torch.equal(torch.stack(out.history), torch.stack([expected[0], *changed]))


@pytest.mark.parametrize("edges", ["sequence", "prompt"])
def test_a_batch_answers_as_its_prompts_alone(runtime: Runtime, edges: str):
    lengths, call = (22, 7, 16, 2), {"max_new_tokens": 10, "block_edges": edges}
    ids, mask = batch(lengths)
    for policy in ("auto", "none"):
        some: Any = runtime.with_policy(policy)
        out = some.generate(ids, attention_mask=mask, stop_at_eos=False, **call)
        for number, row in enumerate(prompts(lengths)):
            alone = some.generate(row[None], stop_at_eos=False, **call)
            assert torch.equal(out.sequences[number, 22:], alone.sequences[0, len(row) :])


def test_a_prompt_in_chunks(runtime: Runtime):
    ids = prompt(61)
    for edges in ("sequence", "prompt"):
        whole = runtime.generate(ids, max_new_tokens=8, block_edges=edges)
        parts = runtime.with_policy("block_causal", prefill_rows=12).generate(ids, max_new_tokens=8, block_edges=edges)
        assert torch.equal(whole.sequences, parts.sequences)
        assert parts.steps_by_kind["prefill"] == 5 + (edges == "prompt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0; a positive integer"),
        ({"dlm_paradigm": "causal"}, "dlm_paradigm = 'causal'"),
        ({"block_size": 0}, "block_size = 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"vocab_size": 100}, "mask_token_id = 100; a token id in"),
        ({"rope_parameters": {**ROPE, "llama_4_scaling_beta": -1.0}}, "llama_4_scaling_beta = -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_a_bad_config_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        family_of(NEMOTRON).read({**NEMOTRON, **changes})


def test_edges_at_the_prompt_are_for_causal_contexts(random_model: Any):
    of_sdar = {"model_type": "sdar", "rope_parameters": None, "mask_token_id": 159, "eos_token_id": 2}
    sdar = Runtime(random_model({**NEMOTRON, **of_sdar}), policy=make_policy("auto"), name="small")
    with pytest.raises(ValueError, match="block_edges = 'prompt', but blocks of 'small' count from a sequence's first"):
        sdar.generate(prompt(9), block_edges="prompt")
    with pytest.raises(ValueError, match="unknown block_edges 'promt'; did you mean 'prompt'"):
        sdar.generate(prompt(9), block_edges="promt")


def test_released_keys_load(write_checkpoint: Any, random_weights: Any, runtime: Runtime):
    repeated = {
        "rope_parameters": {**ROPE, "type": "yarn", "max_position_embeddings": NEMOTRON["max_position_embeddings"]}
    }
    directory = write_checkpoint(NEMOTRON | repeated, random_weights(NEMOTRON), shards=3)
    assert torch.equal(tiered.from_pretrained(directory).logits(prompt(20)), runtime.logits(prompt(20)))


def test_requests_whose_queries_grow_share_forwards(random_model: Any):
    runtime = Runtime(random_model(NEMOTRON | {"block_size": 16}), policy=make_policy("auto"))
    calls = [{"inputs": prompt(length), "max_new_tokens": 32, "steps": 8} for length in (18, 37)]
    scheduler = Scheduler(runtime)
    requests = [scheduler.submit(runtime.prepare(**call)) for call in calls]
    scheduler.run()
    assert scheduler.counts.forwards < scheduler.counts.taken
    for call, request in zip(calls, requests, strict=True):
        assert request.output is not None
        assert torch.equal(request.output.sequences, runtime.generate(**call).sequences)
