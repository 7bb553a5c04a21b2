"""Optional packages, and the error with the install command for a missing one."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message has the install command."""


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """`with needing("bench"): import pyarrow`. Raises `MissingPackageError` with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: {install_command(extra)}"
        raise MissingPackageError(message, name=error.name) from None


def install_command(extra: str) -> str:
    """The command that reinstalls the library with `extra`, from its present source (PEP 610). It never names a package
    of an index, because another project may have the name there."""
    try:
        origin = json.loads(distribution("tiered").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        if (folder / "pyproject.toml").is_file():
            editable = "-e " if origin["dir_info"].get("editable") else ""
            return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    elif url:
        version = origin.get("vcs_info")
        url = f"{version['vcs']}+{url}@{version['commit_id']}" if version else url
        return f"pip install {shlex.quote(f'tiered[{extra}] @ {url}')}"
    return f"pip install '.[{extra}]' in the checkout"
