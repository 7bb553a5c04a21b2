"""A lower bound on the log-probability of a text under a masked diffusion model, by sampling masks.

    log p(x | c) >= -E_l E_m [ L / l · Σ over the l masked positions of -log p(x_i | c, what is not masked) ]

with l uniform in 1 … L and m any l of the L positions: LLaDA's estimator (arXiv 2502.09992). The bound is noisy, and
takes `mc_num` uncached forwards over the whole text under any policy. Models of uniform noise (GIDD) have another one.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.checks import check_integer, check_switch
from tiered.core.errors import NonFiniteError
from tiered.runtime import Runtime


def draw_masks(length: int, count: int, *, seed: int) -> Bool[Tensor, "count length"]:
    """`count` masks. The numbers of masked positions are spread evenly over 1 … `length` from a random offset on, which
    makes the sum less noisy; the positions are random."""
    generator = torch.Generator().manual_seed(seed)
    time = (torch.arange(count) + torch.rand((), generator=generator, dtype=torch.float64)) / count
    masked = (time * length).long().clamp_(max=length - 1) + 1
    ranks = torch.rand(count, length, generator=generator).argsort(dim=1).argsort(dim=1)
    return ranks < masked[:, None]


class Likelihood:
    """Scores texts with one loaded model."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        mc_num: int = 128,
        batch_size: int = 1,
        check_greedy: bool = True,
        cfg_scale: float = 0.0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            runtime: of a masked model.
            mc_num: masks of each text.
            batch_size: masks in a forward.
            check_greedy: whether `score` also runs greedy decoding, one forward a token. If not, it returns False.
            cfg_scale: classifier-free guidance; above 0 each mask takes a second forward, with the prefix masked.
            seed: of the masks. Texts of one length get the same masks, so that choices are compared alike.

        Raises:
            TypeError, ValueError: `mc_num` or `check_greedy` of the wrong type, or out of range.
        """
        check_integer("mc_num", mc_num, least=1)
        check_switch("is_check_greedy", check_greedy)
        self._runtime, self._mc_num, self._batch_size = runtime, mc_num, batch_size
        self._check_greedy, self._cfg_scale, self._seed = check_greedy, cfg_scale, seed

    def score(self, prefix: Sequence[int], target: Sequence[int]) -> tuple[float, bool]:
        """The bound on log p(target | prefix), in nats, and whether greedy decoding would give the target.

        Raises:
            NotImplementedError: the model's noise is not masks, or its rows do not see the whole canvas.
            TierCapacityError: a forward does not fit the budget.
            NonFiniteError: it is NaN or infinite.
        """
        shape = self._runtime.model.shape
        if shape.noise != "mask" or shape.block_causal:
            other = "sees blocks" if shape.noise == "mask" else f"knows {shape.noise} noise"
            raise NotImplementedError(
                "loglikelihood is bounded for masked models where every row sees the whole answer; "
                f"{self._runtime.name!r} ({shape.family}) {other}: tasks that generate (generate_until) are allowed"
            )
        if not target:
            return 0.0, True
        masks = draw_masks(len(target), self._mc_num, seed=self._seed)
        losses = torch.cat([self.losses(prefix, target, part) for part in masks.split(self._batch_size)])
        bound = -float(losses.mean())
        if not math.isfinite(bound):
            raise NonFiniteError("the bound on the log-probability", "cfg_scale is too large, or a weight is broken")
        return bound, self._check_greedy and self._is_greedy(prefix, target)

    def losses(
        self, prefix: Sequence[int], target: Sequence[int], masks: Bool[Tensor, "draws length"]
    ) -> Float[Tensor, " draws"]:
        """The term of each mask, float64: L / l times the sum over its masked positions."""
        device, model, start = self._runtime.device, self._runtime.model, len(prefix)
        masks = masks.to(device)
        ids = torch.tensor([*prefix, *target], device=device).repeat(len(masks), 1)
        wanted = ids[:, start:].clone()
        ids[:, start:][masks] = model.mask_token_id
        taken = self._logits(ids, start).log_softmax(dim=-1).gather(2, wanted[..., None])[..., 0].double()
        return -(taken * masks).sum(dim=1) * len(target) / masks.sum(dim=1)

    def _logits(self, ids: Tensor, start: int) -> Float[Tensor, "draws length vocab"]:
        first = start - self._runtime.model.shape.prediction_shift
        rows = slice(first, first + ids.shape[1] - start)
        logits = self._runtime.logits(ids)[:, rows]
        if self._cfg_scale:
            ids = ids.clone()
            ids[:, :start] = self._runtime.model.mask_token_id
            free = self._runtime.logits(ids)[:, rows]
            logits = free + (1 + self._cfg_scale) * (logits - free)
        return logits

    def _is_greedy(self, prefix: Sequence[int], target: Sequence[int]) -> bool:
        size, cfg = len(target), self._cfg_scale
        options = {"max_new_tokens": size, "block_length": size, "cfg_scale": cfg, "stop_at_eos": False}
        out = self._runtime.generate(torch.tensor([list(prefix)]), **options)
        return out.sequences[0, len(prefix) :].tolist() == list(target)
