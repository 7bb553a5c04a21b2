"""`tiered COMMAND …`, also as `python -m tiered COMMAND …`."""

import sys


def main() -> int:
    """`tiered.cli.main.main`. Ctrl-C exits with status 130 and no message, even during that module's import."""
    try:
        from tiered.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
