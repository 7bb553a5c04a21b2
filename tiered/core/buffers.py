"""Books: declarations of device memory, by which it is planned, booked, allocated and printed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tiered.core.byte_size import format_bytes
from tiered.core.features import Account

FLOAT32, INT64 = 4, 8  # bytes of an element
ELEMENT_BYTES = {
    **{"uint8": 1, "bool": 1, "int32": 4, "int64": 8},
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
}
ShapeAndDtype = tuple[tuple[int, ...], str]


def dtype_name(dtype: object) -> str:
    """The key of `ELEMENT_BYTES` for a dtype of torch, or for its name."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of the device.

    Attributes:
        name: contents of the buffer.
        account: account of its bytes.
        shape: shape of the tensors in it, together.
        dtype: type of the elements, a key of `ELEMENT_BYTES`.
        phase: part of a step that needs the buffer; "" for the whole call. Buffers of one phase exist together.
            Different phases reuse the same memory, that of the logits and activations.
    """

    name: str
    account: Account
    shape: tuple[int, ...]
    dtype: str = "uint8"
    phase: str = ""

    def __post_init__(self) -> None:
        if self.phase and self.account not in (Account.LOGITS, Account.ACTIVATIONS):
            raise ValueError(f"{self.name}: phase = {self.phase!r}, but {self.account.value} last for the whole call")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def as_dict(self) -> dict[str, Any]:
        of_shape = {"shape": list(self.shape), "dtype": self.dtype, "bytes": self.nbytes}
        return {"name": self.name, "account": self.account.value, **of_shape, "phase": self.phase}


def phase(name: str, buffers: Mapping[str, ShapeAndDtype], account: Account = Account.ACTIVATIONS) -> list[Buffer]:
    """Buffers of one phase, from shapes and dtypes by name."""
    return [Buffer(holds, account, shape, dtype, name) for holds, (shape, dtype) in buffers.items()]


def phase_bytes(buffers: Iterable[Buffer], account: Account) -> int:
    """Bytes of the largest phase with buffers under `account`; 0 for no phase."""
    phases: Counter[str] = Counter()
    for buffer in buffers:
        if buffer.phase and buffer.account is account:
            phases[buffer.phase] += buffer.nbytes
    return max(phases.values(), default=0)


def account_bytes(buffers: Iterable[Buffer]) -> dict[Account, int]:
    """Bytes of `buffers` by account. Phases before the logits reuse the logits' memory, so `ACTIVATIONS` has only the
    excess over it."""
    lasting, in_phases = Counter[Account](), list[Buffer]()
    for buffer in buffers:
        if buffer.phase:
            in_phases.append(buffer)
        else:
            lasting[buffer.account] += buffer.nbytes
    logits = phase_bytes(in_phases, Account.LOGITS)
    lasting[Account.LOGITS] += logits
    lasting[Account.ACTIVATIONS] += max(0, phase_bytes(in_phases, Account.ACTIVATIONS) - logits)
    return {account: lasting[account] for account in Account if lasting[account]}


def listed(buffers: Iterable[Buffer]) -> str:
    """`buffers` as plain text, largest first: buffers of the whole call, then the phases of a step, which share
    memory."""
    shown = sorted((buffer for buffer in buffers if buffer.nbytes), key=lambda buffer: -buffer.nbytes)
    lines: list[str] = []
    for turn in dict.fromkeys(["", *(buffer.phase for buffer in shown)]):
        together = [buffer for buffer in shown if buffer.phase == turn]
        lines += ["", f"phase: {turn}" if turn else "buffers of the device, as long as the call"]
        for buffer in together:
            of = f"{' x '.join(map(str, buffer.shape))} {buffer.dtype}"
            lines.append(f"{format_bytes(buffer.nbytes):>14}   {buffer.name:50}{of}")
        lines.append(f"{format_bytes(sum(buffer.nbytes for buffer in together)):>14}   together")
    return "\n".join(lines[1:])
