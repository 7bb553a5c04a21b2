"""The process of points: measures one after the other, and writes the rows of each as it has them.

Reads {"study", "jobs", "local"} as JSON from the first line of stdin. At the end of stdin it ends, with all that it
started. Writes lines of JSON to stdout: {"begin": n}, then {"ended": n, "rows": […]}, or {"ended": n, "failed": why,
"traceback": […]}. Output of libraries goes to stderr.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring.family import MARK, end_family

BROKEN = 3  # exit status: a point broke the device, so the others need a new process
_LINES, _LONGEST = 12, 500  # lines that are kept of a traceback, and characters of a message
_FOLDERS = (Path(__file__).resolve().parents[2], Path(sys.prefix))  # left out of messages: other machines have others


class RefusedError(Exception):
    """The library refuses a point: a row with a reason, and no failure."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise `RefusedError` in place of the errors by which the library refuses a call before any work."""
    from tiered.core.errors import TierCapacityError

    try:
        yield
    except (TierCapacityError, ValueError, TypeError) as error:
        raise RefusedError(" ".join(str(error).split()) or type(error).__name__) from error


def main() -> None:
    """Measure every job of the request."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    _end_with_stdin()
    with contextlib.suppress(Exception):  # imports take seconds, before any job begins; each job reports their errors
        importlib.import_module(f"studies.{request['study']}")
        importlib.import_module("torch")
    for number, settings in enumerate(request["jobs"]):
        said.write(json.dumps({"begin": number}) + "\n")
        _log(f"--- {request['study']} {json.dumps(settings)}\n")
        try:
            study: Any = importlib.import_module(f"studies.{request['study']}")
            import torch

            torch.set_num_threads(settings["threads"])
            rows = study.measure(settings, **request["local"])
            line = json.dumps({"ended": number, "rows": list(rows)}, allow_nan=False)
        except RefusedError as error:
            line = json.dumps({"ended": number, "rows": [{"status": "refused", "why": str(error)}]})
        except Exception as error:
            _log(traceback.format_exc())
            line = json.dumps({"ended": number} | _failure(error))
        said.write(line + "\n")
        if not _device_answers():
            os._exit(BROKEN)  # a library that shuts down might wait for the device


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to measure nothing
        print(text, end="", file=sys.stderr, flush=True)


def _failure(error: Exception) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    message = str(error).strip() or "no message"
    for folder in _FOLDERS:
        text, message = (each.replace(f"{folder}{os.sep}", "") for each in (text, message))
    return {
        "failed": f"{type(error).__name__}: {message.splitlines()[0][:_LONGEST]}",
        "traceback": [line[:_LONGEST] for line in text.splitlines()[-_LINES:]],
    }


def _device_answers() -> bool:
    """Free memory that the point has left. False if a GPU is used and does not work any more."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.empty_cache()
        return int(torch.ones(1, device="cuda").add_(1)) == 2
    except RuntimeError:
        _log(traceback.format_exc())
        return False


def _end_with_stdin() -> None:
    """Let a second process wait for the end of stdin: this one may hang in a way that gives no thread a turn."""
    mark, group = os.environ.get(MARK), os.getpgrp()
    if mark is None or os.fork():
        return
    os.setpgid(0, 0)  # out of the group, which it ends
    os.closerange(1, 64)
    while os.read(0, 4096):
        pass
    end_family(mark, group)
    os._exit(0)


if __name__ == "__main__":
    # Under its own name: a study's `RefusedError` is that module's, not one of `__main__`.
    importlib.import_module("measuring.worker").main()
