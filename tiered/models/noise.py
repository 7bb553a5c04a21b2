"""The noise that GIDD models are trained on (arXiv 2503.04482): tokens become other tokens, or masks, or both."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

NoiseSchedule = Literal["cosine", "linear"]
SCHEDULES: tuple[NoiseSchedule, ...] = get_args(NoiseSchedule)
# Beyond it the share of clean tokens, or of noise, rounds to 0 or 1 in float64.
MOST_LOG_SNR = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A process between clean text at `max_log_snr` and pure noise at `min_log_snr`.

    A token stays clean with probability σ(log-SNR), otherwise it is noise. Noise is a token with probability
    σ(log-SNR + `shift`), uniformly any but the mask, and otherwise the mask.

    `shift` is `noise_type` of config.json: far above 0 for uniform noise, far below for masks alone.
    """

    shift: float
    min_log_snr: float
    max_log_snr: float
    vocab_size: int
    mask_token_id: int

    def log_snrs(self, steps: int, schedule: NoiseSchedule) -> list[float]:
        """The levels at the ends of `steps` steps, clean first: entry i is that of time i / steps. The share of clean
        tokens falls linearly in time, or as a half wave of the cosine."""
        low, high = _sigmoid(self.min_log_snr), _sigmoid(self.max_log_snr)
        levels = []
        for number in range(steps + 1):
            time = number / steps
            left = 1 - time if schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * time)
            clean = (high - low) * left + low
            levels.append(min(max(math.log(clean / (1 - clean)), self.min_log_snr), self.max_log_snr))
        return levels

    def clean(self, log_snr: float) -> float:
        """Probability that a token is clean."""
        return _sigmoid(log_snr)

    def of_tokens(self, log_snr: float) -> float:
        """Probability that noise is a token and not the mask."""
        return _sigmoid(log_snr + self.shift)

    def probability(self, log_snr: float) -> tuple[float, float]:
        """Probability that noise is a given token, and that it is the mask."""
        tokens = self.of_tokens(log_snr)
        return tokens / (self.vocab_size - 1), 1 - tokens


def _sigmoid(number: float) -> float:
    # Without overflow for either sign: shifts are about ±1000.
    return 1 / (1 + math.exp(-number)) if number >= 0 else math.exp(number) / (1 + math.exp(number))
