"""Stands in for the processes of a GPU day in tests: the name of each case says its action.

    python gpu_day_worker.py FOLDER

A case is "NAME: ACTION". FOLDER gets a file named after every process that was started.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

(Path(sys.argv[1]) / str(os.getpid())).touch()
for number, job in enumerate(json.loads(sys.stdin.readline())["jobs"]):
    action, _, value = job["case"].partition(": ")[2].partition(" ")
    print(json.dumps({"begin": number}), flush=True)
    row = {"ms": 1.0}
    match action:
        case "name":
            row["name"] = value
        case "wrong":
            row |= {"status": "failed", "ok": False, "why": "3 bytes"}
        case "skip":
            row = {"status": "skipped", "why": "no such device"}
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stdin.read()  # until the parent process is gone
        case "stop":
            os.kill(os.getppid(), int(value))
            time.sleep(600)
    print(json.dumps({"ended": number, "rows": [row]}), flush=True)
