"""Tokenizers of checkpoints: tokenizer.json, or a vocabulary with merges, and never code that a repository brings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import tiered
from tiered.models.dream import read_dream_config
from tiered.models.locate import checkpoint_directory
from tiered.models.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"]
VOCABULARY = {token: number for number, token in enumerate([*ALPHABET, *(pair.replace(" ", "") for pair in MERGES)])}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
IDS = {token: len(VOCABULARY) + number for number, token in enumerate(SPECIAL)}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "DreamTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    "added_tokens_decoder": {
        str(number): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for token, number in IDS.items()
    },
    "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
    "bos_token": "<|beginoftext|>",
    "eos_token": "<|endoftext|>",
    "mask_token": "<|mask|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "add_bos_token": False,
    "errors": "replace",
    "model_max_length": 131072,
}  # fmt: skip
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "hello world<|im_end|> Wörter,  don't 1234\n\n\tx"


def fast() -> Tokenizer:
    """The same vocabulary as tokenizer.json has it, with the pre-tokenizer of Qwen2's published file."""
    tokenizer = Tokenizer(
        models.BPE(vocab=VOCABULARY, merges=[(left, right) for left, right in map(str.split, MERGES)])
    )
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(pattern=Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer as Dream's repositories have it, with `files` on top. One without text is left out."""

    def write(files: dict[str, str | None] | None = None, **settings: Any) -> Path:
        vocabulary = {
            "vocab.json": json.dumps(VOCABULARY),
            "merges.txt": "\n".join(["#version: 0.2", *MERGES, ""]),
            "tokenizer_config.json": json.dumps({**SETTINGS, **settings}),
            # Were it run, nothing would be loaded.
            "tokenization_dream.py": "raise AssertionError('code of a repository')",
        }
        for name, content in {**vocabulary, **(files or {})}.items():
            if content is not None:
                (tmp_path / name).write_text(content, encoding="utf-8")
        return tmp_path

    return write


LAYOUTS: dict[str, tuple[dict[str, str | None], dict[str, Any]]] = {
    "vocabulary and merges, template among the settings": ({}, {"chat_template": CHATML}),
    "vocabulary and merges, template in a file": ({"chat_template.jinja": CHATML}, {}),
    "tokenizer.json beside them": ({"tokenizer.json": fast().to_str()}, {"chat_template": CHATML}),
    "tokenizer.json alone": (
        {"tokenizer.json": fast().to_str(), "vocab.json": None, "merges.txt": None},
        {"chat_template": CHATML},
    ),
    "under transformers' own name": (
        {},
        {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {}, "chat_template": CHATML},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_same(write: Callable[..., Path], layout: str):
    files, settings = LAYOUTS[layout]
    tokenizer = load_tokenizer(write(files, **settings))
    assert tokenizer is not None
    ids = list(tokenizer(TEXT)["input_ids"])
    assert ids == fast().encode(TEXT).ids
    assert ids[:3] == [VOCABULARY["hello"], VOCABULARY["Ġwo"], VOCABULARY["r"]] and IDS["<|im_end|>"] in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT.replace("<|im_end|>", "")
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL] == list(IDS.values())
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (IDS["<|endoftext|>"], IDS["<|endoftext|>"])
    assert tokenizer.mask_token_id == IDS["<|mask|>"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    begin, end = IDS["<|im_start|>"], IDS["<|im_end|>"]
    spelled = [begin, *fast().encode("user\nhello").ids, end, *fast().encode("\n").ids]
    assert list(chat["input_ids"]) == [*spelled, begin, *fast().encode("assistant\n").ids]  # type: ignore[index]


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_there_is_no_tokenizer_if_a_file_is_missing(write: Callable[..., Path], missing: str):
    assert load_tokenizer(write({missing: None})) is None


def test_tokenizer_json_needs_no_settings(write: Callable[..., Path]):
    absent = dict.fromkeys(("vocab.json", "merges.txt", "tokenizer_config.json"))
    tokenizer = load_tokenizer(write({**absent, "tokenizer.json": fast().to_str()}))
    assert tokenizer is not None
    ids = list(tokenizer(TEXT)["input_ids"])
    assert ids == fast().encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"vocab.json": "{"}, {}, r"cannot be read, by its vocab\.json:"),
        ({"vocab.json": "[]"}, {}, r"cannot be read, by its vocab\.json:"),
        (
            {"merges.txt": "#version: 0.2\nnot in the vocabulary\n"},
            {},
            r"by its merges\.txt or tokenizer_config\.json:",
        ),
        ({"added_tokens.json": "{", "tokenizer_config.json": "{}"}, {}, r"by its added_tokens\.json:"),
        ({"tokenizer_config.json": "[]"}, {}, r"tokenizer_config\.json is damaged: .* not list"),
        (
            {},
            {"tokenizer_class": "AcmeTokenizer", "auto_map": {"AutoTokenizer": ["acme.AcmeTokenizer", None]}},
            r"'AcmeTokenizer' is code of the repository, which is never run; .* 'PreTrainedTokenizerFast', is allowed",
        ),
    ],
    ids=["no JSON", "a list", "merges of nothing", "added tokens", "settings are a list", "code of its own"],
)
def test_files_that_cannot_be_read_are_errors(
    write: Callable[..., Path], files: dict[str, str | None], settings: Any, message: str
):
    directory = write(files, **settings)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(directory)
    assert "trust_remote_code" not in str(caught.value)  # there is no such argument here


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path):
    """LLaDA's embedding may have more rows than there are tokens, and the tokenizer has no more tokens than those."""
    shutil.copytree(checkpoint_directory("embedded"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    with pytest.raises(ValueError, match=r"tokens up to \d+, the model \(config\.json\) those in \[0, 10\)"):
        tiered.from_pretrained(tmp_path / "model")


def test_text_in_and_out(write: Callable[..., Path], tmp_path: Path):
    # A Dream with the vocabulary of the tokenizer: its answers are text.
    config: dict[str, Any] = {
        "model_type": "Dream", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": len(VOCABULARY) + len(SPECIAL),
        "max_position_embeddings": 128, "torch_dtype": "float32", "mask_token_id": IDS["<|mask|>"],
        "eos_token_id": IDS["<|endoftext|>"], "pad_token_id": IDS["<|endoftext|>"],
    }  # fmt: skip
    write(chat_template=CHATML)
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = read_dream_config(config).shape.weight_shapes
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    runtime = tiered.from_pretrained(tmp_path, policy="none")
    out = runtime.generate([{"role": "user", "content": "hello"}], max_new_tokens=8, stop_at_eos=False)
    assert out.text is not None and runtime.tokenizer is not None
    ids = out.sequences[0, -8:].tolist()
    kept = ids[: ids.index(IDS["<|endoftext|>"])] if IDS["<|endoftext|>"] in ids else ids
    assert out.text == [runtime.tokenizer.decode(kept, skip_special_tokens=True)]
    assert not any(token in out.text[0] for token in SPECIAL)
