"""The baselines that bench/compare.py measures beside the policies."""

from dataclasses import asdict, dataclass
from typing import Any

from baselines.by_transformers import ByTransformers
from baselines.prefix_caches import CacheKind
from tiered.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a user would do without this library; the counterpart of `variants.Variant`.

    Attributes:
        name: of the row.
        kind: of cache; None: none.
    """

    name: str
    kind: CacheKind | None

    @property
    def reference(self) -> str:
        """The name of the variant of `none` that answers the same call."""
        return "none"

    def answerer(self, runtime: Runtime) -> Any:
        """What answers in `runtime`'s place, with a `generate` as it has; `Any`, for the runtime is a class and no
        protocol. Raises `ValueError` where it cannot be had."""
        return ByTransformers(runtime, self.kind)

    def call(self, *, answer: int, block: int) -> dict[str, Any]:
        """Options of `generate` for `answer` tokens, in blocks of `block`."""
        return {"max_new_tokens": answer, "block_length": block}

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, with the names that a variant has."""
        options = {"cache": None} if self.kind is None else asdict(self.kind)
        call = {"given": {}, "one_block": False, "random_order": False}
        return {"policy": "transformers", "baseline": True, "options": options} | call


BASELINES = (
    Baseline(name="transformers, no cache", kind=None),
    Baseline(name="transformers, cache", kind=CacheKind()),
    Baseline(name="transformers, offloaded", kind=CacheKind(offloading=True)),
    Baseline(name="transformers, quantized", kind=CacheKind(backend="quanto")),
    Baseline(name="transformers, quantized hqq", kind=CacheKind(backend="hqq")),
    Baseline(name="transformers, quantized fp8", kind=CacheKind(backend="fp8")),
)
