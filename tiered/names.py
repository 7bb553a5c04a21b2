"""An answer for a name that is almost right."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """The error for `name`, which is no `kind`: names the nearest valid one (whatever the case) and lists all."""
    names = sorted(allowed)
    by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.5)
    guess = f"; did you mean {by_lower_case[near[0]]!r}?" if near else ";"
    return ValueError(f"unknown {kind} {name!r}{guess} allowed: {', '.join(names)}")
