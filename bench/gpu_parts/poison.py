"""Fills memory that torch hands out uninitialised, so that what a kernel leaves unwritten shows."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Bytes: 0xFF is NaN in every float format, the largest or −1 as an integer; 0xA5 is a small number in all of them.
POISONS = (0xFF, 0xA5)
_EMPTY = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}


class Poisoned(TorchFunctionMode):
    """As a context: every byte of memory that Python code asks torch for is `poison`, scratch too. For one thread."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self._poison = poison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            fill(made, self._poison)
        return made


def fill(tensor: torch.Tensor, poison: int) -> None:
    """Set every byte of the memory of `tensor`, whatever its dtype and strides."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    flat.fill_(poison)
