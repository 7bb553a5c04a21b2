"""Books: what one call takes on the device under a policy, its own state included."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tiered.features import Account
from tiered.models.shape import ModelShape
from tiered.planning.costs import call_bytes

if TYPE_CHECKING:
    from tiered.policies.base import Policy

_FLOAT32 = 4


def policy_bytes(
    policy: "Policy",
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    block_length: int,
    dtype: str,
    answer: int | None = None,
    guidance: bool = False,
    sampled: bool = False,
    attention_rows: int = 0,
) -> dict[Account, int]:
    """`call_bytes` of what `policy` keeps and asks for. With `guidance`, half of `batch` sees masked prompts."""
    logit_rows = policy.logit_rows(block_length, context)
    plain = call_bytes(
        shape,
        policy.features(shape),
        batch=batch,
        context=context,
        block_length=block_length,
        dtype=dtype,
        answer=answer,
        logit_rows=logit_rows,
        sampled=sampled,
        attention_rows=attention_rows,
    )
    sizes = {"batch": batch, "context": context, "block_length": block_length, "answer": answer}
    state = policy.state_bytes(shape, dtype=dtype, **sizes)
    # The difference that guidance made, kept for the forwards that do without their unconditional half.
    kept = batch // 2 * logit_rows * shape.vocab_size * _FLOAT32 if guidance and policy.skips_guidance() else 0
    return added(plain, state, {Account.LOGITS: kept})


def added(*parts: Mapping[Account, int]) -> dict[Account, int]:
    """The sums by account."""
    accounts = dict.fromkeys(account for part in parts for account in part)
    return {account: sum(part.get(account, 0) for part in parts) for account in accounts}
