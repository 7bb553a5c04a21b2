"""The process of one point: reads it as JSON, measures it, and prints its rows as one line of JSON.

    PYTHONPATH=bench python -m sweeping.worker '{"settings": {…}, "model": "embedded"}'

Without an argument the first line of stdin is read; the end of stdin is then the end of whoever asked, and of this.
"""

import json
import os
import sys
import threading


def main() -> None:
    """Nothing else is printed to stdout, by whatever library."""
    request = json.loads(sys.argv[1] if sys.argv[1:] else sys.stdin.readline())
    if not sys.argv[1:]:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Here, since it takes seconds, in which whoever asked may be gone.
    from sweeping.measure import measure_point

    print(json.dumps({"rows": measure_point(request["settings"], request["model"])}))


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
