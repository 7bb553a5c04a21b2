"""Books: what a record is called, and what form its bytes have."""

from dataclasses import dataclass
from typing import NamedTuple

from tiered.core.features import Feature
from tiered.offload.codec_bytes import Codec, codec_bytes


class RecordKey(NamedTuple):
    """The name of a record: the unit that moves between tiers.

    Attributes:
        feature: what is stored.
        layer: of the model.
        sequence: of the batch.
        part: number of the cluster, piece of a cluster, or span that the record holds in this layer and sequence.
    """

    feature: Feature
    layer: int
    sequence: int
    part: int

    def __str__(self) -> str:
        return f"{self.feature} of layer {self.layer}, sequence {self.sequence}, part {self.part}"


@dataclass(frozen=True, slots=True)
class RecordForm:
    """How a record's bytes are to be read.

    Attributes:
        codec: how the rows are stored.
        rows: number of rows.
        width: elements of a row.
        element_bytes: bytes of an element in the model's dtype.
    """

    codec: Codec
    rows: int
    width: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the record, scales included."""
        return codec_bytes(self.codec, self.rows, self.width, element_bytes=self.element_bytes)
