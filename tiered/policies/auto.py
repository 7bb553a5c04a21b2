"""No policy of its own: the fastest of those whose answers were measured to hold, chosen before each call."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tiered.forward.sizes import CallSizes
from tiered.models.shape import BLOCK_CAUSAL, CANVAS, Sight
from tiered.policies.base import Policy, PolicyState
from tiered.policies.block_causal import BlockCausal
from tiered.policies.dllm_cache.policy import DLLMCache
from tiered.policies.elastic_cache.policy import ElasticCache
from tiered.policies.polestar.policy import Polestar
from tiered.policies.row_schedule import LEAST_STALE_PROMPT, SELDOM, row_schedule


class Held(NamedTuple):
    """A policy, and from which prompt on its answers hold.

    Attributes:
        policy: what a call may run under.
        least_prompt: tokens of a prompt from which on the policy was measured to answer within 1 point of `none`.
        one_block: whether it is made for answers of one block.
    """

    policy: Policy
    least_prompt: int
    one_block: bool = False


SELDOM_FROM = 960  # tokens of the shortest prompts behind which blocks without a refresh were measured
# The plainest first. Right answers: docs/policies.md (drops: several blocks behind 1000 and 2000 tokens),
# docs/benchmarks.md (compare: lookups in 1024 positions) and docs/embedded-model.md (accuracy: lookups in 512 to 2048).
HELD: tuple[Held, ...] = (
    Held(row_schedule("none"), 0),
    Held(row_schedule("fast_dllm_dual"), LEAST_STALE_PROMPT),
    Held(row_schedule("fast_dllm_dual", refresh_blocks=SELDOM), SELDOM_FROM),
    Held(row_schedule("dkv_pd"), LEAST_STALE_PROMPT),
    Held(DLLMCache(), LEAST_STALE_PROMPT),
    Held(ElasticCache(), LEAST_STALE_PROMPT, one_block=True),
    Held(Polestar(), LEAST_STALE_PROMPT),
    Held(Polestar(refresh="drift"), SELDOM_FROM),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Policy):
    """What `tiered.planning.choice` finds the fastest before a call: by the rates of the machine, of the policies that
    fit the budget and whose answers to such prompts were measured to be those of `none`."""

    name: ClassVar[str] = "auto"
    sights: ClassVar[frozenset[Sight]] = CANVAS | BLOCK_CAUSAL

    def candidates(self, sizes: CallSizes, prompt: int) -> tuple[Policy, ...]:
        if sizes.shape.block_causal:
            return (BlockCausal(),)  # exact, and never slower than `none`
        one_block = sizes.answer == sizes.block_length
        return tuple(held.policy for held in HELD if prompt >= held.least_prompt and (one_block or not held.one_block))

    def start(self) -> PolicyState:
        raise TypeError("policy 'auto' is decided before a call (tiered.planning.choice), which runs under another one")
