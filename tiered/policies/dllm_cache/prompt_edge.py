"""The prompt's last row between renewals of the prompt, as dLLM-Cache's authors have it where it predicts a token.

Where predictions are shifted (Dream), that row predicts the answer's first token. In the authors' code (commit
17235bff) it is a row of the prompt: from one renewal to the next only its first layer is computed afresh, and all other
layers add what they added last.
"""

from jaxtyping import Bool, Float
from torch import Tensor


class PromptEdge:
    """Keeps what the layers behind the first add to the row: their branches one by one are of no use to anybody.

    `rows`: how many of them there are, 1 for every family with shifted predictions so far.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._added: Float[Tensor, "batch rows width"] | None = None
        self._entered: Float[Tensor, "batch rows width"] | None = None

    def enter(self, hidden: Float[Tensor, "batch rows width"]) -> None:
        """The first layer has left `hidden` at the row."""
        self._entered = hidden.clone()

    def leave(self, hidden: Float[Tensor, "batch rows width"], renewed: Bool[Tensor, " batch"]) -> None:
        """The last layer has left `hidden`, which stays where the prompt is `renewed`, and is overwritten elsewhere. A
        batch may be the first sequences alone of those that have been there."""
        assert self._entered is not None, "the first layer is in front of the last"
        added = hidden - self._entered
        if self._added is None:
            self._added = added
        kept = self._added[: len(hidden)]
        kept.copy_(added.where(renewed[:, None, None], kept))
        hidden.copy_(self._entered.add_(kept))
        self._entered = None

    def keep(self, sequences: list[int], batch: int) -> None:
        """Go on with these sequences of a batch of `batch` alone (ascending), and with their second canvases."""
        if self._added is not None:
            firsts = range(0, len(self._added), batch)
            self._added = self._added[[first + number for first in firsts for number in sequences]]
