"""Work for compute: rows into the bytes of records, and back."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.offload.codecs import CODECS
from tiered.tiers.batches import Batch
from tiered.tiers.record_book import Entry


def encoding(
    entries: Sequence[Entry], rows: Float[Tensor, "rows width"], out: UInt8[Tensor, " bytes"], offsets: Sequence[int]
) -> Callable[[], None]:
    """What writes `rows` as the records of `entries`."""
    sizes = [entry.form.rows for entry in entries]
    bases = [entry.base for entry in entries if entry.base is not None]
    # Taken now, here and in `decoding`: a bank may be given back before compute gets to it.
    centroids, clusters = None, [base.cluster for base in bases] or None
    if bases:
        centroids = bases[0].bank.centroids
        if any(base.bank is not bases[0].bank for base in bases):
            centroids = torch.stack([base.bank.centroids[base.cluster] for base in bases])
            clusters = list(range(len(bases)))
    return partial(CODECS[entries[0].form.codec].encode, rows, sizes, out, offsets, centroids, clusters)


def decoding(batch: Batch, dtype: torch.dtype) -> Callable[[], None]:
    """What writes the rows of `batch` to their places in its destination."""
    out, rows = batch.to.out, batch.to.rows
    assert batch.buffer is not None and out is not None, "a batch is decoded after it has set out, to somewhere"
    form = batch.entries[0].form
    sizes = [entry.form.rows for entry in batch.entries]
    centroids = [base.bank.centroids[base.cluster] for base in batch.bases if base is not None]
    stacked = torch.stack(centroids) if centroids else None
    ends = [first + size for first, size in zip(batch.rows, sizes, strict=True)]
    if batch.rows[1:] == ends[:-1]:  # in the answer, too, they stand one after another
        part = slice(batch.rows[0], ends[-1])
        target, places = (out[part], None) if rows is None else (out, rows[part])
    else:
        numbers = torch.cat([torch.arange(first, end) for first, end in zip(batch.rows, ends, strict=True)])
        places = on_device(numbers, out.device)
        target, places = out, places if rows is None else rows[places]
    return partial(CODECS[form.codec].decode, batch.buffer, batch.offsets, sizes, dtype, target, places, stacked)
