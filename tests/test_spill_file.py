"""Records in a file: what comes back, what is found damaged, how it grows, and whose it is."""

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tiered.offload.errors import ArenaFullError, CorruptRecordError, TransferError
from tiered.offload.fence import Region
from tiered.offload.spill_file import DiskSlot, SpillFile
from tiered.offload.spill_record import HEADER_BYTES

SLAB = 4 * 4096


def payload(nbytes: int, seed: int = 0) -> Tensor:
    """Random bytes."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def out(nbytes: int) -> Tensor:
    """Where a record is read to."""
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    """A spill file."""
    file = SpillFile(tmp_path, SLAB)
    yield file
    file.close()


def descriptor(file: SpillFile) -> int:
    """The file has no name."""
    return file._file.fileno()


def stored(file: SpillFile, name: str | bytes = "record", version: int = 3, nbytes: int = 5000) -> DiskSlot:
    """A slot with a record written to it."""
    slot = file.place(nbytes)
    assert file.write(slot, name, version, payload(nbytes)) == nbytes + HEADER_BYTES
    return slot


def flip(file: SpillFile, offset: int) -> None:
    """Flip a bit of the byte at `offset`."""
    os.pwrite(descriptor(file), bytes([os.pread(descriptor(file), 1, offset)[0] ^ 0x10]), offset)


@pytest.mark.parametrize("nbytes", [1, 4032, 4033, 5000, SLAB - 64])
@pytest.mark.parametrize("name", ["layer 3, cluster 5", b"\xff\x00", ""])
def test_what_was_written_comes_back(nbytes: int, name: str | bytes, file: SpillFile):
    file.place(100)
    slot, into = file.place(nbytes), out(nbytes)
    assert file.write(slot, name, 7, payload(nbytes)) == nbytes + HEADER_BYTES
    assert file.read(slot, name, 7, into) == nbytes + HEADER_BYTES
    assert torch.equal(into, payload(nbytes))


@pytest.mark.parametrize("without", [None, "posix_fallocate"])  # macOS has none
def test_the_file_grows_by_slabs_that_are_booked_and_taken_from_the_disk(
    without: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if without:
        monkeypatch.delattr(os, without)
    booked = [0]

    def grow(nbytes: int) -> None:
        if booked[0] == 3 * SLAB:
            raise ValueError("over the budget")
        booked[0] += nbytes

    def shrink(nbytes: int) -> None:
        booked[0] -= nbytes

    file = SpillFile(tmp_path, SLAB, grow, shrink)
    assert file.file_bytes == booked[0] == 0
    slots = []
    for slabs in (1, 2, 3):
        slots.append(file.place(SLAB - 64))
        found = os.fstat(descriptor(file))
        assert file.file_bytes == booked[0] == found.st_size == slabs * SLAB <= found.st_blocks * 512
    assert [slot.offset for slot in slots] == [0, SLAB, 2 * SLAB]
    with pytest.raises(ValueError, match="over the budget"):
        file.place(1)
    slots[1].release()
    slot = file.place(100)
    assert (slot.offset, slot.nbytes, slot.room_bytes) == (SLAB, 100, 4096)
    file.check_integrity()
    stats = file.stats()
    assert (stats.requested_bytes, stats.held_bytes) == (2 * SLAB + 164, 2 * SLAB + 4096)
    assert (stats.actual_bytes, stats.pinned) == (3 * SLAB, False)
    for _ in range(2):
        file.close()
        assert booked[0] == 0


def test_a_slot_is_released_once(file: SpillFile):
    slot = file.place(100)
    slot.release()
    with pytest.raises(ValueError, match="released already"):
        slot.release()
    file.check_integrity()


def test_a_slot_handed_out_again_waits_for_its_earlier_users(file: SpillFile):
    class Reading:
        def done(self) -> bool:
            return False

        def synchronize(self) -> None: ...

    slot, read = file.place(100), Reading()
    assert slot.fence.region == Region.DISK_SLOT
    slot.fence.reads(read)
    slot.release()
    assert file.place(SLAB - 64).fence.before_write() == (read,)


@pytest.mark.parametrize("threads", [2, 8])
def test_several_threads(threads: int, file: SpillFile):
    slots = [file.place(4096 + 100 * n) for n in range(32)]

    def work(number: int) -> bool:
        slot, same = slots[number], True
        for version in range(20):
            data, into = payload(slot.nbytes, 100 * number + version), out(slot.nbytes)
            file.write(slot, f"record {number}", version, data)
            file.read(slot, f"record {number}", version, into)
            same &= torch.equal(into, data)
        return same

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(32)))
    file.check_integrity()


@pytest.mark.parametrize("byte", [*range(0, HEADER_BYTES, 3), HEADER_BYTES, 2000, HEADER_BYTES + 4999])
def test_a_flipped_bit_is_found(byte: int, file: SpillFile, tmp_path: Path):
    file.place(100)
    slot = stored(file)
    flip(file, slot.offset + byte)
    with pytest.raises(CorruptRecordError, match=f"record 'record' at offset {slot.offset} .*{tmp_path}: .*checksum"):
        file.read(slot, "record", 3, out(5000))
    flip(file, slot.offset + byte)
    file.read(slot, "record", 3, out(5000))


@pytest.mark.parametrize("where", [HEADER_BYTES + 5000, 8191])
def test_what_is_behind_the_payload_does_not_matter(where: int, file: SpillFile):
    slot = stored(file)
    flip(file, slot.offset + where)
    file.read(slot, "record", 3, out(5000))


@pytest.mark.parametrize(
    ("name", "version", "nbytes", "fault"),
    [
        ("another", 3, 5000, "another name"),
        ("record", 2, 5000, "version 3, not 2"),
        ("record", 3, 4999, "5000 bytes, not 4999"),
    ],
)
def test_a_record_that_is_not_the_one_asked_for(name: str, version: int, nbytes: int, fault: str, file: SpillFile):
    stored(file).release()
    slot = file.place(nbytes)  # the same place, with what was there before
    with pytest.raises(CorruptRecordError, match=f"record '{name}' at offset 0 .*{fault}"):
        file.read(slot, name, version, out(nbytes))
    fresh = file.place(100)
    with pytest.raises(CorruptRecordError, match="nothing was written there"):
        file.read(fresh, "record", 3, out(100))


def test_a_record_at_the_wrong_place(file: SpillFile):
    slots = [stored(file, version=version) for version in (3, 4)]
    os.pwrite(descriptor(file), os.pread(descriptor(file), 6000, 0), slots[1].offset)
    with pytest.raises(CorruptRecordError, match="written for offset 0"):
        file.read(slots[1], "record", 3, out(5000))


@pytest.mark.parametrize("left", [0, 30, HEADER_BYTES, 5000])
def test_a_file_cut_short(left: int, file: SpillFile):
    slot = stored(file)
    os.ftruncate(descriptor(file), left)
    with pytest.raises(CorruptRecordError, match=f"offset 0 of .*: the file ends after {left} of 5064 bytes"):
        file.read(slot, "record", 3, out(5000))
    with pytest.raises(RuntimeError, match=f"of {left} bytes"):
        file.check_integrity()


@pytest.mark.parametrize("version", [-1, 1 << 64])
def test_versions_that_do_not_fit(version: int, file: SpillFile):
    with pytest.raises(ValueError, match=f"version = {version}"):
        file.write(file.place(100), "record", version, payload(100))


@pytest.mark.parametrize(
    "data",
    [
        payload(99),
        payload(200)[::2],
        payload(100).view(10, 10),
        torch.zeros(100),
        torch.zeros(100, device="meta").byte(),
    ],
)
def test_tensors_that_do_not_fit(data: Tensor, file: SpillFile):
    slot = stored(file, nbytes=100)
    for verb in (file.write, file.read):
        with pytest.raises(ValueError, match=r"for a slot of 100|allowed: one contiguous"):
            verb(slot, "record", 4, data)
    file.read(slot, "record", 3, out(100))


@pytest.mark.parametrize("nbytes", [-64, -1, 0, SLAB - 63])
def test_sizes_that_fit_no_slot(nbytes: int, file: SpillFile):
    with pytest.raises(ValueError, match=f"record of {nbytes} bytes: 1 to {SLAB - 64}, slab_bytes = {SLAB}"):
        file.place(nbytes)


# What the system does.


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
        ({"fstatvfs": free(SLAB - 512)}, ArenaFullError, SLAB - 512, NO_ROOM),
        ({"fstatvfs": free(0)}, ArenaFullError, 0, NO_ROOM),
        # What was free before the attempt, which may have filled the disk.
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.ENOSPC)}, ArenaFullError, GIB, NO_ROOM),
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.EDQUOT)}, ArenaFullError, 0, "quota exceeded in"),
        ({"fstatvfs": free(GIB), "posix_fallocate": filling(errno.EFBIG)}, ArenaFullError, 0, "File too large in"),
        ({"posix_fallocate": filling(errno.EIO)}, OSError, None, "disk_path takes no file of records: Input/output"),
        ({"posix_fallocate": None, "pwritev": failing(errno.ENOSPC)}, ArenaFullError, ..., NO_ROOM),
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
    file = SpillFile(tmp_path, SLAB, booked.append, lambda nbytes: booked.append(-nbytes))
    slot = stored(file)
    file.place(SLAB - 64)
    with monkeypatch.context() as patch:
        for name, call in calls.items():
            if call is None:
                patch.delattr(os, name)
            else:
                patch.setattr(os, name, call)
        with pytest.raises(expected) as caught:
            file.place(SLAB - 64)
    assert message in getattr(caught.value, "hint", str(caught.value)) and str(tmp_path) in str(caught.value)
    if isinstance(caught.value, ArenaFullError):
        assert caught.value.needed == SLAB and available in (..., caught.value.available)
    assert sum(booked) == file.file_bytes == 2 * SLAB
    file.check_integrity()
    file.read(slot, "record", 3, out(5000))
    assert file.place(SLAB - 64).offset == 2 * SLAB
    file.close()


def test_a_limit_on_the_length_of_files(file: SpillFile):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file.place(SLAB - 64)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SLAB - 1, hard))
    try:
        with pytest.raises(ArenaFullError) as caught:
            file.place(SLAB - 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.needed, caught.value.available) == (SLAB, 0)
    assert "File too large" in caught.value.hint
    file.check_integrity()
    file.place(SLAB - 64)


@pytest.mark.parametrize(
    ("number", "expected", "message"),
    [
        (errno.ENOSPC, TransferError, "writing record 'record' at offset 0 of .*No space"),  # where it copies on write
        (errno.EIO, TransferError, "writing record 'record' at offset 0 of .*Input/output"),
    ],
)
def test_a_write_that_fails(
    number: int, expected: type[Exception], message: str, file: SpillFile, monkeypatch: pytest.MonkeyPatch
):
    slot = file.place(5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(number))
        with pytest.raises(expected, match=message):
            file.write(slot, "record", 3, payload(5000))
    file.write(slot, "record", 3, payload(5000))
    file.read(slot, "record", 3, out(5000))
    file.check_integrity()


def test_a_read_that_fails(file: SpillFile, monkeypatch: pytest.MonkeyPatch):
    slot = stored(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(TransferError, match=r"reading record 'record' at offset 0 of .*Input/output"):
            file.read(slot, "record", 3, out(5000))
    file.read(slot, "record", 3, out(5000))


def test_a_system_that_writes_nothing(file: SpillFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(TransferError, match="Input/output"):
        file.write(file.place(100), "record", 3, payload(100))


def in_bits(call: Callable[..., int], most: int) -> Callable[..., int]:
    """`call` on the first `most` bytes of what it is given."""

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return call(descriptor, [buffers[0][:most]], offset)

    return short


@pytest.mark.parametrize("most", [1, 63, 64, 1000])
def test_short_reads_and_writes(most: int, file: SpillFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pwritev", in_bits(os.pwritev, most))
    monkeypatch.setattr(os, "preadv", in_bits(os.preadv, most))
    into = out(5000)
    assert file.read(stored(file), "record", 3, into) == 5064
    assert torch.equal(into, payload(5000))


# Whose file it is.


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
    file = SpillFile(link if through == "a link" else folder, SLAB)
    stored(file)
    found = os.fstat(descriptor(file))
    assert (stat.S_IMODE(found.st_mode), found.st_nlink, found.st_dev) == (0o600, 0, folder.stat().st_dev)
    assert not os.get_inheritable(descriptor(file))
    assert not list(folder.iterdir())
    file.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("folder", "reason"), [("none", "No such file"), ("file", "Not a directory")])
def test_folders_that_are_none(folder: str, reason: str, tmp_path: Path):
    (tmp_path / "file").write_text("a thesis")
    with pytest.raises(OSError, match=f"disk_path takes no file of records: {reason}.*{tmp_path / folder}"):
        SpillFile(tmp_path / folder, SLAB)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a thesis"]


def test_slabs_are_whole_units(tmp_path: Path):
    with pytest.raises(ValueError, match="slab_bytes = 5000"):
        SpillFile(tmp_path, 5000)


def test_closing_twice(file: SpillFile, tmp_path: Path):
    slot = stored(file)
    for _ in range(2):
        file.close()
    verbs: list[Callable[[], object]] = [
        lambda: file.place(1),
        lambda: file.write(slot, "record", 3, payload(5000)),
        lambda: file.read(slot, "record", 3, out(5000)),
        file.check_integrity,
        slot.release,
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match=f"spill file in {tmp_path} is closed"):
            verb()


def test_closing_waits_for_a_read_under_way(file: SpillFile, monkeypatch: pytest.MonkeyPatch):
    into = out(5000)
    slot, preadv = stored(file), os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(10)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    threads = [
        threading.Thread(target=work, daemon=True)  # a close that never returns is no reason to hang
        for work in (lambda: file.read(slot, "record", 3, into), file.close)
    ]
    threads[0].start()
    assert reading.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert torch.equal(into, payload(5000))


def test_no_descriptor_is_left(tmp_path: Path):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(100):
        file = SpillFile(tmp_path, SLAB)
        file.place(1)
        file.close()
        with pytest.raises(OSError, match="none"):
            SpillFile(tmp_path / "none", SLAB)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_leaves_the_file_to_its_parent(file: SpillFile):
    slot, (ready, say_ready), (over, say_over) = stored(file), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        os.close(say_over)
        try:
            number = os.dup(descriptor(file))
            for verb in (lambda: file.place(1), slot.release, lambda: file.read(slot, "record", 3, out(5000))):
                try:
                    verb()
                except ValueError as error:
                    refused += "a fork of it" in str(error)
            file.close()
            refused += os.fstat(number).st_size == SLAB  # it closed nobody's but its own
            os.write(say_ready, b"x")
            os.read(over, 1)  # the child lives on, with a descriptor, while the parent closes
            refused += os.fstat(number).st_blocks == 0
        finally:
            os._exit(0 if refused == 5 else 1)
    try:
        os.read(ready, 1)
        file.read(slot, "record", 3, out(5000))
        file.close()
    finally:
        os.close(say_over)  # the child goes on
    assert os.waitpid(child, 0)[1] == 0
    for number in (ready, say_ready, over):
        os.close(number)


def test_a_file_that_nobody_holds_is_closed(tmp_path: Path):
    file = SpillFile(tmp_path, SLAB)
    with pytest.warns(ResourceWarning):
        del file
