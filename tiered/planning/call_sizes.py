"""Books: the sizes of one call, from which its bytes follow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.models.shape import ModelShape

if TYPE_CHECKING:
    from tiered.policies.base import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """What decides how much a call takes.

    Attributes:
        policy: what is kept, and what its passes take.
        shape: sizes of the model.
        batch: sequences that go through a forward together; with `guidance`, twice those asked for.
        context, block_length, dtype, answer, sampled, attention_rows: as in `tiered.planning.costs.call_bytes`.
    """

    policy: "Policy"
    shape: ModelShape
    batch: int
    context: int
    block_length: int
    dtype: str
    answer: int | None = None
    guidance: bool = False
    sampled: bool = False
    attention_rows: int = 0
