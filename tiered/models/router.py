"""The router of a mixture: the experts of each row, and their weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float32, Int
from torch import Tensor

from tiered.kernels.expert_outputs_ref import Picks
from tiered.models.config_fields import positive
from tiered.models.shape import Experts

Score = Literal["softmax", "sigmoid"]
_NO_ZERO = 1e-20  # added to a sum that divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Top-k routing in float32. A row's experts depend on no other row.

    Attributes:
        score: function of a row's logits, one for each expert.
        picked: experts that a row goes to: those with the highest scores, with the bias if there is one.
        groups, kept_groups: experts are picked from `kept_groups` of `groups` equal groups: those whose best two
            experts have the highest sum.
        weighs_bias: True if the bias stays in the weights; False if it only counts for the choice.
        normalised: True if the weights of a row are divided by their sum.
        scale: factor of the weights.
    """

    score: Score
    picked: int
    groups: int = 1
    kept_groups: int = 1
    weighs_bias: bool = False
    normalised: bool = False
    scale: float = 1.0

    def check(self, experts: int) -> "Router":
        """This router for `experts` experts. Raises `ValueError` for settings that contradict each other."""
        in_groups = experts // self.groups * self.kept_groups
        if self.picked > experts:
            raise ValueError(f"config.json: num_experts = {experts} is fewer than num_experts_per_tok = {self.picked}")
        if experts % self.groups:
            raise ValueError(f"config.json: n_group = {self.groups} does not divide num_experts = {experts}")
        if self.kept_groups > self.groups:
            raise ValueError(f"config.json: topk_group = {self.kept_groups} is more than n_group = {self.groups}")
        if self.groups > 1 and experts // self.groups < 2:
            raise ValueError(f"config.json: n_group = {self.groups} leaves groups with one of num_experts = {experts}")
        if self.picked > in_groups:
            raise ValueError(
                f"config.json: num_experts_per_tok = {self.picked}, but topk_group = {self.kept_groups} groups have "
                f"{in_groups} experts"
            )
        return self

    def pick(self, logits: Float32[Tensor, "rows experts"], bias: Float32[Tensor, " experts"] | None = None) -> Picks:
        """The experts of each row, and their weights. Overwrites `logits`."""
        # σ by `exp`, because the last bit of torch's σ differs at the end of a table.
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.neg().exp_().add_(1).reciprocal_()
        del logits  # tables of all experts are large
        ranked = scores if bias is None else scores + bias
        allowed = ranked
        if self.groups > 1 and (self.weighs_bias or bias is None):
            allowed = ranked.clone()
        if self.groups > 1:
            grouped = ranked.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.kept_groups, dim=-1).indices
            dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            allowed.unflatten(-1, (self.groups, -1)).masked_fill_(dropped[..., None], -math.inf)
        experts = allowed.topk(self.picked, dim=-1).indices.sort(dim=-1).values
        weights = (ranked if self.weighs_bias else scores).gather(-1, experts)
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_ZERO)
        return Picks(experts, weights * self.scale if self.scale != 1 else weights)


def picked_experts(experts: Int[Tensor, "rows picked"]) -> list[int]:
    """The experts, each once and ascending, of a table on the host."""
    return list(rows_by_expert(experts))


def rows_by_expert(experts: Int[Tensor, "rows picked"]) -> dict[int, int]:
    """How many rows picked each expert, ascending by expert, of a table on the host."""
    return {expert: rows for expert, rows in enumerate(experts.flatten().bincount().tolist()) if rows}


def experts_of(
    config: Mapping[str, object],
    *,
    width: str = "moe_intermediate_size",
    shared_width: int = 0,
    biased: bool = False,
    dense: tuple[int, ...] = (),
) -> Experts:
    """The mixtures in config.json, by the keys that families share. `width`: key of an expert's width. Raises
    `ValueError` for a size that is absent or impossible, and if no layer has a mixture."""
    layers = positive(config, "num_hidden_layers")
    if len(dense) >= layers:
        raise ValueError(f"config.json: num_hidden_layers = {layers}, none of which has a mixture of experts")
    return Experts(
        count=positive(config, "num_experts"),
        picked=positive(config, "num_experts_per_tok"),
        width=positive(config, width),
        shared_width=shared_width,
        biased=biased,
        dense=dense,
    )
