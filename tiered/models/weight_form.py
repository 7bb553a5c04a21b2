"""Books: the forms that the weights of a model may be kept in, and their bytes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tiered.core.checks import unknown_name
from tiered.kernels.row_code import WeightCode
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

RAW, WITH_HEAD = "raw", "+head"
ALIGNED = 256  # bytes between what the matrices of a record begin at: whole lines of every cache and copy engine
# Points of exact match that the embedded model loses by a code (`bench/measure.py drops`), least first.
DROPS: Mapping[WeightCode, float] = {
    WeightCode.INT8: 0.0,
    WeightCode.FP8: 0.0,
    WeightCode.INT4: 1.0,
    WeightCode.NVFP4: 5.5,
}
CODES = tuple(DROPS)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form of the weights; norms, biases and sinks are always in the model's dtype.

    Attributes:
        code: code of the matrices of layers; None for the model's dtype.
        head: True if the embedding and the head are in that code too.
        fixed: True if all layers stay on the device.
    """

    code: WeightCode | None = None
    head: bool = False
    fixed: bool = False

    @classmethod
    def of(cls, name: "str | WeightForm") -> "WeightForm":
        """The form of `name`: "raw", a code, or a code with "+head"; a form is returned as it is. Raises `ValueError`
        for another name."""
        if isinstance(name, WeightForm):
            return name
        code = str(name).removesuffix(WITH_HEAD)
        if name == RAW:
            return cls()
        if code not in list(WeightCode):
            raise unknown_name("weights", name, [RAW, *CODES, *(each + WITH_HEAD for each in CODES)])
        return cls(WeightCode(code), name != code)

    def __str__(self) -> str:
        return RAW if self.code is None else self.code + (WITH_HEAD if self.head else "")

    def matrix_bytes(self, matrix: tuple[int, int], element_bytes: int) -> int:
        out, inner = matrix
        return out * (inner * element_bytes if self.code is None else self.code.row_bytes(inner))


RAW_WEIGHTS = WeightForm()
FIXED_WEIGHTS = WeightForm(fixed=True)


def drop_of(code: WeightCode) -> str:
    return f"exact match of the embedded model fell by {DROPS[code]:.2g} points"


def weight_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS) -> int:
    """Bytes of all weights; weights without a code are in `dtype`."""
    return shape.layers * layer_bytes(shape, dtype, form) + sum(beside_layers(shape, dtype, form))


def layer_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS) -> int:
    """Bytes of the matrices of a layer."""
    return sum(form.matrix_bytes(matrix, BYTES_PER_ELEMENT[dtype]) for matrix in shape.matrices.values())


def table_bytes(shape: ModelShape, dtype: str, form: WeightForm) -> int:
    """Bytes of the embedding, or of the head."""
    table = shape.vocab_size, shape.width
    return form.matrix_bytes(table, BYTES_PER_ELEMENT[dtype]) if form.head else prod(table) * BYTES_PER_ELEMENT[dtype]


def read_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS) -> int:
    """Bytes of the weights that a forward reads: all except an embedding that serves look-ups alone."""
    table = shape.vocab_size, shape.width
    untied = list(shape.weight_shapes.values()).count(table) > 1
    return weight_bytes(shape, dtype, form) - (table_bytes(shape, dtype, form) if untied else 0)


def places(shape: ModelShape, dtype: str, form: WeightForm) -> tuple[dict[str, tuple[int, int]], int]:
    """First byte and bytes of each matrix in the record of a layer, by name; and bytes of the record."""
    found, end = {}, 0
    for name, matrix in shape.matrices.items():
        nbytes = form.matrix_bytes(matrix, BYTES_PER_ELEMENT[dtype])
        found[name] = end, nbytes
        end += -(-nbytes // ALIGNED) * ALIGNED
    return found, end


def beside_layers(shape: ModelShape, dtype: str, form: WeightForm) -> list[int]:
    """Bytes of each weight outside the layers' records: norms, biases, sinks, the embedding and the head."""
    in_records = Counter(shape.layers * [*shape.matrices.values()])
    sizes = Counter(shape.weight_shapes.values()) - in_records
    table = shape.vocab_size, shape.width
    return [
        table_bytes(shape, dtype, form) if each == table else prod(each) * BYTES_PER_ELEMENT[dtype]
        for each in sizes.elements()
    ]


def held_form(codes: Mapping[str, WeightCode], shape: ModelShape) -> WeightForm:
    """The form of the weights of a checkpoint whose files hold weights in `codes`, by official name. Raises
    `ValueError` unless all matrices of layers are in one code."""
    kinds, table = sorted(set(codes.values())), (shape.vocab_size, shape.width)
    tables = [name for name, each in shape.weight_shapes.items() if each == table]
    found, matrices = sum(1 for name in codes if name not in tables), shape.layers * len(shape.matrices)
    if len(kinds) > 1 or found != matrices:
        raise ValueError(
            f"the checkpoint holds {found} of {matrices} matrices of layers in {' and '.join(kinds)}; all of them in "
            "one code are allowed"
        )
    return WeightForm(kinds[0], head=all(name in codes for name in tables))
