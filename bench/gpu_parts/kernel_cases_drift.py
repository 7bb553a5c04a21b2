"""Cases of drift from the changed keys, against its definition over all keys of then and now."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from gpu_parts import kernel_cases_attention as attention
from gpu_parts.kernel_case import KernelCase, normal, op, shuffled, size
from tiered.policies.polestar.drift_reference import DriftReference

_FILLER = 0.2  # share of the changing columns that are none


@dataclass(frozen=True, kw_only=True)
class Drifted(attention.Attended):
    """Keys now and at the last update, and what the kernel is given: the changed ones, and what they drifted from."""

    last_keys: Tensor
    changed: Tensor
    reference: DriftReference


@dataclass(frozen=True, kw_only=True)
class ProxyDrift(attention.AttentionCase):
    """`changing`: columns whose keys may have changed since. Some are filler, whose keys are NaN."""

    # Of numbers near 0.05, which are differences of scores near 5; a row is a number.
    kernel, products, error, roundings, of_rows = "proxy_drift", 1, 1e-4, 0, 10
    changing: int = 289  # no multiple of 16, as the other sizes

    def tiny(self) -> Self:
        return replace(super().tiny(), batch=1, changing=11)

    def draw(self, generator: torch.Generator) -> Drifted:
        given, device = super().draw(generator), generator.device
        columns = torch.stack([shuffled(generator, self.length)[: self.changing] for _ in range(self.batch)])
        valid = torch.rand(columns.shape, generator=generator, device=device) >= _FILLER
        changes = torch.zeros(self.batch, self.length, dtype=torch.bool, device=device).scatter_(1, columns, valid)
        other = normal(generator, *given.keys.shape, dtype=self.dtype)
        keys = given.keys.where(~changes[:, None, :, None], given.keys + other)
        changed = keys.gather(2, columns[:, None, :, None].expand(-1, self.shape.kv_heads, -1, keys.shape[3]))
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

    def run(self, given: Drifted, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(given.queries, given.changed, given.reference),)

    def seen(self, given: Drifted, results: Sequence[Tensor]) -> Sequence[Tensor]:
        return (results[0][..., None],)

    def truth(self, given: Drifted) -> Sequence[Tensor]:
        """KL of now from then, mean over heads: [batch, rows, 1]."""
        new, old = (given.scores64(keys).log_softmax(-1) for keys in (given.keys, given.last_keys))
        return ((new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)[..., None],)

    def moved(self, given: Drifted) -> int:
        rest = given.reference.rest
        kept = size(rest.peak, rest.mass, given.reference.scores)
        return size(given.queries, given.changed) + kept + 4 * self.batch * self.rows

    def arithmetic(self, given: Drifted) -> int:
        return 2 * given.queries.numel() * self.changing


CHECKED: tuple[KernelCase, ...] = (
    ProxyDrift(shape=attention.LLADA, batch=2, rows=65, masked=True),
    ProxyDrift(shape=attention.DREAM, rows=65, dtype=torch.float32, strided=True),
    ProxyDrift(shape=attention.GIDD, batch=2, rows=65, masked=True, soft_cap=attention.SOFT_CAP, sinks=1),
)
TIMED: tuple[KernelCase, ...] = (
    ProxyDrift(shape=attention.LLADA, rows=attention.TIMED_CLUSTERS, length=attention.TIMED_KEYS, masked=True),
)
