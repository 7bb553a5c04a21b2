"""Books: what one call takes on the device under a policy, its own state and what libraries take included."""

from collections.abc import Mapping

from tiered.core.features import Account
from tiered.forward.costs import call_bytes
from tiered.planning.call_sizes import CallSizes
from tiered.planning.library_costs import library_bytes

_FLOAT32 = 4


def policy_bytes(sizes: CallSizes) -> dict[Account, int]:
    """`call_bytes` of what the policy keeps and asks for, what its state takes, and `library_bytes`."""
    policy, shape = sizes.policy, sizes.shape
    logit_rows = policy.logit_rows(sizes.block_length, sizes.context)
    plain = call_bytes(
        shape,
        policy.features(shape),
        batch=sizes.batch,
        context=sizes.context,
        block_length=sizes.block_length,
        dtype=sizes.dtype,
        answer=sizes.answer,
        logit_rows=logit_rows,
        sampled=sizes.sampled,
        attention_rows=sizes.attention_rows,
    )
    state = policy.state_bytes(
        shape,
        batch=sizes.batch,
        context=sizes.context,
        block_length=sizes.block_length,
        dtype=sizes.dtype,
        answer=sizes.answer,
    )
    # The difference that guidance made, kept for the forwards that do without their unconditional half.
    differences = sizes.batch // 2 if sizes.guidance and policy.skips_guidance() else 0
    kept = {Account.LOGITS: differences * logit_rows * shape.vocab_size * _FLOAT32}
    return added(plain, state, kept, library_bytes(sizes))


def added(*parts: Mapping[Account, int]) -> dict[Account, int]:
    """The sums by account."""
    accounts = dict.fromkeys(account for part in parts for account in part)
    return {account: sum(part.get(account, 0) for part in parts) for account in accounts}
