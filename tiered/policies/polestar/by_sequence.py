"""Some sequences of a drift reference: all of its tensors have the batch first."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

T = TypeVar("T")


def kept(reference: T, sequences: list[int]) -> T:
    """`reference` of these sequences alone."""
    return _each(lambda tensor: tensor[sequences], reference)


def chosen(sequences: Bool[Tensor, " batch"], new: T, old: T) -> T:
    """`new` in these sequences, `old` in the others."""

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(sequences.view(-1, *[1] * (one.dim() - 1)), one, other)

    return _each(pick, new, old)


def _each(function: Any, *trees: Any) -> Any:
    if isinstance(trees[0], Tensor):
        return function(*trees)
    first: Any = trees[0]
    if not is_dataclass(first):  # the same for all sequences
        return first
    parts = {field.name: [getattr(tree, field.name) for tree in trees] for field in fields(first)}
    return type(first)(**{name: _each(function, *values) for name, values in parts.items()})
