"""How host memory is obtained, with fakes of CUDA and cupy where there is no GPU."""

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tiered.offload import pinning
from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError
from tiered.offload.pinning import PINNERS, RegisteredPinner, pick_pinner

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


def mapped(address: int, nbytes: int) -> bool:
    """Whether the process has a mapping of all those bytes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address and address + nbytes <= last:
            return True
    return False


def resident(address: int) -> int:
    """KiB in RAM of the mapping that begins at or before `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "Rss:":
            return int(words[1])
    return 0


class FakeCudart:
    """Registrations by address; a call can be refused."""

    def __init__(self):
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuse_at = -1
        self.drained = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert mapped(address, nbytes)
        assert resident(address) * 1024 >= nbytes, "pages are touched before they are registered"
        assert (address % PAGE, nbytes % PAGE, flags) == (0, 0, 3)
        self.calls += 1
        if self.calls - 1 == self.refuse_at:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert mapped(address, self.registered[address]), "a registration ends before its mapping"
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """torch with CUDA, as far as a pinner sees it."""
    fake = FakeCudart()

    def drain(device: torch.device) -> None:
        assert device == CUDA
        fake.drained += 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pinning, "_drain_error", drain)
    return fake


class CUDARuntimeError(RuntimeError):
    """cupy's."""


class FakeCupy:
    """The parts of cupy that a pinner uses, in `sys.modules`. `live` counts the bytes that are not freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.live = 0
        self.available = True
        self.refuse = False
        fake = self

        class PinnedMemory:
            def __init__(self, size: int):
                if fake.refuse:
                    raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
                self.size = size
                fake.live += size

            def __del__(self):
                if hasattr(self, "size"):
                    fake.live -= self.size

        def pointer(memory: PinnedMemory, offset: int) -> object:
            buffer = (ctypes.c_ubyte * (memory.size + 100))()  # numpy needs the count
            buffer.memory = memory  # pyright: ignore[reportAttributeAccessIssue]
            assert offset == 0
            return buffer

        cupy, cuda, pinned_memory, runtime = (
            ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.pinned_memory", "cupy.cuda.runtime")
        )
        cupy.__spec__ = ModuleSpec("cupy", None)
        vars(pinned_memory).update(PinnedMemory=PinnedMemory, PinnedMemoryPointer=pointer)
        vars(runtime).update(CUDARuntimeError=CUDARuntimeError)
        vars(cuda).update(is_available=lambda: fake.available, pinned_memory=pinned_memory, runtime=runtime)
        vars(cupy).update(cuda=cuda)
        for module in (cupy, cuda, pinned_memory, runtime):
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """A cupy that sees a device."""
    return FakeCupy(monkeypatch)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cupy, installed or not."""
    monkeypatch.setattr(pinning, "find_spec", lambda name: None)


def test_without_cuda_nothing_of_it_is_touched(monkeypatch: pytest.MonkeyPatch):
    def touched(*_: object) -> None:
        raise AssertionError("CUDA was touched")

    for name in ("is_available", "cudart", "current_device", "init", "device"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(pinning, "find_spec", touched)
    pinner = pick_pinner(CPU)
    chunk = pinner.allocate(12345)
    assert (pinner.name, chunk.pinned, chunk.actual_bytes, chunk.bytes.shape) == ("pageable", False, 12345, (12345,))
    assert chunk.bytes.dtype == torch.uint8
    chunk.free()


def test_auto_prefers_cupy(cudart: FakeCudart, cupy: FakeCupy):
    assert pick_pinner(CUDA).name == "cupy"
    cupy.available = False
    assert pick_pinner(CUDA).name == "registered"
    assert pick_pinner(CPU).name == "pageable"


def test_auto_if_cupy_cannot_be_imported(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinning, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert pick_pinner(CUDA).name == "registered"


def test_auto_without_cupy(cudart: FakeCudart, no_cupy: None):
    assert pick_pinner(CUDA).name == "registered"
    assert [name for name, kind in PINNERS.items() if kind.available(CUDA)] == ["registered", "pageable"]


def test_memory_for_the_cpu_is_never_pinned(cudart: FakeCudart, cupy: FakeCupy):
    assert [name for name, kind in PINNERS.items() if kind.available(CPU)] == ["pageable"]


@pytest.mark.parametrize("name", ["cupy", "registered", "pageable"])
@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_do_not_work(name: str, nbytes: int, cudart: FakeCudart, cupy: FakeCupy):
    with pytest.raises(ValueError, match=f"cannot allocate {nbytes} bytes"):
        PINNERS[name](CUDA).allocate(nbytes)


def test_cupy_memory_is_exact_and_lives_as_long_as_a_view(cudart: FakeCudart, cupy: FakeCupy):
    chunk = PINNERS["cupy"](CUDA).allocate(5000)
    assert (chunk.pinned, chunk.actual_bytes, chunk.bytes.shape, cupy.live) == (True, 5000, (5000,), 5000)
    view = chunk.bytes[10:20]
    view.fill_(7)
    assert (chunk.bytes[10:20] == 7).all()
    chunk.free()
    assert cupy.live == 5000
    del view
    assert cupy.live == 0
    chunk.free()


def test_registered_memory_is_whole_pages_in_one_registration(cudart: FakeCudart):
    chunk = PINNERS["registered"](CUDA).allocate(3 * PAGE + 1)
    address = chunk.bytes.data_ptr()
    assert cudart.registered == {address: 4 * PAGE}
    assert (chunk.pinned, chunk.actual_bytes, chunk.bytes.shape) == (True, 4 * PAGE, (3 * PAGE + 1,))
    assert (chunk.bytes == 0).all()
    chunk.free()
    assert not cudart.registered
    assert not mapped(address, 4 * PAGE)
    chunk.free()
    with pytest.raises(ValueError, match="freed"):
        _ = chunk.bytes


def test_a_view_keeps_registered_memory_mapped(cudart: FakeCudart):
    chunk = PINNERS["registered"](CUDA).allocate(64 * PAGE)
    view = chunk.bytes[PAGE:]
    view.fill_(3)
    chunk.free()
    assert not cudart.registered
    assert (view == 3).all()


def test_an_unreferenced_chunk_is_unregistered(cudart: FakeCudart):
    chunk = PINNERS["registered"](CUDA).allocate(PAGE)
    view = chunk.bytes  # the mapping outlives the chunk, the registration does not
    del chunk
    gc.collect()
    assert not cudart.registered
    del view


@pytest.mark.parametrize(("unknown", "error"), [((23,), 22), ((18,), 22), ((18, 23), 22), ((23,), 12), ((18,), 12)])
def test_advice_that_a_system_does_not_know(
    unknown: tuple[int, ...], error: int, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
):
    class OldMmap(mmap.mmap):
        def madvise(self, advice: int, *_: int) -> None:
            if advice in unknown:
                raise OSError(error, os.strerror(error))
            super().madvise(advice)

    monkeypatch.setattr(mmap, "mmap", OldMmap)
    pinner = PINNERS["registered"](CUDA)
    if error == 22:  # the advice is unknown
        chunk = pinner.allocate(1 << 20)
        assert cudart.registered == {chunk.bytes.data_ptr(): 1 << 20}
        chunk.free()
    else:  # no memory
        with pytest.raises(PinError, match="Cannot allocate memory"):
            pinner.allocate(1 << 20)
        assert cudart.calls == 0


def test_more_than_one_registration_takes():
    with pytest.raises(ValueError, match=r"68719476737 bytes .* 68719476736"):
        RegisteredPinner(CUDA).allocate((64 << 30) + 1)


def refuse_cupy(cudart: FakeCudart, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.refuse = True


def refuse_registration(cudart: FakeCudart, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart.refuse_at = 0


def refuse_memory(cudart: FakeCudart, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize(
    ("name", "refuse", "reason"),
    [
        ("cupy", refuse_cupy, "cudaErrorMemoryAllocation"),
        ("registered", refuse_registration, "cudaHostRegister returned 2"),
        ("pageable", refuse_memory, "out of memory"),
    ],
)
def test_a_refusal_names_the_limits_and_a_remedy(
    name: str,
    refuse: Callable[..., None],
    reason: str,
    cudart: FakeCudart,
    cupy: FakeCupy,
    monkeypatch: pytest.MonkeyPatch,
):
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    pinner = PINNERS[name](CUDA)
    with monkeypatch.context() as patch:
        refuse(cudart, cupy, patch)
        with pytest.raises(PinError) as caught:
            pinner.allocate(4 * PAGE)
    ram = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert caught.value.needed == 4 * PAGE
    for part in (
        f"{4 * PAGE} bytes",
        f"{name}: ",
        reason,
        f"Host RAM is {ram} bytes",
        f"memlock limit is {'none' if limit == resource.RLIM_INFINITY else limit}",
        "memory=MemoryBudget(host=…)",
    ):
        assert part in str(caught.value)
    assert not cudart.registered
    assert cudart.drained == (name == "registered")
    cupy.refuse = False
    assert pinner.allocate(PAGE).actual_bytes == PAGE  # the next request is served


def test_a_refused_chunk_leaves_the_earlier_ones(cudart: FakeCudart):
    cudart.refuse_at = 2
    pinner = PINNERS["registered"](CUDA)
    chunks = [pinner.allocate(PAGE) for _ in range(2)]
    with pytest.raises(PinError):
        pinner.allocate(PAGE)
    assert sorted(cudart.registered) == sorted(chunk.bytes.data_ptr() for chunk in chunks)
    chunks.append(pinner.allocate(PAGE))
    for chunk in chunks:
        chunk.free()
    assert not cudart.registered


def in_a_child(check: Callable[[], bool]) -> bool:
    """Whether `check` holds in a fork of this process."""
    child = os.fork()
    if not child:
        answer = False
        try:
            answer = check()
        finally:
            os._exit(0 if answer else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_shares_nor_frees_the_memory(cudart: FakeCudart):
    chunk = PINNERS["registered"](CUDA).allocate(PAGE)
    chunk.bytes.fill_(9)

    def child() -> bool:
        # No page is shared copy-on-write with the child, or the next write here would move ours under the device.
        wiped = bytes(chunk.bytes.numpy()) == bytes(PAGE)
        chunk.free()
        return wiped and len(cudart.registered) == 1

    assert in_a_child(child)
    assert (chunk.bytes == 9).all()
    chunk.free()
    assert not cudart.registered


def test_a_chunk_is_released_before_its_memory_goes():
    order: list[str] = []
    memory = torch.empty(8, dtype=torch.uint8)
    address = memory.data_ptr()

    def before() -> None:
        order.append("before" if chunk.bytes.data_ptr() == address else "too late")

    chunk = Chunk(memory, pinned=False, actual_bytes=8, before=before)
    for _ in range(2):
        chunk.free()
    assert order == ["before"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "registered", "auto"])
def test_pinned_memory_reaches_the_device(name: str):
    if name == "cupy":
        pytest.importorskip("cupy")
    nbytes = (3 << 20) + 5
    pinner = pick_pinner(CUDA) if name == "auto" else PINNERS[name](CUDA)
    chunk = pinner.allocate(nbytes)
    assert chunk.pinned
    assert chunk.bytes.is_pinned()
    assert chunk.bytes[-1:].is_pinned()
    assert nbytes <= chunk.actual_bytes <= (4 << 20)
    chunk.bytes.copy_(torch.arange(nbytes) % 251)
    there = torch.empty(nbytes, dtype=torch.uint8, device=CUDA)
    there.copy_(chunk.bytes, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), (torch.arange(nbytes) % 251).to(torch.uint8))
    chunk.free()


@pytest.mark.gpu
def test_a_refused_registration_does_not_surface_in_the_next_kernel():
    torch.ones(1, device=CUDA)
    cudart = torch.cuda.cudart()
    assert cudart is not None
    assert int(cudart.cudaHostRegister(0, 4096, 0))
    pinning._drain_error(CUDA)
    assert float(torch.ones(1, device=CUDA).add_(1)) == 2
