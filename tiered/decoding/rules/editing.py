"""The sampler of LLaDA2.1 (joint threshold), which fills masks and edits tokens in one step.

Unlike in the authors' code, [MASK] is never proposed, so every block ends.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import check_integer, check_number
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.rewriting import RewritingState
from tiered.decoding.sampling import propose


@dataclass(frozen=True, slots=True, kw_only=True)
class JointThreshold(CommitRule):
    """Fill masks above one threshold, and edit tokens above another, until a step changes nothing.

    A block ends with a step that finds no mask and edits no token, or after `max_post_steps` steps that found no mask.
    The prompt's tokens are never edited.

    Attributes:
        confidence_threshold: confidence above which a mask is filled; in [0, 1].
        editing_threshold: confidence in another token above which a token is edited; in [0, 1].
        max_post_steps: most steps of a block that find no mask.
        num_to_transfer: least masks that a step fills, the most confident ones, if there are as many.
    """

    name: ClassVar[str] = "joint_threshold"
    rank: ClassVar[int] = 2
    rewrites: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    tempered_confidence: ClassVar[bool] = True
    top_k_first: ClassVar[bool] = True
    confidence_threshold: float
    editing_threshold: float
    max_post_steps: int = 16
    num_to_transfer: int = 1

    def __post_init__(self) -> None:
        for name in ("confidence_threshold", "editing_threshold"):
            check_number(name, getattr(self, name), least=0.0, most=1.0)
        check_integer("max_post_steps", self.max_post_steps, least=0)
        check_integer("num_to_transfer", self.num_to_transfer, least=1)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Joint(self)


class _Joint(RewritingState):
    weighs_masks = True

    def __init__(self, rule: JointThreshold) -> None:
        self._joint = rule

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._clean_steps = torch.zeros(len(pending), dtype=torch.long, device=pending.device)

    def propose(self, block: OpenBlock) -> Candidates:
        rule, found = self._joint, propose(block)
        masked = block.pending & (block.tokens == block.mask_token_id)
        filled = _filled(found, masked, rule)
        edited = block.pending & ~masked & (found.confidence > rule.editing_threshold) & (found.tokens != block.tokens)
        self._found_clean, self._is_clean = ~masked.any(dim=1), ~(masked & ~filled).any(dim=1)
        return replace(found, confidence=(filled | edited).double().log_())

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._clean_steps += self._found_clean
        return candidates.pending & (candidates.confidence == 0)

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        settled = self._found_clean & ~changed.any(dim=1)
        return settled | (self._is_clean & (self._clean_steps >= self._joint.max_post_steps))


def _filled(found: Candidates, masked: Bool[Tensor, "batch rows"], rule: JointThreshold) -> Bool[Tensor, "batch rows"]:
    sure = masked & (found.confidence > rule.confidence_threshold)
    ranks = replace(found, confidence=found.confidence.masked_fill(~masked, -torch.inf)).ranks()
    return sure.where(sure.sum(dim=1, keepdim=True) >= rule.num_to_transfer, masked & (ranks < rule.num_to_transfer))
