"""Checks of calls before any work starts, and the sizes of a call of `generate`."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.call import CallContext
from tiered.core.canvas import columns_in_blocks
from tiered.core.checks import check_integer
from tiered.decoding.rules.registry import COMMIT_RULES, fitting_rules
from tiered.forward.sizes import CallShape
from tiered.inputs import Prompts, check_readable
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape
from tiered.options import GenerationOptions
from tiered.planning.checks import beyond_training, check_block, check_policy, check_positions
from tiered.planning.choice import Choice, choose
from tiered.policies.base import Policy

# What a model was trained with, by its noise, where that forbids a rule.
_TRAINED_WITH = {"mask": "masks alone", "random": "random tokens, anew in every step"}


class PackedPrompts(NamedTuple):
    """Left-padded prompts as a canvas holds them.

    Attributes:
        ids: token ids. Ids behind a prompt with a shorter tail than others have no meaning.
        pads: pads of each prompt.
        tails: tokens of each prompt behind its last whole block.
    """

    ids: Int[Tensor, "batch columns"]
    pads: Int[Tensor, " batch"]
    tails: Int[Tensor, " batch"]


def packed(prompts: Prompts, block_length: int = 1) -> PackedPrompts:
    """`prompts` padded on the left by whole blocks: blocks counted from each first token begin in the same columns."""
    lengths = prompts.mask.sum(dim=1)
    longest = int(lengths.max())
    # A stable sort by the mask moves padding to the front and leaves the tokens in order.
    order = prompts.mask.int().argsort(dim=1, stable=True)
    ids, pads, tails = prompts.ids.gather(1, order)[:, -longest:], longest - lengths, lengths % block_length
    if block_length > 1:
        before, whole = pads, lengths - tails
        pads = whole.max() - whole
        columns = torch.arange(int((pads + lengths).max()), device=ids.device)
        ids = ids.gather(1, (columns + (before - pads)[:, None]).clamp(0, longest - 1))
    return PackedPrompts(ids.contiguous(), pads, tails)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A call that is checked but not begun; no bytes are booked for it.

    Attributes:
        prompts: prompts on the host, so that preparing does not wait for a device.
        packed: the same prompts as the canvas holds them.
        options: options of the call.
        sizes: numbers from which its bytes follow.
        choice: policy of the call, and its reason.
        prior: initial ids of answers; None for the model's own noise.
    """

    prompts: Prompts
    packed: PackedPrompts
    options: GenerationOptions
    sizes: CallShape
    choice: Choice
    prior: Tensor | None

    @property
    def warnings(self) -> list[str]:
        warning = beyond_training(self.sizes.shape, self.sizes.context)
        return [] if warning is None else [warning]


def prepare(
    context: CallContext, policy: Policy, options: GenerationOptions, prompts: Prompts, prior: Tensor | None = None
) -> PreparedCall:
    """The call that answers `prompts`. Its policy depends on no other call and no inspector.

    Raises:
        TypeError, ValueError: a prior that does not fit, or more positions than the model allows.
    """
    in_blocks = context.model.shape.block_causal and options.block_edges == "sequence"
    columns = packed(prompts, options.block if in_blocks else 1)
    sizes = _sizes(context, options, columns, prompts.longest)
    if prior is not None:
        wanted = (sizes.answer or 0) if sizes.shape.noise == "random" else options.columns
        _check_prior(prior, (sizes.batch, wanted), options, vocab_size=sizes.shape.vocab_size)
    choice = choose(policy, sizes, context.budget, prompt=prompts.shortest)
    return PreparedCall(prompts=prompts, packed=columns, options=options, sizes=sizes, choice=choice, prior=prior)


def _sizes(context: CallContext, options: GenerationOptions, prompts: PackedPrompts, longest: int) -> CallShape:
    rule, shape, tails = options.rule, context.model.shape, list[int](prompts.tails.tolist())
    front, answer = prompts.ids.shape[1] - max(tails), options.columns
    if shape.block_causal:
        _, answer = columns_in_blocks(tails, options.block, options.max_new_tokens)
    trailing = f" and trailing_noise = {options.trailing_noise}" if options.trailing_noise else ""
    made = f"the prompt's {longest} tokens and max_new_tokens = {options.max_new_tokens}{trailing} make"
    check_positions(shape, front + answer, made)
    return context.sizes(
        len(prompts.ids),
        front + answer,
        options.block,
        answer=answer,
        guidance=options.cfg_scale > 0,
        sampled=options.sampling().needs_room or (rule.rewrites and rule.draws),
        compared=rule.needs_shift,
    )


def check_call(options: GenerationOptions, model: DiffusionModel, policy: Policy, *, name: str) -> None:
    """Raise `ValueError` if the model, called `name`, or the policy cannot run a call with `options`."""
    rule = options.rule
    if rule.in_blocks and not model.shape.block_causal:
        raise ValueError(
            f"the commit rule {rule.name!r} is for block-causal models, but rows of {name!r} see the whole canvas; "
            f"allowed: {', '.join(fitting_rules('mask', rewriting=False))}"
        )
    if "uniform" in rule.noise and model.noise is None:
        noise = _TRAINED_WITH[model.shape.noise]
        raise ValueError(
            f"the commit rule {rule.name!r} is for GIDD's noise, but {name!r} is trained with {noise}; allowed: "
            f"{', '.join(fitting_rules('mask', rewriting=False))}"
        )
    check_policy(
        policy,
        model.shape,
        name=name,
        block_length=options.block,
        guidance=f"cfg_scale = {options.cfg_scale}" if options.cfg_scale else None,
        ordered=options.remasking == "random",
        rewrites=rule.rewrites,
    )
    if unknown := [token for token in options.ends() if token >= model.shape.vocab_size]:
        raise ValueError(f"stop_tokens {unknown}: ids in [0, {model.shape.vocab_size}) are allowed")
    if rule.needs_shift and model.shape.block_causal:
        fitting = [of for of, own in COMMIT_RULES.items() if own.noise == {"mask"} and not own.needs_shift]
        raise ValueError(
            f"the commit rule {rule.name!r} compares attention over the whole canvas, but {name!r} is block-causal; "
            f"allowed: {', '.join(fitting)}"
        )
    if options.correction_steps and model.shape.noise != "uniform":
        raise ValueError(
            f"correction_steps = {options.correction_steps} rewrites tokens, which needs a model of uniform noise; "
            f"{name!r} is trained with {_TRAINED_WITH[model.shape.noise]}, and allows 0"
        )


def _check_prior(prior: Tensor, shape: tuple[int, int], options: GenerationOptions, *, vocab_size: int) -> None:
    if not isinstance(prior, Tensor) or prior.dtype != torch.long:
        raise TypeError(f"prior is a LongTensor of shape {shape}, not {prior!r}")
    if not options.rule.noise & {"uniform", "random"}:
        raise ValueError(f"a prior needs a commit rule that rewrites tokens, not {options.rule.name!r}")
    check_readable("prior", prior)
    if prior.shape != shape:
        raise ValueError(f"prior has the shape {tuple(prior.shape)}; {shape} is allowed")
    least, most = int(prior.min()), int(prior.max())
    if least < 0 or most >= vocab_size:
        raise ValueError(f"prior holds ids from {least} to {most}; ids in [0, {vocab_size}) are allowed")


def read_noise_mask(
    noise_mask: Tensor | None, shape: ModelShape, size: tuple[int, int], device: torch.device
) -> Int[Tensor, " batch"] | None:
    """Number of clean columns of each sequence; None without a mask.

    Raises:
        TypeError: not a tensor.
        ValueError: a family without such a mask, another size than (batch, length), values other than 0 and 1, or clean
            tokens behind noisy ones.
    """
    if noise_mask is None:
        return None
    if not shape.final_apart:
        raise ValueError(
            f"a noise_mask is for families whose clean tokens see only clean ones, not {shape.family!r}; leave it out"
        )
    if not isinstance(noise_mask, Tensor):
        raise TypeError(f"noise_mask is a tensor of size {size}, not {noise_mask!r}")
    check_readable("noise_mask", noise_mask)
    if noise_mask.shape != size:
        raise ValueError(f"noise_mask has the size {tuple(noise_mask.shape)}; {size} is allowed")
    noisy = noise_mask.to(device) != 0
    if not bool((noise_mask.to(device) == noisy).all()):
        raise ValueError("noise_mask holds values other than 0 (clean) and 1 (noisy)")
    clean = (~noisy).sum(dim=1)
    if not torch.equal(noisy, torch.arange(size[1], device=device)[None] >= clean[:, None]):
        raise ValueError("noise_mask has clean tokens behind noisy ones; clean tokens come first")
    return clean


def read_block(block_length: int | None, shape: ModelShape, *, name: str) -> int | None:
    """Block length of a block-causal family; None for a family whose rows see the whole canvas.

    Raises:
        TypeError: not an int.
        ValueError: not positive, given for a family without blocks, or as `check_block`.
    """
    if block_length is not None:
        check_integer("block_length", block_length, least=1)
        if not shape.block_causal:
            raise ValueError(
                f"block_length = {block_length}, but rows of {name!r} see the whole canvas: None is allowed"
            )
    return check_block(shape, block_length, name=name) if shape.block_causal else None
