"""The loop over a run's steps: validation, checkpoints, and the lines of the log."""

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from workloads.scoring import score_examples

from tiered.models.base import DiffusionModel
from tiered.models.tokenizer import load_tokenizer
from tiered.policies.block_causal import BlockCausal
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from training.fresh_batches import SHARE
from training.tasks import FRESH_PRINTED, KEY_TOKENS, LONG_TASKS, TASKS, sample
from training.tokenizer import save_tokenizer
from training.trainer import Trainer

SHORTEST_VALIDATED_LOOKUP, LONGEST_VALIDATED_LOOKUP = 64, 1024
LONGEST_VALIDATED_FRESH = 512
LONG_CANVAS = 128


def train(
    trainer: Trainer,
    checkpoint: Path,
    *,
    log: Callable[[dict[str, Any]], object] = lambda line: None,
    advance: Callable[[int], object] = lambda step: None,
) -> None:
    """Train up to the settings' last step.

    Args:
        trainer: fresh, or restored from `checkpoint`.
        checkpoint: written every `save_every` steps and at the end.
        log: gets a line of figures at the steps that report or validate.
        advance: gets the number of steps done, after each.
    """
    settings, standing = trainer.settings, trainer.standing
    tokenizer = embedded_tokenizer(trainer.model.shape.max_context)
    tokens, seconds = standing.tokens, standing.seconds  # at the last report
    # A thread and a core for each stream of a step, up to the settings' `workers`.
    with ThreadPoolExecutor(settings.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while standing.step < settings.steps:
            trainer.step(pool)
            step, curriculum = standing.step, trainer.curriculum
            if step % settings.report_every == 0:
                speed = (standing.tokens - tokens) / (standing.seconds - seconds)
                tokens, seconds = standing.tokens, standing.seconds
                line = {"step": step, "tokens": tokens, "tokens/s": round(speed), "hours": round(seconds / 3600, 4)}
                line |= {"lists": curriculum.list_high, "lookup": round(curriculum.lookup_high)}
                if settings.fresh_tokens:
                    line |= {name: round(size) for name, size in curriculum.fresh_high.items()}
                log(line | {f"loss {name}": round(loss, 4) for name, loss in standing.losses.items()})
            ends = step == settings.steps
            if ends or step % settings.score_every == 0:
                lookup = min(max(SHORTEST_VALIDATED_LOOKUP, int(curriculum.lookup_high)), LONGEST_VALIDATED_LOOKUP)
                scores = validate(
                    trainer.average, tokenizer, examples=settings.score_examples, first=step, lookup=lookup
                )
                if settings.fresh_tokens:
                    scores |= validate_fresh(
                        trainer.average,
                        tokenizer,
                        examples=settings.score_examples,
                        first=step,
                        sizes=curriculum.fresh_high,
                    )
                trainer.follow(scores)
                log({"step": step, "exact match": scores})
            if ends or step % settings.save_every == 0:
                trainer.save(checkpoint)
            advance(step)


def validate(
    model: DiffusionModel, tokenizer: PreTrainedTokenizerBase, *, examples: int, first: int, lookup: int
) -> dict[str, float]:
    """Exact match by task: validation examples `first` to `first + examples - 1`, lookups of `lookup` prompt tokens.

    The runtime decodes one token a forward without a cache, with a canvas and a block of 32. Under masks it fixes the
    surest token; under uniform noise it rewrites the token that the model would most like to change. Long answers, of
    several blocks, come from a prefix cache, with all sure tokens at once. A model that sees blocks has an exact cache,
    and blocks of its own.
    """
    in_blocks = model.shape.block_causal
    runtime = Runtime(model, policy=BlockCausal() if in_blocks else make_policy("none"), tokenizer=tokenizer)
    scores = {}
    for name in TASKS:
        size = lookup if name == "lookup" else None
        drawn = [sample(name, "validation", number, size=size) for number in range(first, first + examples)]
        scores[name] = score_examples(runtime, drawn).exact_match
    sure: dict[str, Any] = {"max_new_tokens": LONG_CANVAS, "confidence_threshold": 0.9}
    if not in_blocks:
        runtime, sure["block_length"] = runtime.with_policy(make_policy("fast_dllm_prefix")), 32
    for name, spec in LONG_TASKS.items():
        size = max(lookup, spec.sizes[0]) if name == "long_lookup" else spec.sizes[1]
        drawn = [sample(name, "validation", number, size=size) for number in range(first, first + examples)]
        found = score_examples(runtime, drawn, **sure)
        scores[name] = found.exact_match
    return scores


def validate_fresh(
    model: DiffusionModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    examples: int,
    first: int,
    sizes: Mapping[str, float],
) -> dict[str, float]:
    """Exact match of `FRESH_TASKS`, as `validate`, without a cache and one token a forward. Prompts have `sizes`
    tokens, at most `LONGEST_VALIDATED_FRESH`, and the longest answers of such prompts."""
    runtime, scores = Runtime(model, policy=make_policy("none"), tokenizer=tokenizer), {}
    for name, high in sizes.items():
        size = min(int(high), LONGEST_VALIDATED_FRESH)
        printed = min(FRESH_PRINTED[1], int(size * SHARE) // KEY_TOKENS)
        drawn = [
            sample(name, "validation", number, size=size, printed=printed) for number in range(first, first + examples)
        ]
        found = score_examples(runtime, drawn, max_new_tokens=LONG_CANVAS, block_length=32)
        scores[name] = found.exact_match
    return scores


def embedded_tokenizer(max_context: int) -> PreTrainedTokenizerBase:
    """The tokenizer as a checkpoint of the model would bring it."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), model_max_length=max_context)
        tokenizer = load_tokenizer(Path(folder))
    assert tokenizer is not None
    return tokenizer
