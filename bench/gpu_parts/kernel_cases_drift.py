"""Cases of drift from the changed keys, against its definition over all keys of then and now."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gpu_parts.attention_inputs import (
    CHANGING,
    CHECKED_KEYS,
    DREAM,
    GIDD,
    LLADA,
    SOFT_CAP,
    TIMED_CLUSTERS,
    TIMED_KEYS,
    Attended,
    AttentionCase,
)
from gpu_parts.kernel_case import KernelCase, normal, op, shuffled, size
from tiered.policies.polestar.drift_reference import DriftReference

_FILLER = 0.2  # share of the changing columns that are none


@dataclass(frozen=True, kw_only=True)
class Drifted(Attended):
    """Keys now and at the last update, and what the kernel is given: the changed ones, and what they drifted from."""

    last_keys: Tensor
    changed: Tensor
    reference: DriftReference

    def drift64(self) -> Tensor:
        """KL of now from then, mean over heads: [batch, rows]."""
        new, old = (self.scores64(keys).log_softmax(-1) for keys in (self.keys, self.last_keys))
        return (new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)


@dataclass(frozen=True, kw_only=True)
class ProxyDrift(AttentionCase[Drifted]):
    """`changing`: columns whose keys may have changed since. Some are filler, whose keys are NaN."""

    kernel: ClassVar[str] = "proxy_drift"
    changing: int

    @property
    def name(self) -> str:
        return super().name.replace(f"x{self.length} ", f"x{self.changing}of{self.length} ")

    @property
    def bound(self) -> float:
        return 1e-4  # of numbers near 0.05, which are differences of scores near 5

    @property
    def row_bound(self) -> float:
        return 10 * self.bound  # a row is a number

    def tiny(self) -> Self:
        return replace(super().tiny(), batch=1, changing=11)

    def draw(self, generator: torch.Generator) -> Drifted:
        given, device = self.attended(generator), generator.device
        columns = torch.stack([shuffled(generator, self.length)[: self.changing] for _ in range(self.batch)])
        valid = torch.rand(columns.shape, generator=generator, device=device) >= _FILLER
        changes = torch.zeros(self.batch, self.length, dtype=torch.bool, device=device).scatter_(1, columns, valid)
        other = normal(generator, *given.keys.shape, dtype=self.dtype)
        keys = given.keys.where(~changes[:, None, :, None], given.keys + other)
        index = columns[:, None, :, None].expand(-1, self.shape.kv_heads, -1, keys.shape[3])
        changed = keys.gather(2, index)
        changed.transpose(1, 2)[~valid] = torch.nan
        rest: dict[str, Any] = {"soft_cap": given.soft_cap, "sink_keys": given.sink_keys}
        return Drifted(
            queries=given.queries,
            keys=keys,
            key_mask=given.key_mask,
            last_keys=given.keys,
            changed=changed,
            reference=DriftReference.of(given.queries, given.keys, columns, valid, given.key_mask, **rest),
            **rest,
        )

    def run(self, given: Drifted, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (op(self.kernel)(given.queries, given.changed, given.reference),)

    def seen(self, given: Drifted, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (results[0][..., None],)

    def truth(self, given: Drifted) -> tuple[Tensor, ...]:
        return (given.drift64()[..., None],)

    def moved(self, given: Drifted) -> int:
        reference = given.reference
        kept = size(reference.rest.peak, reference.rest.mass, reference.scores)
        return size(given.queries, given.changed) + kept + 4 * self.batch * self.rows

    def arithmetic(self, given: Drifted) -> int:
        return 2 * given.queries.numel() * self.changing


_CHECKED: dict[str, Any] = {"rows": 65, "length": CHECKED_KEYS, "changing": CHANGING}
CHECKED: tuple[KernelCase[Any], ...] = (
    ProxyDrift(shape=LLADA, batch=2, dtype=torch.bfloat16, masked=True, **_CHECKED),
    ProxyDrift(shape=DREAM, dtype=torch.float32, strided=True, **_CHECKED),
    ProxyDrift(shape=GIDD, batch=2, dtype=torch.bfloat16, masked=True, soft_cap=SOFT_CAP, sinks=1, **_CHECKED),
)
TIMED: tuple[KernelCase[Any], ...] = (
    ProxyDrift(
        shape=LLADA, rows=TIMED_CLUSTERS, length=TIMED_KEYS, changing=CHANGING, dtype=torch.bfloat16, masked=True
    ),
)
