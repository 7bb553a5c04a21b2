"""Records in the scratch file: their bytes, damage, growth, and the process that owns the file."""

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tiered.offload.errors import CorruptRecordError, NoRoomError, TransferError
from tiered.offload.scratch_file import ScratchFile, ScratchSlot

SLOT = 4 * 4096


def payload(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def out(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ScratchFile]:
    file = ScratchFile(tmp_path, SLOT)
    yield file
    file.close()


def descriptor(file: ScratchFile) -> int:
    """The file has no name."""
    return file._file.fileno()


def stored(file: ScratchFile, nbytes: int = 5000) -> ScratchSlot:
    """A slot with a record written to it."""
    slot = file.place(nbytes)
    assert slot.write(payload(nbytes)) == nbytes
    return slot


def flip(file: ScratchFile, offset: int) -> None:
    """Flip a bit of the byte at `offset`."""
    os.pwrite(descriptor(file), bytes([os.pread(descriptor(file), 1, offset)[0] ^ 0x10]), offset)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, SLOT])
def test_a_written_record_comes_back(nbytes: int, file: ScratchFile):
    file.place(100)
    slot, into = file.place(nbytes), out(nbytes)
    assert slot.write(payload(nbytes)) == slot.read(into) == nbytes
    assert torch.equal(into, payload(nbytes))


@pytest.mark.parametrize("without", [None, "posix_fallocate"])  # macOS has none
def test_the_file_is_as_long_as_its_last_slot_in_use_booked_and_taken_from_the_disk(
    without: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if without:
        monkeypatch.delattr(os, without)
    booked = [0]

    def grow(nbytes: int) -> None:
        if booked[0] == 3 * SLOT:
            raise ValueError("over the budget")
        booked[0] += nbytes

    def shrink(nbytes: int) -> None:
        booked[0] -= nbytes

    file = ScratchFile(tmp_path, SLOT, grow, shrink)
    assert file.file_bytes == booked[0] == 0
    slots = []
    for count in (1, 2, 3):
        slots.append(file.place(SLOT))
        found = os.fstat(descriptor(file))
        assert file.file_bytes == booked[0] == found.st_size == count * SLOT <= found.st_blocks * 512
    assert [slot.index for slot in slots] == [0, 1, 2]
    with pytest.raises(ValueError, match="over the budget"):
        file.place(1)
    slots[1].release()
    assert booked[0] == 3 * SLOT
    slots[2].release()
    assert booked[0] == file.file_bytes == os.fstat(descriptor(file)).st_size == SLOT
    assert file.place(100).index == 1
    file.check_integrity()
    for _ in range(2):
        file.close()
        assert booked[0] == 0


def test_a_slot_is_released_once(file: ScratchFile):
    slot = file.place(100)
    slot.release()
    with pytest.raises(ValueError, match="released before"):
        slot.release()
    file.check_integrity()


@pytest.mark.parametrize("threads", [2, 8])
def test_several_threads(threads: int, file: ScratchFile):
    slots = [file.place(4096 + 100 * n) for n in range(32)]

    def work(number: int) -> bool:
        slot, same = slots[number], True
        for version in range(20):
            data, into = payload(slot.nbytes, 100 * number + version), out(slot.nbytes)
            slot.write(data)
            slot.read(into)
            same &= torch.equal(into, data)
        return same

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(32)))
    file.check_integrity()


@pytest.mark.parametrize("byte", [0, 2000, 4999])
def test_a_flipped_bit_is_found(byte: int, file: ScratchFile, tmp_path: Path):
    file.place(100)
    slot = stored(file)
    flip(file, SLOT + byte)
    with pytest.raises(CorruptRecordError, match=f"record at offset {SLOT} .*{tmp_path}: the checksum differs"):
        slot.read(out(5000))
    flip(file, SLOT + byte)
    slot.read(out(5000))


def test_bytes_behind_the_record_do_not_matter(file: ScratchFile):
    slot = stored(file)
    flip(file, 5000)
    slot.read(out(5000))


def test_an_unwritten_slot_is_no_record(file: ScratchFile):
    stored(file).release()
    with pytest.raises(CorruptRecordError, match="the checksum differs"):
        file.place(5000).read(out(5000))


@pytest.mark.parametrize("left", [0, 30, 4999])
def test_a_file_cut_short(left: int, file: ScratchFile):
    slot = stored(file)
    os.ftruncate(descriptor(file), left)
    with pytest.raises(CorruptRecordError, match=f"offset 0 of .*: the file ends after {left} of 5000 bytes"):
        slot.read(out(5000))
    with pytest.raises(RuntimeError, match=f"of {left} bytes"):
        file.check_integrity()


@pytest.mark.parametrize("nbytes", [-1, 0, SLOT + 1])
def test_sizes_that_fit_no_slot(nbytes: int, file: ScratchFile):
    with pytest.raises(ValueError, match=f"record of {nbytes} bytes: allowed are 1 to slot_bytes = {SLOT}"):
        file.place(nbytes)


# Failures of the system.


def failing(number: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def filling(number: int) -> Callable[[int, int, int], None]:
    """A `posix_fallocate` that takes a part of what it is asked for and fails."""

    def call(descriptor: int, offset: int, nbytes: int) -> None:
        os.ftruncate(descriptor, offset + nbytes // 2)
        raise OSError(number, os.strerror(number))

    return call


def free(nbytes: int) -> Callable[[int], object]:
    """A `fstatvfs` of a disk of 2 GiB with so much free, and a bit more for the system's own."""
    return lambda descriptor: SimpleNamespace(f_bavail=nbytes // 512, f_bfree=1 << 21, f_blocks=1 << 22, f_frsize=512)


NO_ROOM, GIB = "No space left on device in disk_path", 1 << 30


@pytest.mark.parametrize(
    ("calls", "expected", "available", "message"),
    [
        ({"fstatvfs": free(SLOT - 512)}, NoRoomError, SLOT - 512, NO_ROOM),
        ({"fstatvfs": free(0)}, NoRoomError, 0, NO_ROOM),
        # The bytes that were free before the attempt, which may have filled the disk.
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.ENOSPC)}, NoRoomError, GIB, NO_ROOM),
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.EDQUOT)}, NoRoomError, 0, "quota exceeded in"),
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.EFBIG)}, NoRoomError, 0, "File too large in"),
        ({"posix_fallocate": filling(errno.EIO)}, OSError, None, "disk_path takes no file of records: Input/output"),
        ({"posix_fallocate": None, "pwrite": failing(errno.ENOSPC)}, NoRoomError, ..., NO_ROOM),
    ],
)
def test_a_disk_that_lets_the_file_grow_no_more(
    calls: dict[str, Callable[..., object] | None],
    expected: type[Exception],
    available: object,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    booked: list[int] = []
    file = ScratchFile(tmp_path, SLOT, booked.append, lambda nbytes: booked.append(-nbytes))
    slot = stored(file)
    file.place(SLOT)
    with monkeypatch.context() as patch:
        for name, call in calls.items():
            if call is None:
                patch.delattr(os, name)
            else:
                patch.setattr(os, name, call)
        with pytest.raises(expected) as caught:
            file.place(SLOT)
    assert message in getattr(caught.value, "hint", str(caught.value)) and str(tmp_path) in str(caught.value)
    if isinstance(caught.value, NoRoomError):
        assert caught.value.needed == SLOT and available in (..., caught.value.available)
    assert sum(booked) == file.file_bytes == 2 * SLOT
    file.check_integrity()
    slot.read(out(5000))
    assert file.place(SLOT).index == 2
    file.close()


def test_a_limit_on_the_length_of_files(file: ScratchFile):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file.place(SLOT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SLOT - 1, hard))
    try:
        with pytest.raises(NoRoomError) as caught:
            file.place(SLOT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.needed, caught.value.available) == (SLOT, 0)
    assert "File too large" in caught.value.hint
    file.check_integrity()
    file.place(SLOT)


@pytest.mark.parametrize(
    ("number", "expected", "message"),
    [
        (errno.ENOSPC, TransferError, "writing the record at offset 0 of .*No space"),  # where it copies on write
        (errno.EIO, TransferError, "writing the record at offset 0 of .*Input/output"),
    ],
)
def test_a_write_that_fails(
    number: int, expected: type[Exception], message: str, file: ScratchFile, monkeypatch: pytest.MonkeyPatch
):
    slot = file.place(5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        with pytest.raises(expected, match=message):
            slot.write(payload(5000))
    slot.write(payload(5000))
    slot.read(out(5000))
    file.check_integrity()


def test_a_read_that_fails(file: ScratchFile, monkeypatch: pytest.MonkeyPatch):
    slot = stored(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(TransferError, match=r"reading the record at offset 0 of .*Input/output"):
            slot.read(out(5000))
    slot.read(out(5000))


def test_a_system_that_writes_nothing(file: ScratchFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(TransferError, match="Input/output"):
        file.place(100).write(payload(100))


@pytest.mark.parametrize("most", [1, 63, 1000])
def test_short_reads_and_writes(most: int, file: ScratchFile, monkeypatch: pytest.MonkeyPatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda number, data, offset: pwrite(number, data[:most], offset))
    monkeypatch.setattr(os, "preadv", lambda number, buffers, offset: preadv(number, [buffers[0][:most]], offset))
    into = out(5000)
    assert stored(file).read(into) == 5000
    assert torch.equal(into, payload(5000))


# The process that owns the file.


def without_anonymous_files(path: object, flags: int, *arguments: object, call=os.open) -> int:
    """An `os.open` of a file system, or a system, that knows no O_TMPFILE."""
    if flags & os.O_DIRECTORY:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return call(path, flags, *arguments)


@pytest.mark.parametrize("through", ["the folder", "a link"])
@pytest.mark.parametrize("anonymous", [True, False])
def test_the_file_has_no_name(through: str, anonymous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder")
    if not anonymous:
        monkeypatch.setattr(os, "open", without_anonymous_files)
    file = ScratchFile(link if through == "a link" else folder, SLOT)
    stored(file)
    found = os.fstat(descriptor(file))
    assert (stat.S_IMODE(found.st_mode), found.st_nlink, found.st_dev) == (0o600, 0, folder.stat().st_dev)
    assert not os.get_inheritable(descriptor(file))
    assert not list(folder.iterdir())
    file.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("folder", "reason"), [("none", "No such file"), ("file", "Not a directory")])
def test_bad_folders_are_refused(folder: str, reason: str, tmp_path: Path):
    (tmp_path / "file").write_text("a thesis")
    with pytest.raises(OSError, match=f"disk_path takes no file of records: {reason}.*{tmp_path / folder}"):
        ScratchFile(tmp_path / folder, SLOT)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a thesis"]


def test_closing_twice(file: ScratchFile, tmp_path: Path):
    slot = stored(file)
    for _ in range(2):
        file.close()
    verbs: list[Callable[[], object]] = [
        lambda: file.place(1),
        lambda: slot.write(payload(5000)),
        lambda: slot.read(out(5000)),
        file.check_integrity,
        slot.release,
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match=f"scratch file in {tmp_path} is closed"):
            verb()


def test_no_descriptor_is_left(tmp_path: Path):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(100):
        file = ScratchFile(tmp_path, SLOT)
        file.place(1)
        file.close()
        with pytest.raises(OSError, match="none"):
            ScratchFile(tmp_path / "none", SLOT)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_leaves_the_file_to_its_parent(file: ScratchFile):
    slot, (ready, say_ready), (over, say_over) = stored(file), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        os.close(say_over)
        try:
            number = os.dup(descriptor(file))
            for verb in (lambda: file.place(1), slot.release, lambda: slot.read(out(5000))):
                try:
                    verb()
                except ValueError as error:
                    refused += "a fork of it" in str(error)
            file.close()
            refused += os.fstat(number).st_size == SLOT  # the child's close truncates nothing
            os.write(say_ready, b"x")
            os.read(over, 1)  # the child lives on, with a descriptor, while the parent closes
            refused += os.fstat(number).st_blocks == 0
        finally:
            os._exit(0 if refused == 5 else 1)
    try:
        os.read(ready, 1)
        slot.read(out(5000))
        file.close()
    finally:
        os.close(say_over)  # the child goes on
    assert os.waitpid(child, 0)[1] == 0
    for number in (ready, say_ready, over):
        os.close(number)


def test_an_unreferenced_file_is_closed(tmp_path: Path):
    file = ScratchFile(tmp_path, SLOT)
    with pytest.warns(ResourceWarning):
        del file
