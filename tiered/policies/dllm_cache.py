"""The policy of dLLM-Cache (arXiv 2506.06295): the prompt is renewed at long intervals, the answer at short ones, and
between them the rows of the answer that have moved most, layer by layer.

Semantics follow the paper; `parity` follows the authors' code at commit 17235bff. Departures are in docs/policies.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tiered.branches.clocks import Clocks
from tiered.branches.distance import Similarity
from tiered.branches.verify import Verify
from tiered.checks import check_integer, check_number, check_switch
from tiered.features import Account, Feature
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.names import unknown_name
from tiered.planning.branch_costs import branch_pass_bytes
from tiered.policies.base import Policy, PolicyState
from tiered.policies.schedule import check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class DLLMCache(Policy):
    """Intervals count the forwards of each sequence, over all blocks; a sequence's first one renews everything.

    Attributes:
        prompt_interval: Kp, forwards from one renewal of the prompt's rows to the next; None: never again.
        response_interval: Kr, the same of the answer's rows, masks of later blocks included.
        update_ratio: ρ, share of the answer's rows that any other forward recomputes in each layer.
        verify: which: those whose "value" or "key" is least similar to the cached one, or "random" ones.
        similarity: "cosine", or "l2", the distance.
        guidance_interval: with classifier-free guidance, forwards from one with an unconditional half to the next; the
            half has a cache of its own, and its intervals count the forwards with it. A block's first has it always.
        seed: of random rows.
        parity: as the authors' code: values of all rows replace the cached ones wherever they are compared, the first
            layer renews the whole answer, and guidance is computed in the first five forwards, but not for a new block.
            Where predictions are shifted, the row that predicts the answer's first token is as old as the prompt.
    """

    name: ClassVar[str] = "dllm_cache"
    prompt_interval: int | None = 50
    response_interval: int | None = 7
    update_ratio: float = 0.25
    verify: Verify | str = Verify.VALUE
    similarity: Similarity | str = Similarity.COSINE
    guidance_interval: int = 1
    seed: int = 0
    parity: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_interval", "response_interval"):
            check_interval(name, getattr(self, name))
        check_number("update_ratio", self.update_ratio, least=0.0, most=1.0)
        check_integer("guidance_interval", self.guidance_interval, least=1)
        check_integer("seed", self.seed, least=0)
        check_switch("parity", self.parity)
        for name, allowed in (("verify", Verify), ("similarity", Similarity)):
            if getattr(self, name) not in list(allowed):
                raise unknown_name(name, str(getattr(self, name)), map(str, allowed))

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        kept = (Feature.KEY, Feature.VALUE, Feature.ATTN_OUT, Feature.FFN_OUT)
        return dict.fromkeys(kept, shape.layers)

    def state_bytes(
        self, shape: ModelShape, *, batch: int, context: int, block_length: int, dtype: str, answer: int | None = None
    ) -> Mapping[Account, int]:
        rows = context if answer is None else answer
        taken = branch_pass_bytes(shape, batch=batch, context=context, answer=rows, dtype=dtype)
        if self.parity:  # what is kept of the row in front of the answer, where it predicts, and what that is made of
            taken += 4 * batch * shape.prediction_shift * shape.width * BYTES_PER_ELEMENT[dtype]
        return {Account.ACTIVATIONS: taken}

    def skips_guidance(self) -> bool:
        return self.guidance_interval > 1

    def logit_rows(self, block_length: int, context: int) -> int:
        # The difference that guidance makes outlives its block in the authors' code, so it is of the whole answer.
        return context if self.parity and self.skips_guidance() else block_length

    def start(self) -> PolicyState:
        return Clocks(self)
