"""Options of sampling: how a step proposes tokens and measures confidence in them."""

from dataclasses import dataclass
from typing import Literal, get_args

from tiered.core.checks import check_count, check_number, check_temperature, unknown_name

Confidence = Literal["probability", "margin", "entropy"]
CONFIDENCES: tuple[str, ...] = get_args(Confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of `propose`.

    Attributes:
        temperature: temperature of softmax(logits / temperature), from which tokens are drawn; 0 for the likeliest
            token.
        top_p: probability in (0, 1]; tokens are drawn from the most likely ones that together first exceed it. None for
            no cut.
        top_k: number of most likely tokens to draw from, at least 1; None for no cut. With both, a token must pass
            both.
        confidence: "probability" of the proposed token, "margin" between the two most likely tokens, or negative
            "entropy" Σ p log(p + 1e-10), in nats.
        tempered_confidence: True for confidence under the distribution that tokens are drawn from, as in Dream: divided
            by the temperature, then cut by `top_p` and `top_k`. False for the model's own, as in LLaDA.
        top_k_first: True if `top_p` is a share of the tokens that `top_k` leaves, as in SDAR; False for a share of all.
        random_ranks: True if candidates are ranked randomly instead of by confidence.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of range.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    confidence: Confidence = "probability"
    tempered_confidence: bool = False
    top_k_first: bool = False
    random_ranks: bool = False

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature)
        if self.top_p is not None:
            check_number("top_p", self.top_p, least=0.0, most=1.0)
            if self.top_p == 0:
                raise ValueError("top_p = 0 would leave no token; a number above 0, up to 1, is allowed")
        check_count("top_k", self.top_k)
        if self.confidence not in CONFIDENCES:
            raise unknown_name("confidence", self.confidence, CONFIDENCES)

    @property
    def cuts(self) -> bool:
        matters = self.temperature > 0 or self.tempered_confidence
        return matters and (self.top_k is not None or (self.top_p is not None and self.top_p < 1))

    @property
    def by_row(self) -> bool:
        """True if `propose` works on pending rows alone and needs their number."""
        return self.temperature > 0 or self.cuts

    @property
    def plain(self) -> bool:
        """True if `propose` needs likeliest tokens and their probabilities alone, which tiles of tokens give."""
        return not self.by_row and self.confidence == "probability"

    @property
    def needs_room(self) -> bool:
        """True if `propose` needs room beside the logits, which `CallShape.sampled` books."""
        return self.by_row or self.confidence == "entropy"


GREEDY = Sampling()
