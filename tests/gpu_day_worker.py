"""Stands in for the process of a part of a GPU day in tests: says, and does, what its plan says.

    python gpu_day_worker.py PLAN FOLDER

PLAN is a file of JSON: for each part its cases, each with what becomes of it; and under "again" the seconds that a
process takes to begin which goes on behind another one. FOLDER gets a file named after every
process that was started, children included.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HANG = (
    "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; "
    "print(file=sys.stderr, flush=True); time.sleep(600)"
)

folder = Path(sys.argv[2])
(folder / str(os.getpid())).touch()
request = json.loads(sys.stdin.readline())
plans = json.loads(Path(sys.argv[1]).read_text())
plan = plans.get(request["part"], {"only": "ok"})


def say(text: str) -> None:
    """On stdout, at once."""
    os.write(1, text.encode())


def child(*, own_session: bool) -> None:
    """One that ends by SIGKILL alone, and holds on to stdin and stdout."""
    command = [sys.executable, "-S", "-I", "-c", HANG]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=own_session)
    assert process.stderr is not None
    process.stderr.readline()
    (folder / str(process.pid)).touch()


if "" in plan:
    if plan[""] == "hang":
        time.sleep(600)
    if plan[""] == "import":
        say(json.dumps({"case": "", "row": {"failed": "ModuleNotFoundError: no module"}}) + "\n")
    say(plan[""])
    print("out of luck", file=sys.stderr)
    sys.exit(1)
cases = list(plan) if request["cases"] is None else request["cases"]
time.sleep(plans.get("again", 0) if request["cases"] is not None else 0)
say(json.dumps({"cases": cases}) + "\n")
for case in cases:
    action, _, number = plan[case].partition(" ")
    if action == "leave":
        sys.exit(0)
    say(json.dumps({"begin": case}) + "\n")
    row = {"ms": 1.0, "process": os.getpid()}
    match action:
        case "ok":
            time.sleep(float(number or 0))
        case "name":
            row["name"] = number
        case "fail" | "broken":
            row = {"failed": "RuntimeError: no luck", "traceback": []}
        case "wrong":
            row |= {"ok": False, "why": "3 bytes"}
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            print("out of luck", file=sys.stderr)
            sys.exit(int(number))
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child(own_session=False)
            child(own_session=True)
            time.sleep(600)
        case "half":
            say('{"case": "' + case + '", "row": {"ms": 1.0')
            sys.exit(5)
        case "garbage":
            os.write(1, b"\xff\xfe\0 not JSON\n[1, 2]\n7\n\n{}\n")
            for odd in (
                {"case": "unheard of", "row": {}},
                {"begin": "unheard of"},
                {"case": cases[-1], "row": {"ms": 9.0}},
                {"case": case, "row": 3},
                {"row": {}},
            ):
                say(json.dumps(odd) + "\n")
            say('{"case": "' + case + '", "row": {"ms": NaN}}\n{"cases": ["other"]}\n')
            os.write(1, (json.dumps({"case": case, "row": row}) + "\n").encode() * 2)
            continue
        case "flood":
            while True:
                os.write(1, b"x" * 5000 + b"\n" * (number == "lines"))
        case "deaf":
            os.close(1)
            time.sleep(600)
        case "stop":
            os.kill(os.getppid(), int(number))
            time.sleep(600)
    say(json.dumps({"case": case, "row": row}) + "\n")
    if action == "broken":
        sys.exit(3)
