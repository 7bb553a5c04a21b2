"""Budgets: sizes are normalised, nonsense is refused, one size is the device's, and a folder stays as it was."""

import contextlib
import errno
import os
import shutil
import socket
import stat
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
from tiered.cli.main import main
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.forward.weight_bytes import WeightBytes
from tiered.models.weight_form import WeightForm
from tiered.output import GenerationOutput
from tiered.runtime import Runtime


@pytest.mark.parametrize(
    ("memory", "caps"),
    [
        (None, (None, None, None)),
        ("12GiB", (12 * 2**30, None, None)),
        (4096, (4096, None, None)),
        (0, (0, None, None)),  # a cap of nothing, not no cap
        (MemoryBudget(), (None, None, None)),
        (MemoryBudget(device="1KiB", host=2, disk="3kB", disk_path="/tmp"), (1024, 2, 3000)),
        (MemoryBudget(disk=0), (None, None, 0)),
    ],
)
def test_caps(memory: Any, caps: tuple[int | None, ...]):
    budget = MemoryBudget.of(memory)
    assert tuple(budget.cap(tier) for tier in Tier) == caps
    assert (budget.device, budget.host, budget.disk) == caps


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"device": "12 gigs"}, ValueError, "12 gigs"),
        ({"host": -1}, ValueError, "negative"),
        ({"device": True}, TypeError, "True"),
        ({"device": False}, TypeError, "False"),
        ({"device": ""}, ValueError, "''"),
        ({"device": 0.5}, TypeError, "0.5"),
        ({"disk": "1GiB"}, ValueError, "disk_path"),
    ],
)
def test_refused(sizes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        MemoryBudget(**sizes)


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        MemoryBudget(device=1).device = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_capacity_error_names_the_missing_bytes_and_a_remedy():
    error = TierCapacityError(3 * 2**30, 2**30, Tier.HOST, "lower max_new_tokens")
    assert str(error) == (
        "the host tier needs 3.00 GiB but has 1.00 GiB (3221225472 of 1073741824 bytes); lower max_new_tokens"
    )


# ---- disk_path, and what lies there ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Foreign files of every kind, under names that a runtime might want."""
    folder = tmp_path / "theirs"
    (folder / "within").mkdir(parents=True)
    (folder / "größe 大\n").mkdir()
    for name in ("data", "data.table", "lonely.table", "old.table.part", "tiered-0.spill", "within/note"):
        (folder / name).write_text(f"a thesis, {name}")
    (folder / "empty").touch()
    (folder / "data").chmod(0o640)
    links = {"to data": "data", "to within": "within", "to nothing": "away", "to itself": "to itself"}
    for link, target in links.items():
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as here, contextlib.chdir(folder):  # its address is short
        here.bind("socket")
    with contextlib.suppress(PermissionError):  # only root may make a device; for others nothing is there
        os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    return folder


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """Metadata and content of `folder` and of all that is in it."""
    nameless = False
    with contextlib.suppress(AttributeError, OSError):  # elsewhere a new file has a name until it is unlinked
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
        nameless = True
    told = {}
    for path in [folder, *folder.rglob("*")]:
        found = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        changed = found.st_mtime_ns if nameless or not path.is_dir() else None
        told[str(path)] = (found.st_ino, found.st_mode, found.st_size, changed, found.st_nlink, content)
    return told


NOTHING, OTHER = "must be an existing folder; nothing is there", "must be an existing folder; something else is there"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("none", ValueError, NOTHING),
        ("none/spill", ValueError, NOTHING),
        ("data/spill", ValueError, NOTHING),
        ("lonely", ValueError, NOTHING),  # beside lonely.table
        ("x" * 5000, ValueError, NOTHING),
        ("null\0byte", ValueError, NOTHING),
        ("\udc80", ValueError, NOTHING),
        ("to nothing", ValueError, OTHER),
        ("to itself", ValueError, OTHER),
        ("to data", ValueError, OTHER),
        ("data", ValueError, OTHER),  # beside data.table
        ("empty", ValueError, OTHER),
        ("fifo", ValueError, OTHER),
        ("socket", ValueError, OTHER),
        ("device", ValueError, "must be an existing folder; "),
        (Path("data"), ValueError, OTHER),
        ("", ValueError, f"disk_path = '' {NOTHING}"),
        (5, TypeError, "disk_path = 5; a str or a Path of an existing folder is allowed"),
        (True, TypeError, "disk_path = True; a str or a Path"),
        (b"/tmp", TypeError, "disk_path = b'/tmp'; a str or a Path"),
    ],
)
def test_a_path_that_is_no_folder_is_refused_and_left_alone(
    path: Any,
    error: type[Exception],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    before = contents(folder)
    monkeypatch.chdir(folder)
    if error is ValueError and path != "":
        message = f"disk_path = {str(path)!r} {message}"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_, **__: pytest.fail("something was opened"))
        for size in (None, "1MiB"):
            with pytest.raises(error) as caught:
                MemoryBudget(disk=size, disk_path=path)
            assert message in str(caught.value)
    if isinstance(path, str):
        assert main(["plan", "embedded", "--context", "64", "--disk-memory", "1MiB", "--disk-path", path]) == 2
        assert message in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("path", ["/proc", "/sys"])
def test_a_file_system_that_keeps_no_files_is_refused(path: str, monkeypatch: pytest.MonkeyPatch):
    if not os.path.isdir(path):
        pytest.skip(f"the system has no {path}")
    monkeypatch.setattr(os, "access", lambda *_: True)
    for size in (None, "1MiB"):
        with pytest.raises(ValueError, match=f"disk_path = '{path}' must be a folder .* has no room for files"):
            MemoryBudget(disk=size, disk_path=path)


def test_a_folder_that_we_may_not_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:  # root may write anywhere except on a read-only disk
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ValueError, match=f"disk_path = '{tmp_path}' must be a writable folder"):
        MemoryBudget(disk_path=tmp_path)


@pytest.fixture(scope="module")
def unlimited() -> GenerationOutput:
    """The answer of coded weights without a budget."""
    return answer(tiered.from_pretrained("embedded", policy="none", weights="int8"))


def answer(runtime: Runtime) -> GenerationOutput:
    ids = torch.randint(5, 100, (1, 100), generator=torch.Generator().manual_seed(0))
    return runtime.generate(ids, max_new_tokens=32, steps=2)


def within(unlimited: GenerationOutput, folder: str | Path) -> Runtime:
    """A runtime whose device and host leave some layers of its weights to the disk, in a call as `answer` has it."""
    shape = tiered.from_pretrained("embedded").model.shape
    slot = WeightBytes.of(shape, "float32", WeightForm.of("int8")).slot_bytes
    device = unlimited.memory.peak_device_bytes - 2 * slot
    memory = MemoryBudget(device=device, host=3 * slot, disk="16MiB", disk_path=folder)
    return tiered.from_pretrained("embedded", policy="none", weights="int8", memory=memory)


@pytest.mark.parametrize("path", [".", Path("within"), "within/", "to within", "größe 大\n"])
def test_files_in_the_folder_stay_as_they_were(
    path: str | Path, folder: Path, unlimited: GenerationOutput, monkeypatch: pytest.MonkeyPatch
):
    before = contents(folder)
    monkeypatch.chdir(folder)
    with within(unlimited, path) as runtime:
        out = answer(runtime)
        assert torch.equal(out.sequences, unlimited.sequences)
        assert 0 < out.memory.tiers[Tier.DISK].peak < 2 << 20  # as much as was needed
    assert runtime.ledger.held(Tier.DISK) == 0
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("disk", "gone", "error", "message"),
    [
        ("1000000TiB", False, TierCapacityError, "No space left on device in disk_path"),
        ("16MiB", True, FileNotFoundError, "disk_path takes no file of records: No such file"),
    ],
)
def test_the_disk_is_looked_at_before_weights_load(
    disk: str, gone: bool, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    budget = MemoryBudget(disk=disk, disk_path=folder)
    if gone:
        folder.rmdir()
    monkeypatch.setattr("tiered.loading.load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=message) as caught:
        tiered.from_pretrained("embedded", memory=budget)
    assert str(folder) in str(caught.value)
    if isinstance(caught.value, TierCapacityError):
        free = shutil.disk_usage(tmp_path).free
        assert caught.value.tier is Tier.DISK and caught.value.needed == 10**6 << 40
        assert 0.5 * free < caught.value.available < 2 * free  # others write there too


def test_a_disk_that_fails_within_a_call_does_not_fail_the_next(
    tmp_path: Path, unlimited: GenerationOutput, monkeypatch: pytest.MonkeyPatch
):
    runtime, allocate = within(unlimited, tmp_path), os.posix_fallocate

    def filling(descriptor: int, offset: int, nbytes: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", filling)
        with pytest.raises(TierCapacityError, match="No space left on device in disk_path") as caught:
            answer(runtime)
    assert caught.value.tier is Tier.DISK
    for _ in range(2):
        assert torch.equal(answer(runtime).sequences, unlimited.sequences)
    runtime.ledger.check_integrity()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_fails_the_call_that_needs_it(tmp_path: Path, unlimited: GenerationOutput):
    folder = tmp_path / "folder"
    folder.mkdir()
    runtime = within(unlimited, folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match=f"disk_path .*{folder}"):
        answer(runtime)
    folder.mkdir()
    assert torch.equal(answer(runtime).sequences, unlimited.sequences)
    runtime.ledger.check_integrity()
