"""The laws of the tiers at LLaDA-8B's width: bit for bit, whatever carries the hidden states and whenever.

Four layers of the random model, 4096 positions. Of each call every key, value and logit of every forward is compared,
so a row that is wrong says which came first. What no device promises is a figure, not a check: in bfloat16 a row may
come out otherwise in another batch or among other rows, since libraries choose kernels by shape.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gpu_parts.few_layers import few_layers
from gpu_parts.leftovers import Left, left_by
from gpu_parts.random_llada import random_ids
from gpu_parts.setting import Setting
from gpu_parts.slow_transports import BY_KERNEL, Damaging, Synchronous, random_delays, transport
from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.offload.transport import Transport
from tiered.policies.base import Policy, StepKind
from tiered.policies.none import NoCache
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime

LAYERS = 4
BLOCK = 32
# Four tokens a step, and an update behind more than seven: steps, updates and refreshes in turn. Every layer has
# clusters of its own, so an update fetches in all of them.
DELTA = Polestar(codec=Codec.NVFP4_DELTA, cluster_layers=1, update_threshold=7)
CONTROL = "damaged rows are seen"
# Else an update renews all that there are, and what was fetched is of no use.
TINY = {"clusters": 7, "top_m": 3, "update_threshold": 15}


def cases(setting: Setting) -> list[str]:
    """A control and the laws first; the float32 one last, whose passes take longest."""
    return [CONTROL, *_LAWS, "a padded batch, each alone", "all renewed, none, bfloat16", "all renewed, none, float32"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Of a law, whether it holds and the forwards by kind; else figures of how far calls are apart."""
    if case == CONTROL:
        return _control(setting)
    if case in _LAWS:
        one, other = (call(setting) for call in _LAWS[case])
        return _verdict(one, one.difference(other))
    if case.startswith("a padded batch"):
        return _batch(setting)
    return _all_renewed(
        setting, torch.float32 if case.endswith("float32") else few_layers(setting, LAYERS).wte.weight.dtype
    )


def _policy(setting: Setting, **changes: Any) -> Policy:
    return replace(DELTA, **((TINY if setting.tiny else {}) | changes))


def _call(
    setting: Setting, policy: Policy, carrier: Callable[[], Transport] | None = None, dtype: torch.dtype | None = None
) -> Left:
    runtime = Runtime(few_layers(setting, LAYERS, dtype), policy=policy, transport=carrier)
    # In float32 a full pass takes ten times as long.
    positions = 160 if setting.tiny else 1024 if dtype is torch.float32 else 4096
    return left_by(runtime, random_ids(setting, positions - 2 * BLOCK), **_options(setting))


def _options(setting: Setting) -> dict[str, Any]:
    steps = 8 if setting.tiny else 16
    return {"max_new_tokens": 2 * BLOCK, "block_length": BLOCK, "steps": steps, "stop_at_eos": False}


@cache
def _delta(setting: Setting) -> Left:
    return _call(setting, _policy(setting))


@cache
def _raw(setting: Setting) -> Left:
    return _call(setting, _policy(setting, codec=Codec.RAW))


def _resident(setting: Setting, codec: Codec) -> Left:
    return _call(setting, _policy(setting, codec=codec, hidden_tier=Tier.DEVICE))


def _by(setting: Setting, **given: Any) -> Left:
    return _call(setting, _policy(setting), partial(transport, setting.on, **given))


def _synchronous(setting: Setting) -> Left:
    return _call(setting, _policy(setting), lambda: Synchronous(transport(setting.on)))


def _late(setting: Setting, codec: Codec) -> Left:
    delay = random_delays(setting.on, setting.seed)
    return _call(setting, _policy(setting, codec=codec), partial(transport, setting.on, delay=delay))


# Two calls that leave the same. Synchronous and late copies are all by the engine.
_LAWS: Mapping[str, tuple[Callable[[Setting], Left], Callable[[Setting], Left]]] = {
    "twice the same": (_delta, lambda setting: _by(setting)),
    "raw, offloaded, resident": (_raw, lambda setting: _resident(setting, Codec.RAW)),
    "delta, offloaded, resident": (_delta, lambda setting: _resident(setting, Codec.NVFP4_DELTA)),
    "asynchronous, synchronous": (_delta, _synchronous),
    "copies on time, late": (_delta, lambda setting: _late(setting, Codec.NVFP4_DELTA)),
    "raw copies on time, late": (_raw, lambda setting: _late(setting, Codec.RAW)),
    "by either way, by kernel": (_delta, lambda setting: _by(setting, crossover=BY_KERNEL)),
}


def _control(setting: Setting) -> dict[str, Any]:
    """Whether the laws would see it if the bytes were wrong."""
    damaged = _call(setting, _policy(setting, codec=Codec.RAW), lambda: Damaging(transport(setting.on)))
    difference = _raw(setting).difference(damaged)
    row: dict[str, Any] = {"seen": difference, "ok": difference is not None}
    return row if row["ok"] else row | {"why": "stored rows were damaged, and nothing came of it"}


def _verdict(left: Left, difference: str | None) -> dict[str, Any]:
    passes = {kind.value: left.kinds.count(kind) for kind in StepKind}
    row: dict[str, Any] = {"passes": passes, "ok": difference is None}
    if difference is not None:
        row["why"] = difference
    elif not any(update.fetched_bytes for update in left.updates):
        row |= {"ok": False, "why": "nothing was fetched"}
    elif not all(bool(logits.isfinite().all()) for logits in left.logits):
        row |= {"ok": False, "why": "logits are not finite"}
    return row


def _batch(setting: Setting) -> dict[str, Any]:
    """Two prompts of different lengths, padded on the left, beside each alone: shares of tokens that are the same, and
    how far the first forward's logits are apart."""
    runtime = Runtime(few_layers(setting, LAYERS), policy=_policy(setting))
    prompt = random_ids(setting, 90 if setting.tiny else 2048)
    shorter, pads = prompt[:, : -(prompt.shape[1] // 3)], prompt.shape[1] // 3
    ids = torch.cat([prompt, torch.cat([torch.zeros_like(prompt[:, :pads]), shorter], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    both = left_by(runtime, ids, attention_mask=mask, **_options(setting))
    alone = [left_by(runtime, one, **_options(setting)) for one in (prompt, shorter)]
    return {
        "equal_tokens_share": [_equal(both.tokens[row], one.tokens[0]) for row, one in enumerate(alone)],
        "relative_logits": [_apart(both.logits[0][row], one.logits[0][0]) for row, one in enumerate(alone)],
    }


def _all_renewed(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """Every cluster renewed at every step, beside the uncached model: a check in float32 alone."""
    with _full_precision():
        renewed = _call(setting, replace(DELTA, codec=Codec.RAW, top_m=1 << 20, update_threshold=0), dtype=dtype)
        exact = _call(setting, NoCache(), dtype=dtype)
    share = _equal(renewed.tokens[0], exact.tokens[0])
    apart = max(_apart(one, other) for one, other in zip(renewed.logits, exact.logits, strict=True))
    row: dict[str, Any] = {"equal_tokens_share": share, "relative_logits": apart}
    if dtype is not torch.float32:
        return row
    row["ok"] = share == 1.0
    return row if row["ok"] else row | {"why": "tokens differ in float32: where logits are close, rounding may decide"}


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32 in matrix products of float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _equal(one: Tensor, other: Tensor) -> float:
    """Share of answers' tokens that are the same."""
    return float((one[-2 * BLOCK :] == other[-2 * BLOCK :]).double().mean())


def _apart(one: Tensor, other: Tensor) -> float:
    """||one − other|| / ||other||."""
    return float((one.double() - other.double()).norm() / other.double().norm())
