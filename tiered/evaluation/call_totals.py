"""What the answers of an evaluation cost, summed over its calls: a score means little without its price."""

from dataclasses import dataclass, field
from typing import Any

from tiered.output import GenerationOutput


@dataclass(slots=True)
class CallTotals:
    """Sums over calls of `generate`.

    Attributes:
        calls, sequences: how many there were.
        forwards: of all sequences, each counted as often as it took part.
        tokens: of all answers, before they are cut; end-of-sequence and padding not counted.
        seconds: from first forwards to last commits.
        peak_bytes: the largest peak of each tier, from the ledger.
    """

    calls: int = 0
    sequences: int = 0
    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, out: GenerationOutput) -> None:
        """Count one call."""
        self.calls += 1
        self.sequences += len(out.forwards)
        self.forwards += sum(out.forwards)
        self.tokens += out.timings.tokens
        self.seconds += out.timings.total
        for tier, report in out.memory.tiers.items():
            self.peak_bytes[str(tier)] = max(self.peak_bytes.get(str(tier), 0), report.peak)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON; ratios where there is anything to divide by."""
        figures: dict[str, Any] = {
            "calls": self.calls,
            "sequences": self.sequences,
            "forwards": self.forwards,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "peak_bytes": dict(self.peak_bytes),
        }
        if self.sequences:
            figures["forwards_per_sequence"] = self.forwards / self.sequences
            figures["tokens_per_forward"] = self.tokens / self.forwards
            figures["tokens_per_second"] = self.tokens / self.seconds
        return figures
