"""The harness's model: answers are those of `generate` in any batch, under the options of each request."""

import io
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from training.tasks import sample

import tiered
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.evaluation import TieredLM
from tiered.evaluation.requests import answer_text, request_options
from tiered.runtime import Runtime
from tiered.serving.request import Request

GREEDY = {"until": [], "do_sample": False, "max_gen_toks": 32}
EXAMPLES = [
    sample(task, "test", seed, size=size)
    for task, size in (("sort", 16), ("chain", 6), ("copy", 4), ("lookup", 100))
    for seed in range(3)
]
PROMPTS = [example.prompt for example in EXAMPLES]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained("embedded", policy="none")


@pytest.fixture(scope="module")
def lm(runtime: Runtime) -> TieredLM:
    return TieredLM(runtime, confidence_threshold=0.5, batch_size=5)


def instances(requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Instance]:
    return [Instance("generate_until", {}, request, i) for i, request in enumerate(requests)]


def ask(lm: TieredLM, contexts: Sequence[str], gen_kwargs: Mapping[str, Any] = GREEDY) -> list[str]:
    return lm.generate_until(instances([(context, gen_kwargs) for context in contexts]), disable_tqdm=True)


def options_of(lm: TieredLM, gen_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    return request_options(gen_kwargs, lm.defaults, lm.runtime.model)


def totals(lm: TieredLM) -> dict[str, Any]:
    return lm.get_model_info()["totals"]


def chat(lm: TieredLM, prompt: str) -> str:
    return lm.apply_chat_template([{"role": "user", "content": prompt}])


def chats(lm: TieredLM) -> list[str]:
    return [chat(lm, prompt) for prompt in PROMPTS]


def direct(runtime: Runtime, prompt: str, **options: Any) -> str:
    """The text that `generate` gives for one message."""
    given = {"max_new_tokens": 32, "confidence_threshold": 0.5, **options}
    out = runtime.generate([{"role": "user", "content": prompt}], **given)
    assert out.text is not None
    return out.text[0]


@pytest.mark.parametrize(
    ("policy", "batch_size"), [("none", 5), ("fast_dllm_dual", 12), ("polestar", "auto"), ("polestar", 1)]
)
def test_answers_are_those_of_generate_in_the_order_of_the_requests(
    runtime: Runtime, policy: str, batch_size: int | str
):
    other = runtime.with_policy(policy)
    lm = TieredLM(other, confidence_threshold=0.5, batch_size=batch_size)
    expected = [direct(other, prompt) for prompt in PROMPTS]
    assert ask(lm, chats(lm)) == expected and len(set(expected)) == len(PROMPTS)


def test_a_prompt_is_answered_under_the_policy_that_it_would_have_alone(runtime: Runtime):
    other = runtime.with_policy("auto")
    lm = TieredLM(other, confidence_threshold=0.5, batch_size=12)
    prompts = [*PROMPTS[:3], *(sample("lookup", "test", seed, size=300).prompt for seed in range(2))]
    assert ask(lm, [chat(lm, prompt) for prompt in prompts]) == [direct(other, prompt) for prompt in prompts]
    (plain, three), (_, two) = totals(lm)["policies"].items()
    assert (plain, three, two) == ("none", 3, 2)


def test_requests_with_different_options_in_one_call(runtime: Runtime):
    lm = TieredLM(runtime, confidence_threshold=0.5, batch_size=12)
    kinds: list[dict[str, Any]] = [
        {"until": [" "], "max_gen_toks": 32, "block_length": 32},
        {"until": [], "max_gen_toks": 32, "confidence_threshold": 0.99},
        {"until": "\n", "max_gen_toks": 3, "block_length": 32},
    ]
    requests = [(text, kinds[i % 3]) for i, text in enumerate(chats(lm))]
    expected = []
    for i, prompt in enumerate(PROMPTS):
        text = direct(runtime, prompt, **({"confidence_threshold": 0.99} if i % 3 == 1 else {}))
        if i % 3 == 0:
            text = text.split(" ")[0]
        if i % 3 == 2:
            assert runtime.tokenizer is not None
            text = runtime.tokenizer.decode(runtime.tokenizer(text)["input_ids"][:3])  # type: ignore[index]
        expected.append(text)
    assert lm.generate_until(instances(requests), disable_tqdm=True) == expected


def test_a_stop_token_ends_an_answer(runtime: Runtime):
    assert runtime.tokenizer is not None
    (vera,) = runtime.tokenizer.encode(" Vera", add_special_tokens=False)
    lm = TieredLM(runtime, stop_tokens=[vera])
    assert ask(lm, [chat(lm, "copy: Tara Uma Vera Will Xena")]) == ["Tara Uma"]


def test_no_requests_no_answers(lm: TieredLM):
    assert lm.generate_until([], disable_tqdm=True) == []
    assert lm.loglikelihood([]) == [] and lm.loglikelihood_rolling([]) == []


def test_each_answer_has_draws_of_its_own(runtime: Runtime):
    sampled = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 16}
    lms = {size: TieredLM(runtime, batch_size=size, block_steps=4) for size in (1, 5)}
    torch.manual_seed(3)
    texts = {size: ask(lm, chats(lm), sampled) for size, lm in lms.items()}
    assert texts[1] == texts[5]
    # The same request twice is drawn twice: tasks ask so for several tries.
    assert len(set(ask(lms[5], [chats(lms[5])[0]] * 4, sampled))) > 1
    torch.manual_seed(4)
    assert ask(lms[5], chats(lms[5]), sampled) != texts[5]
    fixed = TieredLM(runtime, batch_size=5, block_steps=4, seed=3)
    assert ask(fixed, chats(fixed), sampled) == texts[5]


def test_seeds_go_by_place(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    lm, prepare, seeds = TieredLM(runtime, batch_size=5, confidence_threshold=0.5), runtime.prepare, []

    def asked(ids: torch.Tensor, *, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return prepare(ids, seed=seed, **options)

    monkeypatch.setattr(lm.runtime, "prepare", asked)
    torch.manual_seed(7)
    ask(lm, chats(lm))
    assert seeds == [7 + i for i in range(len(PROMPTS))]


def test_the_seed_leaves_torchs_own_stream_alone(lm: TieredLM):
    torch.manual_seed(0)
    ask(lm, chats(lm)[:1], {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4})
    assert torch.equal(torch.rand(3), torch.manual_seed(0) and torch.rand(3))


@pytest.mark.parametrize(
    ("until", "most", "expected"),
    [
        ([], 6, "Ada Ben Cleo"),  # up to the end of the sequence, without special tokens
        (["<|user|>"], 6, "Ada Ben"),  # a stop string that decoding would drop
        (["<|user|>", "Ben"], 6, "Ada "),
        (["<|user|>"], 1, "Ada"),
        (["<|mask|>"], 6, "Ada Ben Cleo"),
        ([], 2, "Ada Ben"),
        (["", " Cleo", " Ben"], 6, "Ada"),  # the one that begins first
        (["en Cl", "Ben Cleo"], 6, "Ada "),  # though another ends first
        (["Ada"], 6, ""),
    ],
)
def test_special_tokens_stop_an_answer(tokenizer: Any, until: list[str], most: int, expected: str):
    ids = tokenizer("Ada Ben")["input_ids"] + tokenizer("<|user|>")["input_ids"] + tokenizer("Cleo")["input_ids"]
    ids += [tokenizer.eos_token_id, *tokenizer("Dan")["input_ids"]]
    assert len(ids) == 6
    assert answer_text(tokenizer, ids[:most], [tokenizer.eos_token_id], until) == expected


def test_stop_strings_of_a_request(lm: TieredLM, runtime: Runtime):
    prompt = "copy: Ada Ben Cleo Dan"
    assert direct(runtime, prompt) == "Ada Ben Cleo Dan"
    for until, expected in (
        ([" Cleo", " Ben"], "Ada"),
        ("Dan", "Ada Ben Cleo "),
        (None, "Ada Ben Cleo Dan"),
        (["Zoe"], "Ada Ben Cleo Dan"),
    ):
        assert ask(lm, [chat(lm, prompt)], {"until": until, "max_gen_toks": 32}) == [expected]


@pytest.mark.parametrize(
    ("gen_kwargs", "arguments", "tokens", "columns"),
    [
        ({}, {}, 256, 256),
        ({}, {"gen_length": 64}, 64, 64),
        ({}, {"max_gen_toks": 40, "max_new_tokens": 40}, 40, 64),
        ({"max_gen_toks": 20}, {}, 20, 20),  # one block, as long as the answer
        ({"max_gen_toks": 33}, {"max_gen_toks": 100}, 33, 64),
        ({"max_gen_toks": 20}, {"block_length": 8}, 20, 24),
        ({"max_tokens": 9, "block_length": 4}, {"block_length": 8}, 9, 12),
        ({"max_new_tokens": 5, "max_gen_toks": 7}, {}, 7, 7),  # the harness's own order
        ({"max_gen_toks": 100}, {"alg": "entropy"}, 100, 100),  # Dream's rule takes the answer as one block
        ({"max_gen_toks": 33}, {"steps": 8}, 33, 64),
        ({"max_gen_toks": 33}, {"trailing_noise": 3}, 33, 67),
    ],
)
def test_lengths(runtime: Runtime, gen_kwargs: dict[str, Any], arguments: dict[str, Any], tokens: int, columns: int):
    options, most, _ = options_of(TieredLM(runtime, **arguments), gen_kwargs)
    assert (most, options["max_new_tokens"] + options.get("trailing_noise", 0)) == (tokens, columns)


def test_a_canvas_of_whole_blocks_is_cut_to_the_tokens_asked_for(runtime: Runtime):
    lm = TieredLM(runtime, block_length=16)
    whole = direct(runtime, PROMPTS[0], block_length=16, max_new_tokens=16, confidence_threshold=None)
    (cut,) = ask(lm, chats(lm)[:1], {"max_gen_toks": 9})
    assert whole.startswith(cut) and len(cut.split()) == 9 and len(whole.split()) == 16


@pytest.mark.parametrize(
    ("gen_kwargs", "arguments", "expected"),
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False}, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 5}, {}, {"temperature": 0.0}),
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"do_sample": True}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.2}, {"temperature": 0.5}, {"temperature": 0.2}),
        ({"temperature": 0.2, "top_p": 0.9, "top_k": 5}, {}, {"temperature": 0.2, "top_p": 0.9, "top_k": 5}),
        ({"temperature": 0.2, "top_k": -1}, {"top_k": 5}, {"temperature": 0.2, "top_k": None}),
        ({"num_beams": 1, "repetition_penalty": 1.0}, {}, {}),
        ({"threshold": 0.7}, {"confidence_threshold": 0.9}, {"confidence_threshold": 0.7}),
    ],
)
def test_options_of_a_request(
    runtime: Runtime, gen_kwargs: dict[str, Any], arguments: dict[str, Any], expected: dict[str, Any]
):
    options, _, _ = options_of(TieredLM(runtime, **arguments), gen_kwargs)
    assert options.pop("max_new_tokens") == 256
    assert options == expected


def test_greedy_over_a_temperature_is_said_once(runtime: Runtime, caplog: pytest.LogCaptureFixture):
    lm = TieredLM(runtime, temperature=0.5625, confidence_threshold=0.5)
    assert not caplog.records
    ask(lm, chats(lm)[:3], GREEDY)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "temperature=0.5625; setting `temperature` to 0.0 for greedy decoding" in caplog.text


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"max_gen_tok": 3}, "unknown option 'max_gen_tok'; did you mean 'max_gen_toks'"),
        ({"num_beams": 4}, "num_beams = 4 is not for diffusion models; 1 is allowed"),
        ({"until": 3}, "to be of type .* but got 3"),
        ({"max_gen_toks": 0}, "max_new_tokens = 0"),
        ({"max_gen_toks": "long"}, "invalid literal for int.* 'long'"),
        ({"max_gen_toks": 4096}, "the prompt's 1 tokens and max_new_tokens = 4096 make"),
        ({"max_gen_toks": 32768}, "the prompt's 1 tokens and max_new_tokens = 32768 make"),
        ({"max_length": 64}, "unknown option 'max_length'"),
        ({"top_p": 3.0, "temperature": 1.0}, "top_p = 3.0"),
    ],
)
def test_bad_gen_kwargs_are_named(lm: TieredLM, gen_kwargs: dict[str, Any], message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        ask(lm, [chat(lm, PROMPTS[0])], gen_kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"polcy": "none"}, "unknown model argument 'polcy'; did you mean 'policy'"),
        ({"trust_remote_code": True}, "unknown model argument 'trust_remote_code'"),
        ({"confidence_treshold": 0.9}, "did you mean 'confidence_threshold'"),
        ({"policy": "polestar", "policy_topm": 2}, "unknown option of policy 'polestar' 'topm'; did you mean 'top_m'"),
        ({"policy": "dual"}, "unknown policy 'dual'"),
        ({"batch_size": "many"}, "batch_size = 'many'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"max_new_tokens": 32, "gen_length": 64}, "gen_length = 64 contradicts max_new_tokens = 32"),
        ({"max_gen_toks": 0}, "max_new_tokens = 0"),
        ({"until": "x"}, "unknown model argument 'until'"),
        ({"commit": "adaptive"}, "the commit rule 'adaptive'"),
        ({"steps": 7, "max_gen_toks": 64}, "steps = 7 is not a multiple of the 2 blocks"),
        ({"policy": "dkv_greedy"}, "remasking = 'random' is allowed"),
        ({"mask_id": 7}, "mask_id = 7, but the model's mask token is 3"),
        ({"memory": "1GiB"}, "the runtime is loaded already"),
        ({"mc_num": 0}, "mc_num = 0"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes'"),
    ],
)
def test_bad_model_arguments_are_named(runtime: Runtime, arguments: dict[str, Any], message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        TieredLM(runtime, **arguments)


def test_model_arguments_of_a_command_line(caplog: pytest.LogCaptureFixture):
    lm = TieredLM.create_from_arg_string(
        "pretrained=embedded,policy=polestar,policy_clusters=4,policy_top_m=1,memory=64MiB,host_memory=8MiB,"
        "dtype=bfloat16,batch_size=3,threshold=0.9,gen_length=64",
        # Options that the harness's command line always adds.
        {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
    )
    assert lm.batch_size == 3 and lm.runtime.dtype == torch.bfloat16
    assert str(lm.runtime.policy).startswith("polestar(clusters=4, top_m=1")
    budget = lm.runtime.ledger.budget
    assert (budget.cap(Tier.DEVICE), budget.cap(Tier.HOST)) == (64 * 2**20, 8 * 2**20)
    assert lm.defaults == {"confidence_threshold": 0.9, "max_gen_toks": 64}
    if not torch.cuda.is_available():
        assert lm.device == torch.device("cpu") and "device = 'cuda:0', but there is no CUDA" in caplog.text


def test_a_model_without_a_tokenizer(write_checkpoint: Any):
    with pytest.raises(ValueError, match="has no tokenizer"):
        TieredLM(write_checkpoint(), policy="none")


def test_a_prompt_that_is_too_long_loses_its_beginning(
    lm: TieredLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    tokenizer, words, seen = lm.tokenizer, "Ada " * 4085 + "Ben Cleo", []

    def asked(ids: torch.Tensor, **_: Any) -> Any:
        seen.append(ids[0].tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.runtime, "prepare", asked)
    for context, tokens in (("Ada", 32), (words, 32), (words, 64), ("", 32)):
        with pytest.raises(KeyboardInterrupt):
            ask(lm, [context], {"max_gen_toks": tokens})
    ids = tokenizer(words)["input_ids"]
    assert len(ids) == 4087  # of 4096, of which 32 and 64 are the answer's
    assert seen == [tokenizer("Ada")["input_ids"], ids[-4064:], ids[-4032:], [lm.eot_token_id]]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "Context length (4087) + max_gen_toks (64) = 4151 exceeds model's max length (4096)" in caplog.text


class Beginning:
    """The embedded tokenizer, which has no beginning-of-sequence token, with one that it always adds."""

    bos_token = "<|user|>"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._tokenizer((self.bos_token if add_special_tokens else "") + text)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._tokenizer.convert_tokens_to_ids(token)


def test_one_beginning_of_sequence_token_however_it_comes(runtime: Runtime, tokenizer: Any):
    def encode(tokenizer: Any, text: str, add_bos_token: bool = False) -> list[int]:
        lm.tokenizer, lm._bos = tokenizer, add_bos_token
        return lm.tok_encode(text)

    lm = TieredLM(runtime)
    with_bos, begun = Beginning(tokenizer), tokenizer("<|user|> Ada")["input_ids"]
    for text, add in (("Ada", False), ("<|user|>Ada", False), ("<|user|>Ada", True)):
        assert encode(with_bos, text, add) == begun
    assert lm.prefix_token_id == begun[0] and TieredLM(runtime).prefix_token_id == lm.eot_token_id
    # A tokenizer that adds none by itself, as LLaDA's and Dream's.
    plain = Beginning(tokenizer)
    plain.__class__ = type("Plain", (Beginning,), {"__call__": lambda self, text, **_: tokenizer(text)})
    assert encode(plain, "Ada") == tokenizer("Ada")["input_ids"]
    assert encode(plain, "Ada", True) == begun
    # The continuation of an empty context begins no sequence.
    assert lm.tok_encode("Ada", add_special_tokens=False) == tokenizer("Ada")["input_ids"]


def test_chats(lm: TieredLM, runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    history = [{"role": "user", "content": "copy: Ada Ben"}, {"role": "assistant", "content": "Ada"}]
    assert lm.apply_chat_template(history[:1]) == "<|user|>copy: Ada Ben<|assistant|>"
    assert lm.apply_chat_template(history, add_generation_prompt=False) == "<|user|>copy: Ada Ben<|assistant|>Ada"
    # With the template, and without, a prompt is another one.
    (plain,), (templated,) = (ask(lm, [text]) for text in ("copy: Ada Ben", chat(lm, "copy: Ada Ben")))
    assert templated == "Ada Ben" != plain
    assert runtime.generate(["copy: Ada Ben"], raw=True, max_new_tokens=32, confidence_threshold=0.5).text == [plain]
    assert lm.chat_template(True) == lm.tokenizer.chat_template and "/" not in lm.tokenizer_name
    monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template is not set"):
        lm.apply_chat_template(history)


def test_cached_answers_are_not_computed_again(lm: TieredLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    requests = instances([(text, GREEDY) for text in chats(lm)])
    expected = lm.generate_until(requests, disable_tqdm=True)
    begin, begun, answered = Request.begin, itertools.count(), []

    def interrupted(request: Request, *given: Any) -> None:
        if next(begun) == 7:
            raise RuntimeError("interrupted")
        begin(request, *given)

    before = lm.cache_hook
    caching = CachingLM(lm, str(tmp_path / "answers"))
    try:
        for fails in (True, False, False):
            done = totals(lm)["sequences"]
            with monkeypatch.context() as patched:
                if fails:
                    patched.setattr(Request, "begin", interrupted)
                    with pytest.raises(RuntimeError, match="interrupted"):
                        caching.generate_until(requests)
                    assert lm._scheduler.running == lm._scheduler.waiting == 0
                else:
                    assert caching.generate_until(requests) == expected
            answered.append(totals(lm)["sequences"] - done)
        # Answers from before the interruption are in the cache; afterwards all are.
        assert 0 < answered[0] < 12 and answered[1:] == [12 - answered[0], 0]
    finally:
        lm.set_cache_hook(before)


@pytest.mark.parametrize("disable", [True, False])
def test_progress(lm: TieredLM, disable: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    lm.generate_until(instances([(text, GREEDY) for text in chats(lm)[:2]]), disable_tqdm=disable)
    assert ("2/2" in stream.getvalue()) == (not disable)


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [(4, None, 4), ("4", 2, 4), ("auto", None, 64), ("auto:4", 16, 16)],
)
def test_batch_sizes(runtime: Runtime, given: int | str, most: int | None, expected: int):
    assert TieredLM(runtime, batch_size=given, max_batch_size=most).batch_size == expected


def test_a_budget_lets_fewer_requests_run_at_a_time(runtime: Runtime):
    # Room for a few requests, not for all twelve at once.
    one = TieredLM(runtime, batch_size=1, confidence_threshold=0.5)
    expected = ask(one, chats(one))
    budget = runtime.generate([[{"role": "user", "content": PROMPTS[-1]}]] * 4, max_new_tokens=32).memory
    lm = TieredLM(
        "embedded",
        policy="none",
        memory=budget.peak_device_bytes,
        host_memory=0,  # nor for weights that could be streamed from there
        weights="raw",
        batch_size="auto",
        confidence_threshold=0.5,
    )
    assert ask(lm, chats(lm)) == expected
    cap = lm.runtime.ledger.budget.cap(Tier.DEVICE)
    assert cap is not None and totals(lm)["peak_bytes"]["device"] <= cap
    with pytest.raises(TierCapacityError):
        ask(lm, [chat(lm, "copy: " + "Ada " * 3000)])


def test_results_have_facts_of_the_model(runtime: Runtime):
    lm = TieredLM(runtime, policy="polestar", policy_top_m=1, confidence_threshold=0.5, batch_size=5)
    assert totals(lm)["sequences"] == totals(lm)["tokens_per_second"] == 0
    ask(lm, chats(lm))
    info = json.loads(json.dumps(lm.get_model_info()))
    assert info["policy"] == "polestar(top_m=1)"
    assert info["generation"] == {"confidence_threshold": "0.5", "max_gen_toks": "256"}
    found = info["totals"]
    outs = [
        lm.runtime.generate([{"role": "user", "content": p}], max_new_tokens=32, confidence_threshold=0.5)
        for p in PROMPTS
    ]
    assert found["sequences"] == 12
    assert found["forwards"] == sum(out.num_forwards for out in outs)
    assert found["tokens"] == sum(out.timings.tokens for out in outs)
    assert found["tokens_per_forward"] == pytest.approx(found["tokens"] / found["forwards"])
    assert found["peak_bytes"]["device"] > max(out.memory.peak_device_bytes for out in outs)
