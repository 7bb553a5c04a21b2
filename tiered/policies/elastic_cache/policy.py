"""Elastic-Cache (arXiv 2510.14973). A window of masked positions slides over the answer. A step recomputes all rows
from the layer on in which the attention of the most attended tokens has moved.

Semantics follow the paper, which has no blocks: its setting is `block_length = max_new_tokens`, and other lengths work
too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from tiered.core.checks import check_count, check_integer, check_number, unknown_name
from tiered.core.features import Feature, Tier
from tiered.forward.sizes import CallShape
from tiered.models.shape import ModelShape
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind
from tiered.policies.elastic_cache.program import ElasticStep
from tiered.policies.elastic_cache.rows import Tracked, step_rows
from tiered.policies.elastic_cache.window_bytes import elastic_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticCache(Policy):
    """Layer-wise updates on demand.

    The call begins with a refresh that stores every layer's input. A step recomputes the window, the tokens that the
    last step committed, and the tracked tokens. In each layer, these are the tokens that the window attended to most in
    the last step. If their attention weights have changed, all rows are recomputed from the next layer up.

    The host reads this decision once in each layer, because it sets the number of rows of the next layer. It is on its
    way while the device computes the layer's attention and MLP, so the device does not wait for the host. If the
    decision stayed on the device, every layer of a step would compute all rows. If it were read behind the last layer,
    a step whose attention moves in a lower layer would launch nearly twice as much.

    Attributes:
        window: number of first masked positions, which a step recomputes and may commit.
        similarity_threshold: γ, cosine similarity below which attention has moved; −1 for never, above 1 for always.
        tracked: number of tracked tokens of each layer.
        hidden_tier: tier of the layers' inputs, "host" or "device".
        refresh_interval: forwards of a sequence from one refresh to the next; None for the call's first alone. With 1
            and a window as long as a block, no feature is stale, and answers equal those of `none`.
    """

    name: ClassVar[str] = "elastic_cache"
    window: int = 16
    similarity_threshold: float = 0.9
    tracked: int = 1
    hidden_tier: Tier | str = Tier.HOST
    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)
        check_number("similarity_threshold", self.similarity_threshold, least=-1.0)
        check_integer("tracked", self.tracked, least=1)
        if self.hidden_tier not in (Tier.HOST, Tier.DEVICE):
            raise unknown_name("hidden_tier", str(self.hidden_tier), (Tier.HOST, Tier.DEVICE))
        check_count("refresh_interval", self.refresh_interval)

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return dict.fromkeys((Feature.KEY, Feature.VALUE, Feature.HIDDEN), shape.layers)

    def needs(self, sizes: CallShape) -> Needs:
        return Needs(
            buffers=partial(elastic_buffers, sizes, window=self.window, tracked=self.tracked),
            on_host=frozenset({Feature.HIDDEN} if self.hidden_tier == Tier.HOST else ()),
            logit_rows=min(self.window, sizes.block_length),
            reads_keys=True,
        )

    def start(self) -> PolicyState:
        return _Elastic(self)


class _Elastic(PolicyState):
    def __init__(self, policy: ElasticCache) -> None:
        self._policy = policy
        self._tracked = Tracked(policy.tracked)

    def rows(self, step: Step) -> Pass:
        full = step.active if step.remasked else step.due(self._policy.refresh_interval)
        rows = step_rows(step, self._policy.window, self._tracked, full)
        kind = StepKind.REFRESH if rows.all_due else StepKind.UPDATE if any(full) else StepKind.STEP
        apart = self._policy.hidden_tier == Tier.HOST
        program = ElasticStep(self._tracked, rows, self._policy.similarity_threshold, apart=apart)
        return replace(step.of_rows(rows.rows, rows.output, kind, program), refreshed=full)

    def keep(self, sequences: list[int]) -> None:
        self._tracked.keep(sequences)
