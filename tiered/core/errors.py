"""Errors that callers may want to catch by type. Other bad arguments raise `ValueError` or `TypeError`.

An error's arguments are its `args`, and its message is made on reading, so errors can be pickled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiered.core.byte_size import enough, format_bytes
from tiered.core.features import Tier

if TYPE_CHECKING:
    from torch import Tensor


class TierCapacityError(RuntimeError):
    """A tier's byte budget is too small. Raised before the work starts.

    Attributes:
        needed: bytes that the request needs in the tier.
        available: bytes that the budget leaves for the request.
        tier: the tier that is too small.
        hint: options to lower or raise.
        total: bytes of the least sufficient budget; None if it is unknown, or if the limit is not a budget.
    """

    def __init__(self, needed: int, available: int, tier: Tier, hint: str, total: int | None = None) -> None:
        super().__init__(needed, available, tier, hint, total)
        self.needed, self.available, self.total = needed, available, total
        self.tier, self.hint = tier, hint

    def __str__(self) -> str:
        in_all = ""
        if self.total is not None:
            in_all = (
                f'that is {format_bytes(self.total)} in all: a budget of "{enough(self.total)}" or more is enough; '
            )
        return (
            f"the {self.tier} tier needs {format_bytes(self.needed)} but has {format_bytes(self.available)} "
            f"({self.needed} of {self.available} bytes); {in_all}{self.hint}"
        )


class ContextLengthError(ValueError):
    """Prompt and answer have more positions than the model allows."""


class NonFiniteError(ValueError):
    """NaN or infinity in a weight during loading, or in the logits of a forward. The runtime stays usable.

    Attributes:
        what: the weight, or the first layer whose rows have no finite norm in float32.
        hint: the likely cause, and the option to change.
        sequences: sequences of the batch with such logits, all if that is unknown; empty for a weight.
        answers: ids [batch, max_new_tokens] before that forward, on the CPU, with mask tokens or noise at open columns;
            None for a weight.
    """

    def __init__(self, what: str, hint: str, sequences: Sequence[int] = (), answers: "Tensor | None" = None) -> None:
        super().__init__(what, hint, sequences, answers)
        self.what, self.hint, self.sequences, self.answers = what, hint, sequences, answers

    def __str__(self) -> str:
        return f"{self.what} is not finite; {self.hint}"
