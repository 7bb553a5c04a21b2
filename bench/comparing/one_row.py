"""Measuring one row: the examples of a question, answered by one variant under one commit rule."""

from typing import Any

from baselines.variants import Baseline
from scoring import score_examples
from tally import Tally

import tiered
from comparing.questions import BLOCK, CANVAS, Setting
from tiered.embedded import tasks


def measure(runtime: tiered.Runtime, setting: Setting, seed: int, commit: dict[str, Any]) -> dict[str, Any]:
    """The row of one setting, over examples `seed` and following of the test split, with the options of its commit
    rule; with "why" in place of figures where the variant and the call do not fit each other, or the variant cannot be
    had on this machine."""
    question, tally = setting.question, Tally()
    examples = [
        tasks.sample(question.task, "test", seed + number, size=question.size) for number in range(question.examples)
    ]
    try:
        scores = score_examples(
            setting.variant.answerer(runtime),
            examples,
            watch=tally,
            **(setting.variant.call(answer=CANVAS, block=BLOCK) | commit),
        )
    except (TypeError, ValueError) as error:
        return setting.as_dict() | {"why": str(error)}
    row = setting.as_dict() | {
        "correct": scores.correct,
        "exact_match": round(scores.exact_match, 4),
        "nfe": round(scores.mean_forwards, 3),
        "tokens_per_forward": round(scores.mean_tokens_per_forward, 3),
        "tokens_per_second": round(tally.tokens / tally.seconds, 2),
        "rows_per_forward": round(tally.rows_per_forward, 1),
        "cache_ratio": round(tally.cache_ratio, 4),
        "passes": dict(tally.passes),
        "device_bytes": tally.device,
        "host_bytes": tally.host,
        "moved_bytes": dict(tally.moved),
    }
    return row | ({"bytes": "counted"} if isinstance(setting.variant, Baseline) else {})
