"""The tokenizer beside a checkpoint, through transformers, with remote code off."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in `directory`; None where it has none (token ids still work).

    Raises:
        ValueError: the files are there and cannot be read.
    """
    if not all((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        # An empty config keeps transformers from looking for the model family, which it does not know and warns about.
        return AutoTokenizer.from_pretrained(
            directory, config=PreTrainedConfig(), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever the file's content leads to
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
