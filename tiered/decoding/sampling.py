"""From logits to candidates: the proposed token of every pending row, and the confidence in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates
from tiered.decoding.sampling_options import Sampling
from tiered.decoding.tiled_sums import likeliest_tokens
from tiered.models.logit_tiles import LogitTiles

_SORTED_PARTS = 4  # parts of a sequence's rows, sorted one by one, because a sort takes several times its input
_SUMMED_PARTS = 8  # parts of the vocabulary, summed one by one, because int64 sums take twice the room of logits
# Units of a probability: a power of two, so that a float32 down to 2⁻³⁶ is a whole number of them. Sums fit an int64.
_UNITS = 2**60


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposed tokens of the rows.

    Attributes:
        tokens: tokens drawn at a temperature, or the likeliest ones.
        likeliest: likeliest tokens of the model's own distribution, without the mask token.
        least: least logit that may be drawn in each row; None for no limit.
    """

    tokens: Int[Tensor, "batch block"]
    likeliest: Int[Tensor, "batch block"]
    least: Float[Tensor, "batch block"] | None


def propose(block: OpenBlock) -> Candidates:
    """Candidates of every row; the logits are scratch space afterwards.

    The token is the argmax of logits + temperature · Gumbel numbers among those that `top_p` and `top_k` leave. Its
    confidence is without Gumbel numbers. The mask token is never proposed, but keeps its share of the distribution. The
    likeliest other token is never cut, and equal logits at the edge of a cut all stay.
    """
    if block.sampling.plain and isinstance(block.logits, LogitTiles):
        return block.candidates(*likeliest_tokens(block))
    return block.candidates(*block.by_rows(_proposed))


def _proposed(block: OpenBlock) -> tuple[Int[Tensor, "batch rows"], Float64[Tensor, "batch rows"]]:
    """Tokens, and confidence in them."""
    found, sampling = proposals(block), block.sampling
    temperature = 0.0
    if sampling.tempered_confidence:
        temperature = sampling.temperature
        _cut(block.whole, found.least)
    return found.tokens, _confidence(block, found, temperature)


def proposals(block: OpenBlock) -> Proposals:
    """The tokens of `propose`, from whole logits, which do not change."""
    logits, sampling = block.whole, block.sampling
    masked_out = logits[..., block.mask_token_id].clone()
    logits[..., block.mask_token_id] = -torch.inf
    likeliest = tokens = logits.argmax(dim=-1)
    logits[..., block.mask_token_id] = masked_out
    least = None
    if sampling.by_row:
        rows = block.pending_rows()
        if sampling.cuts:
            least = _least_logits(block, likeliest, rows)
        if sampling.temperature > 0:
            tokens = tokens.clone()
            for i, some in enumerate(rows):
                if len(some):
                    tokens[i, some] = _draw(block, least, i, some)
    return Proposals(tokens, likeliest, least)


def drawn_from(block: OpenBlock) -> Float[Tensor, "batch rows vocab"]:
    """The distribution of pending rows' tokens, written over whole logits; at temperature 0 all on the likeliest."""
    logits, sampling = block.whole, block.sampling
    likeliest = logits.argmax(dim=-1)
    if sampling.temperature == 0:
        return logits.zero_().scatter_(-1, likeliest[..., None], 1.0)
    if sampling.cuts:
        _cut(logits, _least_logits(block, likeliest, block.pending_rows()))
    logits -= logits.gather(-1, likeliest[..., None])
    logits.div_(sampling.temperature).exp_()
    return logits.div_(logits.sum(dim=-1, keepdim=True))


def _cut(logits: Float[Tensor, "batch block vocab"], least: Float[Tensor, "batch block"] | None) -> None:
    """Set logits below `least` to −∞, a sequence at a time, because the mask takes a fourth of the logits' room."""
    if least is not None:
        for row_logits, bound in zip(logits, least, strict=True):
            row_logits.masked_fill_(row_logits < bound[:, None], -torch.inf)


def _least_logits(
    block: OpenBlock, likeliest: Int[Tensor, "batch block"], rows: list[Int[Tensor, " rows"]]
) -> Float[Tensor, "batch block"]:
    logits, sampling = block.whole, block.sampling
    least = logits.new_full(likeliest.shape, -torch.inf)
    for i, pending in enumerate(rows):
        for some in pending.split(max(1, -(-len(pending) // _SORTED_PARTS))) if len(pending) else ():
            # The plan has no room for a copy of a single row beside its sort.
            bound = _least_logit(logits[i] if logits.shape[1] == 1 else logits[i, some], sampling)
            # If the mask token is likeliest, the cut could leave no other token.
            least[i, some] = torch.minimum(bound, logits[i, some, likeliest[i, some]])
    return least


def _least_logit(logits: Float[Tensor, "rows vocab"], sampling: Sampling) -> Float[Tensor, " rows"]:
    least = logits.new_full(logits.shape[:1], -torch.inf)
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1]
    if sampling.top_p is not None and sampling.top_p < 1:
        falling = logits.sort(dim=-1, descending=True).values
        if sampling.top_k_first:
            falling.masked_fill_(falling < least[:, None], -torch.inf)
        # A token stays if the tokens before it do not exceed top_p, so the token that first exceeds it is the last.
        share = (falling / sampling.temperature if sampling.temperature > 0 else falling).softmax(dim=-1)
        # Sums are of integers, because sums of floats depend on the order, which varies from call to call on CUDA.
        last = reached = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        for some in share.chunk(_SUMMED_PARTS, dim=-1):
            sums = some.mul_(_UNITS).long().cumsum_(dim=-1).add_(reached)
            last = last + (sums / _UNITS <= sampling.top_p).sum(dim=-1, keepdim=True)
            reached = sums[:, -1:].clone()
        least = torch.maximum(least, falling.gather(-1, last.clamp_(max=logits.shape[-1] - 1))[:, 0])
    return least


def _draw(
    block: OpenBlock, least: Float[Tensor, "batch rows"] | None, sequence: int, rows: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Samples of one sequence's rows. One sequence at a time, because float64 Gumbel numbers take twice the logits'
    room."""
    allowed = block.whole[sequence, rows]
    if least is not None:
        allowed.masked_fill_(allowed < least[sequence, rows][:, None], -torch.inf)
    allowed[:, block.mask_token_id] = -torch.inf
    names = rows if block.names is None else block.names[rows]
    return block.streams.draw(block.sequence + sequence, names, allowed, block.sampling.temperature)


def _confidence(block: OpenBlock, found: Proposals, temperature: float) -> Float64[Tensor, "batch block"]:
    """Confidence under softmax(logits / temperature), or under the plain logits at temperature 0. In place, because the
    logits are the largest tensor of a step."""
    logits, kind = block.whole, block.sampling.confidence
    if kind == "probability":
        logits -= logits.gather(-1, found.tokens[..., None])
    else:
        logits -= logits.amax(dim=-1, keepdim=True)
    if temperature > 0:
        logits /= temperature
    logits.exp_()
    if kind == "entropy":
        # Σ p log(p + 1e-10), as in the official code. One sequence at a time, because the logarithms take room.
        logits /= logits.sum(dim=-1, keepdim=True)
        return torch.stack([(one + 1e-10).log_().mul_(one).sum(dim=-1) for one in logits]).double()
    if kind == "margin":
        # The likeliest token against the next, which may be the mask token. If that is larger, the margin is below 0.
        top = logits.gather(-1, found.likeliest[..., None])[..., 0].double()
        logits.scatter_(-1, found.likeliest[..., None], 0.0)
        return (top - logits.amax(dim=-1).double()) / (top + logits.sum(dim=-1).double())
    # p(x) = 1 / (1 + Σ exp(l_i − l_x)) over all others i. Near 1, where thresholds decide, float32 has the small sum
    # exactly, while a softmax would round it away.
    others = logits.scatter_(-1, found.tokens[..., None], 0.0).sum(dim=-1)
    return (1.0 + others.double()).reciprocal()
