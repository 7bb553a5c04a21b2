"""Books: the rotation of heads by position, and its stretch beyond the trained ones: `rope_theta`, `rope_scaling`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiered.core.checks import plain_number, unknown_name
from tiered.models.config_fields import number_in
from tiered.models.shape import MOST_SIZE

# The keys of each kind of scaling beside its kind and the base.
KINDS: Mapping[str, frozenset[str]] = {
    "default": frozenset({"trained_rope_theta"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "ntk": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"})
    | {"mscale", "mscale_all_dim", "llama_4_scaling_beta"},
}
THETA = 10000.0  # if config.json has none
_KEYS = ("rope_scaling", "rope_parameters")
_PART = "partial_rotary_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of RoFormer (arXiv 2104.09864), plain or stretched.

    Attributes:
        theta: its base.
        kind: "default" for no stretch. "linear": positions divided by the factor (arXiv 2306.15595). "ntk": a larger
            base, which slows the slowest element down by the factor (arXiv 2309.00071, section 3.1). "yarn": slows
            elements down that turn seldom within the trained positions (there, section 3.2).
            "proportional": no stretch, and elements behind the first `part` of the pairs do not turn (Gemma 4).
        factor: stretched positions over trained positions.
        trained: positions that the model was trained on.
        beta_fast, beta_slow: under "yarn", numbers of turns within the trained positions. An element with `beta_fast`
            or more is not slowed down. One with `beta_slow` or fewer is slowed down by the full factor.
        attention_factor: under "yarn", factor of queries and of keys; None for 0.1 · ln(factor) + 1.
        query_growth: β; queries at position p are times 1 + β · ln(1 + ⌊p / trained⌋) (Ministral 3).
        part: share of a head's elements that are rotated, the first ones; of its pairs if "proportional".
    """

    theta: float = THETA
    kind: str = "default"
    factor: float = 1.0
    trained: int = MOST_SIZE
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    query_growth: float = 0.0
    part: float = 1.0

    @property
    def reach(self) -> int:
        return int(self.trained * self.factor)


def rotation_of(config: Mapping[str, object], *, head_dim: int, positions: int) -> Rotation:
    """The rotation in config.json: `rope_theta`, or `THETA` if it is absent, `partial_rotary_factor`, and
    `rope_scaling`, which newer files call `rope_parameters` and which holds the other two there.

    Args:
        positions: positions that the model was made for, and trained on unless the scaling has another number.

    Raises:
        ValueError: an unknown scaling, one with an unknown key, or a number out of range; as `part_outside`.
    """
    config = part_outside(config)
    name, kind, found = _scaling(config)
    number = partial(number_in, where="")
    theta = number(found, "rope_theta", THETA)
    trained = number(found, "original_max_position_embeddings", float(positions), least=1.0, most=float(MOST_SIZE))
    factor = 1.0
    if kind != "default":
        if "factor" not in found:
            raise ValueError(f"{name} = {config.get(name)!r} lacks a factor, how many times the trained positions")
        factor = number(found, "factor", 1.0, least=1.0)
    elif (before := number(found, "trained_rope_theta", theta)) < theta:
        factor = (theta / before) ** ((head_dim - 2) / head_dim)
    if trained * factor > MOST_SIZE:
        raise ValueError(
            f"{trained:.0f} positions times {factor:g} are more than {MOST_SIZE}, the most that is allowed"
        )
    of_yarn = {of: number(found, of, 1.0) for of in ("beta_fast", "beta_slow", "attention_factor") if of in found}
    if (scales := {of: number(found, of, 1.0) for of in ("mscale", "mscale_all_dim") if of in found}).keys():
        if len(scales) < 2 or "attention_factor" in found:
            raise ValueError(f"{name}: mscale and mscale_all_dim go together, without attention_factor")
        above, below = (0.1 * each * math.log(factor) + 1 for each in (scales["mscale"], scales["mscale_all_dim"]))
        of_yarn["attention_factor"] = above / below
    part = number(config, _PART, 1.0)
    if part > 1 or int(head_dim * part) % 2 or not int(head_dim * part):
        raise ValueError(
            f"{_PART} = {part} of a head of {head_dim} elements; a share that is an even number of them is allowed"
        )
    if kind == "ntk" and head_dim < 4:
        raise ValueError(
            f"{name}: heads of {head_dim} elements turn at one speed, so 'ntk' has no effect; 'linear' is allowed"
        )
    of_yarn["query_growth"] = number(found, "llama_4_scaling_beta", 0.0)
    rotation = Rotation(theta=theta, kind=kind, factor=factor, trained=int(trained), part=part, **of_yarn)
    if rotation.beta_fast <= rotation.beta_slow:
        raise ValueError(f"{name}: beta_fast = {rotation.beta_fast} must be above beta_slow = {rotation.beta_slow}")
    return rotation


def part_outside(config: Mapping[str, object]) -> dict[str, Any]:
    """`config` with `partial_rotary_factor` on its own, wherever the file has it. Raises `ValueError` for two factors
    that differ."""
    found = dict(config)
    for key in _KEYS:
        given = config.get(key)
        if not isinstance(given, Mapping) or (part := given.get(_PART)) is None:
            continue
        if found.get(_PART) not in (None, part):
            raise ValueError(f"{_PART} = {found[_PART]!r}, but {part!r} in {key}; one value is allowed")
        found |= {_PART: part, key: {of: value for of, value in given.items() if of != _PART}}
    return found


def _scaling(config: Mapping[str, object]) -> tuple[str, str, dict[str, Any]]:
    """The key of config.json that scales the rotation, the kind of scaling, and its numbers with `rope_theta`."""
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    name = "rope_scaling"
    for key in _KEYS:
        given: Any = config.get(key) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"{key} = {given!r}; null, or a mapping with a rope_type is allowed: {', '.join(KINDS)}")
        name = key if given else name
        # Ministral 3's files repeat the model's own positions here, which transformers reads beside it alone.
        found |= {of: value for of, value in given.items() if value is not None and of != "max_position_embeddings"}
    kinds = {of: found.pop(of) for of in ("type", "rope_type") if of in found}
    kind = str(kinds.get("rope_type", kinds.get("type", "default")))
    if kind not in KINDS:
        raise ValueError(f"{name}: {unknown_name('rope_type', kind, KINDS)}")
    known = KINDS[kind] | {"rope_theta"}
    if unknown := found.keys() - known:
        allowed = ", ".join(sorted(known))
        raise ValueError(f"{name} = {config.get(name)!r} has {sorted(unknown)}; beside {kind!r} are allowed: {allowed}")
    return name, kind, found


def stretched(
    config: Mapping[str, Any],
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
) -> dict[str, Any]:
    """`config` with another rotation.

    Args:
        rope_theta: another base; None for the config's. Alone, it reaches as many positions as NTK scaling with it.
        rope_scaling: as in config.json, or "KIND:FACTOR", or "default"; None for the config's.

    Raises:
        TypeError, ValueError: another scaling; as `part_outside`.
    """
    config = part_outside(config)  # which another scaling leaves as it is
    if rope_theta is None and rope_scaling is None:
        return config
    given = [config.get(key) or {} for key in _KEYS]
    if not all(isinstance(each, Mapping) for each in given):
        return config  # `rotation_of` refuses it
    before: dict[str, Any] = {"rope_theta": config.get("rope_theta"), **given[0], **given[1]}
    theta = before.pop("rope_theta", None)
    if rope_scaling is not None:
        parameters = _parsed(rope_scaling)
        theta = parameters.pop("rope_theta", theta)
    elif {before.get(key, "default") for key in ("type", "rope_type")} == {"default"}:
        parameters = {"trained_rope_theta": THETA if theta is None else theta}
    else:
        parameters = before
    theta = theta if rope_theta is None else plain_number(rope_theta)
    return {**config, "rope_theta": theta, "rope_scaling": parameters, "rope_parameters": None}


def _parsed(scaling: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(scaling, Mapping):
        return dict(scaling)
    if not isinstance(scaling, str):
        raise TypeError(f"rope_scaling = {scaling!r}; a mapping, or text as 'yarn:4', is allowed")
    kind, colon, factor = scaling.partition(":")
    if not colon:
        return {"rope_type": kind}
    try:
        return {"rope_type": kind, "factor": float(factor)}
    except ValueError as error:
        raise ValueError(f"rope_scaling = {scaling!r}; KIND:FACTOR is allowed, as 'yarn:4'") from error
