"""Sums over the vocabulary, from one pass over tiles of logits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.decoding.generators import Generators
from tiered.decoding.sampling import pending_rows
from tiered.models.logit_tiles import LogitTiles


@dataclass(frozen=True, slots=True)
class TiledBlock:
    """As `OpenBlock`, with logits in tiles.

    Attributes:
        tiles: logits of all rows of the block.
        pending: True for rows that may be rewritten.
        remaining: number of pending rows by sequence, 0 if it waits.
        keep_open: sets logits of tokens that rows may not have yet to −∞, given the tokens of a tile and its logits.
    """

    tiles: LogitTiles
    pending: Bool[Tensor, "batch rows"]
    remaining: list[int]
    keep_open: Callable[[slice, Tensor], None]

    def pending_rows(self) -> list[Int[Tensor, " _"]]:
        return pending_rows(self.pending, self.remaining)


@dataclass(frozen=True, slots=True)
class TiledSums:
    """Sums over the vocabulary of softmax(logits / temperature), by row.

    Attributes:
        peak: largest logit over the temperature; not finite if any logit is NaN, or infinite.
        likeliest, drawn: likeliest token, and one that is drawn from the distribution.
        entropy: in nats.
        soft: `DiffusionModel.soft_tokens` of the distribution.
    """

    peak: Float32[Tensor, "batch rows"]
    likeliest: Int[Tensor, "batch rows"]
    drawn: Int[Tensor, "batch rows"]
    entropy: Float32[Tensor, "batch rows"]
    soft: Float[Tensor, "batch rows width"]

    @classmethod
    def of(
        cls,
        block: TiledBlock,
        temperature: float,
        streams: Generators,
    ) -> "TiledSums":
        """Pending rows draw. A draw is the argmax of a logit plus a Gumbel number, so that no tile needs the others'
        sums."""
        tiles, rows, hidden = block.tiles, block.pending_rows(), block.tiles.hidden
        # Everything is relative to the largest logit so far. Finite from the beginning: 0 · ∞ would be NaN.
        peak = hidden.new_full(hidden.shape[:2], torch.finfo(torch.float32).min, dtype=torch.float32)
        likeliest = torch.zeros_like(peak, dtype=torch.long)
        drawn, best = likeliest.clone(), torch.full_like(peak, -torch.inf, dtype=torch.float64)
        mass, weighted, soft = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(hidden).float()
        for tokens, logits in tiles:
            block.keep_open(tokens, logits)
            logits.div_(temperature)
            for sequence, some in enumerate(rows):
                if len(some):
                    noisy = streams.gumbel(sequence, len(some), logits.shape[2]).add_(logits[sequence, some])
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
            weighted += logits.clamp_(min=torch.finfo(torch.float32).min).mul_(chances).sum(dim=-1)
            soft.mul_(faded[..., None]).add_(tiles.model.soft_tokens(chances, tokens))
            peak = grown
            del logits, chances  # freed before the next tile is made
        soft = soft.div_(mass[..., None]).to(hidden.dtype)
        return cls(peak, likeliest, drawn, mass.log() - weighted / mass, soft)
