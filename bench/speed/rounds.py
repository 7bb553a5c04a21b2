"""Rounds of calls over all settings in turn, and the medians that they come to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speed.subjects import Subject
from tiered.core.errors import TierCapacityError

# Of a round, beside those that say what it is of.
FIGURES = (
    "tokens_per_second",
    "tokens_per_forward",
    "nfe",
    "ms_per_forward",
    "first_block_ms",
    "device_bytes",
    "host_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: `context` tokens in each of `batch` prompts; `confidence` None: one token a step."""

    policy: str
    context: int
    batch: int
    confidence: float | None


def one_round(subject: Subject, setting: Setting) -> dict[str, float]:
    """The figures of one call. Raises what the library refuses it with."""
    options: dict[str, Any] = {} if setting.confidence is None else {"confidence_threshold": setting.confidence}
    runtime = subject.runtime.with_policy(setting.policy)
    out = runtime.generate(subject.prompts(setting.context, setting.batch), **subject.call, **options)
    return {
        "tokens_per_second": out.timings.tokens_per_second,
        "tokens_per_forward": out.tokens_per_forward.mean().item(),
        "nfe": sum(out.forwards) / len(out.forwards),
        "ms_per_forward": out.timings.ms_per_forward,
        "first_block_ms": 1e3 * out.timings.first_block,
        "device_bytes": out.memory.peak_device_bytes,
        "host_bytes": out.memory.peak_host_bytes,
    }


class Rounds:
    """What was measured so far of every setting, or why it was refused."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.rounds: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in settings}
        self.refused: dict[Setting, str] = {}

    def measure(self, subject: Subject) -> None:
        """One round over all settings, those that were refused left out."""
        for setting, rounds in self.rounds.items():
            if setting not in self.refused:
                try:
                    rounds.append(one_round(subject, setting))
                except (TierCapacityError, ValueError, TypeError) as error:
                    self.refused[setting] = str(error)

    def rows(self) -> list[dict[str, Any]]:
        """One for each setting, in their order."""
        return [self._row(setting) for setting in self.rounds]

    def _row(self, setting: Setting) -> dict[str, Any]:
        rounds = self.rounds[setting]
        if setting in self.refused:
            figures = dict.fromkeys((*FIGURES, "low", "high"))
            return asdict(setting) | figures | {"rounds": 0, "why": self.refused[setting]}
        figures: dict[str, Any] = {name: percentile([each[name] for each in rounds], 50) for name in FIGURES}
        for name in ("device_bytes", "host_bytes"):
            figures[name] = round(figures[name])
        speeds = [each["tokens_per_second"] for each in rounds]
        spread = {"low": percentile(speeds, 20), "high": percentile(speeds, 80)}
        return asdict(setting) | figures | spread | {"rounds": len(rounds)}


def percentile(values: Sequence[float], share: float) -> float:
    """With straight lines between neighbours, as numpy has it."""
    return torch.tensor(values, dtype=torch.float64).quantile(share / 100).item()
