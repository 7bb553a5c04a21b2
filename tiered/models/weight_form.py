"""Books: the forms in which the weights of a model may be stored, and their bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tiered.core.checks import unknown_name
from tiered.kernels.row_code import WeightCode
from tiered.models.shape import BYTES_PER_ELEMENT, ROUTER, ROUTER_BIAS, ModelShape

RAW, WITH_HEAD = "raw", "+head"
TABLES = ("wte.weight", "ff_out.weight")  # the embedding, and the head
ALIGNED = 256  # bytes: matrices of a record begin at multiples, which are whole lines of every cache and copy engine
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
    """The form of the weights; norms, biases and sinks always have the model's dtype, routers float32.

    Attributes:
        code: code of the matrices of layers; None for the model's dtype.
        head: True if the embedding and the head are in that code too.
        fixed: True if all layers stay on the device.
        raw: our own names of the matrices of layers that have the model's dtype all the same; none is in a record.
    """

    code: WeightCode | None = None
    head: bool = False
    fixed: bool = False
    raw: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: "str | WeightForm") -> "WeightForm":
        """The form of `name`: "raw", a code, or a code with "+head"; a form is returned unchanged. Raises `ValueError`
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
        beside = f", {len(self.raw)} matrices {RAW}" if self.raw else ""
        return RAW if self.code is None else self.code + (WITH_HEAD if self.head else "") + beside

    def covers(self, own: str, shape: ModelShape) -> bool:
        """Whether the weight named `own` is in the code, if there is one."""
        return (shape.is_matrix(own) and own not in self.raw) or (self.head and own in TABLES)

    def matrix_bytes(self, matrix: tuple[int, int], element_bytes: int) -> int:
        out, inner = matrix
        return out * (inner * element_bytes if self.code is None else self.code.row_bytes(inner))


RAW_WEIGHTS = WeightForm()
FIXED_WEIGHTS = WeightForm(fixed=True)


def drop_of(code: WeightCode) -> str:
    lost = f"{DROPS[code]:.2g} point{'' if DROPS[code] == 1 else 's'}" if DROPS[code] else "no points"
    return f"exact match of the embedded model lost {lost}"


def weight_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS) -> int:
    """Bytes of all weights; weights without a code are in `dtype`."""
    return len(shape.recorded) * layer_bytes(shape, dtype, form) + sum(beside_layers(shape, dtype, form))


def dtype_of(own: str, dtype: str) -> str:
    """The dtype of the weight named `own` in a model of `dtype`."""
    return "float32" if own.rpartition(".")[2] in (ROUTER, ROUTER_BIAS) else dtype


def layer_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS) -> int:
    """Bytes of the matrices in a layer's record."""
    return sum(form.matrix_bytes(matrix, BYTES_PER_ELEMENT[dtype]) for matrix in shape.matrices.values())


def table_bytes(shape: ModelShape, dtype: str, form: WeightForm) -> int:
    """Bytes of the embedding, or of the head."""
    table = shape.vocab_size, shape.width
    return form.matrix_bytes(table, BYTES_PER_ELEMENT[dtype]) if form.head else prod(table) * BYTES_PER_ELEMENT[dtype]


def read_bytes(shape: ModelShape, dtype: str, form: WeightForm = RAW_WEIGHTS, rows: float | None = None) -> int:
    """Bytes of the weights that a forward reads: all except an embedding that is only looked up, and experts that none
    of `rows` goes to (`Experts.reached`). None for `rows` that go to all."""
    table = shape.vocab_size, shape.width
    untied = list(shape.weight_shapes.values()).count(table) > 1
    unread = table_bytes(shape, dtype, form) if untied else 0
    if shape.experts is not None and rows is not None:
        share = 1 - shape.experts.reached(rows) / shape.experts.count
        unread += round(share * len(shape.recorded) * layer_bytes(shape, dtype, form))
    return weight_bytes(shape, dtype, form) - unread


def places(
    shape: ModelShape, dtype: str, form: WeightForm, *, apart: int = 1
) -> tuple[dict[str, tuple[int, int]], int]:
    """First byte and bytes of each matrix in the record of a layer, by name; and bytes of the record. `apart`: records
    of the layer, with an equal part of each matrix."""
    found, end = {}, 0
    for name, (out, inner) in shape.matrices.items():
        nbytes = form.matrix_bytes((out // apart, inner), BYTES_PER_ELEMENT[dtype])
        found[name] = end, nbytes
        end += -(-nbytes // ALIGNED) * ALIGNED
    return found, end


def beside_layers(shape: ModelShape, dtype: str, form: WeightForm) -> list[int]:
    """Bytes of each weight outside the layers' records: norms, biases, sinks, routers, the matrices beside experts, the
    embedding and the head."""
    return [
        table_bytes(shape, dtype, form)
        if own in TABLES
        else form.matrix_bytes((size[0], size[1]), BYTES_PER_ELEMENT[dtype])
        if form.covers(own, shape)
        else prod(size) * BYTES_PER_ELEMENT[dtype_of(own, dtype)]
        for own, size in shape.own_shapes.items()
        if shape.place_of(own) is None
    ]


def form_of(
    name: str | WeightForm, codes: Mapping[str, WeightCode], names: Mapping[str, str], shape: ModelShape
) -> WeightForm:
    """The form `name` of a checkpoint whose files hold weights in `codes`, by official name; "raw" keeps their code.
    `names`: our own name of each. Raises `ValueError` for a form unlike that of the codes, and unless all matrices in
    records are in one code, and no other matrix is in another."""
    form = WeightForm.of(name)
    if not codes:
        return form
    kinds = sorted(set(codes.values()))
    within = [name for name, own in names.items() if shape.place_of(own) is not None]
    found = sum(1 for name in within if name in codes)
    if len(kinds) > 1 or found != len(within):
        raise ValueError(
            f"the checkpoint holds {found} of {len(within)} matrices of {'experts' if shape.experts else 'layers'} in "
            f"{' and '.join(kinds)}; all of them in one code are allowed"
        )
    held = WeightForm(
        kinds[0],
        head=all(name in codes for name, own in names.items() if own in TABLES),
        raw=frozenset(own for name, own in names.items() if shape.is_matrix(own) and name not in codes),
    )
    if str(form) not in (RAW, str(held)):
        raise ValueError(f"weights = {str(form)!r}, but the checkpoint has them in {held}: 'raw' keeps that code")
    return held
