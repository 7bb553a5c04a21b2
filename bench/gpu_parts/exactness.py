"""The laws of the tiers at LLaDA-8B's width: no tier and no delay of a copy changes a bit.

Calls run four layers of the random model over 4096 positions. Every key, value and logit of every forward is compared,
so a wrong row names the first difference. Bits that no device promises are figures, not checks. In bfloat16 a row may
differ in another batch or among other rows, because libraries choose kernels by shape.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gpu_parts.policy_calls import BLOCK, Kinds, Resident, one_after_another, small_records
from gpu_parts.random_llada import few_layers, random_ids
from gpu_parts.setting import Setting, checked
from gpu_parts.slow_transports import Damaging, Synchronous, random_delays, transport
from tiered.core.features import Feature
from tiered.forward.forward import Forward
from tiered.models.base import DiffusionModel
from tiered.offload.codec_bytes import Codec
from tiered.offload.transport import Transport
from tiered.output import GenerationOutput
from tiered.policies.base import Policy, Step, StepKind
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT = (Feature.KEY, Feature.VALUE)
LAYERS = 4
# Four tokens a step, and an update behind more than seven: steps, updates and refreshes in turn. Every layer has
# clusters of its own, so an update fetches in all of them.
DELTA = Polestar(codec=Codec.NVFP4_DELTA, cluster_layers=1, update_threshold=7)
CONTROL = "damaged rows are seen"
# An update must not renew all clusters, or fetched rows are of no use.
TINY = {"clusters": 7, "top_m": 3, "update_threshold": 15}


def cases(setting: Setting) -> list[str]:
    """A control and the laws first; the float32 case last, because its passes take longest."""
    return [CONTROL, *_LAWS, "a padded batch, each alone", "all renewed, none, bfloat16", "all renewed, none, float32"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """A law's verdict and forwards by kind, or figures of the distance between two calls."""
    if case == CONTROL:
        return _control(setting)
    if case in _LAWS:
        one, other = (call(setting) for call in _LAWS[case])
        return _verdict(one, one.difference(other))
    if case.startswith("a padded batch"):
        return _batch(setting)
    dtype = torch.float32 if case.endswith("float32") else few_layers(setting, LAYERS).wte.weight.dtype
    return _all_renewed(setting, dtype)


@dataclass
class Left(Kinds):
    """An inspector that copies keys, values and logits of every forward; it books nothing.

    Attributes:
        stores: keys and values of every layer after each forward, [2 layers, batch, heads, length, head_dim].
        logits: logits of each forward, [batch, rows, vocab].
        out: output of the call, once it has ended.
    """

    stores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    out: GenerationOutput = field(init=False)

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        """See `tiered.decoding.observers.Inspector`."""
        super().after_forward(step, kind, ids, forward, active)
        layers = range(forward.model.shape.layers)
        self.stores.append(torch.stack([forward.store.view(feature, layer) for layer in layers for feature in _KEPT]))

    def difference(self, other: "Left") -> str | None:
        """The first difference, in words; None if the two are the same bit by bit."""
        if self.kinds != other.kinds:
            return f"forwards were {_counts(self.kinds)} here, {_counts(other.kinds)} there"
        for number, kind in enumerate(self.kinds):
            for place, (one, two) in enumerate(zip(self.stores[number], other.stores[number], strict=True)):
                if found := _differing(one, two):
                    return f"{_KEPT[place % 2]} of layer {place // 2} after forward {number} ({kind}): {found}"
            if found := _differing(self.logits[number], other.logits[number]):
                return f"logits of forward {number} ({kind}): {found}"
        return None if torch.equal(self.out.sequences, other.out.sequences) else "tokens, of the same logits"


def left_by(runtime: Runtime, ids: Tensor, **options: Any) -> Left:
    """Run a call of `generate`, and keep its keys, values and logits."""
    left = Left()
    with _kept_logits(runtime.model, left.logits):
        left.out = runtime.generate(ids, inspector=left, **options)
    return left


@contextmanager
def _kept_logits(model: DiffusionModel, kept: list[Tensor]) -> Iterator[None]:
    """Append all logits that `model` makes meanwhile to `kept`."""
    plain = model.logits

    def logits(hidden: Tensor) -> Tensor:
        kept.append(plain(hidden))
        return kept[-1].clone()  # the caller may write into its own

    vars(model)["logits"] = logits
    try:
        yield
    finally:
        del vars(model)["logits"]


def _differing(one: Tensor, two: Tensor) -> str | None:
    """The number of elements that differ in their bits, and the largest difference; None for no difference."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{tuple(one.shape)} of {one.dtype} here, {tuple(two.shape)} of {two.dtype} there"
    bits = _BITS[one.dtype.itemsize]
    differ = one.view(bits) != two.view(bits)
    if not differ.any():
        return None
    by = (one[differ].double() - two[differ].double()).abs().max()
    return f"{int(differ.sum())} of {differ.numel()} elements, by up to {float(by):.3g}"


def _counts(kinds: list[StepKind]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _policy(setting: Setting, **changes: Any) -> Polestar:
    return replace(DELTA, **((TINY if setting.tiny else {}) | changes))


def _options(setting: Setting) -> dict[str, Any]:
    return one_after_another(2 * BLOCK, 8 if setting.tiny else 16)


def _call(
    setting: Setting, policy: Policy, carrier: Callable[[], Transport] | None = None, dtype: torch.dtype | None = None
) -> Left:
    runtime = Runtime(few_layers(setting, LAYERS, dtype), policy=policy, transport=carrier)
    # In float32 a full pass takes ten times as long.
    positions = 160 if setting.tiny else 1024 if dtype is torch.float32 else 4096
    with small_records(setting):
        return left_by(runtime, random_ids(setting, positions - 2 * BLOCK), **_options(setting))


@cache
def _delta(setting: Setting) -> Left:
    return _call(setting, _policy(setting))


@cache
def _raw(setting: Setting) -> Left:
    return _call(setting, _policy(setting, codec=Codec.RAW))


def _resident(setting: Setting, codec: Codec) -> Left:
    return _call(setting, Resident(**asdict(_policy(setting, codec=codec))))


def _by(setting: Setting, codec: Codec = Codec.NVFP4_DELTA, late: bool = False) -> Left:
    delay = random_delays(setting.on, setting.seed) if late else None
    return _call(setting, _policy(setting, codec=codec), partial(transport, setting.on, delay=delay))


# Two calls that must give the same bits.
_LAWS: Mapping[str, tuple[Callable[[Setting], Left], Callable[[Setting], Left]]] = {
    "twice the same": (_delta, _by),
    "raw, offloaded, resident": (_raw, lambda setting: _resident(setting, Codec.RAW)),
    "delta, offloaded, resident": (_delta, lambda setting: _resident(setting, Codec.NVFP4_DELTA)),
    "asynchronous, synchronous": (
        _delta,
        lambda setting: _call(setting, _policy(setting), lambda: Synchronous(transport(setting.on))),
    ),
    "copies on time, late": (_delta, lambda setting: _by(setting, late=True)),
    "raw copies on time, late": (_raw, lambda setting: _by(setting, Codec.RAW, late=True)),
}


def _control(setting: Setting) -> dict[str, Any]:
    """The control: the laws have to see wrong bytes."""
    damaged = _call(setting, _policy(setting, codec=Codec.RAW), lambda: Damaging(transport(setting.on)))
    difference = _raw(setting).difference(damaged)
    blind = "stored rows were damaged, and nothing came of it" if difference is None else None
    return {"seen": difference, **checked(blind)}


def _verdict(left: Left, difference: str | None) -> dict[str, Any]:
    passes = {kind.value: left.kinds.count(kind) for kind in StepKind}
    if not any(update.fetched_bytes for update in left.out.updates):
        difference = difference or "nothing was fetched"
    if not all(bool(logits.isfinite().all()) for logits in left.logits):
        difference = difference or "logits are not finite"
    return {"passes": passes, **checked(difference)}


def _batch(setting: Setting) -> dict[str, Any]:
    """Two prompts of different lengths, padded on the left, beside each prompt alone: shares of equal tokens, and
    distances of the first forward's logits."""
    runtime = Runtime(few_layers(setting, LAYERS), policy=_policy(setting))
    prompt = random_ids(setting, 90 if setting.tiny else 2048)
    shorter, pads = prompt[:, : -(prompt.shape[1] // 3)], prompt.shape[1] // 3
    ids = torch.cat([prompt, torch.cat([torch.zeros_like(prompt[:, :pads]), shorter], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    both = left_by(runtime, ids, attention_mask=mask, **_options(setting))
    alone = [left_by(runtime, one, **_options(setting)) for one in (prompt, shorter)]
    return {
        "equal_tokens_share": [_equal(both.out.sequences[row], one.out.sequences[0]) for row, one in enumerate(alone)],
        "relative_logits": [_apart(both.logits[0][row], one.logits[0][0]) for row, one in enumerate(alone)],
    }


def _all_renewed(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """Every cluster renewed at every step, beside the uncached model: a check in float32 alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        renewed = _call(setting, replace(DELTA, codec=Codec.RAW, top_m=1 << 20, update_threshold=0), dtype=dtype)
        exact = _call(setting, make_policy("none"), dtype=dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    share = _equal(renewed.out.sequences[0], exact.out.sequences[0])
    apart = max(_apart(one, other) for one, other in zip(renewed.logits, exact.logits, strict=True))
    row: dict[str, Any] = {"equal_tokens_share": share, "relative_logits": apart}
    if dtype is not torch.float32:
        return row
    differ = "tokens differ in float32: where logits are close, rounding may decide"
    return row | checked(None if share == 1.0 else differ)


def _equal(one: Tensor, other: Tensor) -> float:
    """Share of answers' tokens that are the same."""
    return float((one[-2 * BLOCK :] == other[-2 * BLOCK :]).double().mean())


def _apart(one: Tensor, other: Tensor) -> float:
    """||one − other|| / ||other||."""
    return float((one.double() - other.double()).norm() / other.double().norm())
