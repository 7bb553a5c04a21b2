"""Random generators of a call, one set a sequence, so that each sequence draws the same numbers in a batch as alone."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.models.noise import Noise

# XORed into the seed, so that a sequence's streams do not draw the same bits.
_RANKS, _GUMBEL, _RULES, _PRIOR = 0, 0x9E3779B9, 0x7F4A7C15, 0x5851F42D


class Generators:
    """Four random streams for each sequence. Sequence i of a batch with seed s draws the same numbers as alone with
    seed s + i."""

    def __init__(self, seed: int | None, batch: int, device: torch.device) -> None:
        """`seed`: None for one from torch's default stream, so that `torch.manual_seed` determines the call."""
        first = int(torch.randint(2**62, ())) if seed is None else seed

        def streams(apart: int, where: torch.device | str = "cpu") -> list[torch.Generator]:
            return [torch.Generator(where).manual_seed((first + i) ^ apart) for i in range(batch)]

        # These are drawn on the CPU, so that a seed means the same on every device. Gumbel numbers, one for each
        # vocabulary entry, are too many to copy and are drawn on the logits' device.
        self._ranks, self._rules, self._prior = streams(_RANKS), streams(_RULES), streams(_PRIOR)
        self._gumbel = streams(_GUMBEL, device)
        self._device = device

    def keep(self, sequences: list[int]) -> None:
        for streams in (self._ranks, self._gumbel, self._rules, self._prior):
            streams[:] = [streams[i] for i in sequences]

    def confidence(
        self, stops: list[int], pads: list[int], start: int, stop: int, active: list[bool]
    ) -> Float[Tensor, "batch columns"]:
        """Uniform float64 scores for columns `start` to `stop`. As in the official sampler, each active sequence draws
        for all of its columns, from `pads[i]` to `stops[i]`."""
        scores = torch.zeros(len(pads), stop - start, dtype=torch.float64)
        for i, pad in enumerate(pads):
            if active[i]:
                scores[i] = torch.rand(stops[i] - pad, generator=self._ranks[i])[start - pad : stop - pad]
        return on_device(scores, self._device)

    def gumbel(self, sequence: int, rows: int, vocab: int) -> Float[Tensor, "rows vocab"]:
        """Standard Gumbel numbers in float64."""
        # float32 truncates the tail and makes the sampling measurably greedier (arXiv 2409.02908).
        uniform = torch.rand(rows, vocab, dtype=torch.float64, device=self._device, generator=self._gumbel[sequence])
        return uniform.log_().neg_().log_().neg_()

    def draw(
        self, sequence: int, rows: Int[Tensor, " rows"], logits: Float[Tensor, "rows vocab"], temperature: float
    ) -> Int[Tensor, " rows"]:
        """Tokens from softmax(logits / temperature) for `rows` of the block. Replace this method to replay tokens."""
        return self.gumbel(sequence, *logits.shape).mul_(temperature).add_(logits).argmax(dim=-1)

    def prior(self, columns: int, process: Noise) -> Int[Tensor, "batch columns"]:
        """Pure noise: `columns` tokens of each sequence at the last noise level of `process`."""
        share, mask = process.of_tokens(process.min_log_snr), process.mask_token_id
        drawn = []
        for stream in self._prior:
            tokens = torch.randint(process.vocab_size - 1, (columns,), generator=stream)
            tokens += tokens >= mask  # any token but the mask
            drawn.append(tokens.where(torch.rand(columns, generator=stream) < share, mask))
        return on_device(torch.stack(drawn), self._device)

    def tokens(self, columns: int, vocab: int) -> Int[Tensor, "batch columns"]:
        """Noise of `columns` random tokens of each sequence."""
        return on_device(_tokens(self._prior, columns, vocab), self._device)

    def of_block(self) -> "BlockStreams":
        """The random numbers of a commit rule in the next block."""
        return BlockStreams([int(torch.randint(2**62, (), generator=each)) for each in self._rules], self._device)


class BlockStreams:
    """Random numbers of one block, from a stream for each sequence. Waiting sequences draw unused numbers, so a rule
    needs no host read to know which ones wait."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device

    def uniform(self, columns: int) -> Float64[Tensor, "batch columns"]:
        """Uniform numbers in [0, 1), `columns` of each sequence."""
        drawn = [torch.rand(columns, dtype=torch.float64, generator=stream) for stream in self._streams]
        return on_device(torch.stack(drawn), self._device)

    def tokens(self, columns: int, vocab: int) -> Int[Tensor, "batch columns"]:
        """As `Generators.tokens`."""
        return on_device(_tokens(self._streams, columns, vocab), self._device)

    def gumbel(self, columns: int) -> Float64[Tensor, "batch columns"]:
        """Standard Gumbel numbers, `columns` of each sequence."""
        return self.uniform(columns).log_().neg_().log_().neg_()


def _tokens(streams: list[torch.Generator], columns: int, vocab: int) -> Int[Tensor, "batch columns"]:
    return torch.stack([torch.randint(vocab, (columns,), generator=stream) for stream in streams])
