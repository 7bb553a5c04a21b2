"""A bad checkpoint or argument raises one clear error, before any work starts."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import ContextLengthError, TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.decoding.rules.threshold import Factor, Threshold
from tiered.decoding.rules.timestep import Timestep
from tiered.models.llada import LLaDA
from tiered.models.presets import read_preset
from tiered.policies.dllm_cache.policy import DLLMCache
from tiered.policies.elastic_cache.policy import ElasticCache
from tiered.policies.registry import make_policy
from tiered.policies.row_schedule import RowSchedule
from tiered.runtime import Runtime

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_PROJ = "model.transformer.blocks.0.q_proj.weight"
WTE = "model.transformer.wte.weight"
NAN, INF = math.nan, math.inf
BRACKETS = 10**5 * "["

Damage = Callable[[Path], object]


def complaint(error: type[Exception], act: Callable[[], object]) -> str:
    """The message of the `error` that `act` raises. A subclass of `error` fails."""
    with pytest.raises(error) as caught:
        act()
    assert caught.type is error
    return str(caught.value)


def started(*_: object, **__: object):
    pytest.fail("work has started")


# ---- checkpoints ----


def config(**changes: object) -> Damage:
    """config.json with other values; `...` takes a key out."""

    def damage(directory: Path):
        file = directory / "config.json"
        changed = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))

    return damage


def weights(changes: Mapping[str, Tensor | None]) -> Damage:
    """Other tensors in the first shard; `None` takes one out."""

    def damage(directory: Path):
        changed: dict[str, Tensor | None] = {**load_file(directory / FIRST), **changes}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, directory / FIRST)

    return damage


def written(file: str, content: str | bytes) -> Damage:
    """`file` with another content."""
    return lambda directory: (directory / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def removed(*files: str) -> Damage:
    """Without `files`."""
    return lambda directory: [(directory / file).unlink() for file in files]


def cut(file: str, size: int) -> Damage:
    """`file` without all bytes behind (below 0: without the last) `size`."""
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:size])


def folder(name: str) -> Damage:
    """A folder called `name`."""
    return lambda directory: (directory / name).mkdir()


def together(*damages: Damage) -> Damage:
    """One after the other."""
    return lambda directory: [damage(directory) for damage in damages]


BAD_CHECKPOINTS: dict[str, tuple[Damage, type[Exception], list[str]]] = {
    "missing shard": (removed(SECOND), FileNotFoundError, ["1 of 2 shards", SECOND]),
    "all shards missing": (removed(FIRST, SECOND), ValueError, ["no complete checkpoint", "*.safetensors"]),
    "shard is a directory": (
        together(removed(SECOND), folder(SECOND)), FileNotFoundError, ["1 of 2 shards", SECOND],
    ),
    "single file is a directory": (
        together(removed(INDEX), folder("model.safetensors")), ValueError, ["model.safetensors is not a file"],
    ),
    **{
        f"index names {name!r}": (
            written(INDEX, json.dumps({"weight_map": {WTE: FIRST, Q_PROJ: name}})),
            ValueError, [INDEX, repr(name), "in the same folder"],
        )
        for name in ("../out.safetensors", "/out.safetensors", f"./{SECOND}", "sub/x.safetensors", "..", ".", "")
    },
    "truncated data": (cut(SECOND, -100), ValueError, [SECOND, "truncated"]),
    "truncated header": (cut(FIRST, 100), ValueError, [FIRST, "truncated"]),
    "empty shard": (cut(FIRST, 0), ValueError, [FIRST, "truncated"]),
    "index of no JSON": (written(INDEX, "{"), ValueError, [INDEX, "damaged", "no JSON"]),
    "index of brackets": (written(INDEX, BRACKETS), ValueError, [INDEX, "damaged", "nested too deeply"]),
    "index without map": (written(INDEX, "{}"), ValueError, [INDEX, "damaged", "weight_map"]),
    "index is a list": (written(INDEX, "[]"), ValueError, [INDEX, "damaged", "not list"]),
    "map of nothing": (written(INDEX, '{"weight_map": {}}'), ValueError, [INDEX, "damaged", "weight_map"]),
    "map is a number": (written(INDEX, '{"weight_map": 1}'), ValueError, [INDEX, "damaged", "weight_map"]),
    "map to numbers": (written(INDEX, '{"weight_map": {"a": 1}}'), ValueError, [INDEX, "damaged", "weight_map"]),
    "index of no text": (written(INDEX, b"\xff\xfe\x00"), ValueError, [INDEX, "damaged", "no JSON"]),
    "neither index nor single file": (removed(INDEX), FileNotFoundError, ["model.safetensors", INDEX]),
    "integer weight": (
        weights({Q_PROJ: torch.zeros(32, 32, dtype=torch.long)}),
        ValueError, [f"{Q_PROJ} I64", "F32, F16, BF16"],
    ),
    "float64 weight": (
        weights({Q_PROJ: torch.zeros(32, 32, dtype=torch.float64)}),
        ValueError, [f"{Q_PROJ} F64", "F32, F16, BF16"],
    ),
    "wrong shape": (
        weights({Q_PROJ: torch.zeros(32, 31)}),
        ValueError, [f"{Q_PROJ} [32, 31] instead of [32, 32]"],
    ),
    "transposed embedding": (
        weights({WTE: torch.zeros(32, 128)}),
        ValueError, [f"{WTE} [32, 128] instead of [128, 32]"],
    ),
    "missing weight": (
        weights({Q_PROJ: None}), ValueError, [f"1 missing: {Q_PROJ}"],
    ),
    "unexpected weight": (weights({"stray": torch.zeros(1)}), ValueError, ["1 unexpected: stray"]),
    "everything at once": (
        weights(
            {
                WTE: None, Q_PROJ: None, "stray.one": torch.zeros(1), "stray.two": torch.zeros(1),
                "model.transformer.blocks.0.k_proj.weight": torch.zeros(3, 5),
                "model.transformer.blocks.0.attn_norm.weight": torch.zeros(32, dtype=torch.float64),
            }
        ),
        ValueError,
        [
            "2 missing:", WTE, Q_PROJ, "2 unexpected: stray.one, stray.two", "k_proj.weight [3, 5] instead of [16, 32]",
            "attn_norm.weight F64",
        ],
    ),
    "no model type": (config(model_type=...), ValueError, ["model_type", "llada, Dream, diffusion_gemma, gidd"]),
    "unknown model type": (
        config(model_type="lladaa"), ValueError, ["model_type 'lladaa'", "did you mean 'llada'?", "Dream"],
    ),
    "model type of another kind": (config(model_type=["llada"]), ValueError, ["model_type ['llada']", "Dream"]),
    "Dream": (
        config(**read_preset("dream-7b")), ValueError,
        ["missing: model.embed_tokens.weight", "unexpected: model.transformer."],
    ),
    "GIDD": (
        config(**read_preset("gidd-unif-3b")), ValueError, ["missing: model.embed_tokens.weight", "attn_layernorm"],
    ),
    "no config": (removed("config.json"), ValueError, ["no complete checkpoint", "config.json"]),
    "config of no JSON": (written("config.json", "{'a': 1}"), ValueError, ["config.json is damaged"]),
    "config of no text": (written("config.json", b"\xff\xfe\x00"), ValueError, ["config.json is damaged"]),
    "config of brackets": (written("config.json", BRACKETS), ValueError, ["config.json", "nested too deeply"]),
    "config is a list": (written("config.json", "[]"), ValueError, ["config.json is damaged", "not list"]),
    "alibi": (config(alibi=True), ValueError, ["alibi = True (allowed: False)", "LLaDA"]),
    "two unsupported": (
        config(rope=False, activation_type="gelu"), ValueError,
        ["rope = False (allowed: True)", "activation_type = 'gelu' (allowed: 'silu')"],
    ),
    "no mask token": (config(mask_token_id=...), ValueError, ["mask_token_id = None", "[0, 128)"]),
    "mask token outside": (config(mask_token_id=128), ValueError, ["mask_token_id = 128", "[0, 128)"]),
    "end token of another kind": (config(eos_token_id=[[0]]), ValueError, ["eos_token_id = [0]", "[0, 128)"]),
    "end of a turn outside": (
        written("generation_config.json", '{"eos_token_id": 128}'), ValueError, ["eos_token_id = 128", "[0, 128)"],
    ),
    "generation config of no JSON": (
        written("generation_config.json", "{"), ValueError, ["generation_config.json is damaged", "no JSON"],
    ),
    "theta as text": (config(rope_theta="1e4"), ValueError, ["rope_theta = '1e4'", "positive number"]),
    "more layers than any model": (config(n_layers=10**6), ValueError, ["n_layers = 1000000", "up to 1024"]),
    "a scaled rotation": (config(rope_scaling={"type": "yarn"}), ValueError, ["rope_scaling", "'yarn'"]),
    **{
        f"tokenizer {what}": (written(file, content), ValueError, ["the tokenizer in", "cannot be read", f"its {file}"])
        for what, file, content in (
            ("of no JSON", "tokenizer.json", "{"),
            ("of nothing", "tokenizer.json", "{}"),
            ("of brackets", "tokenizer.json", BRACKETS),
            ("of an unknown kind", "tokenizer_config.json", '{"tokenizer_class": 5}'),
            ("of an end that is no token", "tokenizer_config.json", '{"eos_token": {"a": 5}}'),
        )
    },
    "tokenizer settings of no JSON": (
        written("tokenizer_config.json", "["), ValueError, ["tokenizer_config.json is damaged", "no JSON"],
    ),
    "tokenizer settings of brackets": (
        written("tokenizer_config.json", BRACKETS), ValueError, ["tokenizer_config.json", "nested too deeply"],
    ),
    "tokenizer of a larger model": (
        config(vocab_size=100, mask_token_id=99, eos_token_id=98, pad_token_id=97),
        ValueError, ["the tokenizer in", "up to 110", "[0, 100)"],
    ),
}  # fmt: skip
# Errors that are found while weights are read.
BAD_WEIGHTS: dict[str, tuple[Damage, type[Exception], list[str]]] = {
    "weight of NaN": (
        weights({WTE: torch.zeros(128, 32).index_fill(0, torch.tensor([7]), NAN)}), tiered.NonFiniteError,
        [f"the weight {WTE} is not finite", FIRST, "damaged"],
    ),
    "weight of infinity": (
        weights({WTE: torch.zeros(128, 32, dtype=torch.bfloat16).fill_diagonal_(-INF)}), tiered.NonFiniteError,
        [f"the weight {WTE} is not finite", FIRST, "damaged"],
    ),
    "weight beyond the checkpoint's own dtype": (
        together(config(torch_dtype="float16"), weights({WTE: torch.full((128, 32), -1e8)})), tiered.NonFiniteError,
        [f"the weight {WTE}", "up to 1e+08", "float16, which ends at 6.55e+04", "dtype = 'float32' or 'bfloat16'"],
    ),
}  # fmt: skip


def files_of(directory: Path) -> dict[str, bytes | None]:
    """Every name beside and below `directory`, with the bytes of its file."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.parent.rglob("*")}


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.forward.incoming_weights.assign", started)


@pytest.mark.parametrize(("damage", "error", "fragments"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_bad_checkpoint(
    write_checkpoint: Callable[..., Path],
    nothing_loads: None,
    damage: Damage,
    error: type[Exception],
    fragments: list[str],
):
    not_loaded(write_checkpoint, damage, error, fragments)


@pytest.mark.parametrize(("damage", "error", "fragments"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weight(
    write_checkpoint: Callable[..., Path], damage: Damage, error: type[Exception], fragments: list[str]
):
    not_loaded(write_checkpoint, damage, error, fragments)


def not_loaded(
    write_checkpoint: Callable[..., Path], damage: Damage, error: type[Exception], fragments: list[str]
) -> None:
    directory = write_checkpoint(shards=2, tokenizer=True)
    damage(directory)
    before = files_of(directory)
    message = complaint(error, lambda: tiered.from_pretrained(directory))
    assert [fragment for fragment in fragments if fragment not in message] == [], message
    assert files_of(directory) == before


def test_the_checkpoint_is_good_before_the_damage(write_checkpoint: Callable[..., Path], nothing_loads: None):
    with pytest.raises(pytest.fail.Exception, match="work has started"):
        tiered.from_pretrained(write_checkpoint(shards=2, tokenizer=True))


# ---- arguments of from_pretrained ----


@pytest.mark.parametrize(
    ("arguments", "error", "fragments"),
    [
        ({"device": "gpu"}, ValueError, ["'gpu'", "'auto', 'cpu', 'cuda'"]),
        ({"device": "meta"}, ValueError, ["'meta'", "'auto', 'cpu', 'cuda'"]),
        ({"device": None}, ValueError, ["None", "'auto', 'cpu', 'cuda'"]),
        ({"device": "cuda:4096"}, ValueError, ["'cuda:4096'", "CUDA devices"]),
        ({"dtype": "float8"}, ValueError, ["unknown dtype 'float8'", "? allowed: auto, bfloat16, float16, float32"]),
        (
            {"dtype": torch.float64},
            ValueError,
            ["unknown dtype 'float64'", "allowed: auto, bfloat16, float16, float32"],
        ),
        ({"dtype": None}, ValueError, ["unknown dtype 'None'", "allowed: auto, bfloat16, float16, float32"]),
        ({"memory": "12 GiBi"}, ValueError, ["'12 GiBi'", "GiB"]),
        ({"memory": "lots"}, ValueError, ["'lots'", "GiB"]),
        ({"memory": -1}, ValueError, ["-1", "negative"]),
        ({"memory": 1.5e9}, TypeError, ["1500000000.0", "'12GiB'"]),
        ({"memory": True}, TypeError, ["True", "'12GiB'"]),
        ({"policy": "fast_dllm"}, ValueError, ["policy 'fast_dllm'", "did you mean 'fast_dllm_", "allowed:", "none"]),
        ({"policy": RowSchedule}, TypeError, ["policy", "RowSchedule"]),
        ({"policy": None}, TypeError, ["policy", "None"]),
        ({"policy": "none", "refresh_interval": 1}, ValueError, ["'refresh_interval'", "policy 'none'"]),
        (
            {"policy": "fast_dllm_dual", "refresh_intervall": 1},
            ValueError,
            ["'refresh_intervall'", "policy 'fast_dllm_dual'", "did you mean 'refresh_interval'?"],
        ),
        *[
            (
                {"policy": "polestar", name: 1},
                ValueError,
                [f"argument of from_pretrained {name!r}", f"did you mean {meant!r}?", "clusters"],
            )
            for name, meant in [
                ("memroy", "memory"),
                ("polcy", "policy"),
                ("torch_dtype", "dtype"),
                ("device_map", "device"),
            ]
        ],
        ({"trust_remote_code": True}, ValueError, ["trust_remote_code", "code in a checkpoint is never run"]),
        ({"policy": "none", "xyz": 1}, ValueError, ["'xyz'; allowed: device, dtype, kv, memory, policy, rope_scaling"]),
        ({"policy": make_policy("none"), "memroy": 1}, ValueError, ["did you mean 'memory'?"]),
        (
            {"policy": make_policy("none"), "refresh_interval": 1},
            ValueError,
            ["refresh_interval", "in the object: none"],
        ),
        *[
            (
                {"policy": "fast_dllm_dual", "refresh_interval": value},
                error,
                [f"refresh_interval = {value!r}", "at least 1"],
            )
            for value, error in [
                (0, ValueError),
                (-1, ValueError),
                (1.0, TypeError),
                (True, TypeError),
                ("1", TypeError),
            ]
        ],
    ],
)
def test_bad_argument(
    write_checkpoint: Callable[..., Path],
    nothing_loads: None,
    arguments: dict[str, Any],
    error: type[Exception],
    fragments: list[str],
):
    directory = write_checkpoint()
    message = complaint(error, lambda: tiered.from_pretrained(directory, **arguments))
    assert [fragment for fragment in fragments if fragment not in message] == [], message


@pytest.mark.parametrize(
    ("name", "error", "fragments"),
    [
        ("someone/no-such-model", ValueError, ["'someone/no-such-model'", "`hf download someone/no-such-model`"]),
        ("no-such-model", ValueError, ["'no-such-model'", "embedded,"]),
        ("embeded", ValueError, ["'embeded'", "did you mean 'embedded'?"]),
        ("./no/such/directory", ValueError, ["'./no/such/directory'", "embedded,", "directory (none"]),
        ("llada-8b", ValueError, ["'llada-8b' can be planned", "`hf download GSAI-ML/LLaDA-8B-Instruct`"]),
        ("llada-1.5", ValueError, ["'llada-1.5' can be planned", "`hf download GSAI-ML/LLaDA"]),
        ("GSAI-ML/LLaDA-1.5", ValueError, ["can be planned", "`hf download GSAI-ML/LLaDA-1.5`"]),
        (7, TypeError, ["7", "a string or a Path"]),
        ({"model_type": "llada"}, TypeError, ["model_type", "a string or a Path"]),
    ],
)
def test_bad_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Any, error: type[Exception], fragments: list[str]
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # whatever this machine has cached
    message = complaint(error, lambda: tiered.from_pretrained(name))
    assert [fragment for fragment in fragments if fragment not in message] == [], message


# ---- arguments of generate and logits ----


@pytest.fixture
def runtime(tiny_model: LLaDA, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A runtime in which a forward fails the test."""
    monkeypatch.setattr(tiny_model, "embed", started)
    ledger = Ledger()
    ledger.allocate({Account.WEIGHTS: 1000})
    return Runtime(tiny_model, policy=make_policy("none"), ledger=ledger, tokenizer=tokenizer)


def refused(runtime: Runtime, error: type[Exception], act: Callable[[], object], fragments: list[str]):
    """`act` raises the `error` with these `fragments` in its message, and leaves nothing in the books."""
    before = runtime.ledger.report()
    message = complaint(error, act)
    assert [fragment for fragment in fragments if fragment not in message] == [], message
    assert runtime.ledger.report() == before


IDS = torch.arange(6).view(2, 3)
CHAT = [{"role": "user", "content": "copy: Ada"}]


@pytest.mark.parametrize("inputs", [IDS, "copy: Ada", ["copy: Ada", "sort: Ben Ada"], CHAT, [CHAT, CHAT]])
def test_the_call_is_good_before_the_damage(runtime: Runtime, inputs: Any):
    with pytest.raises(pytest.fail.Exception, match="work has started"):
        runtime.generate(inputs, max_new_tokens=8)


@pytest.mark.parametrize(
    ("inputs", "mask", "error", "fragments"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, ValueError, ["empty", "[1, 0]"]),
        (torch.zeros(0, 3, dtype=torch.long), None, ValueError, ["empty", "[0, 3]"]),
        (torch.zeros(3, dtype=torch.long), None, ValueError, ["[batch, length]", "torch.int64 [3]"]),
        (torch.zeros(1, 2, 3, dtype=torch.long), None, ValueError, ["[batch, length]", "[1, 2, 3]"]),
        (torch.zeros(1, 3), None, ValueError, ["LongTensor", "torch.float32"]),
        (torch.ones(1, 3, dtype=torch.bool), None, ValueError, ["LongTensor", "torch.bool"]),
        (IDS - 1, None, ValueError, ["token id -1", "[0, 128)"]),
        (IDS + 123, None, ValueError, ["token id 128", "[0, 128)"]),
        (IDS, torch.ones(2, 2), ValueError, ["attention_mask", "[2, 2]", "[2, 3]"]),
        (IDS, torch.ones(3), ValueError, ["attention_mask", "[3]", "[2, 3]"]),
        (IDS, torch.full((2, 3), 0.5), ValueError, ["attention_mask", "0 (padding) and 1 (token)"]),
        (IDS, torch.tensor([[0, 1, 2], [1, 1, 1]]), ValueError, ["attention_mask", "0 (padding) and 1 (token)"]),
        (IDS, torch.tensor([[0.0, NAN, 1], [1, 1, 1]]), ValueError, ["attention_mask", "0 (padding) and 1 (token)"]),
        (IDS, torch.tensor([[0, 1, 1], [0, 0, 0]]), ValueError, ["prompts [1] are empty", "attention_mask"]),
        (IDS, "111", TypeError, ["attention_mask", "lists of ints", "'111'"]),
        ([[1, 2], [3]], [[1], [1, 1]], ValueError, ["attention_mask", "rows of other lengths"]),
        ([[1, 2], [3]], torch.ones(2, 2), ValueError, ["attention_mask", "rows of other lengths"]),
        ([[1, 2], []], None, ValueError, ["prompt 1 is empty"]),
        ([1, 2, 128], None, ValueError, ["token id 128", "[0, 128)"]),
        ([1, 2**70], None, TypeError, ["lists of ints", "1180591620717411303424"]),
        ([[1, [2]]], None, TypeError, ["lists of ints", "[[1, [2]]]"]),
        ([1.5], None, ValueError, ["LongTensor", "torch.float64"]),
        (np.ones(3, dtype=np.int64), None, ValueError, ["[batch, length]", "torch.int64 [3]"]),
        (np.array([["a"]]), None, TypeError, ["a numpy array", "'a'"]),
        ({"input_ids": IDS, "labels": IDS}, None, TypeError, ["'labels'", "input_ids, attention_mask"]),
        ({"input_ids": IDS, "attention_mask": IDS}, IDS, TypeError, ["attention_mask is given twice"]),
        ({"input_ids": IDS, "token_type_ids": IDS}, None, ValueError, ["token_type_ids", "other than 0"]),
        (IDS.to("meta"), None, ValueError, ["ids", "meta", "a dense one with values"]),
        (IDS.to_sparse(), None, ValueError, ["ids", "torch.sparse_coo"]),
        (torch.nested.nested_tensor([IDS, IDS], layout=torch.jagged), None, ValueError, ["ids", "nested"]),
        (IDS, torch.ones(2, 3, device="meta"), ValueError, ["attention_mask", "meta"]),
        (IDS, torch.ones(2, 3).to_sparse(), ValueError, ["attention_mask", "torch.sparse_coo"]),
    ],
)
def test_bad_ids(runtime: Runtime, inputs: Any, mask: Any, error: type[Exception], fragments: list[str]):
    refused(runtime, error, lambda: runtime.generate(inputs, attention_mask=mask), fragments)
    refused(runtime, error, lambda: runtime.logits(inputs, mask), fragments)


@pytest.mark.parametrize(
    ("inputs", "error", "fragments"),
    [
        ("", ValueError, ["prompt 0 is empty"]),
        ("  \n", ValueError, ["prompt 0 is empty"]),
        (["copy: Ada", ""], ValueError, ["prompt 1 is empty"]),
        ([], ValueError, ["inputs are empty"]),
        ((), ValueError, ["inputs are empty"]),
        ([[]], TypeError, ["a chat is a non-empty list", "[]"]),
        (["copy: Ada", 7], TypeError, ["a chat is a non-empty list", "'copy: Ada'"]),
        ([{"role": "user"}], TypeError, ["'role' and 'content'", "{'role': 'user'}"]),
        ([{"role": "user", "content": [{"type": "image_url"}]}], TypeError, ["'image_url'; 'text' is allowed"]),
        ([{"role": "user", "content": None}], TypeError, ["content is text, not None"]),
        ([CHAT, [{"content": "copy: Ada"}]], TypeError, ["'role' and 'content'", "{'content': 'copy: Ada'}"]),
        ({"role": "user", "content": "copy: Ada"}, TypeError, ["chat messages", "dict"]),
        (["copy: Ada", "copy: \ud83d"], ValueError, ["'\\ud83d' at character 6", "surrogate", "'copy: \\ud83d'"]),
        ([{"role": "user", "content": "\udcff"}], ValueError, ["'\\udcff' at character 8", "surrogate"]),
        (None, TypeError, ["inputs are missing", "LongTensor"]),
        (7, TypeError, ["LongTensor", "int"]),
    ],
)
def test_bad_text(runtime: Runtime, inputs: Any, error: type[Exception], fragments: list[str]):
    refused(runtime, error, lambda: runtime.generate(inputs), fragments)


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({}, ["inputs are missing"]),
        ({"inputs": IDS, "input_ids": IDS}, ["inputs and input_ids are both given"]),
        ({"input_ids": "copy: Ada"}, ["input_ids", "lists of ints", "str"]),
        ({"input_ids": ["copy: Ada"]}, ["input_ids", "lists of ints", "list"]),
    ],
)
def test_prompts_come_by_one_name(runtime: Runtime, given: dict[str, Any], fragments: list[str]):
    refused(runtime, TypeError, lambda: runtime.generate(**given), fragments)


def test_a_mask_beside_text(runtime: Runtime):
    mask = torch.ones(1, 3)
    refused(runtime, TypeError, lambda: runtime.generate("copy: Ada", attention_mask=mask), ["attention_mask", "ids"])


def test_text_without_a_tokenizer(runtime: Runtime):
    runtime.tokenizer = None
    files = ["tokenizer.json", "tokenizer_config.json", "token ids"]
    for inputs in ("copy: Ada", CHAT):
        refused(runtime, ValueError, lambda inputs=inputs: runtime.generate(inputs), files)


def test_chat_without_a_template(runtime: Runtime, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    refused(runtime, ValueError, lambda: runtime.generate(CHAT), ["no chat template", "string"])


def test_logits_take_ids_alone(runtime: Runtime):
    text: Any = "copy: Ada"
    refused(runtime, TypeError, lambda: runtime.logits(text), ["LongTensor", "str"])


def test_a_prompt_longer_than_the_context(runtime: Runtime):
    ids = torch.zeros(1, 225, dtype=torch.long)
    numbers = ["225 tokens", "max_new_tokens = 32", "257", "256"]
    refused(runtime, ContextLengthError, lambda: runtime.generate(ids, max_new_tokens=32), numbers)
    with pytest.raises(pytest.fail.Exception, match="work has started"):
        runtime.generate(ids[:, 1:], max_new_tokens=32)


@pytest.mark.parametrize("option", ["max_new_tokens", "block_length", "steps", "seed"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(-1, ValueError), (-32, ValueError)],
        *[
            (True, TypeError),
            ("32", TypeError),
            (32.0, TypeError),
            (NAN, TypeError),
            (INF, TypeError),
            ([32], TypeError),
        ],
    ],
)
def test_bad_integer(runtime: Runtime, option: str, value: Any, error: type[Exception]):
    allowed = [f"{option} = {value!r}", "an int", "is allowed"]
    refused(runtime, error, lambda: runtime.generate(IDS, **{option: value}), allowed)


@pytest.mark.parametrize("option", ["temperature", "cfg_scale", "confidence_threshold", "factor"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(-0.5, ValueError), (-1, ValueError), (NAN, ValueError), (INF, ValueError), (-INF, ValueError)],
        *[(1e308, ValueError), (10**400, ValueError), (True, TypeError), ("0.5", TypeError), ([0.5], TypeError)],
    ],
)
def test_bad_number(runtime: Runtime, option: str, value: Any, error: type[Exception]):
    allowed = [f"{option} = {value!r}", "a number", "is allowed"]
    refused(runtime, error, lambda: runtime.generate(IDS, **{option: value}), allowed)


@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({"max_new_tokens": 0}, ValueError, ["max_new_tokens = 0", "at least 1"]),
        ({"block_length": 0}, ValueError, ["block_length = 0", "at least 1"]),
        ({"steps": 0}, ValueError, ["steps = 0", "at least 1"]),
        ({"max_new_tokens": None}, TypeError, ["max_new_tokens = None", "an int"]),
        ({"temperature": None}, TypeError, ["temperature = None", "a number"]),
        ({"seed": 2**63}, ValueError, [f"seed = {2**63}", "from 0 to"]),
        ({"confidence_threshold": 1.01}, ValueError, ["confidence_threshold = 1.01", "from 0 to 1"]),
        # Divided by, float32's 0 would give NaN.
        ({"temperature": 1e-300}, ValueError, ["temperature = 1e-300", "0, or a number from 1.17549e-38 on"]),
        ({"alg": "entropy", "alg_temp": 1e-300}, ValueError, ["confidence_temperature = 1e-300", "0, or a number"]),
        ({"factor": 0}, ValueError, ["factor = 0", "above 0"]),
        ({"stop_at_eos": 1}, TypeError, ["stop_at_eos = 1", "True or False"]),
        ({"stop_at_eos": None}, TypeError, ["stop_at_eos = None", "True or False"]),
        ({"output_history": "yes"}, TypeError, ["output_history = 'yes'", "True or False"]),
        ({"max_new_tokens": 40}, ValueError, ["max_new_tokens = 40", "block_length = 32", "32 or 64"]),
        ({"max_new_tokens": 8, "block_length": 16}, ValueError, ["max_new_tokens = 8", "block_length = 16", "16"]),
        (
            {"max_new_tokens": 64, "block_length": 16, "steps": 6},
            ValueError,
            ["steps = 6", "the 4 blocks", "4 or 8"],
        ),
        ({"remasking": "low_confidance"}, ValueError, ["remasking 'low_confidance'", "did you mean 'low_confidence'?"]),
        ({"remasking": "random", "threshold": 0.9}, ValueError, ["'random'", "'static'", "'threshold'"]),
        ({"max_new_token": 8}, ValueError, ["option 'max_new_token'", "did you mean 'max_new_tokens'?"]),
        ({"tresholds": 0.9}, ValueError, ["option 'tresholds'", "did you mean 'threshold'?", "confidence_threshold"]),
        ({"config": 1}, ValueError, ["option 'config'", "allowed:"]),
        (
            {"commit": "treshold"},
            ValueError,
            ["commit rule 'treshold'", "did you mean 'threshold'?", "joint_threshold, origin"],
        ),
        (
            {"alg": "maskgit"},
            ValueError,
            ["commit rule 'maskgit'", "origin, quota, sequential, static, threshold"],
        ),
        ({"commit": 0.9}, TypeError, ["commit", "0.9"]),
        ({"commit": Threshold}, TypeError, ["commit", "Threshold"]),
        ({"commit": "threshold"}, ValueError, ["'threshold' takes confidence_threshold", "given: none"]),
        ({"commit": "static", "factor": 1.0}, ValueError, ["'static' takes no option", "given: factor"]),
        ({"commit": Factor(factor=1.0), "factor": 2.0}, ValueError, ["factor", "Factor(factor=1.0)"]),
        ({"threshold": 0.9, "factor": 1.0}, ValueError, ["confidence_threshold and factor", "one of them"]),
        ({"gen_length": 32, "max_new_tokens": 64}, ValueError, ["32", "64", "one of them"]),
        ({"threshold": 0.9, "confidence_threshold": 0.8}, ValueError, ["0.9", "0.8", "one of them"]),
        ({"alg": "random", "remasking": "low_confidence"}, ValueError, ["remasking", "one of them"]),
        ({"mask_id": 126336}, ValueError, ["mask_id = 126336", "127"]),
        ({"mask_token_id": 5}, ValueError, ["mask_token_id = 5", "127"]),
        ({"generation_config": 5}, TypeError, ["generation_config", "a mapping", "int"]),
        ({"generation_config": [("steps", 8)]}, TypeError, ["generation_config", "a mapping", "list"]),
        ({"generation_config": {"step": 8}}, ValueError, ["option 'step'", "did you mean 'steps'?"]),
        ({"generation_config": {5: 8}}, ValueError, ["option 5", "allowed:"]),
        ({"generation_config": {"mask_token_id": 5}}, ValueError, ["mask_token_id = 5", "127"]),
        ({"generation_config": {"threshold": 2}}, ValueError, ["confidence_threshold = 2", "from 0 to 1"]),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ValueError, ["min_new_tokens = 9", "max_new_tokens = 8"]),
        ({"min_length": 129}, ValueError, ["min_new_tokens = 129", "max_new_tokens = 128"]),
        ({"inspector": "x"}, TypeError, ["device_bytes and after_forward", "'x'"]),
        ({"streamer": 5}, TypeError, ["put and end", "5"]),
        ({"streamer": [].append}, TypeError, ["put and end", "append"]),
    ],
)
def test_bad_option(runtime: Runtime, options: dict[str, Any], error: type[Exception], fragments: list[str]):
    refused(runtime, error, lambda: runtime.generate(IDS, **options), fragments)


def test_a_streamer_needs_both_methods(runtime: Runtime):
    class PutAlone:
        def put(self, value: Tensor): ...

    streamer: Any = PutAlone()
    refused(runtime, TypeError, lambda: runtime.generate(IDS, streamer=streamer), ["put and end", "PutAlone"])


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *[(Threshold, {"confidence_threshold": value}) for value in (-0.1, 1.1, NAN, "0.9", True, None)],
        *[(DriftAware, {"early_threshold": value}) for value in (NAN, INF, 1e39)],
        *[(Timestep, {"confidence_temperature": value}) for value in (NAN, INF, 1e39, 1e-39)],
        *[(DLLMCache, {"update_ratio": value}) for value in (NAN, INF)],
        *[(ElasticCache, {"similarity_threshold": value}) for value in (NAN, INF, 1e39)],
        *[(Factor, {"factor": value}) for value in (0, -1.0, NAN, INF, 1e308, "1", False, None)],
    ],
)
def test_bad_number_of_a_rule_or_policy(rule: Callable[..., object], options: Mapping[str, Any]):
    (name, value), *_ = options.items()
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name} = {value!r}")):
        rule(**options)


# ---- budgets ----


@pytest.mark.parametrize(("dtype", "element"), [("auto", 4), ("bfloat16", 2), (torch.float16, 2)])
def test_weights_beyond_the_budget(
    write_checkpoint: Callable[..., Path],
    tiny_weights: Mapping[str, Tensor],
    nothing_loads: None,
    dtype: str | torch.dtype,
    element: int,
):
    directory = write_checkpoint()
    # Of two layers none can be streamed. With them goes a forward over one token.
    name = str(dtype).removeprefix("torch.")
    least = tiered.plan(directory, context=1, block_length=1, policy="none", dtype=name).tiers[Tier.DEVICE]
    needed = least.total
    assert least.accounts[Account.WEIGHTS] == element * sum(weight.numel() for weight in tiny_weights.values())
    with pytest.raises(TierCapacityError, match="this loads the model alone, calls take more") as caught:
        tiered.from_pretrained(directory, memory=needed - 1, dtype=dtype)
    error = caught.value
    assert (error.needed, error.available, error.tier) == (needed, needed - 1, Tier.DEVICE)
    with pytest.raises(pytest.fail.Exception, match="work has started"):
        tiered.from_pretrained(directory, memory=needed, dtype=dtype)


@pytest.mark.parametrize("options", [{}, {"cfg_scale": 1.0}, {"temperature": 0.5}])
def test_a_call_beyond_the_budget(tiny_model: LLaDA, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    def runtime(cap: int | None) -> Runtime:
        ledger = Ledger(MemoryBudget(device=cap))
        ledger.allocate({Account.WEIGHTS: 1000})
        return Runtime(tiny_model, policy=make_policy("none"), ledger=ledger)

    calls = [lambda r: r.generate(IDS, max_new_tokens=8, **options), lambda r: r.logits(IDS)]
    for call in calls:
        free = runtime(None)
        call(free)
        needed = free.ledger.report().peak_device_bytes - 1000
        assert needed > 0
        with monkeypatch.context() as patch:
            patch.setattr(tiny_model, "embed", started)
            small = runtime(1000 + needed - 1)
            before = small.ledger.report()
            with pytest.raises(TierCapacityError, match="raise `memory`") as caught:
                call(small)
            error = caught.value
            assert (error.needed, error.available, error.tier) == (needed, needed - 1, Tier.DEVICE)
            assert small.ledger.report() == before
            with pytest.raises(pytest.fail.Exception, match="work has started"):
                call(runtime(1000 + needed))


def test_a_failed_call_gives_its_room_back(runtime: Runtime):
    with pytest.raises(pytest.fail.Exception):
        runtime.generate(IDS, max_new_tokens=8)
    assert runtime.ledger.held(Tier.DEVICE) == 1000
