"""The tokenizer beside a checkpoint, through transformers, with remote code off."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tiered.models.locate import read_object

VOCABULARY_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
# Files of a tokenizer, for error messages.
TOKENIZER_SOURCES = f"{VOCABULARY_FILE}, or vocab.json and merges.txt with {SETTINGS_FILE}"
# By `tokenizer_class`, the name of the class in transformers. For a repository's code it is the one that does the same.
# The usual class is itself, since `AutoTokenizer` would read the files of all models of transformers, for a second.
_CLASSES: Mapping[str, str] = {"DreamTokenizer": "Qwen2Tokenizer", "PreTrainedTokenizerFast": "PreTrainedTokenizerFast"}


def load_tokenizer(directory: Path, *, vocab_size: int | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in `directory`; None if it has none. Raises `ValueError`, which names the file, for files that
    cannot be read, need code of their own, or have tokens beyond the `vocab_size` tokens of the model. A response
    template that transformers cannot read is such a file."""
    has_settings = (directory / SETTINGS_FILE).exists()
    in_parts = has_settings and (directory / "vocab.json").exists() and (directory / "merges.txt").exists()
    if not (directory / VOCABULARY_FILE).exists() and not in_parts:
        return None
    kind = str(read_object(directory / SETTINGS_FILE).get("tokenizer_class")) if has_settings else ""
    try:
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        if kind not in _CLASSES:
            # An empty config keeps transformers from looking up the model family, which it would warn about.
            options["config"] = transformers.PreTrainedConfig()
        named: Any = getattr(transformers, _CLASSES.get(kind, "AutoTokenizer"))
        tokenizer: PreTrainedTokenizerBase = named.from_pretrained(directory, **options)
        if getattr(tokenizer, "response_template", None) is not None:
            tokenizer.get_response_parser(prefix="")
    except Exception as error:  # transformers raises different types, depending on the file's content
        if "trust_remote_code" in str(error):  # its advice, which does not work here
            raise ValueError(
                f"the tokenizer in {directory} cannot be read: its class {kind!r} is code of the repository, which is "
                f"never run; with {VOCABULARY_FILE} beside it, a tokenizer_class of transformers in {SETTINGS_FILE}, "
                "such as 'PreTrainedTokenizerFast', is allowed"
            ) from None
        raise ValueError(
            f"the tokenizer in {directory} cannot be read, by its {_broken(directory)}: {error}"
        ) from error
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has tokens up to {largest}, the model (config.json) those in "
            f"[0, {vocab_size}): they do not belong together"
        )
    return tokenizer


def _broken(directory: Path) -> str:
    """The file that a tokenizer cannot be read from. Its settings have been parsed already."""
    for name in (VOCABULARY_FILE, "vocab.json", "added_tokens.json", "special_tokens_map.json"):
        file = directory / name
        try:
            if file.exists():
                _ = Tokenizer.from_file(str(file)) if name == VOCABULARY_FILE else read_object(file)
        except Exception:  # tokenizers raises this for any fault
            return name
    return SETTINGS_FILE if (directory / VOCABULARY_FILE).exists() else f"merges.txt or {SETTINGS_FILE}"
