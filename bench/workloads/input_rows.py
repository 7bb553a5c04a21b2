"""The input rows of every layer in an uncached forward: the rows that a hidden-state cache stores."""

from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.runtime import Runtime


def hidden_states(runtime: Runtime, *ids: Any, **given: Any) -> Float[Tensor, "layers batch length width"]:
    """The rows, in the model's dtype, of the forward of `runtime.logits(*ids, **given)`. Padding rows mean nothing."""
    states: list[Tensor] = []
    dense = Forward.dense

    def recorded(self: Forward, layer: int, pass_: Pass, **_: bool) -> Pass:
        states.append(pass_.hidden.clone())  # a layer updates its input in place
        return dense(self, layer, pass_)  # no branch waits for the next one

    with patch.object(Forward, "dense", recorded):
        runtime.logits(*ids, **given)
    return torch.stack(states)
