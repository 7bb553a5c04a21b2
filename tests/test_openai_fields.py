"""Bodies of OpenAI's endpoints: fields are read under our names, or refused under their own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tiered.options import GenerationOptions
from tiered.serving.openai_fields import Limits, ParsedRequest, read_body, read_json, sampler_seed
from tiered.serving.prompts import RefusedBody

HELLO = [{"role": "user", "content": "hello"}]
PARTS = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


def read(
    *, chat: bool = True, defaults: Mapping[str, Any] | None = None, most: int = 128, blocks: bool = False, **body: Any
) -> ParsedRequest:
    source, limits = {"messages": HELLO} if chat else {"prompt": "hello"}, Limits(answer_tokens=most, choices=4)
    own = defaults if defaults is not None else {"steps": 8}
    return read_body(source | body, chat=chat, defaults=own, limits=limits, mask_token_id=3, block_causal=blocks)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"confidence_threshold": 0.9, "confidence": "probability", "block_steps": 4, "temperature": 0.5}),
        ({"threshold": 0.8}, {"confidence_threshold": 0.8, "confidence": "probability"}),
        ({"commit": "static"}, {"commit": "static", "block_steps": 4, "temperature": 0.5}),
        ({"commit": "static", "confidence": "margin"}, {"confidence": "margin"}),
        ({"steps": 64}, {"confidence_threshold": 0.9, "steps": 64}),
    ],
)
def test_a_choice_of_the_request_replaces_that_of_the_server(body: dict[str, Any], expected: dict[str, Any]):
    defaults = {"confidence_threshold": 0.9, "confidence": "probability", "block_steps": 4, "temperature": 0.5}
    found = read(**body, defaults=defaults).options
    assert found.items() >= expected.items()
    assert ("commit" in body) == ("confidence_threshold" not in found)
    assert ("steps" in body) == ("block_steps" not in found)
    GenerationOptions(**found)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"options": {"steps": 8}, "n": 1, "seed": None, "most": None, "stop": [], "stream": False}),
        ({"max_tokens": 20}, {"options": {"steps": 8, "max_new_tokens": 20}, "most": 20}),
        ({"max_completion_tokens": 70}, {"options": {"steps": 8, "max_new_tokens": 96}, "most": 70}),
        ({"max_tokens": 20, "block_length": 8}, {"options": {"steps": 8, "block_length": 8, "max_new_tokens": 24}}),
        ({"max_new_tokens": 64}, {"options": {"steps": 8, "max_new_tokens": 64}, "most": None}),
        ({"gen_length": 64, "threshold": 0.9}, {"most": None}),
        ({"max_tokens": 33, "commit": "timestep"}, {
            "options": {"commit": "timestep", "steps": 8, "max_new_tokens": 33}, "most": 33
        }),
        ({"max_tokens": 33, "commit": "origin", "block_size": 8, "seed": -1}, {
            "options": {"commit": "origin", "steps": 8, "block_length": 8, "max_new_tokens": 40}, "most": 33
        }),
        ({"max_tokens": 33, "blocks": True}, {"options": {"steps": 8, "max_new_tokens": 33}, "most": 33}),
        ({"most": 8}, {"options": {"steps": 8, "max_new_tokens": 8}, "most": 8}),
        ({"most": 8, "block_length": 3}, {"options": {"steps": 8, "block_length": 3, "max_new_tokens": 9}, "most": 8}),
        ({"most": 64, "defaults": {"max_new_tokens": 64}}, {"options": {"max_new_tokens": 64}, "most": None}),
        ({"most": 32, "defaults": {"max_new_tokens": 64}}, {"options": {"max_new_tokens": 32}, "most": 32}),
        ({"mask_id": 3, "mask_token_id": 3, "return_dict": True, "return_dict_in_generate": True, "steps": 4}, {
            "options": {"steps": 4}
        }),
        ({"return_history": False}, {"options": {"steps": 8}}),
        ({"steps": 4, "temperature": 0.5, "top_p": 0.9}, {"options": {"steps": 4, "temperature": 0.5, "top_p": 0.9}}),
        ({"chat_template_kwargs": {"x": 1}}, {"template": {"x": 1}}),
        ({"chat_template_kwargs": None}, {"template": {}}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 5, "n": 3, "user": "me", "metadata": {"a": "b"}}, {"seed": 5, "n": 3}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": None, "logprobs": None, "tools": [], "logit_bias": {}, "presence_penalty": 0.0}, {"stop": []}),
        (
            {"stream": True, "stream_options": {"include_usage": True, "include_drafts": True}},
            {"stream": True, "usage": True, "drafts": True},
        ),
        (
            {"messages": [{"role": "developer", "content": "x"}, *HELLO]},
            {"prompts": [[{"role": "system", "content": "x"}, *HELLO]]},
        ),
        (
            {"messages": [{"role": "user", "content": PARTS}]},
            {"prompts": [HELLO]},
        ),
        ({"messages": [{**HELLO[0], "type": "text", "name": "me", "tool_calls": None}]}, {"prompts": [HELLO]}),
    ],
)  # fmt: skip
def test_fields_that_are_read(body: dict[str, Any], expected: dict[str, Any]):
    wanted = read(**body)
    assert {name: getattr(wanted, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[[1, 2]]]), ([[1, 2], [3]], [[[1, 2]], [[3]]])],
)
def test_the_prompts_of_completions(prompt: object, prompts: list[object]):
    wanted = read(chat=False, prompt=prompt)
    assert wanted.raw
    assert [each.tolist() if isinstance(each, torch.Tensor) else each for each in wanted.prompts] == prompts


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"maxtokens": 5}, "maxtokens", "did you mean 'max_tokens'"),
        ({"qqqqqqqq": 5}, "qqqqqqqq", "unknown field 'qqqqqqqq'$"),
        ({"logprobs": True}, "logprobs", "not supported here, and not ignored"),
        ({"logprobs": 0}, "logprobs", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "chat_template_kwargs = 5; an object is allowed"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"output_history": True}, "output_history", "not supported"),
        ({"return_history": True}, "return_history", "not supported"),
        ({"mask_token_id": 5}, "mask_token_id", "the model's mask token is 3"),
        ({"return_dict": False}, "return_dict", "the result is always an object"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"model": 5}, "model", "model = 5; a string is allowed"),
        ({"n": 0}, "n", "n = 0"),
        ({"n": 5}, "n", "are 5; at most 4"),
        ({"n": True}, "n", "n = True"),
        ({"seed": 2**63}, "seed", "seed = 9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed", "seed = -9223372036854775809"),
        ({"seed": 1.5}, "seed", "seed = 1.5"),
        ({"stream": 1}, "stream", "stream = 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "together with stream = true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "has no 'usage'"),
        ({"stop": ["a"] * 5}, "stop", "stop has 5 strings"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0"),
        ({"max_tokens": 129}, "max_tokens", "at most 128"),
        ({"max_new_tokens": 256}, "max_new_tokens", "at most 128"),
        ({"block_length": 256}, "block_length", "block_length = 256; an int from 1 to 128 is allowed"),
        ({"max_tokens": 8, "block_size": 256}, "block_size", "block_size = 256; an int from 1 to 128 is allowed"),
        ({"trailing_noise": 129}, "trailing_noise", "trailing_noise = 129; an int from 0 to 128 is allowed"),
        ({"max_tokens": 8, "threshold": 2}, "threshold", "confidence_threshold = 2"),
        ({"max_tokens": 10, "max_completion_tokens": 20}, "max_completion_tokens", "different lengths"),
        ({"max_tokens": 10, "block_length": 0}, "block_length", "block_length = 0"),
        ({"steps": 4, "diffusion_steps": 5}, "diffusion_steps", "contradicts steps = 4"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "at least one message"),
        ({"messages": ["hello"]}, "messages", "a message is an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role = 'tool'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content is text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "files, images and URLs are not"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", "tool_calls in a"),
        ({"prompt": "hello"}, "prompt", "unknown field 'prompt'"),
    ],
)  # fmt: skip
def test_refused_fields_are_named(body: dict[str, Any], field: str | None, words: str):
    with pytest.raises(RefusedBody, match=words) as refused:
        read(**body)
    assert (refused.value.field, refused.value.status) == (field, 400)


def test_a_seed_in_the_samplers_range_stays_and_others_meet_none_of_them():
    assert [sampler_seed(seed) for seed in (0, 7, 2**62)] == [0, 7, 2**62]
    obvious = [
        *range(-100, 100),
        *(sign * 2**power + by for power in (31, 32, 62, 63) for sign in (1, -1) for by in (-1, 0)),
    ]
    others = [sampler_seed(seed) for seed in obvious if not 0 <= seed <= 2**62]
    assert all(0 <= seed <= 2**62 for seed in others)
    # The CPU's generator looks at 32 bits alone.
    low = [seed % 2**32 for seed in [*others, *range(100)]]
    assert len({*low}) == len(low)


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], {"a": 1}, [[1], "a"], [-1], [True]])
def test_bad_prompts_of_completions(prompt: object):
    if prompt == "":  # the runtime says what is wrong with it
        assert read(chat=False, prompt=prompt).prompts == [""]
        return
    with pytest.raises(RefusedBody, match="prompt must be a string"):
        read(chat=False, prompt=prompt)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"5", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}", b'{"a": NaN,']
)
def test_bodies_that_are_no_json_object(body: bytes):
    with pytest.raises(RefusedBody):
        read_json(body)
