"""The calls that both `generate` and a plan refuse."""

from tiered.core.errors import ContextLengthError
from tiered.forward.sizes import CallShape
from tiered.models.shape import MOST_SIZE, ModelShape
from tiered.policies.base import Policy
from tiered.policies.registry import policies_for


def check_positions(shape: ModelShape, positions: int, what: str) -> None:
    """Raise `ContextLengthError` if `positions` exceed the model's context; `what` begins the message."""
    if positions > shape.max_context:
        hint = f"; rope_scaling = 'ntk:{-(-positions // shape.trained_context)}' would stretch it, without training"
        raise ContextLengthError(
            f"{what} {positions} positions; the model was made for {shape.max_context} (config.json)"
            f"{hint if positions <= MOST_SIZE else ''}"
        )


def check_block(shape: ModelShape, block_length: int | None, *, name: str) -> int:
    """The length of blocks in a call of the model called `name`, which counts them from a sequence's first token.

    Raises:
        ValueError: neither config.json nor `block_length` has it, or they contradict each other.
    """
    if shape.block_length is None and block_length is None:
        raise ValueError(
            f"the config.json of {name!r} has no block_size: give block_length, as long as the blocks that the "
            "checkpoint was trained on"
        )
    # A canvas of random tokens may have another length than in training.
    if shape.noise == "mask" and shape.block_length is not None and block_length not in (None, shape.block_length):
        raise ValueError(
            f"block_length = {block_length}; {name!r} was made for blocks of {shape.block_length} (config.json): "
            f"{shape.block_length} is allowed"
        )
    return block_length or shape.block_length or 0


def beyond_training(shape: ModelShape, positions: int) -> str | None:
    """The warning for `positions` beyond those that the model was trained on; None if there are none."""
    if positions <= shape.trained_context:
        return None
    return (
        f"{positions} positions, but the model was trained on {shape.trained_context}: quality beyond them depends on"
        " its rotation (rope_theta, rope_scaling)"
    )


def check_policy(
    policy: Policy,
    shape: ModelShape,
    *,
    name: str,
    block_length: int,
    guidance: str | None,
    ordered: bool,
    rewrites: bool,
) -> None:
    """Raise `ValueError` if the model, called `name`, and the policy do not fit each other in such a call.

    Args:
        guidance: the argument for classifier-free guidance, as `name = value`; None for no guidance.
        ordered: whether the tokens that a step commits are known before it.
        rewrites: whether any token of a block may change in a step.
    """
    if shape.sight not in policy.sights:
        what = (
            f"reuses outdated keys and values, but those of finished blocks are exact in {name!r}"
            if shape.block_causal
            else f"keeps finished blocks for good, but every row of {name!r} sees the whole canvas"
        )
        raise ValueError(f"policy {policy.name!r} {what}; allowed: {', '.join(policies_for(shape.sight))}")
    if policy.needs_order() and not ordered:
        masks = "" if shape.noise == "mask" else f", and a rule for masks: {name!r} has {shape.noise} noise"
        raise ValueError(
            f"policy {policy.name!r} recomputes the tokens that a step will commit, so it must know them before: "
            f"remasking = 'random' is allowed, not 'low_confidence', which decides on the logits{masks}"
        )
    sizes = CallShape(shape=shape, batch=1, context=block_length, block_length=block_length, dtype="float32")
    seen = policy.needs(sizes).logit_rows or block_length
    if rewrites and seen < block_length:
        raise ValueError(
            f"policy {policy.name!r} looks at {seen} rows of a block in a step, but any of its {block_length} may be "
            "rewritten: a longer window or shorter blocks are allowed"
        )
    if guidance and (shape.sight == "noise" or shape.noise == "random"):
        why = "which it has no token for" if shape.noise == "random" else f"which {name!r} would treat as final text"
        raise ValueError(f"{guidance} masks prompts, {why}; a call without guidance is allowed")
