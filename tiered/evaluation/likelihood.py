"""A lower bound on the log-probability of a text under a masked diffusion model, by sampling masks.

    log p(x | c) >= -E_l E_m [ L / l · Σ over the l masked positions of -log p(x_i | c, unmasked positions) ]

with l uniform in 1 … L and m any l of the L positions: LLaDA's estimator (arXiv 2502.09992). The bound is noisy, and
takes up to `mc_num` uncached forwards over the whole text under any policy. Models of uniform noise (GIDD) need another
bound.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.checks import check_integer, check_switch
from tiered.core.errors import NonFiniteError
from tiered.models.logit_tiles import with_guidance
from tiered.runtime import Runtime

Ids = Sequence[int]


def draw_masks(length: int, count: int, *, seed: int) -> Bool[Tensor, "count length"]:
    """`count` masks of random positions. Their sizes are spread evenly over 1 … `length` from a random offset, which
    reduces the variance."""
    generator = torch.Generator().manual_seed(seed)
    time = (torch.arange(count) + torch.rand((), generator=generator, dtype=torch.float64)) / count
    masked = (time * length).long().clamp_(max=length - 1) + 1
    ranks = torch.rand(count, length, generator=generator).argsort(dim=1).argsort(dim=1)
    return ranks < masked[:, None]


@dataclass(frozen=True)
class Likelihood:
    """Scores texts with one loaded model.

    Attributes:
        mc_num: number of masks of each text.
        batch_size: number of masks in a forward.
        check_greedy: whether `score` also runs greedy decoding, one forward a token; otherwise it returns False.
        cfg_scale: scale of classifier-free guidance; above 0 each mask takes a second forward, with the prefix masked.
        seed: seed of the masks. Texts of one length get the same masks, so choices are compared fairly.
    """

    runtime: Runtime
    _: KW_ONLY
    mc_num: int = 128
    batch_size: int = 1
    check_greedy: bool = True
    cfg_scale: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("mc_num", self.mc_num, least=1)
        check_switch("is_check_greedy", self.check_greedy)

    def score(self, prefix: Ids, target: Ids) -> tuple[float, bool]:
        """The bound on log p(target | prefix), in nats, and whether greedy decoding gives the target.

        Raises:
            NotImplementedError: the model's noise is not masks, or its rows do not see the whole canvas.
            NonFiniteError: the bound is NaN or infinite.
        """
        shape = self.runtime.model.shape
        if shape.noise != "mask" or shape.block_causal:
            other = "is block-causal" if shape.noise == "mask" else f"has {shape.noise} noise"
            raise NotImplementedError(
                "loglikelihood needs a masked model whose rows see the whole canvas, but "
                f"{self.runtime.name!r} ({shape.family}) {other}: tasks that generate (generate_until) are allowed"
            )
        if not target:
            return 0.0, True
        # Short targets have few masks, and a mask that was drawn twice is computed once.
        masks, counts = draw_masks(len(target), self.mc_num, seed=self.seed).unique(dim=0, return_counts=True)
        losses = torch.cat([self.losses(prefix, target, part) for part in masks.split(self.batch_size)])
        bound = -float(losses @ counts.to(losses)) / self.mc_num
        if not math.isfinite(bound):
            raise NonFiniteError("the bound on the log-probability", "cfg_scale is too large, or a weight is broken")
        return bound, self.check_greedy and self._is_greedy(prefix, target)

    def losses(self, prefix: Ids, target: Ids, masks: Bool[Tensor, "draws length"]) -> Float[Tensor, " draws"]:
        """The estimator's term of each mask, float64: L / l times the sum over its masked positions."""
        device, start = self.runtime.device, len(prefix)
        masks = masks.to(device)
        ids = torch.tensor([*prefix, *target], device=device).repeat(len(masks), 1)
        wanted = ids[:, start:].clone()
        ids[:, start:][masks] = self.runtime.model.mask_token_id
        taken = self._logits(ids, start).log_softmax(dim=-1).gather(2, wanted[..., None])[..., 0].double()
        return -(taken * masks).sum(dim=1) * len(target) / masks.sum(dim=1)

    def _logits(self, ids: Tensor, start: int) -> Float[Tensor, "draws length vocab"]:
        first, end = (column - self.runtime.model.shape.prediction_shift for column in (start, ids.shape[1]))
        logits = self.runtime.logits(ids, columns=(first, end))
        if not self.cfg_scale:
            return logits
        prefix = torch.arange(ids.shape[1], device=ids.device) < start
        free = self.runtime.logits(ids.masked_fill(prefix, self.runtime.model.mask_token_id), columns=(first, end))
        return with_guidance((logits, free), self.cfg_scale)

    def _is_greedy(self, prefix: Ids, target: Ids) -> bool:
        options = {"block_length": len(target), "cfg_scale": self.cfg_scale, "stop_at_eos": False}
        out = self.runtime.generate(torch.tensor([[*prefix]]), max_new_tokens=len(target), **options)
        return out.sequences[0, len(prefix) :].tolist() == [*target]
