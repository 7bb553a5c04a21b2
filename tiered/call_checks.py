"""Whether options, model and policy of a call go together; what does not is named, with what would."""

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.checks import check_integer
from tiered.decoding.observers import Inspector
from tiered.decoding.rules.registry import COMMIT_RULES, fitting_rules
from tiered.inputs import check_readable
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape
from tiered.options import GenerationOptions
from tiered.planning.checks import check_block, check_policy
from tiered.policies.base import Policy


def check_call(chosen: GenerationOptions, model: DiffusionModel, policy: Policy, *, name: str) -> None:
    """Raise `ValueError` where `chosen` asks for what the model, called `name`, or the policy cannot do."""
    rule = chosen.rule()
    if rule.rewrites and model.noise is None:
        raise ValueError(
            f"the commit rule {rule.name!r} follows the noise that models of GIDD are trained on; {name!r} knows masks "
            f"alone, which go with {', '.join(fitting_rules('mask', rewriting=False))}"
        )
    check_policy(
        policy,
        model.shape,
        name=name,
        block_length=chosen.block,
        guidance=f"cfg_scale = {chosen.cfg_scale}" if chosen.cfg_scale else None,
        ordered=chosen.remasking == "random",
        rewrites=rule.rewrites,
    )
    if unknown := [token for token in chosen.ends(0) if token >= model.shape.vocab_size]:
        raise ValueError(f"stop_tokens {unknown}: ids in [0, {model.shape.vocab_size}) are allowed")
    if rule.needs_shift and model.shape.block_causal:
        fitting = [of for of in fitting_rules("mask", rewriting=False) if not COMMIT_RULES[of].needs_shift]
        raise ValueError(
            f"the commit rule {rule.name!r} compares attention over the whole canvas; {name!r} sees blocks, which go "
            f"with {', '.join(fitting)}"
        )
    if chosen.correction_steps and model.shape.noise != "uniform":
        raise ValueError(
            f"correction_steps = {chosen.correction_steps} rewrites tokens, which models of uniform noise can; "
            f"{name!r} knows masks alone, and allows 0"
        )


def check_inspector(inspector: object) -> None:
    """Raise `TypeError` for what is neither an inspector nor None."""
    if inspector is not None and not isinstance(inspector, Inspector):
        raise TypeError(f"an inspector has the methods device_bytes and after_forward, not {inspector!r}")


def check_prior(prior: Tensor, shape: tuple[int, int], chosen: GenerationOptions, *, vocab_size: int) -> None:
    """Check what answers are to begin as.

    Raises:
        TypeError: no LongTensor.
        ValueError: no dense tensor with values, another shape, ids outside the vocabulary, or a commit rule that fixes
            tokens once for all.
    """
    if not isinstance(prior, Tensor) or prior.dtype != torch.long:
        raise TypeError(f"prior is a LongTensor of shape {shape}, not {prior!r}")
    rule = chosen.rule()
    if not rule.rewrites:
        raise ValueError(f"a prior goes with a commit rule that rewrites tokens, not with {rule.name!r}")
    check_readable("prior", prior)
    if prior.shape != shape:
        raise ValueError(f"prior has the shape {tuple(prior.shape)}; {shape} is allowed")
    least, most = int(prior.min()), int(prior.max())
    if least < 0 or most >= vocab_size:
        raise ValueError(f"prior holds ids from {least} to {most}; ids in [0, {vocab_size}) are allowed")


def read_noise_mask(
    noise_mask: Tensor | None, shape: ModelShape, size: tuple[int, int], device: torch.device
) -> Int[Tensor, " batch"] | None:
    """How many columns of each sequence are clean; None: nobody says it.

    Raises:
        TypeError: no tensor.
        ValueError: a family to which it makes no difference, another size than (batch, length), values other than 0
            and 1, or clean tokens behind noisy ones.
    """
    if noise_mask is None:
        return None
    if not (shape.noise_masked or shape.sight == "context"):
        raise ValueError(f"a noise_mask is for families whose clean tokens see clean ones alone, not {shape.family!r}")
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
        raise ValueError("noise_mask has clean tokens behind noisy ones; clean ones stand in front")
    return clean


def read_block(block_length: int | None, shape: ModelShape, *, name: str) -> int | None:
    """How long the blocks are that rows see; None: they see the whole canvas.

    Raises:
        TypeError: no int.
        ValueError: not positive, for a family without blocks, or as `check_block`.
    """
    if block_length is not None:
        check_integer("block_length", block_length, least=1)
        if not shape.block_causal:
            raise ValueError(
                f"block_length = {block_length}, but rows of {name!r} see the whole canvas: None is allowed"
            )
    return check_block(shape, block_length, name=name) if shape.block_causal else None
