"""Books: the codes that weights [out, inner] may be in, each output row of which is coded alone. Integers only.

            codes                                       scales                                    bits an element
    fp8     E4M3                                        one float32 a row                         8 + 32/inner
    int8    two's complement                            one float32 a row                         8 + 32/inner
    int4    two's complement, two a byte, even low      one bfloat16 for 32 columns               4.5
    nvfp4   E2M1, two a byte, even column low           one E4M3 for 16 columns, a float32 a row  4.5 + 32/inner

All are symmetric: a value is its code times its scale, or times both of them. A row holds its codes, then the scales
of its groups, then, from the next whole word of 4 bytes on, its own scale, then zeros up to whole vectors of 16 bytes.
Where `inner` is no multiple of a group, the last one is filled up with zeros.
"""

from enum import StrEnum

from tiered.kernels.record_layout import GROUP

VECTOR, WORD = 16, 4


class WeightCode(StrEnum):
    """What the elements of a weight become."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    NVFP4 = "nvfp4"

    @property
    def group(self) -> int:
        """Columns that share a scale; 1 where only the row has one."""
        return {WeightCode.INT4: 32, WeightCode.NVFP4: GROUP}.get(self, 1)

    def groups(self, elements: int) -> int:
        """Of a row, the last of them filled up."""
        return -(-elements // self.group)

    def code_bytes(self, elements: int) -> int:
        """Of the codes of a row, which is where the scales of its groups begin."""
        return elements if self.group == 1 else self.groups(elements) * self.group // 2

    def row_scale(self, elements: int) -> int:
        """Where the scale of a row begins; of int4, which has none, where the row ends."""
        of_group = {WeightCode.INT4: 2, WeightCode.NVFP4: 1}.get(self, 0)
        return _whole(self.code_bytes(elements) + self.groups(elements) * of_group, WORD)

    def row_bytes(self, elements: int) -> int:
        """Of a row of `elements`, in whole vectors."""
        return _whole(self.row_scale(elements) + (0 if self is WeightCode.INT4 else WORD), VECTOR)


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of
