"""Cases of what an update measures drift with, against its definition over all keys of then and now."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gpu_parts import kernel_cases_attention as attention
from gpu_parts.kernel_case import KernelCase, normal, op, shuffled, size
from tiered.policies.polestar.drift_reference import DriftReference

_FILLER = 0.2  # share of the columns that are none


@dataclass(frozen=True, kw_only=True)
class Drifted(attention.Attended):
    """Keys now and at the last update, which differ at `columns` where `valid`; those keys alone; and what they drift
    from."""

    last_keys: Tensor
    columns: Tensor
    valid: Tensor
    changed: Tensor
    reference: DriftReference

    @property
    def there(self) -> Tensor:
        """[batch, columns], False at filler and at pads."""
        return self.valid if self.key_mask is None else self.valid & self.key_mask.gather(1, self.columns)

    def outside(self, changing: int) -> tuple[Tensor, Tensor]:
        """Where the first `changing` columns stand, and how many of the others each part has."""
        state = self.reference
        columns = self.columns.where(self.there, self.keys.shape[2])[:, :changing]
        part_of = state.part_of.scatter(1, columns, -1)[..., None]
        sizes = (part_of == torch.arange(state.sizes.shape[1], device=part_of.device)).sum(1)
        if self.sink_keys is not None:
            sizes[:, -1] = self.sink_keys.shape[1]
        return columns.double(), sizes.double()

    def weights64(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Of `columns`, 0 at filler, and of everything else: [batch, heads, rows, columns] and [..., 1]."""
        weights = self.scores64(keys).exp()
        index = self.columns[:, None, None].expand(*weights.shape[:3], -1)
        chosen = weights[..., -self.keys.shape[2] :].gather(3, index) * self.there[:, None, None]
        return chosen, weights.sum(3, keepdim=True) - chosen.sum(3, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class DriftCase(attention.AttentionCase):
    """`changing`: columns whose keys may have changed since. Some are filler, whose keys are NaN. `parts`: of the
    other columns."""

    products, roundings = 1, 0
    in_reference: ClassVar[bool]
    changing: int = 289  # no multiple of 16, as the other sizes
    parts: int = 1

    def tiny(self) -> Self:
        return replace(super().tiny(), batch=1, changing=11)

    def draw(self, generator: torch.Generator) -> Drifted:
        given, device = super().draw(generator), generator.device
        columns = torch.stack([shuffled(generator, self.length)[: self.changing] for _ in range(self.batch)])
        valid = torch.rand(columns.shape, generator=generator, device=device) >= _FILLER
        changes = torch.zeros(self.batch, self.length, dtype=torch.bool, device=device).scatter_(1, columns, valid)
        other = normal(generator, *given.keys.shape, dtype=self.dtype)
        keys = given.keys.where(~changes[:, None, :, None], given.keys + other)
        source = keys if self.in_reference else given.keys
        changed = source.gather(2, columns[:, None, :, None].expand(-1, self.shape.kv_heads, -1, keys.shape[3]))
        changed.transpose(1, 2)[~valid] = torch.nan
        rest: dict[str, Any] = {"soft_cap": given.soft_cap, "sink_keys": given.sink_keys}
        clusters: dict[str, Any] = {}
        if self.parts > 1:
            shape = self.batch, self.length
            of = torch.randint(-1, self.parts - 1, shape, generator=generator, device=device)
            clusters = {"cluster_of": of, "clusters": self.parts - 1}
        tracked = (columns, valid) if self.in_reference else (columns[:, :0], valid[:, :0])
        return Drifted(
            queries=given.queries,
            keys=keys,
            key_mask=given.key_mask,
            last_keys=given.keys,
            columns=columns,
            valid=valid,
            changed=changed,
            reference=DriftReference.of(given.queries, given.keys, *tracked, given.key_mask, **rest, **clusters),
            **rest,
        )

    def read(self, given: Drifted) -> int:
        """Bytes of what goes in: the state of the reference, and what stands beside it."""
        state = given.reference
        of_state = size(state.scores, state.columns, state.sums.peak, state.sums.mass, state.sizes)
        return size(given.queries, given.changed) + of_state

    def arithmetic(self, given: Drifted) -> int:
        return 2 * given.queries.numel() * self.changing


@dataclass(frozen=True, kw_only=True)
class ProxyDrift(DriftCase):
    """The first half of the columns stays changing. Seen: drift; what is kept and its weights, and the rest's."""

    # Of numbers near 0.05, which are differences of scores near 5; a row is a number.
    kernel, error, of_rows, in_reference = "proxy_drift", 1e-4, 10, True

    @property
    def kept(self) -> int:
        """Columns that stay changing."""
        return self.changing // 2

    def run(self, given: Drifted, room: Sequence[Tensor]) -> Sequence[Tensor]:
        found = op(self.kernel)(given.queries, given.changed, None, given.reference, (0, self.kept))
        drift, scores, columns, sums, sizes = found
        return drift, scores, columns, *astuple(sums), sizes

    def seen(self, given: Drifted, results: Sequence[Tensor]) -> Sequence[Tensor]:
        drift, scores, columns, peak, mass, sizes = results
        rest = (peak.double().exp() * mass).sum(3, keepdim=True)
        return drift[..., None], scores.double().exp(), columns, rest, sizes

    def truth(self, given: Drifted) -> Sequence[Tensor]:
        """KL of now from then, mean over heads; weights of now."""
        new, old = (given.scores64(keys).log_softmax(-1) for keys in (given.keys, given.last_keys))
        drift = (new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)[..., None]
        (chosen, others), (columns, sizes) = given.weights64(given.keys), given.outside(self.kept)
        return drift, chosen[..., : self.kept], columns, others + chosen[..., self.kept :].sum(3, keepdim=True), sizes

    def moved(self, given: Drifted) -> int:
        state = given.reference
        written = size(state.scores[..., : self.kept], state.columns[:, : self.kept], state.sums.peak, state.sums.mass)
        return self.read(given) + written + size(state.sizes) + 4 * self.batch * self.rows


@dataclass(frozen=True, kw_only=True)
class ProxyWiden(DriftCase):
    """All columns begin to change. Seen: where they are and their weights, and the rest's."""

    # What is taken off the parts rounds at the size of these.
    kernel, error, of_rows, in_reference = "proxy_widen", 1e-5, 10, False

    def run(self, given: Drifted, room: Sequence[Tensor]) -> Sequence[Tensor]:
        found = op(self.kernel)(given.queries, given.changed, None, given.reference, given.columns, given.valid)
        scores, columns, sums, sizes = found
        return scores, columns, *astuple(sums), sizes

    def seen(self, given: Drifted, results: Sequence[Tensor]) -> Sequence[Tensor]:
        scores, columns, peak, mass, sizes = results
        return scores.double().exp(), columns, (peak.double().exp() * mass).sum(3, keepdim=True), sizes

    def truth(self, given: Drifted) -> Sequence[Tensor]:
        (chosen, others), (columns, sizes) = given.weights64(given.last_keys), given.outside(self.changing)
        return chosen, columns, others, sizes

    def moved(self, given: Drifted) -> int:
        state, scores = given.reference, 4 * given.queries[..., 0].numel() * self.changing
        written = size(state.sums.peak, state.sums.mass, state.sizes, given.columns) + scores
        return self.read(given) + size(given.columns, given.valid) + written


_GIDD: dict[str, Any] = {
    "shape": attention.GIDD,
    "rows": 65,
    "masked": True,
    "soft_cap": attention.SOFT_CAP,
    "sinks": 1,
}
_TIMED: dict[str, Any] = {
    "shape": attention.LLADA, "rows": attention.TIMED_CLUSTERS, "length": attention.TIMED_KEYS, "masked": True,
}  # fmt: skip
CHECKED: tuple[KernelCase, ...] = tuple(
    case
    for kind in (ProxyDrift, ProxyWiden)
    for case in (
        kind(shape=attention.LLADA, batch=2, rows=65, masked=True),
        kind(shape=attention.LLADA, rows=16, masked=True, parts=17),
        kind(shape=attention.DREAM, rows=65, dtype=torch.float32, strided=True, parts=3),
        kind(batch=2, parts=9, **_GIDD),
    )
)
TIMED: tuple[KernelCase, ...] = (ProxyDrift(**_TIMED), ProxyWiden(**_TIMED))
