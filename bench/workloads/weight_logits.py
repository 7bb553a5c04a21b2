"""Effects of the form of weights on logits, beside the same model with raw ones, and the bytes of the form."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from measuring.worker import refusing
from torch import Tensor
from training.tasks import TASKS, sample

import tiered
from tiered.models.weight_form import WeightForm, layer_bytes, weight_bytes
from tiered.runtime import Runtime
from workloads.kv_logits import apart, canvas, distances
from workloads.models import VOCABULARY
from workloads.streamed_model import random_files
from workloads.subjects import RANDOM

ANSWER = 32  # rows at the end of each canvas that are compared
PROMPT = 224  # tokens in front of them, of a random model


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One row: KL of the distributions of an answer's rows, and the share with another likeliest token, over all tasks.

    `settings` has "form", "model" ("random": of "width" and "layers", with logits of a standard deviation of about 4)
    and "examples" of each task, or canvases. "bytes_per_element": of layers' matrices; "weight_bytes": of all weights.
    """
    with ExitStack() as stack:
        of_random = settings["model"] == RANDOM
        sizes = (settings["width"], settings["layers"], PROMPT + ANSWER) if of_random else ()
        path: Any = stack.enter_context(random_files(*sizes)) if of_random else paths[settings["model"]]
        with refusing():
            raw, coded = (
                stack.enter_context(tiered.from_pretrained(path, policy="none", device="cpu", weights=form))
                for form in ("raw", settings["form"])
            )
        found = distances(apart(raw, coded, ids, ANSWER) for ids in _canvases(raw, settings))
        shape, form = raw.model.shape, WeightForm.of(settings["form"])
        elements = sum(map(prod, shape.matrices.values()))
    yield found | {
        "bytes_per_element": layer_bytes(shape, shape.dtype, form) / elements,
        "weight_bytes": weight_bytes(shape, shape.dtype, form),
    }


def _canvases(runtime: Runtime, settings: Mapping[str, Any]) -> Iterator[Tensor]:
    """Prompts with noise behind them: masks, or random tokens if the model was trained on these."""
    draws, count = torch.Generator().manual_seed(settings["seed"]), settings["examples"]
    if settings["model"] == RANDOM:
        for ids in torch.randint(0, VOCABULARY - 2, (count, PROMPT), generator=draws):
            yield F.pad(ids[None], (0, ANSWER), value=runtime.model.mask_token_id)
        return
    for task in TASKS:
        for number in range(count):
            ids = canvas(runtime, sample(task, "test", settings["seed"] + number).prompt, ANSWER)
            if runtime.model.shape.noise != "mask":
                ids[:, -ANSWER:] = torch.randint(0, runtime.model.shape.vocab_size, (1, ANSWER), generator=draws)
            yield ids
