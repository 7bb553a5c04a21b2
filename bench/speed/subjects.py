"""Who is asked for speed, and what: an embedded model with lookups, or a random model with random tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from step_cost import VOCABULARY, random_model

import tiered
from tiered.embedded import tasks
from tiered.inputs import Inputs
from tiered.offload.device import pick_device
from tiered.policies.none import NoCache
from tiered.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and what it is asked: `prompts(context, batch)`.

    Attributes:
        call: options of every call.
    """

    runtime: Runtime
    prompts: Callable[[int, int], Inputs]
    call: dict[str, Any]


def embedded_subject(model: str, device: str, seed: int, call: dict[str, Any]) -> Subject:
    """An embedded model, and lookups from the test split."""

    def prompts(context: int, batch: int) -> Inputs:
        examples = [tasks.sample("lookup", "test", seed + number, size=context) for number in range(batch)]
        return [[{"role": "user", "content": example.prompt}] for example in examples]

    return Subject(runtime=tiered.from_pretrained(model, policy="none", device=device), prompts=prompts, call=call)


def random_subject(width: int, layers: int, positions: int, device: str, seed: int, call: dict[str, Any]) -> Subject:
    """A random model for up to `positions`, and random tokens. Its answers have no end."""

    def prompts(context: int, batch: int) -> Inputs:
        return torch.randint(0, VOCABULARY - 2, (batch, context), generator=torch.Generator().manual_seed(seed))

    model = random_model(width, layers, positions).to(pick_device(device))
    return Subject(
        runtime=Runtime(model, policy=NoCache()), prompts=prompts, call=call | {"stop_at_eos": False, "seed": seed}
    )
