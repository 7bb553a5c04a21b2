"""The cost card of a pass: bytes and operations that its sizes dictate, and the time that nothing can beat."""

from dataclasses import dataclass

import torch

from tiered.models.shape import ModelShape
from tiered.offload.device_timer import device_times

_SIDE = 768  # of the matrices that the arithmetic of a machine is measured with
_BYTES = 1 << 26  # that are summed up to measure its memory: more than any cache holds on one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine reaches, measured on itself: in a product of square matrices, in a sum over a long vector."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCard:
    """What one forward takes.

    Attributes:
        read_bytes: what the pass has to read once: the weights, without an embedding that is only looked up in, and the
            keys and values of every position.
        flops: multiplications and additions of its matrix products, attention among them; where final tokens see each
            other alone (`ModelShape.noise_masked`), a little more than it takes.
    """

    read_bytes: int
    flops: int

    def floor(self, rates: Rates) -> float:
        """Seconds that the pass takes at least: its arithmetic or its reading, whichever is longer."""
        return max(self.flops / rates.flops_per_second, self.read_bytes / rates.bytes_per_second)


def cost_card(
    shape: ModelShape, *, batch: int, context: int, rows: int, dtype_bytes: int, output_rows: int | None = None
) -> CostCard:
    """The card of one forward.

    Args:
        shape: of the model.
        batch: sequences.
        context: positions of each, all of which every row attends to.
        rows: that the pass recomputes of each sequence.
        dtype_bytes: of an element of weights and cache.
        output_rows: rows whose logits are needed; the last layer computes keys and values of the others alone. None:
            all of `rows`.

    Raises:
        ValueError: more rows than the context has, or more output rows than rows.
    """
    outputs = rows if output_rows is None else output_rows
    if not 0 < outputs <= rows <= context:
        raise ValueError(f"rows = {rows}, output_rows = {outputs}; 0 < output_rows <= rows <= {context} is allowed")
    width, heads_width = shape.width, shape.heads * shape.head_dim
    keys_values = 4 * width * shape.kv_width
    attention = 4 * width * heads_width + 4 * (context + shape.sink_tokens) * heads_width
    mlp = 2 * (shape.mlp_matrices + 1) * width * shape.mlp_width
    passing = (shape.layers - 1) * rows + outputs  # rows that go through attention and MLP, over all layers
    per_sequence = (
        shape.layers * rows * keys_values + passing * (attention + mlp) + outputs * 2 * width * shape.vocab_size
    )
    weights = shape.parameters * dtype_bytes
    kept = 2 * shape.layers * batch * context * shape.kv_width * dtype_bytes
    table = (shape.vocab_size, width)
    untied = list(shape.weight_shapes.values()).count(table) > 1
    looked_up = shape.vocab_size * width * dtype_bytes if untied else 0
    return CostCard(read_bytes=weights - looked_up + kept, flops=batch * per_sequence)


def machine_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """What `device` reaches in `dtype`; the best of a few tries."""
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    vector = torch.ones(_BYTES // dtype.itemsize, dtype=dtype, device=device)
    product, total = (min(device_times(work, device, rounds=5)) for work in (lambda: matrix @ matrix, vector.sum))
    return Rates(flops_per_second=2 * _SIDE**3 / product, bytes_per_second=_BYTES / total)
