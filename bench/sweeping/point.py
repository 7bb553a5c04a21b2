"""One point of a sweep: all that a measurement rests on, and the name that its content gives it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeping.axes import OPTION_AXES
from tiered.core.byte_size import parse_bytes
from tiered.policies.registry import make_policy

SCHEMA = "tiered sweep 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all points of a sweep share.

    Attributes:
        model: its name, without the folders of a path.
        weights_sha256: of its weights.
        device: "cpu" or "cuda".
        tasks: by name, how many examples of it.
        max_new_tokens, block_length: of every answer.
        seed: number of the first example of each task, and of the call.
        threads: that torch computes with.
    """

    model: str
    weights_sha256: str
    device: str
    tasks: Mapping[str, int]
    max_new_tokens: int = 32
    block_length: int = 32
    seed: int = 0
    threads: int = 1

    def settings(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "weights_sha256": self.weights_sha256,
            "device": self.device,
            "tasks": dict(self.tasks),
            "max_new_tokens": self.max_new_tokens,
            "block_length": self.block_length,
            "seed": self.seed,
            "threads": self.threads,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A policy with its options, and the calls that it answers.

    Attributes:
        policy: name of a policy or preset.
        options: of the policy, all that are given.
        context: tokens of the prompts of lookups.
        batch: sequences of a call.
        budget: of the device tier, as it was written; None: no cap.
        confidence: threshold of the commit rule; None: one token a step.
        common: the rest.

    Raises:
        ValueError, TypeError: no such policy, option or size.
    """

    policy: str
    options: Mapping[str, Any]
    context: int
    batch: int
    budget: str | None
    confidence: float | None
    common: Common

    def settings(self) -> dict[str, Any]:
        """Plain types for JSON: all that a measurement depends on. Two ways to write a size are one."""
        return self.common.settings() | {
            "policy": self.policy,
            "policy_options": dict(self.options),
            "context": self.context,
            "batch": self.batch,
            "budget_bytes": self.budget_bytes,
            "confidence": self.confidence,
        }

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of the budget; None: no cap."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def key(self) -> str:
        """16 hex digits: what the settings hash to."""
        return key_of(self.settings())

    def columns(self) -> dict[str, Any]:
        """The columns of a row that say which point it is of."""
        values = self.axis_values()
        clusters = values["clusters"]
        return {
            "point": self.key,
            "model": self.common.model,
            "policy": self.policy,
            "policy_options": json.dumps(dict(self.options), sort_keys=True),
            "clusters": clusters if isinstance(clusters, int) else None,
            "top_m": values["top_m"],
            "update_threshold": values["update_threshold"],
            "codec": values["codec"],
            "context": self.context,
            "batch": self.batch,
            "budget": self.budget,
            "budget_bytes": self.budget_bytes,
            "confidence": self.confidence,
        }

    def axis_values(self) -> dict[str, Any]:
        """Where it is on every axis; None where the policy has no such axis."""
        policy = make_policy(self.policy, **self.options)
        options = {axis: getattr(policy, axis, None) for axis in OPTION_AXES}
        return (
            {"policy": self.policy}
            | options
            | {"codec": None if options["codec"] is None else str(options["codec"])}
            | {"context": self.context, "batch": self.batch, "budget": self.budget, "confidence": self.confidence}
        )

    def __str__(self) -> str:
        values = self.axis_values()
        names = {"clusters": "C", "top_m": "M", "update_threshold": "T"}
        own = [f"{names.get(axis, axis)}={values[axis]}" for axis in OPTION_AXES if values[axis] is not None]
        call = [f"context={self.context}", f"batch={self.batch}", f"confidence={self.confidence}"]
        budget = [] if self.budget is None else [f"budget={self.budget}"]
        return " ".join([self.policy, *own, *call, *budget])


def key_of(settings: Mapping[str, Any]) -> str:
    """16 hex digits of the sha256 of `settings` as canonical JSON: sorted, without spaces."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
