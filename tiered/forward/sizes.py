"""Books: the sizes of one call, from which all its bytes follow."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tiered.core.buffers import Buffer
from tiered.core.checks import unknown_name
from tiered.core.features import ANSWER_ONLY, KEY_VALUE, Account, Feature
from tiered.kernels.row_code import GROUP, RowCode
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.models.weight_form import RAW, RAW_WEIGHTS, WeightForm

DEFAULT_BLOCK_LENGTH = 32


def kv_code(name: str, shape: ModelShape) -> RowCode | None:
    """The code of keys and values by its name; None for "raw".

    Raises:
        ValueError: there is no such code, or the model's heads do not fit it.
    """
    if name not in (RAW, *RowCode):
        raise unknown_name("kv", name, [RAW, *(code.value for code in RowCode)])
    for of in (kind.shape for kind in shape.kinds if name == RowCode.NVFP4):
        halves = 2 if of.keys_of_values else 1  # attention reads each half of values whose keys it makes
        if of.head_dim % (halves * GROUP):
            raise ValueError(
                f"kv = {name!r} scales {GROUP} elements together, but {'halves of ' * (halves - 1)}heads have "
                f"{of.head_dim // halves}, which is not a multiple; allowed: 'raw', 'fp8'"
            )
    return None if name == RAW else RowCode(name)


def stored_row(shape: ModelShape, feature: Feature, kv: RowCode | None, element_bytes: int) -> tuple[int, int]:
    """Heads of a stored row of `feature`, and elements of the model's dtype that each head takes; 0 if it is made."""
    if feature not in KEY_VALUE:
        return 1, shape.width
    if feature is Feature.KEY and shape.keys_of_values:
        return shape.kv_heads, 0
    elements = shape.head_dim if kv is None else kv.row_bytes(shape.head_dim) // element_bytes
    return shape.kv_heads, elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Properties of a GPU that decide the workspaces of its libraries.

    Attributes:
        workspace_bytes: bytes of the workspace of cuBLAS.
        multiprocessors: number of its multiprocessors.
        name: name from its driver; "" for no GPU in particular.
    """

    workspace_bytes: int
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """Sizes that decide the bytes of a call, together with its policy.

    Attributes:
        shape: sizes of the model.
        batch: sequences of the request.
        context: positions of the canvas, prompt and answer together.
        block_length: positions of a block.
        dtype: dtype of weights and activations, a key of `BYTES_PER_ELEMENT`.
        weights: how weights are stored.
        kv: code of keys and values; None for none.
        answer: positions behind the prompt, for features that are kept only there; None for any number.
        guidance: whether classifier-free guidance doubles the sequences of a forward.
        sampled: whether proposing takes more than the logits: tokens are drawn at a temperature above 0, the
            distribution is cut, or its entropy is the confidence.
        compared: whether the last layer's attention of the block is kept, for a commit rule that needs its shift.
        whole_logits: whether the call returns its logits, which then are never in tiles.
        gpu: GPU of the call; None on the CPU, whose libraries need no workspace.
    """

    shape: ModelShape
    batch: int
    context: int
    block_length: int
    dtype: str
    weights: WeightForm = RAW_WEIGHTS
    kv: RowCode | None = None
    answer: int | None = None
    guidance: bool = False
    sampled: bool = False
    compared: bool = False
    whole_logits: bool = False
    gpu: Gpu | None = None

    @property
    def sequences(self) -> int:
        """Sequences of a forward."""
        return self.batch * (2 if self.guidance else 1)

    @property
    def element(self) -> int:
        """Bytes of an element of weights and activations."""
        return BYTES_PER_ELEMENT[self.dtype]

    def columns(self, feature: Feature) -> int:
        """Columns of a sequence for which `feature` is kept."""
        return self.answer if self.answer and feature in ANSWER_ONLY else self.context

    def row_bytes(self, feature: Feature) -> int:
        """Bytes of a stored row of `feature`."""
        heads, elements = stored_row(self.shape, feature, self.kv, self.element)
        return heads * elements * self.element


def feature_buffers(
    sizes: CallShape,
    features: Mapping[Feature, int],
    most_rows: int | None = None,
    below: Mapping[Feature, Collection[int]] = MappingProxyType({}),
) -> dict[Feature, list[Buffer]]:
    """The tensors of a store that keeps each feature for this many layers: one for each of `ModelShape.kinds`.

    Args:
        most_rows: most columns of a pass; None for the whole canvas.
        below: layers of each feature that are below the device.
    """
    kinds, buffers = sizes.shape.kinds, {feature: list[Buffer]() for feature in features}
    for feature, count in features.items():
        for kind in kinds:
            heads, elements = stored_row(kind.shape, feature, sizes.kv, sizes.element)
            columns = sizes.columns(feature)
            if feature in KEY_VALUE:
                columns = kind.kept(columns, most_rows or columns)
            kept = count  # 1, if all layers of the kind overwrite it
            if count == sizes.shape.layers:
                kept = sum(layer not in below.get(feature, ()) for layer in kind.layers)
            rows = (kept, sizes.sequences, heads, columns, elements)
            buffers[feature].append(Buffer(feature.value, Account(feature), rows, sizes.dtype))
    return buffers
