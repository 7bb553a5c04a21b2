"""How a step turns logits into proposals, and what it takes for the model's confidence in them."""

from dataclasses import dataclass
from typing import Literal, get_args

from tiered.core.checks import check_integer, check_number, check_switch, check_temperature, unknown_name

Confidence = Literal["probability", "margin", "entropy"]
CONFIDENCES: tuple[str, ...] = get_args(Confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of `propose`.

    Attributes:
        temperature: tokens are drawn from softmax(logits / temperature); 0: the most likely one is taken.
        top_p: draw only from the most likely tokens that together first exceed this probability, in (0, 1].
        top_k: draw only from so many most likely tokens, at least 1. With both, a token has to pass both.
        confidence: "probability" of the proposed token; "margin" of the most likely token over the next; "entropy":
            the negative entropy Σ p log(p + 1e-10), in nats.
        tempered_confidence: True if the confidence is of the distribution that tokens are drawn from, as in Dream:
            divided by the temperature, then cut by `top_p` and `top_k`. False for the model's own, as in LLaDA.
        top_k_first: True if `top_p` counts in what `top_k` leaves, as in SDAR; False for all tokens.
        random_ranks: True if candidates are ranked by chance, whatever the confidence.

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
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1)
        if self.confidence not in CONFIDENCES:
            raise unknown_name("confidence", self.confidence, CONFIDENCES)
        check_switch("tempered_confidence", self.tempered_confidence)

    @property
    def cuts(self) -> bool:
        matters = self.temperature > 0 or self.tempered_confidence
        return matters and (self.top_k is not None or (self.top_p is not None and self.top_p < 1))

    @property
    def by_row(self) -> bool:
        """Whether pending rows are worked on by themselves, so that `propose` must know how many there are."""
        return self.temperature > 0 or self.cuts

    @property
    def needs_room(self) -> bool:
        """Whether `propose` takes more room than the logits, as `CallShape.sampled` has it booked."""
        return self.by_row or self.confidence == "entropy"


GREEDY = Sampling()
