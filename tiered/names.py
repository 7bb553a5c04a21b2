"""An answer for a name that is almost right."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """The error for `name`, which is no `kind`: names the nearest valid one (whatever the case) and lists all."""
    names = sorted(allowed)
    if not names:
        return ValueError(f"unknown {kind} {name!r}; there is none")
    near = nearest(name, names)
    guess = f"; did you mean {near!r}?" if near else ";"
    return ValueError(f"unknown {kind} {name!r}{guess} allowed: {', '.join(names)}")


def nearest(name: object, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that is most like `name`, whatever the case; None: none is much like it."""
    by_lower_case = {known.lower(): known for known in allowed}
    near = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.5)
    return by_lower_case[near[0]] if near else None
