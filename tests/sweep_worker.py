"""Stands in for the process of a sweep's point in tests: quick, and the same figures for the same settings.

    python sweep_worker.py LOG

Appends a line to LOG, then does what the batch of the point asks for: 901 and following are ways to go wrong.
"""

import hashlib
import json
import os
import signal
import sys
import time

request = json.loads(sys.stdin.readline())
settings = request["settings"]
key = hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
with open(sys.argv[1], "a") as log:
    log.write(json.dumps([key, request["run"], settings["policy"], settings["batch"]]) + "\n")

match settings["batch"]:
    case 901:
        sys.stderr.buffer.write(b"\xff\xfe\n")
        sys.exit("out of luck")
    case 902:
        time.sleep(600)
    case 903:
        print("no rows")
        sys.exit()
    case 905:
        os.kill(os.getpid(), signal.SIGKILL)
    case 907:
        # Fails once.
        if not os.path.exists(sys.argv[1] + ".failed"):
            open(sys.argv[1] + ".failed", "w").close()
            sys.exit("the first time")

number = int(key, 16)
rows = []
for place, (task, examples) in enumerate(settings["tasks"].items()):
    if settings["batch"] == 906 and place:
        rows.append({"status": "refused", "why": "too large", "task": task})
        continue
    correct = (number + place) % (examples + 1)
    rows.append(
        {
            "status": "ok",
            "task": task,
            "examples": examples,
            "correct": correct,
            "exact_match": 1.5 if settings["batch"] == 904 else correct / examples,
            "nfe": 1 + number % 31 / 7,
            "tokens_per_forward": 2.5,
            "tokens_per_second": number % 1000 / 3,
            "ms_per_forward": 1 / 3,
            "first_block_ms": 0.1,
            "updates": number % 5,
            "device_bytes": number % 2**40,
            "host_bytes": 0,
            "to_device_bytes": 1,
            "to_host_bytes": 2,
            "copy_ms": 1.0,
            "hidden_ms": 0.75,
            "exposed_ms": 0.25,
            "seconds": 0.5,
        }
    )
time.sleep(0.02)
print("some library says hello")
print(json.dumps({"rows": rows}))
