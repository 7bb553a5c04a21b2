"""Books: reading values of a config.json: sizes, numbers, switches, ids of special tokens; each error names its key."""

from collections.abc import Mapping
from types import MappingProxyType

from tiered.models.shape import BYTES_PER_ELEMENT, MOST_SIZE

# float32's range: what norms and rotations are computed in, whatever the model's dtype.
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Switches of other models, by their usual names, with what leaves the function computed as it is. A family that has one
# says so in its own table.
_SWITCHES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention_bias": (False,),
        "attn_logit_softcapping": (False,),
        "compression_config": (False,),
        "final_logit_softcapping": (False,),
        "is_causal": (False,),
        "mlp_bias": (False,),
        "num_experts": (0,),
        "num_local_experts": (0,),
        "partial_rotary_factor": (1.0,),
        "sliding_window": (False,),
        "use_mrope": (False,),
        "use_qk_norm": (False,),
        "use_sliding_window": (False,),
    }
)


def value_of(config: Mapping[str, object], key: str, default: object) -> object:
    """`config[key]`; `default` where it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def positive(config: Mapping[str, object], key: str, default: int | None = None, *, most: int = MOST_SIZE) -> int:
    """`config[key]` as a size; `default` stands in for a key that is absent or null.

    Raises:
        ValueError: absent without a default, or not a positive integer up to `most`.
    """
    value = value_of(config, key, default)
    if value is None:
        raise ValueError(f"config.json lacks {key!r}, which this model family needs")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r}; a positive integer up to {most} is allowed")
    return value


def length_or_none(config: Mapping[str, object], key: str) -> int | None:
    """`config[key]` as a size; None where it is absent or null.

    Raises:
        ValueError: as `positive`.
    """
    return None if config.get(key) is None else positive(config, key)


def without_window(config: Mapping[str, object]) -> dict[str, object]:
    """`config` without the width of a window that it leaves unused, as Qwen's do: `use_sliding_window` is off.

    Raises:
        ValueError: a width that is none, or layers (`layer_types`) with a window.
    """
    length_or_none(config, "sliding_window")
    kinds = value_of(config, "layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config.json: layer_types = {kinds!r}; 'full_attention' in every layer is allowed")
    used = switch(config, "use_sliding_window")
    return {**config, "sliding_window": config.get("sliding_window") if used else None}


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """The dtype that config.json names (`torch_dtype`, or `dtype` in newer files); float32 where it names none.

    Raises:
        ValueError: a dtype that no checkpoint of these families has.
    """
    name = str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix("torch.")
    if name not in BYTES_PER_ELEMENT:
        raise ValueError(f"config.json: torch_dtype = {name!r}; allowed: {', '.join(BYTES_PER_ELEMENT)}")
    return name


def require(config: Mapping[str, object], allowed: Mapping[str, tuple[object, ...]], family: str) -> None:
    """Check that each key of `allowed`, and each switch of other models, holds a value that our forward implements
    where config.json has it; null is as good as absent.

    Raises:
        ValueError: names every key, its value and what is allowed.
    """
    wrong = [
        f"{key} = {config[key]!r} (allowed: {', '.join(map(repr, values))})"
        for key, values in {**_SWITCHES, **allowed}.items()
        if config.get(key) is not None and config[key] not in values
    ]
    if wrong:
        raise ValueError(f"config.json asks for what the {family} forward does not have: {'; '.join(wrong)}")


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


def special_tokens(
    config: Mapping[str, object],
    vocab_size: int,
    keys: Mapping[str, str],
    defaults: tuple[int | None, int | None, int | None],
) -> dict[str, int]:
    """`mask_token_id`, `eos_token_id` and `pad_token_id`, from their `keys`; `defaults` stand for absent ones, in this
    order.

    Raises:
        ValueError: absent without a default, a token outside the vocabulary, or a mask that is the end of an answer.
    """
    ids: dict[str, int] = {}
    for name, default in zip(("mask_token_id", "eos_token_id", "pad_token_id"), defaults, strict=True):
        key = keys[name]
        value = value_of(config, key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ValueError(f"config.json: {key} = {value!r}; a token id in [0, {vocab_size}) is allowed")
        ids[name] = value
    if ids["mask_token_id"] == ids["eos_token_id"]:
        raise ValueError(
            f"config.json: {keys['mask_token_id']} = {ids['mask_token_id']} is the {keys['eos_token_id']} too; "
            "two tokens are needed, since no answer ends with a mask"
        )
    return ids
