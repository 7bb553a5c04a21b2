"""Tables of cases of which `make test` runs a part."""

from collections.abc import Iterable
from typing import Any

import pytest


def and_long(short: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The cases in `short`, and of `make test-long` all others of `every`; a case is a value, or a tuple of several."""
    cases = list(short)
    others = (case if isinstance(case, tuple) else (case,) for case in every if case not in cases)
    return [*cases, *(pytest.param(*values, marks=pytest.mark.long) for values in others)]
