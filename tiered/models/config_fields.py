"""Books: what a forward reads of a config.json beside the sizes: numbers, switches and ids of special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.models.shape import ModelShape, value_of

# float32's range: what norms and rotations are computed in, whatever the model's dtype.
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every forward needs beside the sizes.

    Attributes:
        rope_theta, norm_eps: of the rotation and the norms.
        head_tied: whether the language-model head is the embedding.
    """

    shape: ModelShape
    rope_theta: float
    norm_eps: float
    head_tied: bool
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int


def common_fields(
    config: Mapping[str, object],
    shape: ModelShape,
    *,
    head_tied: bool,
    norm_eps: float,
    tokens: tuple[int | None, int | None, int | None] = (None, None, None),
) -> dict[str, Any]:
    """The fields of `ModelConfig`, whose keys in config.json are the same in every family.

    `norm_eps` and `tokens` (mask, end, padding) are what stands for absent keys.

    Raises:
        ValueError: a number out of float32's range, a scaled rotation, a token outside the vocabulary, or a mask that
            is the end of an answer.
    """
    names = ("mask_token_id", "eos_token_id", "pad_token_id")
    ids = {name: token_id(config, name, shape.vocab_size, token) for name, token in zip(names, tokens, strict=True)}
    if ids["mask_token_id"] == ids["eos_token_id"]:
        raise ValueError(
            f"config.json: mask_token_id = {ids['mask_token_id']} is the eos_token_id too; two tokens are needed, "
            "since no answer ends with a mask"
        )
    return {
        "shape": shape,
        "rope_theta": rope_theta(config),
        "norm_eps": positive_number(config, "rms_norm_eps", norm_eps),
        "head_tied": head_tied,
        **ids,
    }


def positive_number(config: Mapping[str, object], key: str, default: float) -> float:
    """`config[key]` as a number; `default` where it is absent or null.

    Raises:
        ValueError: not a number above 0, or none that float32 holds.
    """
    value = value_of(config, key, default)
    # Written so that NaN fails too, and an int that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise ValueError(f"config.json: {key} = {value!r}; a positive number that float32 can hold is allowed")
    return float(value)


def finite_number(config: Mapping[str, object], key: str, default: float, *, most: float = _MOST) -> float:
    """`config[key]` as a number from -`most` to `most`; `default` where it is absent or null.

    Raises:
        ValueError: another value.
    """
    value = value_of(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r}; a finite number from {-most:g} to {most:g} is allowed")
    return float(value)


def switch(config: Mapping[str, object], key: str, default: bool = False) -> bool:
    """`config[key]`; `default` where it is absent or null.

    Raises:
        ValueError: neither true nor false.
    """
    value = value_of(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} = {value!r}; true or false is allowed")
    return value


def token_id(config: Mapping[str, object], key: str, vocab_size: int, default: int | None = None) -> int:
    """`config[key]` as a token of the vocabulary; `default` where it is absent or null.

    Raises:
        ValueError: absent without a default, or no id in [0, `vocab_size`).
    """
    value = value_of(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ValueError(f"config.json: {key} = {value!r}; a token id in [0, {vocab_size}) is allowed")
    return value


def rope_theta(config: Mapping[str, object]) -> float:
    """The base of the rotation: `rope_theta`, which newer files have inside `rope_parameters`; 10000 where absent.

    Raises:
        ValueError: no positive number, or a rotation that is scaled.
    """
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        given: Any = config.get(key) or {}
        plain = isinstance(given, Mapping) and given.keys() <= {"type", "rope_type", "rope_theta"}
        if not plain or any(given.get(name, "default") != "default" for name in ("type", "rope_type")):
            raise ValueError(
                f"config.json: {key} = {given!r}, but the forward rotates without scaling; null or "
                "{'rope_type': 'default'}, with a rope_theta or without, is allowed"
            )
        found |= {name: value for name, value in given.items() if name == "rope_theta"}
    return positive_number(found, "rope_theta", 10000.0)
