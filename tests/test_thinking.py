"""Answers with thinking, over HTTP, by `generate` and by the command: split as transformers splits them, if the
tokenizer says how. The model is DiffusionGemma's tiny one."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import Served, serving
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiered
from tiered.cli.main import main
from tiered.models.response import CONTENT, THINKING, ResponseParts, response_template, split_response
from tiered.models.tokenizer import load_tokenizer
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

TESTS = Path(__file__).parent
TINY = TESTS / "goldens" / "diffusion_gemma" / "dgemma_tiny"
# The page's own, for the released files.
PAGE = (TESTS.parent / "docs" / "diffusion-gemma.md").read_text(encoding="utf-8")
TEMPLATE: dict[str, Any] = json.loads(re.findall(r"```json\n(.+?)```", PAGE, re.DOTALL)[0])["response_template"]
CHAT = (
    "{{ bos_token }}{% if enable_thinking %}<|turn>system\n<|think|><turn|>{% endif %}"
    "{% for message in messages %}<|turn>{{ message.role }}\n"
    "{% if message.reasoning_content %} w5{% endif %}{{ message.content }}<turn|>{% endfor %}"
    "{% if messages | length > 3 %}{{ raise_exception('too many messages') }}{% endif %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
FIXED = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<|turn>": 103, "<turn|>": 104, "<|think|>": 105,
    "user\n": 106, "model\n": 107, "system\n": 108, "assistant\n": 109,
}  # fmt: skip
SPECIAL = [*list(FIXED)[:6], "<|channel>", "<channel|>"]
MESSAGES: list[Any] = [{"role": "user", "content": " w110"}]
# Its tokens, without and with thinking on.
PLAIN = [2, 103, 106, 110, 104, 103, 107]
THOUGHTFUL = [2, 103, 108, 105, 104, *PLAIN[1:]]
CALL: dict[str, Any] = {"seed": 0, "block_length": 16, "block_steps": 8}
ON: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


def tokenizer_of(answer: list[int]) -> PreTrainedTokenizerFast:
    """A tokenizer of words and marks with which the model's `answer` begins with thinking."""
    once = [token for token in answer[3:] if answer.count(token) == 1 and token > 110]
    names = {"<|channel>": answer[0], "thought\n": answer[1], "<channel|>": once[3], **FIXED}
    tokens = {number: token for token, number in names.items()}
    assert len(tokens) == len(names), "each has its own"
    vocabulary = {tokens.get(number, f" w{number}"): number for number in range(512)}
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(pattern=Regex(r"\w+\n| \w+"), behavior="isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    named: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT, **named)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("thinking") / "gemma"
    shutil.copytree(TINY, directory)
    out = tiered.from_pretrained(directory).generate(torch.tensor([THOUGHTFUL]), max_new_tokens=32, **CALL)
    tokenizer = tokenizer_of(out.sequences[0, len(THOUGHTFUL) :].tolist())
    tokenizer.response_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Iterator[Runtime]:
    with tiered.from_pretrained(checkpoint) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tokenizer(runtime: Runtime) -> Any:
    return runtime.tokenizer


@pytest.fixture(scope="module")
def served(runtime: Runtime) -> Iterator[Served]:
    with serving(runtime) as served:
        yield served


@pytest.fixture(scope="module")
def unsplit(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a response template."""
    directory = tmp_path_factory.mktemp("unsplit") / "gemma"
    shutil.copytree(checkpoint, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings.pop("response_template") == TEMPLATE
    # A field that transformers no longer reads.
    settings["response_schema"] = {"type": "object", "x-regex": "(?P<content>.*)"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def post(served: Served, **body: Any) -> httpx.Response:
    whole = {"messages": MESSAGES, "max_tokens": 32} | CALL | body
    return httpx.post(f"{served.url}/v1/chat/completions", json=whole, timeout=60)


def message(served: Served, **body: Any) -> dict[str, Any]:
    return post(served, **body).json()["choices"][0]["message"]


def ids_of(runtime: Runtime, prompt: list[int]) -> list[int]:
    return runtime.generate(torch.tensor([prompt]), max_new_tokens=32, **CALL).sequences[0, len(prompt) :].tolist()


def test_an_answer_is_split_as_transformers_splits_it(served: Served, runtime: Runtime, tokenizer: Any):
    expected = tokenizer.parse_response(ids_of(runtime, THOUGHTFUL), prefix=THOUGHTFUL)
    answer = message(served, **ON)
    assert answer == {"role": "assistant", **expected, "refusal": None}
    assert re.fullmatch(r"w\d+( w\d+){3,}", answer[THINKING]) and len(answer["content"].split()) > 5
    reply = post(served, **ON).json()
    assert reply["usage"]["completion_tokens"] == 32 and reply["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_thinking(served: Served, runtime: Runtime, tokenizer: Any):
    # The mark of an end that is none to this model goes, and nothing behind it.
    text = tokenizer.decode(ids_of(runtime, PLAIN)).replace("<turn|>", "").strip()
    for body in ({}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert message(served, **body) == {"role": "assistant", "content": text, THINKING: None, "refusal": None}


def test_a_stream_has_deltas_of_both(served: Served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    chunks = client.chat.completions.create(
        model="embedded", messages=MESSAGES, max_tokens=32, n=2, seed=0, stream=True,
        extra_body={**ON, "block_length": 16, "block_steps": 8},
    )  # fmt: skip
    texts: list[dict[str, str]] = [{}, {}]
    order: list[str] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for part, text in choice.delta.model_dump(include={CONTENT, THINKING}).items():
                if text:
                    texts[choice.index][part] = texts[choice.index].get(part, "") + text
                    order += [part] if choice.index == 0 else []
    for index, parts in enumerate(texts):
        answer = message(served, **ON, seed=index)
        assert {part: text.strip() for part, text in parts.items()} == {
            part: answer[part] for part in (CONTENT, THINKING) if answer[part]
        }
    assert order == sorted(order, reverse=True) and len({*order}) == 2, "thinking comes first"


def test_an_answer_that_ends_while_it_thinks(served: Served):
    whole = message(served, **ON)
    short = message(served, **ON, max_tokens=4)
    assert short["content"] == "" and len(short[THINKING].split()) == 2 and whole[THINKING].startswith(short[THINKING])
    second = whole[THINKING].split()[1]
    stopped = post(served, **ON, stop=[f" {second}"]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"][THINKING] == whole[THINKING].split()[0] and stopped["message"]["content"] == ""


def test_generate_and_its_command_answer_alike(
    served: Served, runtime: Runtime, checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    answer = message(served, **ON)
    out = runtime.generate(MESSAGES, max_new_tokens=32, **CALL, **ON)
    assert (out.text, out.thinking) == ([answer["content"]], [answer[THINKING]])
    # In a batch of unequal prompts; a string is a user's message.
    both = runtime.generate([" w110", " w110 w111"], max_new_tokens=32, **CALL, **ON)
    assert both.text is not None and both.thinking is not None
    assert (both.text[0], both.thinking[0]) == (answer["content"], answer[THINKING])
    options = ["--max-new-tokens", "32", "--seed", "0", "--block-length", "16", "--block-steps", "8"]
    call = ["generate", " w110", "--model", str(checkpoint), *options]
    asked = ["--chat-template-kwargs", json.dumps(ON["chat_template_kwargs"])]
    assert main([*call, *asked]) == 0
    assert capsys.readouterr().out == f"{answer['content']}\n"
    assert main([*call, *asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["thinking"]) == (out.text, out.thinking) and record.items() >= ON.items()
    assert main([*call, "--raw", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "thinking" not in record and "chat_template_kwargs" not in record


def test_text_that_is_continued_is_not_split(served: Served, runtime: Runtime, tokenizer: Any):
    prompt = tokenizer.decode(THOUGHTFUL)
    text = tokenizer.decode(ids_of(runtime, THOUGHTFUL), skip_special_tokens=True)
    assert text.startswith("thought\n")
    reply = httpx.post(f"{served.url}/v1/completions", json={"prompt": prompt, "max_tokens": 32} | CALL, timeout=60)
    assert reply.json()["choices"][0]["text"] == text
    out = runtime.generate(prompt, raw=True, max_new_tokens=32, **CALL)
    assert out.text == [text] and out.thinking is None


def test_nothing_is_split_without_a_response_template(unsplit: Path, runtime: Runtime, tokenizer: Any):
    text = tokenizer.decode(ids_of(runtime, THOUGHTFUL), skip_special_tokens=True)
    with tiered.from_pretrained(unsplit) as other, serving(other) as served:
        assert message(served, **ON) == {"role": "assistant", "content": text, "refusal": None}
        lines = [line[6:] for line in post(served, **ON, stream=True).text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert {key for delta in deltas for key in delta} == {"role", "content"}
        out = other.generate(MESSAGES, max_new_tokens=32, **CALL, **ON)
    assert out.text == [text] and out.thinking is None and "thinking" not in out.as_dict()


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "= 5; an object is allowed"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object is allowed"),
        ({"chat_template_kwargs": {"enable_thinkin": 1}}, "chat_template_kwargs", "did you mean 'enable_thinking'"),
        ({"chat_template_kwargs": {"qq": 1}}, "chat_template_kwargs", "has 'qq', which .* allowed: enable_thinking$"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "has 'tokenize'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has 'messages'"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "has 'bos_token'"),
        ({"messages": 4 * MESSAGES}, "messages", "refuses the chat: too many messages"),
        ({"messages": [{**MESSAGES[0], THINKING: "x"}]}, "messages", "reasoning_content in a message"),
        ({"messages": [{"role": "assistant", "content": "", THINKING: 5}]}, "messages", "reasoning_content in a"),
    ],
)
def test_bad_fields_of_a_chat_are_named(served: Served, body: dict[str, Any], field: str, words: str):
    reply = post(served, **body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field and re.search(words, error["message"]), error


def test_variables_need_a_chat(served: Served, runtime: Runtime, capsys: pytest.CaptureFixture[str]):
    prompt = {"prompt": " w110", "max_tokens": 32, **ON}
    reply = httpx.post(f"{served.url}/v1/completions", json=prompt, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "chat_template_kwargs"
    calls: list[tuple[Any, dict[str, Any]]] = [(" w110", {"raw": True}), (torch.tensor([PLAIN]), {})]
    for inputs, how in calls:
        with pytest.raises(TypeError, match="chat_template_kwargs are for prompts that a chat template writes"):
            runtime.generate(inputs, **how, **ON)
    with pytest.raises(TypeError, match="chat_template_kwargs = 5; a mapping"):
        runtime.generate(" w110", chat_template_kwargs=cast("Any", 5))
    for text, words in (("{", "is not JSON"), ("[1]", "is a list; a JSON object is allowed")):
        with pytest.raises(SystemExit):
            main(["generate", "x", "--chat-template-kwargs", text])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "template",
    [
        "{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}",
        "{% for message in messages %}{%- generation -%}{{ x }}{% endgeneration %}{% break %}{% endfor %}",
        "{% macro shown(y) %}{{ x }}{% endmacro %}{{ shown(raise_exception is defined) }}",
    ],
)
def test_variables_that_templates_read(template: str):
    tokenizer = tokenizer_of([*range(300, 332)])
    tokenizer.chat_template = template
    runtime = Runtime(tiered.from_pretrained(TINY).model, policy=make_policy("none"), tokenizer=tokenizer)
    call = runtime.prepare(MESSAGES, chat_template_kwargs={"x": " w9"})
    assert call.prompts.chat and call.prompts.rows() == [[9]]
    with pytest.raises(ValueError, match="has 'y', which the chat template does not read; allowed: x"):
        runtime.prepare(MESSAGES, chat_template_kwargs={"y": 1})


def test_a_chat_template_that_cannot_be_read():
    tokenizer = tokenizer_of([*range(300, 332)])
    tokenizer.chat_template = "{% if %}"
    runtime = Runtime(tiered.from_pretrained(TINY).model, policy=make_policy("none"), tokenizer=tokenizer)
    for variables, words in ((None, "refuses the chat"), ({"x": 1}, "cannot be read")):
        with pytest.raises(ValueError, match=f"the chat template {words}: Expected an expression"):
            runtime.prepare(MESSAGES, chat_template_kwargs=variables)


def test_thinking_of_earlier_answers_is_the_templates(served: Served):
    earlier = {"role": "assistant", "content": " w7"}
    chat = [*MESSAGES, earlier, *MESSAGES]
    thoughtful = [*MESSAGES, earlier | {THINKING: "hm"}, *MESSAGES]
    counts = [post(served, messages=each).json()["usage"]["prompt_tokens"] for each in (chat, thoughtful)]
    assert counts[1] == counts[0] + 1


def test_a_response_template_that_cannot_be_read(checkpoint: Path, tmp_path: Path):
    directory = tmp_path / "gemma"
    shutil.copytree(checkpoint, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["response_template"] = {"fields": {"content": {"opens": "x"}}, "start_anchor": "x"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"by its tokenizer_config\.json: .*unknown keys \['opens'\]"):
        load_tokenizer(directory)


# The parts themselves.

WITH_TOOLS = {
    **TEMPLATE,
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": TEMPLATE["fields"][THINKING],
        "tool_calls": {"open": "<|tool_call>", "close": "<tool_call|>", "content": "json", "repeats": True},
        "content": {"close": ["<turn|>", "<eos>"], "optional": False},
    },
}
ANCHOR = "<|turn>model\n"
ANSWERS = [
    "",
    "Hello.",
    " Hello <b> there. \n",
    "<|channel>thought\nHm.\n<channel|>Hello.",
    "<|channel>thought\n<channel|>Hello.",
    "<|channel>thought\nHm. And",
    "<|channel>thought\nHm.<channel|>",
    "<|channel>thoughts<channel|>Hello.",
]


@pytest.fixture(scope="module")
def with_template(tokenizer: Any) -> Iterator[Callable[[object], dict[str, Any] | None]]:
    own = tokenizer.response_template

    def of(template: object) -> dict[str, Any] | None:
        tokenizer.response_template = template
        return response_template(tokenizer)

    yield of
    tokenizer.response_template = own


@pytest.mark.parametrize("of", [TEMPLATE, WITH_TOOLS])
@pytest.mark.parametrize("answer", ANSWERS)
def test_parts_are_those_of_transformers(
    tokenizer: Any,
    with_template: Callable[[object], dict[str, Any] | None],
    of: dict[str, Any],
    answer: str,
):
    template = with_template(of)
    assert template is not None
    expected = tokenizer.parse_response(answer, template, prefix=ANCHOR)
    thinking = next((expected[name] for name in (THINKING, "thinking") if name in expected), None)
    prompt = tokenizer.convert_tokens_to_ids(["<|turn>", "model\n"])
    assert split_response(tokenizer, template, prompt, answer) == (expected.get("content", ""), thinking)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 40)))
def test_parts_do_not_depend_on_the_pieces_that_come(answer: str, cuts: list[int]):
    tokenizer = tokenizer_of([*range(300, 332)])
    parts = ResponseParts(tokenizer, TEMPLATE, [103, 107])
    places = [0, *sorted(cuts), len(answer)]
    pieces = [piece for first, last in pairwise(places) for piece in parts.put(answer[first:last])]
    pieces += parts.end()
    joined = {part: "".join(text for each, text in pieces if each == part) for part in (CONTENT, THINKING)}
    whole = split_response(tokenizer, TEMPLATE, [103, 107], answer)
    assert parts.response == whole == (joined[CONTENT].strip(), joined[THINKING].strip() or None)


def test_a_call_of_a_tool_stays_in_the_content(
    tokenizer: Any, with_template: Callable[[object], dict[str, Any] | None]
):
    template = with_template(WITH_TOOLS)
    assert template is not None
    answer = "<|channel>thought\nHm.<channel|>So: <|tool_call>{}<tool_call|><turn|>"
    assert split_response(tokenizer, template, [103, 107], answer) == ("So: <|tool_call>{}<tool_call|>", "Hm.")


def test_thinking_that_the_prompt_begins(tokenizer: Any):
    opened = tokenizer.convert_tokens_to_ids(["<|turn>", "model\n", "<|channel>", "thought\n"])
    assert split_response(tokenizer, TEMPLATE, opened, "Hm.<channel|>Hello.") == ("Hello.", "Hm.")


@pytest.mark.parametrize("missing", [CONTENT, THINKING])
def test_a_template_without_thinking_splits_nothing(
    with_template: Callable[[object], dict[str, Any] | None], missing: str
):
    fields = {name: field for name, field in TEMPLATE["fields"].items() if name != missing}
    assert with_template({**TEMPLATE, "fields": fields or {"content": {}}}) is None
    assert with_template(None) is None
