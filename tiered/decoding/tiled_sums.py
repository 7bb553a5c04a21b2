"""Sums over the vocabulary, from one pass over tiles of logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from tiered.decoding.open_block import OpenBlock
from tiered.models import shape
from tiered.models.logit_tiles import LogitTiles

_LEAST = torch.finfo(torch.float32).min


def likeliest_tokens(block: OpenBlock) -> tuple[Int[Tensor, "batch rows"], Float64[Tensor, "batch rows"]]:
    """The likeliest token of each row but the mask token, and its probability; the mask token keeps its share."""
    # Everything is relative to the largest logit so far. Finite from the beginning: 0 · ∞ would be NaN.
    top = torch.full_like(block.tokens, _LEAST, dtype=torch.float32)
    likeliest, others, of_mask = torch.zeros_like(block.tokens), torch.zeros_like(top), torch.zeros_like(top)
    mask = block.mask_token_id
    for tokens, logits in block.by_tokens(shape.tokens_at_once(block.tokens.numel())):
        if tokens.start <= mask < tokens.stop:
            of_mask = logits[..., mask - tokens.start].clone()
            logits[..., mask - tokens.start] = -torch.inf
        here, token = logits.max(dim=-1)
        newer, grown = here > top, torch.maximum(top, here)
        logits -= grown[..., None]
        logits.exp_()
        # Of the others alone: near 1, where thresholds decide, float32 has their small sum exactly, and a sum with the
        # likeliest token's own 1 would round it away.
        own = logits.gather(-1, token[..., None])
        logits.scatter_(-1, token[..., None], own.masked_fill_(newer[..., None], 0.0))
        faded = (top - grown).exp()
        others = faded * (others + newer) + logits.sum(dim=-1)
        likeliest, top = (token + tokens.start).where(newer, likeliest), grown
        del logits  # freed before the next tile is made
    others += (of_mask - top).exp()
    return likeliest, 1.0 / (1.0 + others.double())


@dataclass(frozen=True, slots=True)
class TiledSums:
    """Sums over the vocabulary of softmax(logits / temperature), by row.

    Attributes:
        likeliest, drawn: likeliest token, and one that is drawn from the distribution.
        entropy: in nats.
        soft: `DiffusionModel.soft_tokens` of the distribution.
    """

    likeliest: Int[Tensor, "batch rows"]
    drawn: Int[Tensor, "batch rows"]
    entropy: Float32[Tensor, "batch rows"]
    soft: Float[Tensor, "batch rows width"]

    @classmethod
    def of(cls, block: OpenBlock, temperature: float) -> "TiledSums":
        """Pending rows draw. A draw is the argmax of a logit plus a Gumbel number, so that no tile needs the others'
        sums."""
        assert isinstance(block.logits, LogitTiles), "made of tiles"
        model, hidden, rows = block.logits.model, block.logits.hidden, block.pending_rows()
        # Everything is relative to the largest logit so far, as above.
        peak = torch.full_like(block.tokens, _LEAST, dtype=torch.float32)
        likeliest = torch.zeros_like(block.tokens)
        drawn, best = likeliest.clone(), torch.full_like(peak, -torch.inf, dtype=torch.float64)
        mass, weighted, soft = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(hidden).float()
        for tokens, logits in block.by_tokens(shape.VOCABULARY_TILE):
            logits.div_(temperature)
            for sequence, some in enumerate(rows):
                if len(some):
                    noisy = block.streams.gumbel(sequence, len(some), logits.shape[2]).add_(logits[sequence, some])
                    value, token = noisy.max(dim=-1)
                    del noisy
                    better = value > best[sequence, some]
                    drawn[sequence, some] = (token + tokens.start).where(better, drawn[sequence, some])
                    best[sequence, some] = torch.maximum(value, best[sequence, some])
            top, token = logits.max(dim=-1)
            likeliest = (token + tokens.start).where(top > peak, likeliest)
            grown = torch.maximum(peak, top)
            faded = (peak - grown).exp()
            weighted = faded * (weighted + mass * (peak - grown))
            logits -= grown[..., None]
            chances = logits.exp()
            mass = faded * mass + chances.sum(dim=-1)
            # A token that is masked counts 0 · log 0 = 0.
            weighted += logits.clamp_(min=_LEAST).mul_(chances).sum(dim=-1)
            soft.mul_(faded[..., None]).add_(model.soft_tokens(chances, tokens))
            peak = grown
            del logits, chances  # freed before the next tile is made
        soft = soft.div_(mass[..., None]).to(hidden.dtype)
        return cls(likeliest, drawn, mass.log() - weighted / mass, soft)
