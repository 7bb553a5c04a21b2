"""The norm of the LLaDA and Dream families."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm: normalised in float32, rounded to the model's dtype, then scaled."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        return F.rms_norm(hidden.float(), self.weight.shape, eps=self.eps).to(hidden.dtype) * self.weight
