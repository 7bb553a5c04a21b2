"""Records in a file: what comes back, what is found damaged, and what is left after every way to stop."""

import errno
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.offload import locked_file, spill_table
from tiered.offload.errors import ArenaFullError, CorruptRecordError, TransferError
from tiered.offload.fence import Region
from tiered.offload.file_io import read_all, write_all
from tiered.offload.record_file import RecordFile
from tiered.offload.spill_file import DiskSlot, SpillFile
from tiered.offload.spill_record import HEADER_BYTES, find_fault, pack_header

SLAB = 4 * 4096


def payload(nbytes: int, seed: int = 0) -> Tensor:
    """Random bytes."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def out(nbytes: int) -> Tensor:
    """Where a record is read to."""
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the spill file goes."""
    return tmp_path / "spill"


@pytest.fixture
def file(path: Path):
    """A spill file of four slabs."""
    file = SpillFile(path, 4 * SLAB, SLAB)
    yield file
    file.close()


def stored(file: SpillFile, name: str | bytes = "record", version: int = 3, nbytes: int = 5000) -> DiskSlot:
    """A slot with a record written to it."""
    slot = file.place(nbytes)
    assert file.write(slot, name, version, payload(nbytes)) == nbytes + HEADER_BYTES
    return slot


def flip(path: Path, offset: int) -> None:
    """Flip a bit of the byte at `offset`."""
    with path.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("nbytes", [1, 4032, 4033, 5000, SLAB - 64])
@pytest.mark.parametrize("name", ["layer 3, cluster 5", b"\xff\x00", ""])
def test_what_was_written_comes_back(nbytes: int, name: str | bytes, file: SpillFile):
    file.place(100)
    slot, into = file.place(nbytes), out(nbytes)
    assert file.write(slot, name, 7, payload(nbytes)) == nbytes + HEADER_BYTES
    assert file.read(slot, name, 7, into) == nbytes + HEADER_BYTES
    assert torch.equal(into, payload(nbytes))


def test_the_file_is_taken_from_the_disk_at_once(path: Path):
    file = SpillFile(path, 4 * SLAB + 4095, SLAB)
    assert file.file_bytes == path.stat().st_size == 4 * SLAB
    assert path.stat().st_blocks * 512 >= 4 * SLAB
    slots = [file.place(SLAB - 64) for _ in range(4)]
    assert [slot.offset for slot in slots] == [0, SLAB, 2 * SLAB, 3 * SLAB]
    with pytest.raises(ArenaFullError, match=r"disk=…, disk_path=….* no room for 4096 bytes \(0 are free\)") as caught:
        file.place(1)
    assert caught.value.capacity == 4 * SLAB
    slots[2].release()
    file.check_integrity()
    slot = file.place(100)
    assert (slot.offset, slot.nbytes, slot.room_bytes) == (2 * SLAB, 100, 4096)
    stats = file.stats()
    assert (stats.requested_bytes, stats.held_bytes) == (3 * SLAB + 164, 3 * SLAB + 4096)
    assert (stats.actual_bytes, stats.pinned) == (4 * SLAB, False)
    file.close()


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
def test_several_threads(threads: int, path: Path):
    file = SpillFile(path, 64 * SLAB, SLAB)
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
    file.close()


@pytest.mark.parametrize("byte", [*range(0, HEADER_BYTES, 3), HEADER_BYTES, 2000, HEADER_BYTES + 4999])
def test_a_flipped_bit_is_found(byte: int, file: SpillFile, path: Path):
    file.place(100)
    slot = stored(file)
    flip(path, slot.offset + byte)
    with pytest.raises(CorruptRecordError, match=f"record 'record' at offset {slot.offset} of {path}: .*checksum"):
        file.read(slot, "record", 3, out(5000))
    flip(path, slot.offset + byte)
    file.read(slot, "record", 3, out(5000))


@pytest.mark.parametrize("where", [HEADER_BYTES + 5000, 8191])
def test_what_is_behind_the_payload_does_not_matter(where: int, file: SpillFile, path: Path):
    slot = stored(file)
    flip(path, slot.offset + where)
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


def test_a_record_at_the_wrong_place(file: SpillFile, path: Path):
    slots = [stored(file, version=version) for version in (3, 4)]
    raw = bytearray(path.read_bytes())
    raw[slots[1].offset : slots[1].offset + 6000] = raw[:6000]
    path.write_bytes(raw)
    with pytest.raises(CorruptRecordError, match="written for offset 0"):
        file.read(slots[1], "record", 3, out(5000))


@pytest.mark.parametrize("left", [0, 30, HEADER_BYTES, 5000])
def test_a_file_cut_short(left: int, file: SpillFile, path: Path):
    slot = stored(file)
    os.truncate(path, left)
    with pytest.raises(CorruptRecordError, match=f"offset 0 of {path}: the file ends after {left} of 5064 bytes"):
        file.read(slot, "record", 3, out(5000))
    with pytest.raises(RuntimeError, match=f"of {left} bytes"):
        file.check_integrity()


def test_a_header_of_another_format():
    header = pack_header("record", 1, 0, b"data")
    assert find_fault(header, "record", 1, 0, b"data") is None
    other = b"otherapp" + header[8:60]
    assert "otherapp" in str(find_fault(other + zlib.crc32(other).to_bytes(4, "little"), "record", 1, 0, b"data"))


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("leftover", [False, True])
def test_a_disk_without_room_for_the_file(number: int, leftover: bool, path: Path, monkeypatch: pytest.MonkeyPatch):
    if leftover:
        SpillFile(path, SLAB, SLAB).close(delete=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(number))
        with pytest.raises(ArenaFullError, match=rf"disk_path {path} \(lower disk\)") as caught:
            SpillFile(path, 4 * SLAB, SLAB)
    assert caught.value.needed == 4 * SLAB
    assert not list(path.parent.iterdir())
    SpillFile(path, 4 * SLAB, SLAB).close()


def test_another_failure_leaves_no_half_file_either(path: Path, monkeypatch: pytest.MonkeyPatch):
    for call in ("posix_fallocate", "fsync", "ftruncate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.EIO))
            with pytest.raises(OSError, match="Input/output error"):
                SpillFile(path, 4 * SLAB, SLAB)
        assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("number", "expected", "message"),
    [
        (errno.ENOSPC, ArenaFullError, r"disk_path .* \(lower disk\).* no room for 5064 bytes"),
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


@given(st.lists(st.binary(max_size=9), max_size=4), st.integers(1, 12), st.integers(0, 5))
def test_buffers_are_one_row_of_bytes(parts: list[bytes], most: int, offset: int):
    descriptor, whole, into = os.memfd_create("file"), b"".join(parts), [bytearray(len(part)) for part in parts]

    def write(_: int, buffers: Sequence[memoryview], at: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:most], at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        patch.setattr(os, "preadv", in_bits(os.preadv, most))
        assert write_all(descriptor, parts, offset) == len(whole)
        assert os.pread(descriptor, 100, offset) == whole
        assert read_all(descriptor, into, offset) == len(whole)
        assert b"".join(into) == whole
        assert read_all(descriptor, [*into, bytearray(3)], offset) == len(whole)
    os.close(descriptor)


# Reopening.


def test_a_reopened_file_has_its_records(path: Path):
    file = SpillFile(path, 4 * SLAB, SLAB)
    gap = file.place(9000)
    records = {f"record {n}": (stored(file, f"record {n}", n, 3000 + 2000 * n), n) for n in range(4)}
    gap.release()
    file.save_table(records)
    file.close(delete=False)
    file = SpillFile(path, 8 * SLAB, SLAB, reopen=True)
    found = file.load_table()
    assert {name: (slot.offset, slot.nbytes, n) for name, (slot, n) in found.items()} == {
        name: (slot.offset, slot.nbytes, n) for name, (slot, n) in records.items()
    }
    for name, (slot, version) in found.items():
        into = out(slot.nbytes)
        file.read(slot, name, version, into)
        assert torch.equal(into, payload(slot.nbytes))
    file.check_integrity()
    assert file.file_bytes == 4 * SLAB
    fresh = file.place(9000)
    assert fresh.offset == gap.offset
    for slot, _ in found.values():
        slot.release()
    assert file.stats().requested_bytes == 9064
    file.close()


def test_a_file_that_is_not_reopened_starts_anew(path: Path):
    file = SpillFile(path, 4 * SLAB, SLAB)
    file.save_table({"record": (stored(file), 3)})
    file.close(delete=False)
    file = SpillFile(path, 2 * SLAB, SLAB)
    assert path.stat().st_size == 2 * SLAB
    assert file.load_table() == {}
    with pytest.raises(CorruptRecordError, match="nothing was written there"):
        file.read(file.place(5000), "record", 3, out(5000))
    file.close(delete=False)
    file = SpillFile(path, 2 * SLAB, SLAB, reopen=True)
    assert file.load_table() == {}
    file.close()


def test_a_record_written_over_since_the_table_is_found_out(path: Path):
    file = SpillFile(path, 4 * SLAB, SLAB)
    slot = stored(file)
    file.save_table({"record": (slot, 3)})
    file.write(slot, "record", 4, payload(5000, 1))
    file.close(delete=False)
    file = SpillFile(path, 4 * SLAB, SLAB, reopen=True)
    slot, version = file.load_table()["record"]
    with pytest.raises(CorruptRecordError, match="version 4, not 3"):
        file.read(slot, "record", version, out(5000))
    file.close()


def test_a_file_cut_short_while_it_was_closed(path: Path):
    file = SpillFile(path, 4 * SLAB, SLAB)
    records = {name: (stored(file, name), 3) for name in ("first", "second")}
    file.save_table(records)
    file.close(delete=False)
    os.truncate(path, 6000)
    file = SpillFile(path, 4 * SLAB, SLAB, reopen=True)
    found = file.load_table()
    file.read(found["first"][0], "first", 3, out(5000))
    with pytest.raises(CorruptRecordError, match="record 'second' at offset 8192"):
        file.read(found["second"][0], "second", 3, out(5000))
    file.check_integrity()
    file.close()


def crash(path: Path, point: str) -> None:
    """Save a table, then die at `point` of saving the next, or within a record."""
    file = SpillFile(path, 4 * SLAB, SLAB)
    old, new = stored(file, "old", 1), file.place(5000)
    file.save_table({"old": (old, 1)})
    file.write(new, "new", 2, payload(5000, 2))
    when, name = point.split()
    call = getattr(os, name)

    def dying(*arguments: object) -> None:
        if when == "after":
            call(*arguments)
        if when == "within":
            descriptor, parts, offset = arguments
            assert isinstance(parts, list)
            call(descriptor, [parts[0], parts[1][:1000]], offset)
        os._exit(7)

    setattr(os, name, dying)
    if when == "within":
        file.write(old, "old", 1, payload(5000, 3))
    file.save_table({"old": (old, 1), "new": (new, 2)})


def in_a_child(work: Callable[[], object]) -> int:
    """The exit status of a fork that does `work`: 0, or 1 where it raises."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("point", "names"),
    [
        ("before fdatasync", {"old"}),
        ("before fsync", {"old"}),
        ("after fsync", {"old"}),
        ("before replace", {"old"}),
        ("after replace", {"old", "new"}),
        ("within pwritev", {"old"}),
    ],
)
def test_a_process_killed_at_any_point(point: str, names: set[str], path: Path):
    assert in_a_child(lambda: crash(path, point)) == 7
    file = SpillFile(path, 4 * SLAB, SLAB, reopen=True)
    found = file.load_table()
    assert set(found) == names
    for name, (slot, version) in found.items():
        if "within" in point:
            with pytest.raises(CorruptRecordError, match="payload's checksum"):
                file.read(slot, name, version, out(5000))
        else:
            file.read(slot, name, version, out(5000))
    file.save_table(found)
    file.close()
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "1", '{"format": 2}', '{"format": 1, "slab_bytes": 16384, "slabs": 4}'),
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, 100]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, 100, "1"]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [-4096, 100, 1]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [100, 100, 1]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, 100, -1]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, -10, 1]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, 99999, 1]}}',
        '{"format": 1, "slab_bytes": 16384, "slabs": 4, "records": {"a": [0, 100, 1], "b": [0, 100, 1]}}',
    ],
)
def test_a_damaged_table(content: str, path: Path):
    SpillFile(path, 4 * SLAB, SLAB).close(delete=False)
    table = spill_table.table_path(path)
    table.write_text(content)
    with pytest.raises(CorruptRecordError, match=str(path)):
        SpillFile(path, 4 * SLAB, SLAB, reopen=True)
    SpillFile(path, 4 * SLAB, SLAB).close()  # and the lock is free


@pytest.mark.parametrize(("slab_bytes", "capacity"), [(2 * SLAB, 4 * SLAB), (SLAB, 4 * SLAB - 1)])
def test_reopening_with_another_shape(slab_bytes: int, capacity: int, path: Path):
    SpillFile(path, 4 * SLAB, SLAB).close(delete=False)
    with pytest.raises(ValueError, match=f"has 4 slabs of {SLAB} bytes; slab_bytes = {slab_bytes} .* {capacity} "):
        SpillFile(path, capacity, slab_bytes, reopen=True)


def test_slots_that_a_table_cannot_name(file: SpillFile):
    slot = stored(file)
    slot.release()
    with pytest.raises(ValueError, match="'record' is in a slot that was released"):
        file.save_table({"record": (slot, 3)})


# Whose file it is.


def test_a_file_of_someone_else_stays(path: Path):
    path.write_text("a thesis")
    with pytest.raises(ValueError, match="no spill file: it stays"):
        SpillFile(path, 4 * SLAB, SLAB)
    with pytest.raises(ValueError, match="no table: nothing to reopen"):
        SpillFile(path, 4 * SLAB, SLAB, reopen=True)
    assert path.read_text() == "a thesis"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("where", "reopen", "message"),
    [(".", False, "Is a directory"), ("none/spill", False, "No such file"), ("spill", True, "No such file")],
)
def test_paths_that_do_not_work(where: str, reopen: bool, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"disk_path .* cannot be opened: {message}"):
        SpillFile(tmp_path / where, SLAB, SLAB, reopen=reopen)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("capacity", "slab_bytes"), [(SLAB - 1, SLAB), (0, SLAB), (SLAB, 5000)])
def test_sizes_that_do_not_work(capacity: int, slab_bytes: int, path: Path):
    with pytest.raises(ValueError, match="slab_bytes ="):
        SpillFile(path, capacity, slab_bytes)
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("reopen", [False, True])
def test_one_user_at_a_time(reopen: bool, file: SpillFile, path: Path):
    def again() -> None:
        with pytest.raises(ValueError, match=f"disk_path {path} is in use"):
            SpillFile(path, SLAB, SLAB, reopen=reopen)

    slot = stored(file)
    again()
    assert in_a_child(again) == 0
    file.read(slot, "record", 3, out(5000))


def test_a_name_that_changes_hands_while_we_wait_for_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch):
    flock, first = locked_file.fcntl.flock, SpillFile(path, SLAB, SLAB)

    def deleted_meanwhile(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        first.close(delete=True)
        flock(descriptor, operation)

    monkeypatch.setattr(locked_file.fcntl, "flock", deleted_meanwhile)
    file = SpillFile(path, SLAB, SLAB)
    assert path.stat().st_size == SLAB
    file.check_integrity()
    file.close()


@pytest.mark.parametrize("delete", [True, False])
def test_closing_twice(delete: bool, path: Path):
    file = SpillFile(path, SLAB, SLAB)
    slot = stored(file)
    for _ in range(2):
        file.close(delete)
    assert path.exists() == spill_table.table_path(path).exists() == (not delete)
    verbs: list[Callable[[], object]] = [
        lambda: file.place(1),
        lambda: file.write(slot, "record", 3, payload(5000)),
        lambda: file.read(slot, "record", 3, out(5000)),
        lambda: file.save_table({}),
        file.load_table,
        file.check_integrity,
        slot.release,
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match=f"spill file {path} is closed"):
            verb()


def test_closing_waits_for_a_read_under_way(path: Path, monkeypatch: pytest.MonkeyPatch):
    file, into = SpillFile(path, SLAB, SLAB), out(5000)
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


def test_a_thousand_files_leave_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a disk's time
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(1000):
        file = SpillFile(tmp_path / str(number % 3), SLAB, SLAB)
        if number % 100 == 0:
            with pytest.raises(ValueError, match="in use"):
                SpillFile(file.path, SLAB, SLAB)
        file.close(delete=number % 2 == 0)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_leaves_the_file_to_its_parent(file: SpillFile, path: Path):
    slot, (ready, say_ready), (over, say_over) = stored(file), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        os.close(say_over)
        try:
            for verb in (lambda: file.place(1), slot.release, lambda: file.read(slot, "record", 3, out(5000))):
                try:
                    verb()
                except ValueError as error:
                    refused += "a fork of it" in str(error)
            os.write(say_ready, b"x")
            os.read(over, 1)  # the child lives on, with the descriptor, while the parent closes and opens again
            file.close(delete=True)
        finally:
            os._exit(0 if refused == 3 else 1)
    try:
        os.read(ready, 1)
        file.read(slot, "record", 3, out(5000))
        file.close(delete=False)
        again = SpillFile(path, 4 * SLAB, SLAB)
    finally:
        os.close(say_over)  # the child goes on
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    with pytest.raises(ValueError, match="in use"):
        SpillFile(path, SLAB, SLAB)
    again.close()
    for descriptor in (ready, say_ready, over):
        os.close(descriptor)


def test_a_file_that_nobody_holds_is_closed(path: Path):
    file = RecordFile(path, create=True)
    with pytest.warns(ResourceWarning):
        del file
    RecordFile(path, create=False).close((path,))
    assert not path.exists()
