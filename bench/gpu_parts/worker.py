"""The process of one part: measures case after case, and says each row as it has it.

Reads its request as JSON from the first line of stdin; the end of stdin is the end of whoever asked, and of this with
all that it started. Says lines of JSON on stdout; what libraries print goes to stderr.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from gpu_parts.family import MARK, end_family

BROKEN = 3  # exit status: a case failed and took the device with it, the others need a new process
_LINES = 12  # of a traceback that a row keeps
_LONGEST = 500  # characters of a message
_FOLDERS = (Path(__file__).resolve().parents[2], Path(sys.prefix))  # they say nothing to a reader elsewhere


def main() -> None:
    """Every case that was asked for, or all."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    _end_with_stdin()
    try:
        # Here, since it takes seconds, in which whoever asked may be gone.
        from gpu_parts.part import part_named
        from gpu_parts.setting import Setting
        from tiered.offload.device import computing_on

        setting, module = Setting(**request["setting"]), part_named(request["part"]).module()
        cases = module.cases(setting) if request["cases"] is None else request["cases"]
    except Exception as error:
        _log(traceback.format_exc())
        _say(said, {"case": "", "row": _failure(error)})
        sys.exit(1)
    _say(said, {"cases": cases})
    for case in cases:
        _say(said, {"begin": case})
        _log(f"--- {request['part']}: {case}\n")
        try:
            with computing_on(setting.on):  # as calls do
                row = module.measure(setting, case)
            if not isinstance(row, dict):
                raise TypeError(f"measure() gave {row!r}; a dict is allowed")
            line = json.dumps({"case": case, "row": row}, allow_nan=False)
        except Exception as error:
            _log(traceback.format_exc())
            line = json.dumps({"case": case, "row": _failure(error)})
        said.write(line + "\n")
        if not _answers(setting):
            os._exit(BROKEN)  # a library that puts itself away might wait for the device


def _say(said: TextIO, line: dict[str, Any]) -> None:
    said.write(json.dumps(line) + "\n")


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


def _answers(setting: Any) -> bool:
    """Whether the device still works, with what the case has left behind thrown away."""
    import torch

    gc.collect()
    if setting.on.type != "cuda":
        return True
    try:
        torch.cuda.empty_cache()
        return int(torch.ones(1, device=setting.on).add_(1)) == 2
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
    main()
