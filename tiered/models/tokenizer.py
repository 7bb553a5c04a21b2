"""The tokenizer beside a checkpoint, through transformers, with remote code off."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# What a tokenizer is read from, for error messages.
TOKENIZER_SOURCES = "tokenizer_config.json and tokenizer.json, or vocab.json and merges.txt in place of the latter"
_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
# Classes that repositories bring as code of their own, and those of transformers that do the same.
_SAME_AS: Mapping[str, type[PreTrainedTokenizerBase]] = {"DreamTokenizer": Qwen2Tokenizer}


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in `directory`; None where it has none (token ids still work).

    Raises:
        ValueError: the files are there and cannot be read.
    """
    config = directory / "tokenizer_config.json"
    complete = any(all((directory / name).exists() for name in names) for names in _VOCABULARIES)
    if not (config.exists() and complete):
        return None
    try:
        known = _SAME_AS.get(json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class"))
        if known is not None:
            return known.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        # An empty config keeps transformers from looking for the model family, which it does not know and warns about.
        return AutoTokenizer.from_pretrained(
            directory, config=PreTrainedConfig(), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever the file's content leads to
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
