"""The output of `generate`: answers, and the call's figures from the ledger and the clock."""

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
from tiered.inputs import Prompts
from tiered.kernels.host_values import on_device
from tiered.models.response import response_template, split_response
from tiered.planning.choice import Choice
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.tiers.stats import TierStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds of a call.

    Attributes:
        total: seconds from the first forward to the last commit.
        first_block: seconds until the first block was final.
        steps: seconds of every forward with its commit.
        tokens: tokens of all answers before their end-of-sequence token.
    """

    total: float
    first_block: float
    steps: list[float] = field(repr=False)
    tokens: int

    @property
    def ms_per_forward(self) -> float:
        """Mean milliseconds of a forward with its commit."""
        return 1000 * sum(self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers over `total`, without prompt, end-of-sequence and padding."""
        return self.tokens / self.total

    def as_dict(self) -> dict[str, Any]:
        """The figures in plain types for JSON, without `steps`."""
        return {
            "total_s": self.total,
            "first_block_s": self.first_block,
            "ms_per_forward": self.ms_per_forward,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """The result of `Runtime.generate`. Names follow transformers' `DiffusionGemmaGenerationOutput`.

    Attributes:
        choice: policy of the call, and the reason if it was chosen by "auto".
        sequences: ids of the prompts as they were passed, padding included, followed by the answers. From its first
            end-of-sequence token on an answer holds padding, unless `stop_at_eos` was off.
        text: answers up to their end, without special tokens; None without a tokenizer. Answers to chats are without
            their thinking if the tokenizer has a response template.
        thinking: the thinking of each answer, None for none; None unless `text` is without it.
        num_forwards: forwards of the batch (NFE); with guidance, one forward serves both canvases.
        forwards: forwards of each sequence.
        tokens_per_forward: TPF of each sequence: its answer's tokens, without end-of-sequence and padding, over its
            forwards.
        steps_by_kind: number of steps (forwards) by kind (`refresh`, `update`, `step`, …).
        rows_per_step: rows that each step recomputed, averaged over layers, of the sequence with the most rows.
        experts_per_step: experts that each step picked for all sequences together, averaged over the layers with a
            mixture; empty for a dense model.
        memory: bytes in each tier, from the ledger.
        timings: seconds of the call.
        updates: records of each update, by layer, of a policy that measures drift.
        tiers: copies of the call's features between tiers; None if all features are on the device.
        weights: copies of streamed layers of weights; None if all weights are on the device.
        history: `sequences` before the first forward and after each that changed a token; None without
            `output_history`.
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
    thinking: list[str | None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The figures and the text in plain types for JSON, without ids and history."""
        return {
            "choice": self.choice.as_dict(),
            "text": self.text,
            **({} if self.thinking is None else {"thinking": self.thinking}),
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
        prompts: Prompts,
        denoised: GenerationState,
        *,
        choice: Choice,
        ends: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None,
        memory: MemoryReport,
        tiers: TierStats | None,
        weights: TierStats | None = None,
    ) -> "GenerationOutput":

        def behind_prompts(answers: Tensor) -> Tensor:
            return torch.cat([on_device(prompts.ids, answers.device), answers], dim=1)

        answers = denoised.answers_read
        before_end = is_any(answers, ends).cumsum(dim=1) == 0
        before_end &= torch.arange(answers.shape[1]) < torch.tensor(denoised.lengths)[:, None]
        tokens = before_end.sum(dim=1)
        text, thinking = None, None
        if tokenizer is not None:
            kept = [answer[mask].tolist() for answer, mask in zip(answers, before_end, strict=True)]
            template = response_template(tokenizer) if prompts.chat else None
            text = tokenizer.batch_decode(kept, skip_special_tokens=template is None)
            if template is not None:
                pairs = zip(prompts.rows(), text, strict=True)
                parts = [split_response(tokenizer, template, prompt, answer) for prompt, answer in pairs]
                text, thinking = [part.content for part in parts], [part.thinking for part in parts]
        steps = denoised.step_seconds
        first_block = sum(steps[: denoised.block_ends[0]])
        timings = Timings(total=denoised.seconds, first_block=first_block, steps=steps, tokens=int(tokens.sum()))
        return cls(
            choice=choice,
            sequences=behind_prompts(denoised.answers),
            text=text,
            thinking=thinking,
            num_forwards=len(steps),
            forwards=denoised.forwards,
            rows_per_step=denoised.rows,
            experts_per_step=denoised.experts if any(denoised.experts) else [],
            tokens_per_forward=tokens / torch.tensor(denoised.forwards),
            steps_by_kind={kind.value: count for kind, count in denoised.steps_by_kind.items()},
            memory=memory,
            timings=timings,
            updates=denoised.updates,
            tiers=tiers,
            weights=weights,
            history=[behind_prompts(state) for state in denoised.history] or None,
        )
