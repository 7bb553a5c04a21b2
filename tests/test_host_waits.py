"""Waits of the host for the device are counted by line, and nothing is left changed."""

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import FLAGGED, HostWait, host_waits

WARNING = f"{FLAGGED} (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:227.)"


class FakeEvent:
    """A CUDA event that is always over."""

    def synchronize(self) -> str:
        return "over"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Debug modes that were set, on a CUDA device that is not there."""
    known: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: known[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", known.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return known


def flagged() -> None:
    """torch's warning in C++ is of the line of Python that called it, like this one."""
    warnings.warn(WARNING, UserWarning, stacklevel=1)


def here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"tests/{Path(__file__).name}:{frame.f_back.f_lineno + offset}"


def line_of(function: Callable[..., object]) -> str:
    """The last line of a function."""
    lines, first = inspect.getsourcelines(function)
    return f"tests/{Path(__file__).name}:{first + len(lines) - 1}"


def test_every_wait_counts_for_its_line(modes: list[Any]):
    with host_waits() as found:
        for _ in range(3):
            flagged()
        expected = here(1)
        torch.cuda.synchronize()
        assert FakeEvent().synchronize() == "over"
    assert found == Counter(
        {
            HostWait(line_of(flagged), "flagged", ""): 3,
            HostWait(expected, "device", ""): 1,
            HostWait(f"{expected.rsplit(':', 1)[0]}:{int(expected.rsplit(':', 1)[1]) + 1}", "event", ""): 1,
        }
    )


def test_lines_of_torch_are_passed_over(modes: list[Any]):
    inside = compile(f"import warnings; warnings.warn({WARNING!r})", str(Path(torch.__file__).parent / "x.py"), "exec")

    def warn() -> None:
        exec(inside, {})

    with host_waits() as found:
        warn()
    assert [wait.line for wait in found] == [line_of(warn)]


def test_a_wait_has_the_place_of_its_caller(modes: list[Any]):
    where = iter(["layer 3", "layer 3", "head"])
    with host_waits(lambda: next(where)) as found:
        flagged()
        flagged()
        flagged()
    assert {wait.at: count for wait, count in found.items()} == {"layer 3": 2, "head": 1}


def test_other_threads_and_other_warnings_do_not_count(modes: list[Any]):
    with pytest.warns(UserWarning, match="something else") as shown, host_waits() as found:
        thread = threading.Thread(target=flagged)
        thread.start()
        thread.join()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert not found
    assert [str(warning.message) for warning in shown] == ["something else"]


def test_everything_is_as_it_was(modes: list[Any]):
    before = torch.cuda.synchronize, FakeEvent.synchronize, warnings.showwarning, list(warnings.filters)
    modes.append(2)  # the caller wants errors
    with pytest.raises(KeyError), host_waits():
        assert modes[-1] == "warn"
        raise KeyError
    assert modes == [0, 2, "warn", 2]
    assert before == (torch.cuda.synchronize, FakeEvent.synchronize, warnings.showwarning, list(warnings.filters))
    with pytest.warns(UserWarning, match=FLAGGED):
        flagged()


def test_without_cuda_there_is_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: pytest.fail("there is no device"))
    with host_waits() as found:
        torch.randn(4).nonzero().tolist()
    assert not found


@pytest.mark.gpu
def test_on_a_device():
    rows = torch.arange(8, device="cuda")
    pinned = torch.empty(8, dtype=rows.dtype, pin_memory=True)
    event = torch.cuda.Event()
    torch.cuda.synchronize()
    with host_waits() as found:
        rows.add_(1).mul_(2)
        pinned.copy_(rows, non_blocking=True)
        event.record()
        first = here(1)
        rows.tolist()
        rows[0].item()
        rows[rows > 3].sum()
        torch.tensor([1, 2], device="cuda")
        torch.cuda.current_stream().synchronize()
        event.synchronize()
        torch.cuda.synchronize()
    file, line = first.split(":")
    lines = {int(wait.line.removeprefix(f"{file}:")) - int(line): wait.what for wait in found}
    assert lines == {**dict.fromkeys(range(5), "flagged"), 5: "event", 6: "device"}
    assert torch.cuda.get_sync_debug_mode() == 0
