"""Effects of a codec of keys and values on the logits of a canvas, beside the same model with raw ones."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from training import tasks

import tiered
from tiered.forward.sizes import kv_code
from tiered.runtime import Runtime


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each task: KL of the distributions of an answer's masks, and the share with another likeliest token.

    `settings` has "model", "kv", "answer" (masks behind a prompt) and "tasks" (name, size, count).
    """
    raw = tiered.from_pretrained(paths[settings["model"]], policy="none", device=settings["device"])
    coded = Runtime(raw.model, policy=raw.policy, tokenizer=raw.tokenizer, kv=kv_code(settings["kv"], raw.model.shape))
    for task, size, count in settings["tasks"]:
        found = []
        for number in range(count):
            prompt = tasks.sample(task, "test", settings["seed"] + number, size=size).prompt
            found.append(apart(raw, coded, canvas(raw, prompt, settings["answer"]), settings["answer"]))
        yield {"task": task, "size": size, "examples": count} | distances(found)


def distances(found: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Columns from the results of `apart` for several canvases."""
    kl, others = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {"kl": kl.mean().item(), "kl_p99": kl.quantile(0.99).item(), "other_token": others.mean().item()}


def canvas(runtime: Runtime, prompt: str, answer: int) -> Tensor:
    """Ids of a chat's prompt, and masks."""
    assert runtime.tokenizer is not None, "embedded models have one"
    chat = [{"role": "user", "content": prompt}]
    ids: Any = runtime.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    return F.pad(ids, (0, answer), value=runtime.model.mask_token_id)


def apart(raw: Runtime, coded: Runtime, ids: Tensor, answer: int) -> tuple[Tensor, Tensor]:
    """For each of the last `answer` rows: KL of `coded` beside `raw`, and 1 if its likeliest token is another."""
    ours, theirs = (runtime.logits(ids)[0, -answer:].double().log_softmax(-1) for runtime in (coded, raw))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    return kl, (ours.argmax(-1) != theirs.argmax(-1)).double()
