"""Books: readers of config.json for sizes, numbers, switches and ids of special tokens; errors name the key."""

from collections.abc import Mapping
from typing import Any

from tiered.core.buffers import dtype_name
from tiered.core.checks import FLOAT32_LEAST, FLOAT32_MOST
from tiered.models.shape import BYTES_PER_ELEMENT, MOST_LAYERS, MOST_SIZE

# Switches of other models, by their usual names, with the values that leave the forward unchanged. A family that has
# one lists it in its own table. An empty tuple allows only null.
_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attn_logit_softcapping": (False,),
    "block_length": (),
    "block_size": (),
    "clip_qkv": (),
    "compression_config": (False,),
    "final_logit_softcapping": (False,),
    "is_causal": (False,),
    "layer_types": ("full_attention",),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "sliding_window": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

# Kinds of layers by their usual names, and the default of the first layer with a window, as in Qwen3.
FULL, SLIDING, _MAX_WINDOW_LAYERS = "full_attention", "sliding_attention", 28


def value_of(config: Mapping[str, object], key: str, default: object) -> object:
    """`config[key]`; `default` if it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def positive(config: Mapping[str, object], key: str, default: int | None = None, *, most: int = MOST_SIZE) -> int:
    """`config[key]` as a size; `default` if it is absent or null. Raises `ValueError` if it is absent without a
    default, and unless it is a positive integer up to `most`."""
    value = value_of(config, key, default)
    if value is None:
        raise ValueError(f"config.json lacks {key!r}, which this model family needs")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r}; a positive integer up to {most} is allowed")
    return value


def count(config: Mapping[str, object], key: str, default: int = 0) -> int:
    """`config[key]`; `default` if it is absent or null. Raises `ValueError` unless it is an integer of at least 0."""
    value = value_of(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SIZE:
        raise ValueError(f"config.json: {key} = {value!r}; an integer from 0 on is allowed")
    return value


def length_or_none(config: Mapping[str, object], key: str) -> int | None:
    """`config[key]` as a size; None if it is absent or null. Raises as `positive`."""
    return None if config.get(key) is None else positive(config, key)


def windows_of(config: Mapping[str, object], *, used: bool) -> tuple[tuple[int | None, ...], dict[str, object]]:
    """The width of each layer's window (`ModelShape.windows`), and `config` without the keys that define it.

    `sliding_window` is the width in the layers that `layer_types` names, or without it in layers from
    `max_window_layers` on, as transformers reads Qwen3's. `used`: whether the width counts.

    Raises:
        ValueError: the width is invalid, layers have another kind or number, or a kind lacks its width.
    """
    layers, width = positive(config, "num_hidden_layers", most=MOST_LAYERS), length_or_none(config, "sliding_window")
    width = width if used else None
    first = count(config, "max_window_layers", _MAX_WINDOW_LAYERS)
    kinds = value_of(config, "layer_types", [SLIDING if width and n >= first else FULL for n in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ValueError(
            f"config.json: layer_types = {kinds!r}; {FULL!r} or {SLIDING!r} for each of {layers} layers is allowed"
        )
    if width is None and used and config.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window = True, but there is no sliding_window: its width is needed")
    if width is None and SLIDING in kinds:
        raise ValueError(f"config.json: layer_types has {SLIDING!r}, but no sliding_window is in use")
    windows = tuple(width if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()
    return windows, {**config, "layer_types": None, "sliding_window": None, "use_sliding_window": None}


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """The dtype in config.json (`torch_dtype`, or `dtype` in newer files); float32 if it has none. Raises `ValueError`
    for a dtype that no checkpoint of these families has."""
    name = dtype_name(config.get("torch_dtype") or config.get("dtype") or "float32")
    if name not in BYTES_PER_ELEMENT:
        raise ValueError(f"config.json: torch_dtype = {name!r}; allowed: {', '.join(BYTES_PER_ELEMENT)}")
    return name


def require(config: Mapping[str, object], allowed: Mapping[str, tuple[object, ...]], family: str) -> None:
    """Check the keys of `allowed` and the switches of other models. Each may be absent or null, or hold a value that
    our forward implements, or a list of such values. Otherwise `ValueError` lists every key, its value and the allowed
    ones."""
    wrong = [
        f"{key} = {value!r} (allowed: {', '.join(map(repr, values)) or 'null'})"
        for key, values in {**_SWITCHES, **allowed}.items()
        if (value := config.get(key)) is not None
        and any(each not in values for each in (value if isinstance(value, list) else [value]))
    ]
    if wrong:
        raise ValueError(f"the {family} forward does not implement settings of config.json: {'; '.join(wrong)}")


def number_in(
    config: Mapping[str, object],
    key: str,
    default: float,
    *,
    least: float = FLOAT32_LEAST,
    most: float = FLOAT32_MOST,
    where: str = "config.json: ",
) -> float:
    """`config[key]` as a number from `least` to `most`; `default` if it is absent or null. Raises `ValueError`, which
    begins with `where`, for another value."""
    value = config.get(key)
    if value is None:
        return default
    # This form also rejects NaN, and an int that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        positive = (least, most) == (FLOAT32_LEAST, FLOAT32_MOST)
        allowed = "a positive number that float32 can hold" if positive else f"a number from {least:g} to {most:g}"
        raise ValueError(f"{where}{key} = {value!r}; {allowed} is allowed")
    return float(value)


def switch(config: Mapping[str, object], key: str, default: bool = False) -> bool:
    """`config[key]`; `default` if it is absent or null. Raises `ValueError` unless it is true or false."""
    value = value_of(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} = {value!r}; true or false is allowed")
    return value


def end_tokens(*configs: Mapping[str, object], default: object = None) -> list[object]:
    """The tokens that end answers, each once and in order: `eos_token_id` of each config is one or a list of them.
    `default` stands for what the first config lacks; [None] without any."""
    found: list[object] = []
    for config in configs:
        given = value_of(config, "eos_token_id", default)
        found += [each for each in (given if isinstance(given, list) else [given]) if each not in found]
        default = None
    return [each for each in found if each is not None] or [None]


def special_tokens(
    config: Mapping[str, object],
    vocab_size: int,
    keys: Mapping[str, str],
    defaults: tuple[int | None, int | None, int | None],
) -> dict[str, Any]:
    """`mask_token_id`, `eos_token_id` and `pad_token_id` by their `keys`, with `defaults` in this order, and as
    `more_ends` the end tokens behind the first. Raises `ValueError` for a token outside the vocabulary, for an absent
    one without a default, and if the mask ends answers."""

    def token(key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ValueError(f"config.json: {key} = {value!r}; a token id in [0, {vocab_size}) is allowed")
        return value

    masked, padded = keys["mask_token_id"], keys["pad_token_id"]
    mask = token(masked, value_of(config, masked, defaults[0]))
    end, *more_ends = (token("eos_token_id", each) for each in end_tokens(config, default=defaults[1]))
    if mask in (end, *more_ends):
        raise ValueError(
            f"config.json: {masked} = {mask} is the eos_token_id too; two tokens are needed, since no answer ends with "
            "a mask"
        )
    pad = token(padded, value_of(config, padded, defaults[2]))
    return {"mask_token_id": mask, "eos_token_id": end, "pad_token_id": pad, "more_ends": tuple(more_ends)}
