"""The process of points: measures one after the other, and says the rows of each as it has them.

Reads {"study", "jobs", "local"} as JSON from the first line of stdin; the end of stdin is the end of whoever asked, and
of this with all that it started. Says lines of JSON on stdout: {"begin": n}, then {"ended": n, "rows": […]}, or
{"ended": n, "failed": why, "traceback": […]}. What libraries print goes to stderr.
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

BROKEN = 3  # exit status: a point took the device with it, the others need a new process
_LINES, _LONGEST = 12, 500  # of a traceback that is kept, and the characters of a message
_FOLDERS = (Path(__file__).resolve().parents[2], Path(sys.prefix))  # they say nothing to a reader elsewhere


class RefusedError(Exception):
    """The library says no to what a point asks: a row with a reason, and no failure."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """What the library says no with, before it does any work, as `RefusedError`."""
    from tiered.core.errors import TierCapacityError

    try:
        yield
    except (TierCapacityError, ValueError, TypeError) as error:
        raise RefusedError(" ".join(str(error).split()) or type(error).__name__) from error


def main() -> None:
    """Every job that was asked for."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    _end_with_stdin()
    with contextlib.suppress(Exception):  # before any job begins, since it takes seconds; each says what is wrong
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
            os._exit(BROKEN)  # a library that puts itself away might wait for the device


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
    """Whether the GPU still works, if one is used, with what the point has left behind thrown away."""
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
    """A process beside this one waits for the end of stdin: this one may hang where no thread of it gets a turn."""
    mark, group = os.environ.get(MARK), os.getpgrp()
    if mark is None or os.fork():
        return
    os.setpgid(0, 0)  # it ends the group, and then goes on with what is left
    os.closerange(1, 64)
    while os.read(0, 4096):
        pass
    end_family(mark, group)
    os._exit(0)


if __name__ == "__main__":
    # Under its own name: a study's `RefusedError` is that module's, not one of `__main__`.
    importlib.import_module("measuring.worker").main()
