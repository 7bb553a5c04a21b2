"""The tokens of one sequence as lines: each coloured by its state, and below it the glyph of that or of its column."""

import unicodedata
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from tiered.core.features import ColumnState
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.looks import COLUMNS, STATES, Pen, main_state

LINE_BREAK = "⏎"
_UNPRINTABLE = "�"


class Words:
    """Texts of tokens, looked up once each: one token at a time, and nothing that moves the cursor."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None

    def of(self, token: int) -> str:
        """The text of `token` with the space in front of it, if it has one; a line break is `⏎`."""
        if token not in self._known:
            self._known[token] = printable(self._text(token))
        return self._known[token]

    def _text(self, token: int) -> str:
        # Alone, a token would lose its space in many tokenizers; behind another it keeps it.
        if self._anchor is None:
            special = set(self._tokenizer.all_special_ids)
            first = next((token for token in range(len(self._tokenizer)) if token not in special), 0)
            self._anchor = first, self._decode([first])
        first, before = self._anchor
        both = self._decode([first, token])
        return both[len(before) :] if both.startswith(before) else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence is one text"
        return text


def printable(text: str) -> str:
    """`text` without control characters, which a model may write and a terminal would obey."""
    text = text.replace("\r\n", "\n").replace("\n", LINE_BREAK).replace("\t", " ")
    return "".join(_UNPRINTABLE if unicodedata.category(char)[0] == "C" else char for char in text)


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
                lines[-1].glyphs.append_text(self._below(piece, state, int(frame.column_states[sequence, column])))
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

    def _below(self, piece: str, state: State, column: int) -> Text:
        """As wide as `piece`, its glyph under the first letter."""
        look = STATES[state] if state in _MARKED else COLUMNS[main_state(column)]
        indent = len(piece) - len(piece.lstrip()) if piece.strip() else 0
        glyph = " " if look is COLUMNS[ColumnState.DEVICE] else self.pen.glyph(look)
        below = Text(" " * indent)
        below.append(glyph if cell_len(piece) > indent else "", look.style)
        below.append(" " * (cell_len(piece) - cell_len(below.plain)))
        return below


def _empty() -> TokenLine:
    return TokenLine(Text(no_wrap=True), Text(no_wrap=True))
