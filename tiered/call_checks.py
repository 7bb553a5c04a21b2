"""Arguments of `logits` and inspectors, checked before work starts."""

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.checks import check_integer
from tiered.decoding.observers import Inspector
from tiered.inputs import check_readable
from tiered.models.shape import ModelShape
from tiered.planning.checks import check_block


def check_inspector(inspector: object) -> None:
    """Raise `TypeError` for what is neither an inspector nor None."""
    if inspector is not None and not isinstance(inspector, Inspector):
        raise TypeError(f"an inspector has the methods device_bytes and after_forward, not {inspector!r}")


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
