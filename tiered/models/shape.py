"""Books: a model's sizes, as planning, caching and weight checking need them. Integers only, from config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

# What no model comes near, and what keeps every count of bytes an int64: two sizes, the layers and 4 bytes are 2^60.
MOST_SIZE, MOST_LAYERS = 2**24, 2**10
# Bytes an element takes, by the names that config.json and safetensors users write.
BYTES_PER_ELEMENT: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense diffusion LM, in elements and rows; the same words for every family.

    Attributes:
        family: name of the model family, as in `tiered.models.families`.
        layers: transformer layers.
        width: hidden size (the length of a row's hidden state).
        heads, kv_heads, head_dim: query heads, key/value heads, elements of a head.
        mlp_width: elements of the MLP's inner layer.
        mlp_matrices: matrices that read the MLP's input (2 with a gate, 1 without).
        vocab_size: rows of the embedding, which is also the width of the logits.
        max_context: positions that the model was made for.
        dtype: dtype of the checkpoint, a key of `BYTES_PER_ELEMENT`.
        noise: noise process the model was trained on, "mask" or "uniform".
        noise_masked: whether final tokens attend to final tokens alone (GIDD), else every row attends to every row.
        prediction_shift: 1 where row p predicts position p + 1 (Dream), else 0.
        soft_cap: c where attention scores s become c · tanh(s / c); None where they stay as they are.
        sink_tokens: learned keys and values of each layer that every row attends to beside those of the canvas.
        weight_shapes: every tensor of the checkpoint, by its official name, with its shape.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_matrices: int
    vocab_size: int
    max_context: int
    dtype: str
    noise: str = "mask"
    noise_masked: bool = False
    prediction_shift: int = 0
    soft_cap: float | None = None
    sink_tokens: int = 0
    weight_shapes: Mapping[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(prod(shape) for shape in self.weight_shapes.values())

    @property
    def kv_width(self) -> int:
        """Elements of one row's key, or value, in one layer."""
        return self.kv_heads * self.head_dim


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
        "quantization_config": (False,),
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
