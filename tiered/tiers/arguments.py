"""What `TierManager.store` is given, checked before anything happens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.tiers.banks import CentroidBank, banks_of
from tiered.tiers.record_book import RecordForm, RecordKey


def check_rows(name: str, rows: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError where `rows` is not [rows, width] in `dtype` on `device`."""
    if rows.dim() != 2 or rows.dtype != dtype or rows.device != device:
        raise ValueError(
            f"{name} is {rows.dtype} {tuple(rows.shape)} on {rows.device}; needed is {dtype} [rows, width] on {device}"
        )


def checked_forms(
    keys: Sequence[RecordKey],
    rows: Tensor,
    sizes: Sequence[int],
    *,
    codec: Codec | str,
    bank: CentroidBank | Sequence[CentroidBank] | None,
    clusters: Sequence[int] | None,
    tier: Tier,
) -> list[RecordForm]:
    """The form of each record; ValueError where the arguments do not fit each other."""
    if codec not in list(Codec):
        raise ValueError(f"unknown codec {str(codec)!r}; allowed: {', '.join(Codec)}")
    if tier not in (Tier.DEVICE, Tier.HOST):
        raise ValueError(f"records are stored in the device or host tier, not in {tier}")
    if len(set(keys)) != len(keys):
        raise ValueError("the keys of one store must be distinct")
    if len(sizes) != len(keys) or any(size < 1 for size in sizes) or sum(sizes) != len(rows):
        raise ValueError(f"{len(keys)} records of sizes {list(sizes)} are not the {len(rows)} rows")
    if Codec(codec).needs_base != (bank is not None and clusters is not None):
        allowed = ", ".join(codec for codec in Codec if codec.needs_base)
        raise ValueError(f"bank and clusters are for the codec {allowed}, which needs both; the codec is {codec}")
    if bank is not None and clusters is not None:
        banks = banks_of(bank, len(keys))
        if len(clusters) != len(keys) or len(banks) != len(keys):
            raise ValueError(f"clusters = {list(clusters)} and {len(banks)} banks must be one for each of {len(keys)}")
        for one, cluster in zip(banks, clusters, strict=True):
            count, width = one.centroids.shape
            if not 0 <= cluster < count:
                raise ValueError(
                    f"clusters = {list(clusters)} must name one of {count} centroids for each of {len(keys)}"
                )
            if width != rows.shape[1]:
                raise ValueError(f"rows of width {rows.shape[1]} cannot be deltas against centroids of width {width}")
    if codec != Codec.RAW and rows.device.type == "cpu" and not rows.isfinite().all():
        raise ValueError(f"rows must be finite: one NaN or Inf spoils a whole record in the codec {codec}")
    return [RecordForm(Codec(codec), size, rows.shape[1], rows.element_size()) for size in sizes]
