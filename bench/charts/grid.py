"""A map of figures over two settings: cells in six shades, with words in them."""

from collections.abc import Callable, Sequence
from typing import Any

from charts.rows import Row, shown
from charts.theme import LIGHT, RAMP, alt, colour, data


def steps(values: Sequence[float], by_ratio: bool = False) -> list[float]:
    """The least value of each shade except the first. `by_ratio`: equal ratios in place of equal distances."""
    least, most = min(values), max(values)
    shares = [number / len(RAMP) for number in range(1, len(RAMP))] if least < most else []
    return [least * (most / least) ** share if by_ratio else least + share * (most - least) for share in shares]


def grid(
    rows: Sequence[Row], x: alt.X, y: alt.Y, figure: str, begins: Sequence[float], told: Callable[[Row], str], key: int
) -> Any:
    """`begins`: see `steps`, of `figure`; `told`: text of a cell; `key`: pixels of a legend's width, 0 for none."""
    bounds = [shown(figure, begin) for begin in begins]
    names = [f"below {bounds[0]}", *(f"from {bound}" for bound in bounds)] if bounds else ["all alike"]
    cells = []
    for row in rows:
        shade = sum(row[figure] >= begin for begin in begins) if figure in row else None
        ink = "soft" if shade is None else "on-high" if shade > 3 else "on-low"
        cells.append(row | {"shade": shade is not None and names[shade], "told": told(row), "ink": LIGHT[ink]})
    base = data(cells).encode(x, y)
    shades = colour("shade", dict(zip(names, (LIGHT[name] for name in RAMP), strict=False)), key)
    blank = alt.condition("datum.shade === false", alt.value(LIGHT["blank"]), shades)
    text = base.mark_text().encode(text="told:N", color=alt.Color("ink:N", scale=None))
    return alt.layer(base.mark_rect(stroke=LIGHT["card"]).encode(color=blank), text)
