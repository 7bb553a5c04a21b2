"""Weights of a model by the names in official checkpoints."""

from typing import Any

from torch import Tensor


def official(model: Any, name: str) -> Tensor:
    """The weight with the official `name`; a view of some of its rows if it is a piece of one of ours. Raises
    `AttributeError` for a coded weight."""
    weight = model.get_parameter(model.config.parameter_names[name])
    return weight[model.config.pieces[name]] if name in model.config.pieces else weight
