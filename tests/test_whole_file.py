"""Files that are written whole or not at all, and never in the place of one that a command did not make."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiered.core.whole_file import check_new_file, write_then_rename


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    "make",
    [Path.touch, lambda path: path.symlink_to("nowhere"), os.mkfifo],
    ids=["file", "link to nothing", "pipe"],
)
def test_what_exists_is_no_new_file(tmp_path: Path, make: Callable[[Path], object]):
    path = tmp_path / "found"
    check_new_file("--out", path)
    make(path)
    with pytest.raises(FileExistsError, match=r"^--out \S+found exists; the name of a new file is allowed$"):
        check_new_file("--out", path)


@pytest.mark.parametrize(
    "write",
    [lambda part: part.write_text("whole"), lambda part: save_file({"whole": torch.zeros(2)}, part)],
    ids=["text", "safetensors"],
)
def test_a_file_has_the_mode_that_open_gives_it_and_may_have_a_long_name(
    tmp_path: Path, umask: None, write: Callable[[Path], object]
):
    path = tmp_path / ("x" * 250)
    for _ in range(2):  # anew, too
        write_then_rename(path, write)
        assert b"whole" in path.read_bytes() and path.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_names_the_file_and_leaves_all_others_as_they_are(tmp_path: Path):
    def full(part: Path) -> None:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {tmp_path / name: name for name in ("a", ".a.part")}
    for path, text in before.items():
        path.write_text(text)

    def interrupted(part: Path) -> None:
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'"):
        write_then_rename(tmp_path / "a", full)
    with pytest.raises(KeyboardInterrupt):
        write_then_rename(tmp_path / "a", interrupted)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
