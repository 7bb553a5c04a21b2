"""Runs bench/measure.py again and again and ends each at a random moment, for tests.

    python measure_killer.py LOG SIGNAL,SIGNAL,… ARGUMENTS

LOG grows by a line with every measurement that begins. One process has imported everything and forks the runs, which
saves the seconds of an import each. The last line of stdout is JSON: for every signal, how the sweep ended and whether
there was a table.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import measure

log, signals, arguments = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
table = Path(arguments[arguments.index("--out") + 1]) / "rows.parquet"
moments, ends = random.Random(7), []


def begun() -> int:
    """Measurements so far."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


for name in signals:
    before = begun()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os._exit(measure.main(arguments))
    os.setpgid(child, child)
    # Within the first few measurements or before them, and at any moment of one.
    until, deadline = before + moments.randrange(3), time.monotonic() + 60
    while begun() < until and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.1))
    os.killpg(child, getattr(signal, name))
    status = os.waitpid(child, 0)[1]
    ends.append({"signal": name, "exit": os.waitstatus_to_exitcode(status), "table": table.exists()})
print(json.dumps(ends))
