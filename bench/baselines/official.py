"""The official implementations, each in a process of the venv that its authors' versions need.

None of their code is in this repository: CODE_ROOT is a folder of the user's with a checkout in each of its folders
(docs/peers.md). A missing checkout is refused.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring.worker import RefusedError

from baselines.asked import Asked

WORKER = Path(__file__).with_name("official_worker.py")
# Folders of CODE_ROOT that each needs, by name; the names are methods of `official_worker.Implementations`.
IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "vanilla": ("llada", "dllm"),
    "fast_plain": ("fastdllm",),
    "fast_prefix": ("fastdllm",),
    "fast_dual": ("fastdllm",),
    "dllm_cache": ("dllmcache", "dllm"),
    "dkv_decode": ("dkv",),
    "polestar": ("polestar",),
}
HOW = "docs/peers.md says how to get it"


class Official(Asked):
    """An official implementation that answers prompts.

    Attributes:
        about: columns of its rows: the commits of the checkouts, and the versions of torch and transformers.
    """

    def __init__(self, name: str, checkpoint: Path, *, code: str | None, python: str | None, threads: int) -> None:
        """`checkpoint` in Hugging Face's layout; `code`, `python`: CODE_ROOT, and the venv's interpreter.

        Raises:
            RefusedError: the code is not there.
            PeerError: it does not load.
        """
        if code is None or python is None:
            raise RefusedError(f"official code is asked with --official and --official-python alone; {HOW}")
        for folder in IMPLEMENTATIONS[name]:
            if not (Path(code) / folder).is_dir():
                raise RefusedError(f"no folder {folder} in that of --official; {HOW}")
        # -I: the venv alone, and no folder of this repository, is on its path. Compilation would be timed, and some of
        # the code does not compile.
        command = [python, "-I", str(WORKER), name, code, str(checkpoint), str(threads)]
        super().__init__(command, threads=threads, environment={"TORCHDYNAMO_DISABLE": "1"})
        commits = {folder: commit_of(Path(code) / folder) for folder in IMPLEMENTATIONS[name]}
        versions = {f"official_{package}": version for package, version in self.about.items()}
        self.about = {"commits": commits} | versions

    def ask(self, prompt: list[int], call: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `prompt` as `Runtime.generate` with `call`: {"tokens", "seconds", "forwards"}. Without "steps" or a
        threshold in `call`, a step commits one token. `options` have the implementation's own names. Raises
        `PeerError`."""
        length = call["max_new_tokens"]
        return self.request(
            prompt=prompt,
            length=length,
            block=call["block_length"],
            steps=call.get("steps", length),
            threshold=call.get("confidence_threshold"),
            early=call.get("early_threshold"),
            options=options,
        )


def commit_of(folder: Path) -> str | None:
    """The commit of a checkout, with "-dirty" if it was changed, else the text of its file COMMIT; None without one."""
    if not (folder / ".git").exists():
        told = folder / "COMMIT"
        return told.read_text(encoding="utf-8").strip() if told.is_file() else None
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder)]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def located(official: str | None, official_python: str | None) -> dict[str, str | None]:
    """`code` and `python` as `Official` takes them. Raises `ValueError` for one without the other, or a wrong path."""
    if (official is None) is not (official_python is None):
        raise ValueError("--official and --official-python go together")
    if official is None or official_python is None:
        return {"code": None, "python": None}
    if not Path(official).is_dir():
        raise ValueError(f"--official {official}; a folder of checkouts is allowed")
    if (python := shutil.which(official_python)) is None:
        raise ValueError(f"--official-python {official_python}; the python of a venv is allowed")
    return {"code": str(Path(official).resolve()), "python": str(Path(python).absolute())}
