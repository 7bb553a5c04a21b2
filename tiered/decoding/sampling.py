"""From logits to candidates: the proposed token of every pending row, and how sure the model is of it."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.commit.base import Candidates

# Between the seeds of a sequence's two streams: from one seed, ranks and noise would be made of the same bits.
_APART = 0x9E3779B9


class SequenceNoise:
    """Random streams, one pair for each sequence: sequence i of a batch with seed s draws what it would draw alone
    with seed s + i, whatever the others do."""

    def __init__(self, seed: int | None, batch: int, device: torch.device) -> None:
        """`seed` None takes one from torch's default stream, so that `torch.manual_seed` governs the call."""
        first = int(torch.randint(2**62, ())) if seed is None else seed
        # Ranks are drawn on the CPU so that a seed means the same on every device. Gumbel noise has a number for each
        # vocabulary entry, too many to carry over, and is drawn where the logits are.
        self._ranks = [torch.Generator().manual_seed(first + i) for i in range(batch)]
        self._gumbel = [torch.Generator(device).manual_seed((first + i) ^ _APART) for i in range(batch)]
        self._device = device

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending)."""
        self._ranks = [self._ranks[i] for i in sequences]
        self._gumbel = [self._gumbel[i] for i in sequences]

    def confidence(
        self, length: int, pads: list[int], start: int, stop: int, active: list[bool]
    ) -> Float[Tensor, "batch columns"]:
        """Uniform float64 scores for columns `start` to `stop` of canvases of `length` columns.

        Each active sequence draws for all of its columns but its `pads[i]` first, as the official sampler does.
        """
        scores = torch.zeros(len(pads), stop - start, dtype=torch.float64)
        for i, pad in enumerate(pads):
            if active[i]:
                scores[i] = torch.rand(length - pad, generator=self._ranks[i])[start - pad : stop - pad]
        return scores.to(self._device)

    def gumbel(self, sequence: int, rows: int, vocab: int) -> Float[Tensor, "rows vocab"]:
        """Standard Gumbel noise in float64."""
        # float32 noise truncates the tail and makes the sampling measurably greedier (arXiv 2409.02908).
        uniform = torch.rand(rows, vocab, dtype=torch.float64, device=self._device, generator=self._gumbel[sequence])
        return uniform.log_().neg_().log_().neg_()


def propose(
    logits: Float[Tensor, "batch block vocab"],
    pending: Bool[Tensor, "batch block"],
    *,
    mask_token_id: int,
    temperature: float = 0.0,
    noise: SequenceNoise | None = None,
    remaining: list[int] | None = None,
) -> Candidates:
    """Candidates of every row; `logits` is scratch space afterwards.

    The token is the argmax of logits + `temperature` · Gumbel noise; its confidence is the softmax probability of the
    logits without noise. The mask token is never proposed, or a row could stay undecided for ever.

    Args:
        temperature: 0 takes the argmax.
        noise, remaining: needed above temperature 0; `remaining[i]` is the number of pending rows of sequence i that
            draw noise (0 for a sequence that waits for the others).
    """
    masked_out = logits[..., mask_token_id].clone()
    logits[..., mask_token_id] = -torch.inf
    tokens = logits.argmax(dim=-1)
    if temperature > 0:
        assert noise is not None and remaining is not None
        _sample(logits, pending, tokens, temperature, noise, remaining)
    logits[..., mask_token_id] = masked_out
    # p(x) = 1 / (1 + Σ exp(l_i − l_x)) over all others i: near 1, where thresholds decide, the sum is small and float32
    # keeps it exactly where a softmax would round it away. In place, since the logits are the largest tensor of a step.
    logits -= logits.gather(-1, tokens[..., None])
    others = logits.exp_().scatter_(-1, tokens[..., None], 0.0).sum(dim=-1)
    confidence = 1.0 / (1.0 + others.double())
    return Candidates(tokens=tokens, confidence=confidence.masked_fill(~pending, -torch.inf), pending=pending)


def _sample(
    logits: Float[Tensor, "batch block vocab"],
    pending: Bool[Tensor, "batch block"],
    tokens: Int[Tensor, "batch block"],
    temperature: float,
    noise: SequenceNoise,
    remaining: list[int],
) -> None:
    """Overwrite `tokens` at pending rows by samples. One sequence at a time: the noise is in float64."""
    pending_first = pending.int().argsort(dim=1, descending=True, stable=True)
    for sequence, count in enumerate(remaining):
        if count:
            rows = pending_first[sequence, :count]
            # One expression, so that no sequence's noise outlives its turn: it is twice as large as the logits.
            tokens[sequence, rows] = (
                noise.gumbel(sequence, count, logits.shape[-1])
                .mul_(temperature)
                .add_(logits[sequence, rows])
                .argmax(dim=-1)
            )
