"""The figure of speed over context: a line for every policy, with the spread of its rounds."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from reporting.colours import policy_colours
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.scales import Scale, log_ticks, ticks
from reporting.skips import Source
from reporting.svg import Panel, element, text, width_of
from reporting.wording import confidence_name, named, nbytes, plain

NAME, TOPIC = "throughput", "Speed over context"
HINT = "python bench/throughput.py writes it."
Row = dict[str, Any]


def throughput_figures(throughput: Source) -> list[Figure]:
    """One figure, with a panel for every batch and commit rule."""
    rows = throughput.rows
    if not rows:
        return [missing(NAME, TOPIC, throughput.gap or f"{throughput.file} has no rows", HINT)]
    colours = policy_colours([row["policy"] for row in rows])
    groups: dict[tuple[int, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["batch"], row["confidence"]), []).append(row)
    titles = {key: f"{_batch(key[0])}, {confidence_name(key[1])}" for key in groups}
    figure = Figure(
        name=NAME,
        topic=TOPIC,
        headline=_sentence(rows),
        caption="Tokens of answers a second by tokens of the prompt; rounds of all policies alternate. Whiskers: from "
        "the 20th to the 80th percentile of the rounds.",
        groups=[
            Group(
                panels=[_panel(titles[key], own, colours, 460.0) for key, own in groups.items()],
                narrow=[_panel(titles[key], own, colours, 370.0) for key, own in groups.items()],
            )
        ],
        tables=[_table(titles[key], own) for key, own in groups.items()],
        sources=[throughput.file],
    )
    return [figure]


def _batch(batch: int) -> str:
    return "one sequence a call" if batch == 1 else f"{batch} sequences a call"


def _sentence(rows: Sequence[Row]) -> str:
    longest = max(row["context"] for row in rows)
    there = [row for row in rows if row["context"] == longest]
    lowest = min((row["batch"], row["confidence"] or 0) for row in there)
    own = [row for row in there if (row["batch"], row["confidence"] or 0) == lowest]
    fastest, slowest = max(own, key=lambda r: r["tokens_per_second"]), min(own, key=lambda r: r["tokens_per_second"])
    call = f"{_batch(lowest[0])}, {confidence_name(own[0]['confidence'])}"
    first, last = (f"{named(row['policy'])} {plain(row['tokens_per_second'])}" for row in (fastest, slowest))
    there = f"At prompts of {longest} tokens ({call})"
    return f"{there}, {first} tokens a second" + ("." if fastest is slowest else f", {last}.")


def _panel(title: str, rows: Sequence[Row], colours: dict[str, str], width: float) -> Panel:
    contexts = sorted({row["context"] for row in rows})
    speeds = [row["tokens_per_second"] for row in rows]
    log_y = min(speeds) > 0 and max(speeds) > 15 * min(speeds)
    names = max(width_of(row["policy"], 11) for row in rows)
    low = min(row.get("low") or row["tokens_per_second"] for row in rows)
    high = max(max(row.get("high") or 0, row["tokens_per_second"]) for row in rows)
    y = Scale(low=low / 1.2 if log_y else 0.0, high=1.08 * high or 1.0, start=250.0, stop=30.0, log=log_y)
    log_x = contexts[0] > 0 and contexts[-1] > 4 * contexts[0]
    x = Scale(low=contexts[0], high=contexts[-1], start=58.0, stop=width - names - 26, log=log_x)
    parts = [text(0, 14, title, size=13, font_weight=600)]
    for tick in log_ticks(y.low, y.high) if y.log else ticks(0, y.high):
        parts.append(element("path", d=f"M48 {y(tick):.1f}H{x.stop + 8:.1f}", stroke="var(--grid)"))
        parts.append(text(40, y(tick) + 4, plain(tick), size=11, fill="var(--soft)", anchor="end"))
    shown = -1e9
    for context in contexts:
        if x(context) - shown > 34:
            shown = x(context)
            parts.append(text(shown, 268, str(context), size=11, fill="var(--soft)", anchor="middle"))
    parts.append(text((x.start + x.stop) / 2, 286, "prompt tokens", fill="var(--soft)", anchor="middle"))
    ends = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["context"])
        parts.append(_line(own, x, y, colours[policy]))
        ends[policy] = y(own[-1]["tokens_per_second"]) + 4
    parts.extend(_names(ends, x.stop + 14, colours))
    label = f"tokens a second by context, {title}; the table below has the figures"
    return Panel(width=width, height=296, body=Markup("").join(parts), label=label)


def _line(rows: Sequence[Row], x: Scale, y: Scale, paint: str) -> Markup:
    points = [(x(row["context"]), y(row["tokens_per_second"])) for row in rows]
    path = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in points)
    parts = [element("path", d=path, fill="none", stroke=paint, stroke_width=1.8)]
    for row, (across, up) in zip(rows, points, strict=True):
        low, high = row.get("low"), row.get("high")
        tip = [row["policy"], f"{row['context']} tokens", f"{plain(row['tokens_per_second'])} tokens/s"]
        inside = [element("circle", cx=across, cy=up, r=4.0, fill=paint, stroke="var(--card)")]
        if low is not None and high is not None:
            tip.append(f"{plain(low)} to {plain(high)} (20th to 80th percentile)")
            whisker = f"M{across:.1f} {y(max(low, y.low)):.1f}V{y(high):.1f}"
            inside.insert(0, element("path", d=whisker, stroke=paint, stroke_width=1.2))
        parts.append(element("g", *inside, class_="mark", data_tip="\n".join(tip), data_value=row["tokens_per_second"]))
    return Markup("").join(parts)


def _names(ends: dict[str, float], left: float, colours: dict[str, str]) -> list[Markup]:
    """Names at the ends of their lines, pushed apart."""
    drawn, last = [], -1e9
    for policy, height in sorted(ends.items(), key=lambda item: item[1]):
        last = max(height, last + 13)
        drawn.append(text(left, last, policy, size=11, fill=colours[policy]))
    return drawn


def _table(title: str, rows: Sequence[Row]) -> Table:
    names = ("tokens_per_second", "low", "high", "tokens_per_forward", "nfe", "ms_per_forward", "first_block_ms")
    heads = ("tokens/s", "20th", "80th percentile", "TPF", "NFE", "ms a forward", "ms to the first block")
    cells = [
        [
            Cell(row["policy"]),
            Cell(str(row["context"]), row["context"]),
            *(Cell(plain(row.get(name)), row.get(name)) for name in names),
            *(Cell(nbytes(row.get(name)), row.get(name)) for name in ("device_bytes", "host_bytes")),
        ]
        for row in rows
    ]
    return Table(name=title, columns=("policy", "prompt", *heads, "device", "host"), rows=cells)
