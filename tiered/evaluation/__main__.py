"""`python -m tiered.evaluation run …`: the harness's own command line, with the model `tiered`.

All flags are those of `lm-eval run`. Without `--model` and `--config`, the model is `tiered`.
"""

import logging
import sys

from tiered.core.errors import TierCapacityError
from tiered.evaluation import register
from tiered.offload.errors import OffloadError


def main() -> int:
    """Run the harness. Returns 2 for a bad argument or too little memory, 130 after Ctrl-C; `LMEVAL_LOG_LEVEL=DEBUG`
    logs the traceback."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        flags = {argument.partition("=")[0] for argument in sys.argv}
        runs = sys.argv[2:] and sys.argv[1] not in ("ls", "validate")
        if runs and not flags & {"--model", "-M", "--config", "-C"}:
            sys.argv += ["--model", "tiered"]
        cli_evaluate()
    except (ValueError, TypeError, TierCapacityError, OffloadError, OSError, NotImplementedError, ImportError) as error:
        logging.getLogger(__name__).debug("the error as it was raised", exc_info=True)
        print(f"tiered.evaluation: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
