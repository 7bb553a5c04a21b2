"""Books: the work of one forward: bytes that it reads and its floating-point operations."""

from dataclasses import dataclass
from typing import NamedTuple

from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.models.weight_form import read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """Bytes and operations of one forward.

    Attributes:
        weight_bytes: bytes of weights read, each once; with all experts, without an embedding that is only looked up.
        kv_bytes: bytes of keys and values read, each once: of every position, or of the window in layers with one.
        flops: multiplications and additions of its matrix products, attention included. An upper bound if final tokens
            only see each other ("noise" of `ModelShape.sight`).
        attention_flops: multiplications and additions of attention.
    """

    weight_bytes: int
    kv_bytes: int
    flops: float
    attention_flops: float

    @property
    def read_bytes(self) -> int:
        """Bytes of weights, keys and values."""
        return self.weight_bytes + self.kv_bytes


class RowFlops(NamedTuple):
    """Multiplications and additions of a row in a layer, by piece.

    Attributes:
        write: FLOP of its keys and values.
        attend: FLOP of the projections of attention, and `attention`.
        mlp: FLOP of its MLP; in a layer with a mixture, of the router and the experts that the row goes to.
        attention: FLOP of attention over all columns that the row sees.
    """

    write: int
    attend: int
    mlp: int
    attention: int

    @classmethod
    def of(cls, shape: ModelShape, context: int) -> "RowFlops":
        """Work of a row that attends to `context` columns, or to those in its window; on average over layers."""
        widths = [(kind, len(kind.layers) * kind.shape.heads_width) for kind in shape.kinds]
        heads_width = sum(width for _, width in widths) / shape.layers
        seen = sum(width * (kind.columns(context) + shape.sink_tokens) for kind, width in widths)
        attention = round(4 * seen / shape.layers)
        return cls(
            write=round(2 * shape.width * shape.kv_elements / shape.layers),
            attend=round(4 * shape.width * heads_width) + attention,
            mlp=2 * _mlp_elements(shape),
            attention=attention,
        )

    @property
    def layer(self) -> int:
        """Operations of all pieces."""
        return self.write + self.attend + self.mlp


def _mlp_elements(shape: ModelShape) -> int:
    """Elements of the MLP matrices that a row is multiplied by, on average over layers."""
    dense, experts = (shape.mlp_matrices + 1) * shape.width * shape.mlp_width, shape.experts
    if experts is None:
        return dense
    met = 3 * (experts.picked * experts.width + experts.shared_width) + experts.count
    return round((len(experts.dense) * dense + len(shape.recorded) * shape.width * met) / shape.layers)


def forward_work(
    shape: ModelShape, *, batch: int, context: int, rows: float, dtype: str, output_rows: float
) -> ForwardWork:
    """The work of one forward.

    Args:
        shape: sizes of the model.
        batch: sequences.
        context: positions of each sequence. Every row attends to all of them.
        rows: rows of each sequence that the forward recomputes, on average over layers.
        dtype: dtype of weights and cache, a key of `BYTES_PER_ELEMENT`.
        output_rows: rows whose logits are needed; of other rows the last layer only computes keys and values.

    Raises:
        ValueError: more rows than the context has, or more output rows than rows.
    """
    if not 0 < output_rows <= rows <= context:
        raise ValueError(f"rows = {rows}, output_rows = {output_rows}; 0 < output_rows <= rows <= {context} is allowed")
    of_row = RowFlops.of(shape, context)
    passing = (shape.layers - 1) * rows + output_rows  # rows that go through attention and MLP, over all layers
    per_sequence = (
        shape.layers * rows * of_row.write
        + passing * (of_row.attend + of_row.mlp)
        + output_rows * 2 * shape.width * shape.vocab_size
    )
    return ForwardWork(
        weight_bytes=read_bytes(shape, dtype),
        kv_bytes=shape.kv_read(context) * batch * BYTES_PER_ELEMENT[dtype],
        flops=batch * per_sequence,
        attention_flops=batch * passing * of_row.attention,
    )
