"""The tokens of one sequence as lines: each coloured by its state, and below it a glyph for its state or its place."""

from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.text import Text

from tiered.core.features import Place
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.looks import PLACES, STATES, Pen
from tiered.observe.watch.place_map import main_place
from tiered.observe.watch.words import LINE_BREAK, Words

_MARKED = (State.DRAFT, State.FRESH, State.REVISED)


@dataclass(slots=True)
class TokenLine:
    """A line of tokens, the line of glyphs below it, and whether a token of the current block is in it."""

    tokens: Text
    glyphs: Text
    current: bool = False


@dataclass(frozen=True, slots=True)
class TokenWriter:
    """Writes tokens of one model on one terminal."""

    words: Words
    pen: Pen
    mask_token_id: int
    eos_token_id: int

    def answer(self, frame: Frame, sequence: int, width: int) -> list[TokenLine]:
        """The answer of `sequence`, broken into lines of `width` cells; what is behind its end is left out."""
        lines = [_empty()]
        room = width
        for column in range(*frame.answer):
            state = State(frame.states[sequence, column])
            if state is State.END:
                break
            text = self._text(int(frame.tokens[sequence, column]))
            for piece in chop_cells(text, width) if cell_len(text) > width else [text]:
                taken = cell_len(piece)
                if taken > room:
                    lines.append(_empty())
                    room = width
                lines[-1].tokens.append(piece, STATES[state].style)
                lines[-1].glyphs.append_text(self._below(piece, state, int(frame.places[sequence, column])))
                room -= taken
            lines[-1].current |= frame.span[0] <= column < frame.span[1]
            if text.endswith(LINE_BREAK):
                lines.append(_empty())
                room = width
        return lines if len(lines) == 1 or lines[-1].tokens else lines[:-1]

    def prompt(self, frame: Frame, sequence: int, width: int) -> Text:
        """The end of the prompt of `sequence`, one line."""
        columns = [column for column in range(frame.answer[0]) if frame.states[sequence, column] != State.PAD]
        pieces: list[str] = []
        room = width - cell_len(self.pen.dots)
        for column in reversed(columns):
            piece = self._text(int(frame.tokens[sequence, column]))
            if cell_len(piece) > room:
                pieces.append(self.pen.dots)
                break
            pieces.append(piece)
            room -= cell_len(piece)
        return Text("".join(reversed(pieces)), STATES[State.PROMPT].style)

    def plain(self, frame: Frame, sequence: int, columns: range) -> str:
        """The tokens of `columns` as they stand, without colour; nothing of what is behind the answer's end."""
        kept = (column for column in columns if frame.states[sequence, column] != State.END)
        return "".join(self._text(int(frame.tokens[sequence, column])) for column in kept)

    def _text(self, token: int) -> str:
        if token == self.mask_token_id:
            return self.pen.glyph(STATES[State.NOISE])
        if token == self.eos_token_id:
            return self.pen.end
        text = self.words.of(token)
        return text.encode("ascii", "replace").decode() if self.pen.plain else text

    def _below(self, piece: str, state: State, places: int) -> Text:
        """As wide as `piece`, its glyph under the first letter."""
        look = STATES[state] if state in _MARKED else PLACES[main_place(places)]
        indent = len(piece) - len(piece.lstrip()) if piece.strip() else 0
        glyph = " " if look is PLACES[Place.DEVICE] else self.pen.glyph(look)
        below = Text(" " * indent)
        below.append(glyph if cell_len(piece) > indent else "", look.style)
        below.append(" " * (cell_len(piece) - cell_len(below.plain)))
        return below


def _empty() -> TokenLine:
    return TokenLine(Text(no_wrap=True), Text(no_wrap=True))
