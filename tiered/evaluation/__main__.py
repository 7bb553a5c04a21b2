"""`python -m tiered.evaluation …`: the harness's own command line, with the model `tiered`.

    python -m tiered.evaluation run --model tiered --model_args pretrained=embedded,policy=polestar \\
        --tasks tiered_embedded --include_path tasks/ --apply_chat_template --output_path results/

All flags are those of `lm-eval run`. Without `--model` and `--config`, the model is `tiered`.
"""

import logging
import sys
from collections.abc import Sequence

from tiered.core.errors import TierCapacityError
from tiered.evaluation import MODEL_NAME, register

_MODEL_FLAGS = ("--model", "-M", "--config", "-C")


def with_model(arguments: Sequence[str]) -> list[str]:
    """`arguments` with `--model tiered`, if they run an evaluation and name no model."""
    runs = arguments[:1] == ["run"] or (len(arguments) > 1 and arguments[0].startswith("-"))
    named = any(argument.partition("=")[0] in _MODEL_FLAGS for argument in arguments)
    return [*arguments] if named or not runs or len(arguments) < 2 else [*arguments, "--model", MODEL_NAME]


def main() -> int:
    """Run the harness. Returns 2 for a bad argument or too little memory; `LMEVAL_LOG_LEVEL=DEBUG` shows where."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        sys.argv[1:] = with_model(sys.argv[1:])
        cli_evaluate()
    except (ValueError, TypeError, TierCapacityError, OSError, NotImplementedError, ImportError) as error:
        logging.getLogger(__name__).debug("the error as it was raised", exc_info=True)
        print(f"tiered.evaluation: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
