"""Chats as the harness asks for them: text that has gone through the tokenizer's own template."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    """`messages` as one prompt, at whose end the answer begins.

    Without `add_generation_prompt` the last message is the answer's own beginning, which goes on (a task's
    `gen_prefix`): it is left open.

    Raises:
        ValueError: the tokenizer has no template.
    """
    template(tokenizer, True)
    text = tokenizer.apply_chat_template(
        list(messages),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    return str(text)


def template(tokenizer: PreTrainedTokenizerBase, chosen: bool | str | None) -> str | None:
    """The template that `--apply_chat_template` asks for: the tokenizer's own, or none.

    Raises:
        ValueError: the tokenizer has no template, or one is asked for by name: the harness tells a model the name for
            its results alone, not when it applies a template.
    """
    if not chosen:
        return None
    if isinstance(chosen, str):
        raise ValueError(f"--apply_chat_template {chosen}: no template is chosen by name here; leave the name out")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; run without --apply_chat_template")
    return tokenizer.get_chat_template()
