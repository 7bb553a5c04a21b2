"""The word-level tokenizer of the embedded model: built here, stored as tokenizer.json, read by `AutoTokenizer`.

A token carries the space in front of it (" Ada", the first letter of a key " Q"). Tokens put together, without the
first space, are the text again. Digits, key letters and punctuation are single tokens.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from training.tasks import LETTERS, NAMES

MASK, EOS, USER, ASSISTANT, UNKNOWN = "<|mask|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|unknown|>"
SPECIAL_TOKENS: tuple[str, ...] = (EOS, USER, ASSISTANT, MASK, UNKNOWN)
WORDS = (
    " copy",
    " reverse",
    " sort",
    " replace",
    " insert",
    " remove",
    " with",
    " after",
    " lookup",
    " add ",
    " chain ",
)
PUNCTUATION = (":", "=", "+", "-", " +", " -", " ?")
# A word before digits keeps the space behind it, so that a digit has one token wherever it stands.
PIECES = r" (?:add|chain) | ?[A-Z][a-z]+| ?[a-z]+| ?[A-Z]|\d| ?[^\w\s]"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|assistant|>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token → id, special tokens first."""
    names = [f" {name}" for name in NAMES]
    keys = [f" {letter}" for letter in LETTERS] + list(LETTERS)
    tokens = [*SPECIAL_TOKENS, *WORDS, *PUNCTUATION, *"0123456789", *names, *keys]
    return {token: index for index, token in enumerate(tokens)}


def build_tokenizer() -> Tokenizer:
    """The tokenizer: text between special tokens is space-normalised, then split by `PIECES`."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            normalizers.Prepend(" "),
            # An answer that begins with digits has no space to carry.
            normalizers.Replace(Regex(r"^ (?=\d)"), ""),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(directory: Path, *, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as `AutoTokenizer.from_pretrained(directory)` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
