"""Stands in for the process of points in tests: quick, and the same figures for the same settings.

    python measure_worker.py LOG

Appends a line to LOG for every point that it begins, then does what the point's batch asks for: 901 and following are
ways to go wrong.
"""

import hashlib
import json
import os
import signal
import sys
import time

request = json.loads(sys.stdin.readline())
for number, settings in enumerate(request["jobs"]):
    key = int(hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8], 16)
    with open(sys.argv[1], "a") as log:
        log.write(json.dumps([key, settings["policy"], settings["batch"]]) + "\n")
    print(json.dumps({"begin": number}), flush=True)
    match settings["batch"]:
        case 901:
            sys.stderr.buffer.write(b"\xff\xfe\n")
            sys.exit("out of luck")
        case 902:
            time.sleep(600)
        case 903:
            print(json.dumps({"ended": number, "rows": "no rows"}), flush=True)
            continue
        case 904:
            print(json.dumps({"ended": number, "failed": "KeyError: 'x'", "traceback": ["line"]}), flush=True)
            continue
        case 905:
            os.kill(os.getpid(), signal.SIGKILL)
        case 906:
            print(json.dumps({"ended": number, "rows": [{"status": "refused", "why": "too large"}]}), flush=True)
            continue
        case 907 if not os.path.exists(sys.argv[1] + ".failed"):
            open(sys.argv[1] + ".failed", "w").close()
            sys.exit("the first time")
    rows = [
        {
            "task": task,
            "size": size,
            "examples": count,
            "correct": (key + place) % (count + 1),
            "tokens_per_second": key % 1000 / 3,
            "device_bytes": key % 2**40,
            "host_bytes": 0,
            "passes": {"step": 3},
        }
        for place, (task, size, count) in enumerate(settings["tasks"])
    ]
    time.sleep(0.02)
    print("some library says hello")
    print(json.dumps({"ended": number, "rows": rows}), flush=True)
