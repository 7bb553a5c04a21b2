"""The folders, their names when installed, and the page about their contents."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path
from urllib.request import urlopen
from zipfile import ZipFile

import pytest

from tiered.core.extras import needing
from tiered.models.locate import checkpoint_directory

ROOT = Path(__file__).resolve().parents[1]
LINKED = ["kernels", "offload", "clustering"]

# Every model imports this file, and this file from a package named `kernels` if one can be found.
OF_KERNELS = "from transformers.integrations.hub_kernels import use_kernel_forward_from_hub as it; print(it.__name__)"


def python(code: str, folder: Path, **environment: str) -> str:
    """Output of `code` in a fresh interpreter that runs in `folder`."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("room", LINKED)
def test_the_room_is_reached_through_a_link(room: str):
    assert os.readlink(ROOT / "tiered" / room) == f"../{room}"
    assert (ROOT / room).is_dir()


@pytest.mark.parametrize("room", LINKED)
def test_the_room_is_no_top_level_package(room: str):
    # Hugging Face owns `kernels`: transformers imports from a package of that name, wherever it finds one.
    assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.parametrize("room", LINKED)
def test_the_room_has_no_name_of_its_own(room: str, tmp_path: Path):
    locations = f"list(getattr(importlib.util.find_spec({room!r}), 'submodule_search_locations', None) or [])"
    found = python(f"import importlib.util; print(*{locations}, sep='\\n')", tmp_path)
    assert not [line for line in found.splitlines() if Path(line).resolve().is_relative_to(ROOT)]


@pytest.mark.parametrize("room", LINKED)
def test_at_the_root_the_room_is_a_bare_folder(room: str):
    # The folder lies on sys.path there. A specification without an origin runs no file, and any real package wins.
    code = f"import importlib.util; print(getattr(importlib.util.find_spec({room!r}), 'origin', None))"
    origin = python(code, ROOT)
    assert origin == "None" or not Path(origin).resolve().is_relative_to(ROOT)


def test_at_the_root_an_installed_package_named_kernels_wins(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.touch()
    assert python("import kernels; print(kernels.__file__)", ROOT, PYTHONPATH=str(tmp_path)) == str(theirs)


@pytest.mark.slow
def test_transformers_works_at_the_root():
    assert python(OF_KERNELS, ROOT) == "use_kernel_forward_from_hub"


@pytest.mark.slow
def test_the_rooms_install_inside_tiered(tmp_path: Path):
    # From an editable install the repository's own files, from a wheel copies of them.
    modules = [f"tiered.{room}.{file.stem}" for room in LINKED for file in sorted((ROOT / room).glob("*.py"))]
    code = f"import importlib.util, tiered\nfor name in {modules}: print(importlib.util.find_spec(name).origin)"
    origins = [Path(line) for line in python(code, tmp_path).splitlines()]
    assert [f"tiered.{origin.parent.name}.{origin.stem}" for origin in origins] == modules
    assert modules


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"pip install '{ROOT}[bench]'"),
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, f"pip install -e '{ROOT}[bench]'"),
        ({"url": "file:///gone", "dir_info": {}}, "pip install '.[bench]' in the checkout"),
        (
            {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'tiered[bench] @ git+https://example.org/x.git@abc'",
        ),
        ({"url": "file:///x/tiered.whl", "archive_info": {}}, "pip install 'tiered[bench] @ file:///x/tiered.whl'"),
        (None, "pip install '.[bench]' in the checkout"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    origin: dict[str, object] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if origin is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr("tiered.core.extras.distribution", lambda _: PathDistribution(tmp_path))
    message = re.escape(f"no_such_package is not installed: {command}")
    with pytest.raises(ModuleNotFoundError, match=f"^{message}$"), needing("bench"):
        importlib.import_module("no_such_package")


def test_no_page_and_no_message_installs_the_name_from_an_index():
    """The library is on no index: another project may have its name there."""
    pattern = re.compile(r"pip install (?:[^\n]* )?['\"]?tiered(?:\[[\w,]*\])?['\"`\n]")
    folders = ("docs", "tiered", "bench", *LINKED)
    files = [path for name in folders for kind in ("*.py", "*.md") for path in (ROOT / name).rglob(kind)]
    files += [ROOT / name for name in ("README.md", "Makefile", "constraints.txt", "pyproject.toml")]
    assert [path for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
    assert pattern.search("pip install 'tiered[serve]'") and pattern.search("pip install tiered\n")


def test_every_package_is_listed():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "tiered").rglob("*.py")}
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders} | {f"tiered.{x}" for x in LINKED})


def test_every_room_is_on_the_page():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "rooms.md").read_text(), re.MULTILINE)
    rooms = {f"tiered/{path.name}/" for path in (ROOT / "tiered").iterdir() if (path / "__init__.py").exists()}
    assert sorted(rows) == sorted({"bench/", "tiered/*.py", *rooms, *(f"{room}/" for room in LINKED)})


def test_the_error_for_a_model_outside_the_wheel_names_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tiered.models.locate.EMBEDDED_MODELS", {"embedded-blocks": tmp_path})
    with pytest.raises(
        ValueError, match=r"^the weights of 'embedded-blocks' are only in the source tree.* --editable \."
    ):
        checkpoint_directory("embedded-blocks")


@pytest.mark.long
def test_the_wheel_answers_in_an_empty_environment(tmp_path: Path):
    """A newcomer has the wheel, and the packages that pip brings with it: every line of README.md under Use runs."""
    # A copy, because a build leaves folders in its source tree, and takes files from them.
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "bench", "tests", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        weights = [name for name in files.namelist() if name.endswith(".safetensors")]
    assert weights == ["tiered/embedded/assets/model.safetensors"] and wheel.stat().st_size < 10e6

    # The Makefile knows which build of torch this machine takes.
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["make", f"PYTHON={sys.executable}", ".venv/.torch"], cwd=tmp_path, check=True)
    there = tmp_path / ".venv" / "bin"
    package = f"{wheel}[serve,watch]"
    subprocess.run([there / "pip", "install", "--quiet", "-c", "constraints.txt", package], cwd=tmp_path, check=True)

    def tiered(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([there / "tiered", *arguments], cwd=tmp_path, capture_output=True, text=True)

    readme = (ROOT / "README.md").read_text()
    (sample,) = re.findall(r"```python\n(.+?)```", readme, re.DOTALL)
    done = subprocess.run([there / "python", "-c", sample], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("['Ben Cleo Ivan Nora']"), done.stderr
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    tiered (.+)$", readme, re.MULTILINE)]
    generate, serve, plan = lines
    with socket.create_server(("127.0.0.1", 0)) as free:
        serve[-1] = str(free.getsockname()[1])
    answered, card = tiered(*generate), tiered(*plan)
    assert answered.returncode == 0 and "Ben Cleo Ivan Nora" in answered.stdout, answered.stderr
    (total,) = re.findall(r"^  total .+$", readme, re.MULTILINE)
    assert total in card.stdout, card.stderr
    with subprocess.Popen([there / "tiered", *serve], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None and "tiered: embedded at http" in server.stderr.readline()
            with urlopen(f"http://127.0.0.1:{serve[-1]}/v1/models", timeout=60) as models:
                assert "embedded" in models.read().decode()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert tiered("plan", "embedded-blocks", "--context", "64").returncode == 0
    refused = tiered("generate", "sort: Nora Ben", "--model", "embedded-blocks")
    assert refused.returncode == 2 and "pip install --editable ." in refused.stderr
    assert re.search(r"embedded-uniform .* plan only", tiered("models").stdout)
