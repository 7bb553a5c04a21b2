"""Every kernel at a model's size: its bits, its error, lanes that it leaves unwritten, equal results of two runs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpu_parts.kernel_case import KernelCase, generator_of, interpret, sized
from gpu_parts.setting import Setting, checked

# Bytes: 0xFF is NaN in every float format, the largest or −1 as an integer; 0xA5 is a small number in all of them.
_POISONS = (0xFF, 0xA5)
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def cases(setting: Setting) -> list[str]:
    """All cases, by kernel."""
    return list(sized("CHECKED", setting.tiny))


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Errors and their bounds; `bits` says whether a law holds, if there is one."""
    interpret(setting.on)
    of = sized("CHECKED", setting.tiny)[case]
    return {"kernel": of.kernel} | check(of, generator_of(case, setting.seed, setting.on))


class Poisoned(TorchFunctionMode):
    """A context in which every byte of memory that Python code asks torch for is `poison`, scratch too. Lanes that a
    kernel leaves unwritten then show. It is for one thread."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self._poison = poison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ in _EMPTY:  # its whole storage, whatever its dtype and strides
            storage = made.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=made.device).set_(storage, 0, (storage.nbytes(),), (1,))
            flat.fill_(self._poison)
        return made


def check(case: KernelCase, generator: torch.Generator) -> dict[str, Any]:
    """The row of a case. The same inputs are given twice, with the memory for the results poisoned in two ways."""
    given = case.draw(generator)
    first, again = (_results(case, given, poison, generator.device) for poison in _POISONS)
    row: dict[str, Any] = {"bound": case.bound, "row_bound": case.of_rows * case.bound}
    faults = []
    if not _same(first, again):
        third = _results(case, given, _POISONS[0], generator.device)
        faults.append("lanes are left unwritten" if _same(first, third) else "the same inputs give other bits again")
    law = case.law(given)
    if law is not None:
        faults += (why := list(_differences(first, law)))
        row["bits"] = not why
    errors, why = _errors(case.seen(given, first), case.truth(given))
    row |= errors
    faults += why or [
        f"{what} {row[what]:.2g}, at most {row[bound]:.2g} is rounding"
        for what, bound in [("rel_error", "bound"), ("row_error", "row_bound")]
        if not row[what] <= row[bound]
    ]
    return row | checked(*faults)


def _results(case: KernelCase, given: Any, poison: int, device: torch.device) -> Sequence[Tensor]:
    with Poisoned(poison):
        results = case.run(given, case.room(given))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(some, others, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _differences(found: Sequence[Tensor], law: Sequence[Tensor]) -> Iterator[str]:
    """Differences from the law, bit for bit."""
    for one, wanted in zip(found, law, strict=True):
        if one.shape != wanted.shape or one.dtype != wanted.dtype:
            yield f"{one.dtype} {tuple(one.shape)}, the reference has {wanted.dtype} {tuple(wanted.shape)}"
            continue
        wrong = (_bytes(one) != _bytes(wanted).to(one.device)).nonzero()[:, 0]
        if len(wrong):
            yield f"{len(wrong)} of {one.numel() * one.element_size()} bytes are not the reference's, first {wrong[0]}"


def _errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[dict[str, float | None], list[str]]:
    """The largest errors over all results, of a whole result and of a row; None, and why, if there are none."""
    none: dict[str, float | None] = {"rel_error": None, "row_error": None}
    of_all, of_rows = [], []
    for one, true in zip(found, truth, strict=True):
        if one.shape != true.shape:
            return none, [f"shape {tuple(one.shape)}, not {tuple(true.shape)}"]
        one, true = one.double().to(true.device), true.double()
        bad = int((~one.isfinite()).sum())
        if bad:
            return none, [f"{bad} of {one.numel()} numbers are not finite"]
        norm, norms, errors = float(true.norm()), true.norm(dim=-1), (one - true).norm(dim=-1)
        if not math.isfinite(norm) or norm == 0:
            raise ValueError(f"the true results have the norm {norm}: a case must have finite ones that are not all 0")
        of_all.append(float(errors.norm()) / norm)
        # The error of a row of zeros is over the mean norm of rows.
        of_rows.append(float((errors / norms.where(norms > 0, norm / norms.numel() ** 0.5)).max()))
    return {"rel_error": max(of_all), "row_error": max(of_rows)}, []
