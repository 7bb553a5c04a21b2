"""The sentences around the tables of a comparison: what is particular to some rows, and how figures were measured."""

import textwrap

from comparing.rounds import AGAIN
from comparing.summary import LONG, Row, grouped, is_long


def notes(result: Row) -> list[str]:
    """A paragraph of what is particular to some rows, if there is anything."""
    told = [*_calls(result["variants"]), *_refusals(result["rows"])]
    return [prose(" ".join(told))] if told else []


def _calls(variants: Row) -> list[str]:
    """A sentence for each policy that answers another call than the rest, or has options that are no defaults."""
    ways = {"one_block": "in one block", "random_order": "in random order"}
    policies = {name: variant for name, variant in variants.items() if variant["policy"] != "none"}
    return [
        *(
            f"`{name}` answers {way}, and so does one row of `none`."
            for name, variant in policies.items()
            for flag, way in ways.items()
            if variant[flag]
        ),
        *(
            f"`{name}` has `{', '.join(f'{option}={value!r}' for option, value in variant['given'].items())}`."
            for name, variant in policies.items()
            if variant["given"]
        ),
    ]


def _refusals(rows: list[Row]) -> list[str]:
    """A sentence for each reason that some policies have no figures for, with the commit rule where others have."""
    commits = list(grouped(rows, "commit"))
    refused: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        if "why" in row:
            refused.setdefault(row["why"], {}).setdefault(row["policy"], {})[row["commit"]] = None
    told: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for why, policies in refused.items():
        for policy, theirs in policies.items():
            told.setdefault((why, tuple(theirs)), []).append(f"`{policy}`")
    return [
        f"{' and '.join(policies)}{'' if len(theirs) == len(commits) else ', ' + ' and '.join(theirs)}: {why}."
        for (why, theirs), policies in told.items()
    ]


def second_caption(result: Row, commit: str, cost: Row | None) -> str:
    """What stands above the table of what a step costs."""
    long = f"Lookups in {LONG[1] + result['canvas']} positions, {commit}, answers in blocks of {result['block']}"
    speeds = _speeds(result)
    if cost is None:
        return f"{long}.{speeds}" if speeds else f"{long}:"
    return (
        f"{long}.{speeds} Then the time of a plain step in {cost['positions']} positions (a random model, width "
        f"{cost['width']}, {cost['layers']} layers) over a full pass; over the floor, which is the share of the "
        "positions that it recomputes; and, of a layer, over a block-only step of as many rows:"
    )


def _speeds(result: Row) -> str:
    """How speeds were measured, with a blank in front; nothing for rows from before there were rounds."""
    shown = [row for row in result["rows"] if is_long(row) and "why" not in row]
    rounds = [row["rounds"] for row in shown if "rounds" in row]
    told = ""
    if rounds:
        several = sorted({number for number in rounds if number > 1})
        number = " to ".join(dict.fromkeys(str(each) for each in (several[0], several[-1]))) if several else "one"
        told += f" Speed is the median of {number} rounds" if several else " Speed is of one round"
        told += " (of one, where there is no ratio)" if several and len(rounds) < len(shown) else ""
        told += "; over `none` in the same call and round" if any("speedup" in row for row in result["rows"]) else ""
        told += ", with the 20th to 80th percentile." if max(rounds) > 1 else "."
    if floor := result.get("noise_floor"):
        told += (
            f" `{AGAIN}` is `none` measured twice: {floor['pairs']} such pairs are apart by {100 * floor['p80']:.1f} % "
            f"at the 80th percentile, by {100 * floor['largest']:.1f} % at most, and less than that is noise."
        )
    if any(row.get("bytes") == "counted" for row in result["rows"]):
        told += " Bytes after ≥ are counted: weights and cached tensors, without activations."
    return told


def prose(text: str) -> str:
    """Lines as long as those of the page."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
