"""Names of accounts with their most bytes, beside or below a stack."""

from markupsafe import Markup

from reporting.accounts import paint
from reporting.scales import Scale
from reporting.svg import element, text, width_of
from reporting.wording import nbytes

LINE = 15.0


def names_beside(series: dict[str, list[int]], middles: dict[str, float], left: float, y: Scale) -> Markup:
    """Names at the height where their areas end, pushed apart; from the bottom up."""
    column = left + 23 + max(width_of(account, 11) for account in series)
    places, lowest = {}, y.start + 4
    for account in series:
        lowest = min(middles[account] + 4, lowest) if not places else min(middles[account] + 4, lowest - LINE)
        places[account] = lowest
    lift = max(0.0, y.stop + 4 - lowest)  # too many: what is left goes over the bottom
    parts = []
    for account, place in places.items():
        at = place + lift
        parts.append(element("rect", x=left, y=at - 9, width=9, height=9, rx=1.5, fill=paint(account)))
        parts.append(text(left + 15, at, account, size=12))
        size = nbytes(max(series[account]))
        parts.append(text(column, at, size, size=11, fill="var(--soft)"))
    return Markup("").join(parts)


def names_below(series: dict[str, list[int]], top: float, start: float, right: float) -> tuple[Markup, int]:
    """The names in lines from `top`, and how many lines."""
    parts, left, row = [], start, 0
    for account, sizes in series.items():
        words = f"{account} {nbytes(max(sizes))}"
        wide = 26 + width_of(words, 11)
        if left > start and left + wide > right:
            left, row = start, row + 1
        parts.append(element("rect", x=left, y=top + LINE * row - 9, width=9, height=9, rx=1.5, fill=paint(account)))
        parts.append(text(left + 14, top + LINE * row, words, size=11))
        left += wide
    return Markup("").join(parts), row + 1
