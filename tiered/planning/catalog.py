"""The models that have names on this machine: the embedded ones, the presets, and cached hub checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tiered.forward.forward_bytes import kv_bytes_per_token
from tiered.models.families import family_of
from tiered.models.locate import EMBEDDED_MODELS, find_directory, read_config
from tiered.models.presets import PRESETS
from tiered.models.shape import BYTES_PER_ELEMENT
from tiered.offload.codec_bytes import Codec

Source = Literal["embedded", "preset", "cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `plan` takes by name.

    Attributes:
        name: name that `plan` takes.
        source: source of its config.json.
        family: name of its family.
        parameters: elements of its weights.
        layers: transformer layers.
        kv_bytes_per_token: bytes of one token's keys and values in all layers, in the checkpoint's dtype.
        hidden_bytes_per_token: bytes of one token's hidden states in all layers, by codec.
        offload_saves: share of the device bytes of keys, values and raw hidden states that offloading the latter frees.
        loadable: whether its weights are on this machine; if not, it can only be planned.
    """

    name: str
    source: Source
    family: str
    parameters: int
    layers: int
    kv_bytes_per_token: int
    hidden_bytes_per_token: Mapping[Codec, int]
    offload_saves: float
    loadable: bool

    def as_dict(self) -> dict[str, Any]:
        hidden = {codec.value: count for codec, count in self.hidden_bytes_per_token.items()}
        return asdict(self) | {"hidden_bytes_per_token": hidden}


def known_models() -> list[KnownModel]:
    """The embedded models, then every preset, then the cached checkpoints of known families by name."""
    return [
        *(_known(name, "embedded") for name in EMBEDDED_MODELS),
        *(_known(name, "preset") for name in PRESETS),
        *_cached_models(),
    ]


def _known(name: str, source: Source) -> KnownModel:
    config = read_config(name)
    family = family_of(config)
    shape = family.shape(config)
    # A directory may have a preset's name; the preset itself has no weights.
    directory = None if source == "preset" else find_directory(name)
    kept, element = kv_bytes_per_token(shape, shape.dtype), BYTES_PER_ELEMENT[shape.dtype]
    hidden = {codec: shape.layers * codec.row_bytes(shape.width, element) for codec in Codec}
    return KnownModel(
        name=name,
        source=source,
        family=family.name,
        parameters=shape.parameters,
        layers=shape.layers,
        kv_bytes_per_token=kept,
        hidden_bytes_per_token=hidden,
        offload_saves=hidden[Codec.RAW] / (kept + hidden[Codec.RAW]),
        loadable=directory is not None and any(directory.glob("*.safetensors")),
    )


def _cached_models() -> Iterator[KnownModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for name in sorted(repository.repo_id for repository in repositories if repository.repo_type == "model"):
        # Leaves out checkpoints whose config.json is missing, damaged, or of a family without implementation.
        with suppress(ValueError):
            if find_directory(name) is not None:
                yield _known(name, "cache")
