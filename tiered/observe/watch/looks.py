"""How tokens, columns and accounts look: a glyph and a style each, so that neither colour nor a wide font is needed."""

from dataclasses import dataclass

from tiered.core.features import Account, ColumnState
from tiered.observe.watch.frame import State


@dataclass(frozen=True, slots=True)
class Look:
    """A glyph, the one that stands for it where a terminal cannot write it, a rich style, and what it is called."""

    glyph: str
    plain: str
    style: str
    name: str


# Glyphs of states stand below their tokens; a mask has no text and is its glyph.
STATES = {
    State.PAD: Look(" ", " ", "", "padding"),
    State.PROMPT: Look(" ", " ", "bright_black", "prompt"),
    State.NOISE: Look("░", ".", "bright_black", "noise"),
    State.DRAFT: Look("?", "?", "italic cyan", "draft"),
    State.FRESH: Look("+", "+", "bold green", "committed now"),
    State.REVISED: Look("~", "~", "bold yellow", "rewritten now"),
    State.FIXED: Look(" ", " ", "", "committed"),
    State.END: Look(" ", " ", "bright_black", "end"),
}

# Of several that are true of a column, and of equally many columns in a cell, the first one counts.
COLUMNS = {
    ColumnState.FETCHED: Look("▲", "^", "bold red", "fetched and recomputed"),
    ColumnState.RECOMPUTED: Look("■", "#", "green", "recomputed"),
    ColumnState.STORED: Look("▂", "_", "blue", "hidden rows in host"),
    ColumnState.STREAMED: Look("≈", "=", "magenta", "streamed"),
    ColumnState.DEVICE: Look("·", ".", "bright_black", "device only"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Accounts that are shown as one, and how."""

    accounts: tuple[Account, ...]
    look: Look


GROUPS = (
    Group((Account.WEIGHTS,), Look("█", "W", "blue", "weights")),
    Group((Account.KEY, Account.VALUE), Look("▓", "K", "green", "keys, values")),
    Group((Account.HIDDEN,), Look("▒", "H", "magenta", "hidden")),
    Group((Account.ATTN_OUT, Account.FFN_OUT), Look("◆", "B", "yellow", "branches")),
    Group((Account.CENTROIDS,), Look("●", "C", "red", "centroids")),
    Group((Account.STAGING,), Look("≡", "S", "cyan", "staging")),
    Group((Account.LOGITS, Account.ACTIVATIONS, Account.LIBRARIES), Look("▪", "A", "white", "steps")),
    Group((Account.SPARE,), Look("□", "-", "bright_black", "spare")),
)


@dataclass(frozen=True, slots=True)
class Pen:
    """What a terminal can write. `plain`: ASCII alone."""

    plain: bool = False

    @classmethod
    def of(cls, encoding: str) -> "Pen":
        """For a terminal with this encoding."""
        return cls(plain=not encoding.lower().replace("-", "").replace("_", "").startswith("utf"))

    def glyph(self, look: Look) -> str:
        """The glyph of `look`."""
        return look.plain if self.plain else look.glyph

    @property
    def bars(self) -> str:
        """Eight heights."""
        return "_.:-=+*#" if self.plain else "▁▂▃▄▅▆▇█"

    @property
    def dots(self) -> str:
        """What is left out."""
        return "..." if self.plain else "…"

    @property
    def rule(self) -> str:
        """A line across."""
        return "-" if self.plain else "─"

    @property
    def end(self) -> str:
        """An end-of-sequence token."""
        return "$" if self.plain else "∎"


def main_state(states: int) -> ColumnState:
    """Of several states that are true of a column the one that is shown."""
    return next((state for state in COLUMNS if states & state), ColumnState.DEVICE)
