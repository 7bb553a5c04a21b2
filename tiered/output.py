"""What `generate` returns: answers, and the figures of the call from the ledger and the clock."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.core.canvas import is_any
from tiered.core.memory_report import MemoryReport
from tiered.decoding.output_writer import GenerationState
from tiered.kernels.host_values import on_device
from tiered.planning.choice import Choice
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.tiers.stats import TierStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds of a call.

    Attributes:
        total: from the first forward to the last commit.
        first_block: until the first block was final.
        steps: of every forward with its commit.
        tokens: tokens of all answers, without those from the end-of-sequence token on.
    """

    total: float
    first_block: float
    steps: list[float] = field(repr=False)
    tokens: int

    @property
    def ms_per_forward(self) -> float:
        """Milliseconds of a forward with its commit, on average."""
        return 1000 * sum(self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers over `total`; prompt, end-of-sequence and padding not counted."""
        return self.tokens / self.total

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, without the list of steps."""
        return {
            "total_s": self.total,
            "first_block_s": self.first_block,
            "ms_per_forward": self.ms_per_forward,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """The result of `Runtime.generate`. Names follow transformers' `DiffusionGemmaGenerationOutput` where it has them.

    Attributes:
        choice: the policy that the call ran under; and why, where that was left open.
        sequences: the prompts as they were passed, padding included, and the answers behind them. From the first
            end-of-sequence token on an answer holds padding, unless `stop_at_eos` was off.
        text: answers up to their end, without special tokens; None without a tokenizer.
        num_forwards: forwards of the batch (NFE); with guidance, one forward serves both canvases.
        forwards: forwards that each sequence took part in.
        tokens_per_forward: TPF of each sequence: its answer's tokens (end-of-sequence and padding not counted) over
            its forwards.
        steps_by_kind: number of steps, which are forwards, by kind (`refresh`, `update`, `step`, …).
        rows_per_step: rows of each sequence that every step recomputed, on average over layers; of the sequence with
            the most rows.
        experts_per_step: experts of a layer that every step picked, for all sequences together, on average over layers
            with a mixture; empty for a dense model.
        memory: bytes in each tier, from the ledger.
        timings: seconds.
        updates: what every layer of every update did, for a policy that measures drift.
        tiers: copies between the tiers, of what the call keeps below the device; None: nothing.
        weights: the same of the layers of weights that are streamed; None: all are on the device.
        history: with `output_history`, `sequences` before the first forward and after each one that changed something.
    """

    choice: Choice
    sequences: Int[Tensor, "batch length"]
    text: list[str] | None
    num_forwards: int
    forwards: list[int]
    tokens_per_forward: Float[Tensor, " batch"]
    steps_by_kind: dict[str, int]
    rows_per_step: list[float]
    experts_per_step: list[float] = field(repr=False, default_factory=list)
    memory: MemoryReport
    timings: Timings
    updates: Sequence[GroupUpdate] = field(repr=False, default=())
    tiers: TierStats | None = field(repr=False, default=None)
    weights: TierStats | None = field(repr=False, default=None)
    history: list[Int[Tensor, "batch length"]] | None

    @property
    def passes(self) -> dict[str, int]:
        """Deprecated name of `steps_by_kind`."""
        return self._renamed("passes", "steps_by_kind")

    @property
    def rows_per_forward(self) -> list[float]:
        """Deprecated name of `rows_per_step`."""
        return self._renamed("rows_per_forward", "rows_per_step")

    def _renamed(self, old: str, new: str) -> Any:
        warnings.warn(f"GenerationOutput.{old} is now {new}", DeprecationWarning, stacklevel=3)
        return getattr(self, new)

    def as_dict(self) -> dict[str, Any]:
        """The figures in plain types, for JSON; without ids and history."""
        return {
            "choice": self.choice.as_dict(),
            "text": self.text,
            "num_forwards": self.num_forwards,
            "tokens_per_forward": self.tokens_per_forward.tolist(),
            "steps_by_kind": self.steps_by_kind,
            "experts_per_step": self.experts_per_step,
            "timings": self.timings.as_dict(),
            "memory": self.memory.as_dict(),
            "updates": [update.as_dict() for update in self.updates],
            "tiers": None if self.tiers is None else self.tiers.as_dict(),
            "weights": None if self.weights is None else self.weights.as_dict(),
        }

    @classmethod
    def of(
        cls,
        prompts: Int[Tensor, "batch prompt"],
        denoised: GenerationState,
        *,
        choice: Choice,
        ends: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None,
        memory: MemoryReport,
        tiers: TierStats | None,
        weights: TierStats | None = None,
    ) -> "GenerationOutput":
        """From what the loop leaves behind, and the books of the call."""

        def behind_prompts(answers: Tensor) -> Tensor:
            return torch.cat([prompts.to(answers.device), answers], dim=1)

        answers = denoised.answers
        before_end = is_any(answers, ends).cumsum(dim=1) == 0
        columns = torch.arange(answers.shape[1], device=answers.device)
        before_end &= columns < on_device(denoised.lengths, answers.device)[:, None]
        tokens = before_end.sum(dim=1)
        text = None
        if tokenizer is not None:
            kept = [answer[mask].tolist() for answer, mask in zip(answers.cpu(), before_end.cpu(), strict=True)]
            text = tokenizer.batch_decode(kept, skip_special_tokens=True)
        steps = denoised.step_seconds
        first_block = sum(steps[: denoised.block_ends[0]])
        timings = Timings(total=denoised.seconds, first_block=first_block, steps=steps, tokens=int(tokens.sum()))
        return cls(
            choice=choice,
            sequences=behind_prompts(answers),
            text=text,
            num_forwards=len(steps),
            forwards=denoised.forwards,
            rows_per_step=denoised.rows,
            experts_per_step=denoised.experts if any(denoised.experts) else [],
            tokens_per_forward=tokens.cpu() / torch.tensor(denoised.forwards),
            steps_by_kind={kind.value: count for kind, count in denoised.steps_by_kind.items()},
            memory=memory,
            timings=timings,
            updates=denoised.updates,
            tiers=tiers,
            weights=weights,
            history=[behind_prompts(state) for state in denoised.history] or None,
        )
