"""Cases of drift: from the changed keys alone, and from all keys of then and now; both against one definition."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from gpu_parts.attention_inputs import Attended, AttentionCase
from gpu_parts.kernel_case import normal, op, shuffled, size
from tiered.policies.polestar.drift_reference import DriftReference

_FILLER = 0.2  # share of the changing columns that are none


@dataclass(frozen=True, kw_only=True)
class Drifted(Attended):
    """Keys now and at the last update."""

    last_keys: Tensor

    def drift64(self) -> Tensor:
        """KL of now from then, mean over heads: [batch, rows]."""
        new, old = (self.scores64(keys).log_softmax(-1) for keys in (self.keys, self.last_keys))
        return (new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)


@dataclass(frozen=True, kw_only=True)
class Tracked(Drifted):
    """What the incremental kernel is given."""

    changed: Tensor
    reference: DriftReference


@dataclass(frozen=True, kw_only=True)
class _DriftCase(AttentionCase[Drifted]):
    """`changing`: columns whose keys have changed since."""

    changing: int

    @property
    def bound(self) -> float:
        return 1e-4  # of numbers near 0.05, which are differences of scores near 5

    @property
    def row_bound(self) -> float:
        return 10 * self.bound  # a row is a number

    def seen(self, given: Drifted, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (results[0][..., None],)

    def tiny(self) -> Self:
        return replace(super().tiny(), batch=1, changing=11)

    def drifted(self, generator: torch.Generator) -> tuple[Drifted, Tensor, Tensor]:
        """Keys of which some have changed; their columns, and which of these are no filler: both [batch, changing]."""
        given, device = self.attended(generator), generator.device
        columns = torch.stack([shuffled(generator, self.length)[: self.changing] for _ in range(self.batch)])
        valid = torch.rand(columns.shape, generator=generator, device=device) >= _FILLER
        changes = torch.zeros(self.batch, self.length, dtype=torch.bool, device=device).scatter_(1, columns, valid)
        other = normal(generator, *given.keys.shape, dtype=self.dtype)
        keys = given.keys.where(~changes[:, None, :, None], given.keys + other)
        drifted = Drifted(
            queries=given.queries,
            keys=keys,
            key_mask=given.key_mask,
            soft_cap=given.soft_cap,
            sink_keys=given.sink_keys,
            last_keys=given.keys,
        )
        return drifted, columns, valid


@dataclass(frozen=True, kw_only=True)
class FullDrift(_DriftCase):
    """All keys, twice."""

    kernel: ClassVar[str] = "full_drift"

    def draw(self, generator: torch.Generator) -> Drifted:
        return self.drifted(generator)[0]

    def run(self, given: Drifted, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = given.key_mask, given.soft_cap, given.sink_keys
        return (op(self.kernel)(given.queries, given.keys, given.last_keys, *rest),)

    def truth(self, given: Drifted) -> tuple[Tensor, ...]:
        return (given.drift64()[..., None],)

    def moved(self, given: Drifted) -> int:
        columns = given.bytes_of_columns(given.keys, given.last_keys)
        return size(given.queries, given.sink_keys) + columns + 4 * self.batch * self.rows

    def arithmetic(self, given: Drifted) -> int:
        return 4 * given.queries.numel() * self.length


@dataclass(frozen=True, kw_only=True)
class ProxyDrift(_DriftCase):
    """The changed keys; NaN at filler."""

    kernel: ClassVar[str] = "proxy_drift"

    @property
    def name(self) -> str:
        return super().name.replace(f"x{self.length} ", f"x{self.changing}of{self.length} ")

    def draw(self, generator: torch.Generator) -> Tracked:
        given, columns, valid = self.drifted(generator)
        index = columns[:, None, :, None].expand(-1, self.shape.kv_heads, -1, given.keys.shape[3])
        changed = given.keys.gather(2, index)
        changed.transpose(1, 2)[~valid] = torch.nan
        reference = DriftReference.of(
            given.queries,
            given.last_keys,
            columns,
            valid,
            given.key_mask,
            soft_cap=given.soft_cap,
            sink_keys=given.sink_keys,
        )
        return Tracked(
            queries=given.queries,
            keys=given.keys,
            key_mask=given.key_mask,
            soft_cap=given.soft_cap,
            sink_keys=given.sink_keys,
            last_keys=given.last_keys,
            changed=changed,
            reference=reference,
        )

    def run(self, given: Drifted, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert isinstance(given, Tracked)
        return (op(self.kernel)(given.queries, given.changed, given.reference),)

    def truth(self, given: Drifted) -> tuple[Tensor, ...]:
        return (given.drift64()[..., None],)

    def moved(self, given: Drifted) -> int:
        assert isinstance(given, Tracked)
        reference = given.reference
        kept = size(reference.rest.peak, reference.rest.mass, reference.scores)
        return size(given.queries, given.changed) + kept + 4 * self.batch * self.rows

    def arithmetic(self, given: Drifted) -> int:
        return 2 * given.queries.numel() * self.changing
