"""Books: of which tensors of its files a weight is made that a checkpoint holds in codes."""

from dataclasses import dataclass

from tiered.kernels.weight_code import WeightCode

FLOATS = ("F32", "BF16", "F16")  # dtypes of scales that a float32 holds


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the files: its name, and the shapes and dtypes (safetensors' names) that it may have."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedParts:
    """What a weight in codes is made of.

    Attributes:
        codes: one an element, or two a byte, as `code` has them; of int4 one a byte.
        scale: of a row, or one for all of them; None: it is 1.
        block_scales: of groups.
        zeros: zero points, which have to be zeros.
        divides: `scale` is what the product of code and block scale is divided by.
        swizzled: the block scales lie as tensor cores of NVIDIA read them.
        spare: names of tensors that come with it and are not read.
    """

    code: WeightCode
    codes: Part
    scale: Part | None = None
    block_scales: Part | None = None
    zeros: Part | None = None
    divides: bool = False
    swizzled: bool = False
    spare: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[Part, ...]:
        """The parts that are there."""
        return tuple(part for part in (self.codes, self.scale, self.block_scales, self.zeros) if part)


def by_row(out: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one scale a row, or one for all."""
    return (out, 1), (out,), (1, 1), (1,), ()
