"""Answers of four blocks behind short prompts, by families whose rows see the whole canvas."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

import tiered
from tiered.output import GenerationOutput
from tiered.policies.base import Policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = {"llada": "llada/llada_tiny_gqa", "dream": "dream/dream_tiny", "gidd": "gidd/gidd_tiny_unif"}
PROMPT, BLOCK, BLOCKS = 20, 8, 4


@cache
def runtime(family: str) -> Runtime:
    return tiered.from_pretrained(GOLDENS / FAMILIES[family], dtype="float32", policy="none")


def answered(family: str, policy: Policy, prompts: slice = slice(0, 1), **given: Any) -> GenerationOutput:
    """Four blocks behind prompts of 20, 13 and 17 tokens."""
    ids = torch.randint(2, 480, (3, PROMPT), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :3] = 0
    call = {"max_new_tokens": BLOCK * BLOCKS, "block_length": BLOCK, "stop_at_eos": False} | given
    return runtime(family).with_policy(policy).generate(ids[prompts], attention_mask=mask[prompts], **call)


def alone(family: str, policy: Policy, number: int, **given: Any) -> GenerationOutput:
    """One of the prompts in a call of its own, with the draws that it has in a batch."""
    seed = {"seed": given["seed"] + number} if "seed" in given else {}
    return answered(family, policy, slice(number, number + 1), **given | seed)
