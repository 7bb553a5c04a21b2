"""The look of every picture: colours for light and dark pages, the same for a policy everywhere, and drawing as SVG.

Charts are drawn once, in light colours. In a page each light colour is a CSS variable, which has another value in the
dark, so no two names share a light colour. Hues keep apart for the colour-blind (Okabe and Ito 2008); shades of a hue
differ in lightness.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from charts.rows import Row
from tiered.core.extras import needing

with needing("bench"):
    import altair as alt
    import vl_convert

WIDE, NARROW = 930, 350  # pixels of a picture: on a desk, on a phone
FONT = "Verdana, DejaVu Sans, sans-serif"  # both are equally wide: measured text does not overlap


def _colours(text: str) -> dict[str, tuple[str, str]]:
    names = (entry.split() for entry in text.split(";"))
    return {name: (f"#{light}", f"#{dark}") for name, light, dark in names}


# Name, colour on light pages, colour on dark ones.
BASE = _colours("""page fbfaf7 14171a; card ffffff 1b1f23; ink 1f2428 e6e4df; soft 59626a a9b1b8; line d3d0c8 3a4147;
    grid ecebe6 272c31; accent 0b6e63 5ccfbc; blank e3e1da 31373d; hidden a9cfe6 2f5f7d; exposed d55e01 ff8f4d;
    on-low 1f2429 f2f0eb; on-high fffffe 101315; on-bright 17191b 101316""")
RAMP = _colours("""few eaf2f8 22303b; some c3dcec 2a4c63; middling 92c0dd 33698c; more 5a9fca 376f97;
    many 2c7bb0 7db3d8; most 0c5588 b5d9f1""")
POLICIES = _colours("""none 7a828a 9aa3ab; attended c03d50 f0838f; fast_dllm_prefix 6fb7e0 a7d8f5;
    fast_dllm_dual 0072b2 4fa6e3; dkv_decode 8a63b8 b795e4; dkv_greedy 5d3a8c 9873c8;
    dkv_prefill b79bd8 d8c4f2; dkv_pd 714aa5 a47fd6;
    dllm_cache cc79a7 e79cc5; elastic_cache e69f00 f5bb45; uniform a89400 e5d63f; uniform_prefix cfc04a f3eb9a;
    polestar 009e73 36c99c; polestar-drift 8fd6bf b5efdd; polestar-paper 5cc2a2 8be0c6;
    polestar-fresh 7aa800 b9e34d; polestar-window 00664a 1f9c77""")
OTHERS = _colours("other-0 3d3a35 d9d4ca; other-1 8c6d4f c9a785; other-2 b0413e ef8a86")  # peers, by name in turn
ACCOUNTS = _colours("""weights b5b1a8 6b7178; key 0072b3 4fa6e4; value 7fb9dd 2d6b97; hidden_states 009e74 36c99d;
    attn_out 63c2a4 1f8f6d; ffn_out b3e0d1 175f4a; centroids e69f01 f5bb46; staging cc79a8 e79cc6; spare f0d9a8 66583a;
    logits 8a63b9 b795e5; activations d9cbe8 564870; libraries 3d3a36 d9d4cb""")
VARIABLES = BASE | RAMP | POLICIES | OTHERS | ACCOUNTS
LIGHT = {name: light for name, (light, _) in VARIABLES.items()}
_NAMES = {light: name for name, light in LIGHT.items()}
_WORDS = {"labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"], "labelFontSize": 12, "titleFontSize": 12}
_LINES = {"domainColor": LIGHT["line"], "tickColor": LIGHT["line"], "gridColor": LIGHT["grid"]}
CONFIG = {
    **{"aria": False, "font": FONT, "background": LIGHT["card"], "padding": 4, "view": {"stroke": None}},
    "axis": _WORDS | _LINES | {"titleFontWeight": "normal", "labelLimit": 160, "labelSeparation": 3},
    "legend": _WORDS | {"symbolType": "square", "columnPadding": 14, "rowPadding": 3},
    "title": {
        "color": LIGHT["ink"],
        "fontSize": 13,
        "fontWeight": 600,
        "anchor": "start",
        "frame": "group",
        "offset": 8,
    },
    "text": {"fontSize": 12, "color": LIGHT["ink"]},
}


def css() -> str:
    """The variables: light, and dark on screens that prefer it."""
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in VARIABLES.items()) for side in (0, 1))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def policy_colours(policies: Iterable[str]) -> dict[str, str]:
    """The colour of each policy, in the order of legends."""
    shown = sorted(set(policies), key=lambda policy: (rank(policy), policy))
    unknown = [policy for policy in shown if rank(policy) == len(POLICIES)]
    others = {policy: LIGHT[f"other-{number % len(OTHERS)}"] for number, policy in enumerate(unknown)}
    return {policy: others.get(policy) or LIGHT[list(POLICIES)[rank(policy)]] for policy in shown}


def rank(policy: str) -> int:
    """The place of a policy in `POLICIES`, from the simplest on; their number if it has none. A name counts up to a
    comma, and without the `-again` of a second measurement."""
    name = policy.partition(",")[0].removesuffix("-again")
    return list(POLICIES).index(name) if name in POLICIES else len(POLICIES)


def ink_on(colour: str) -> str:
    """The colour of text on a policy's light colour, by WCAG 2.1's relative luminance; its dark colours are bright."""
    parts = [(int(colour[place : place + 2], 16) / 255) ** 2.2 for place in (1, 3, 5)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    return LIGHT["on-bright" if luminance > 0.2 else "on-high"]


def colour(field: str, colours: Mapping[str, str], width: int) -> alt.Color:
    """A colour for each value of `field`, with a legend in as many columns as `width` pixels hold, 0 for none."""
    columns = max(1, int(width / (7.9 * max(map(len, colours), default=1) + 30)))
    key = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=0, symbolStrokeWidth=0) if width else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=key)


def data(rows: Iterable[Row]) -> alt.Chart:
    """A chart of `rows`, without marks yet. They go in as JSON, because altair copies and checks other data."""
    return alt.Chart(alt.InlineData(values=json.dumps(list(rows)), format=alt.JsonDataFormat(type="json")))


def side_by_side(
    parts: Mapping[str, Sequence[Row]],
    width: int,
    draw: Callable[[Sequence[Row], int], Any],
    *,
    margin: int,
    least: int,
) -> alt.TopLevelMixin:
    """A panel for each of `parts`, by their titles, as many beside one another as fit. `draw` makes one of a width in
    pixels. `margin`: pixels of its axis beside that; `least`: pixels of a panel, margin included."""
    columns = max(1, min(len(parts), width // least))
    inner = width // columns - margin
    letters = int((inner + margin - 50) / 8.2)  # pixels of an axis, and of a letter
    charts = [draw(rows, inner).properties(title=textwrap.wrap(title, letters)) for title, rows in parts.items()]
    return alt.concat(*charts, columns=columns, spacing=16).resolve_scale(color="shared", strokeDash="shared")


def svg(chart: alt.TopLevelMixin) -> str:
    """The chart as an SVG file in light colours."""
    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    drawn = vl_convert.vegalite_to_svg(chart.to_dict(validate=False) | {"config": CONFIG}, vl_version=version)
    return re.sub(r'<path [^>]*(?:display="none"|d="M0,0h0v0h0Z")[^>]*/>', "", drawn)  # most of it: invisible frames


def inlined(drawn: str, label: str, name: str) -> str:
    """An SVG as a part of a page: colours are variables, `label` is for screen readers, ids begin with `name`."""
    text = re.sub(r"#[0-9a-f]{6}\b", lambda hit: f"var(--{_NAMES[hit[0]]})" if hit[0] in _NAMES else hit[0], drawn)
    text = re.sub(r'(id="|url\(#)', rf"\1{name}-", text)
    told = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return re.sub(r"<svg [^>]*?(?= width)", f'<svg role="img" aria-label="{told}"', text, count=1)
