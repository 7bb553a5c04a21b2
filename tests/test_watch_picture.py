"""Frames as lines: what is coloured how, what stands below what, and what is left out where there is no room."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from tiered.core.features import Account, ColumnState, Tier
from tiered.observe.watch.bars import LABEL, column_map, columns_per_cell, copies, tier_bars
from tiered.observe.watch.frame import Copied, Frame, State, TierBytes
from tiered.observe.watch.looks import COLUMNS, GROUPS, STATES, Pen
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.tokens import TokenWriter, Words, printable
from tiered.observe.watch.views import PlainView, Still
from tiered.offload.lane import Lane

MASK, EOS = 3, 0
MIB = 1 << 20


@pytest.fixture(scope="module")
def words(tokenizer: PreTrainedTokenizerBase) -> Words:
    return Words(tokenizer)


@pytest.fixture
def writer(words: Words) -> TokenWriter:
    return TokenWriter(words, Pen(), MASK, EOS)


@pytest.fixture
def painter(writer: TokenWriter) -> Painter:
    return Painter("model · policy", writer, Pen())


def frame(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, span: tuple[int, int], **more: Any) -> Frame:
    """One sequence; `answer` with `.` for masks, `span` counted from its first token."""
    ids, answered = tokenizer.encode(prompt), []
    for piece in re.findall(r"\.|[^.]+", answer):
        answered += [MASK] if piece == "." else tokenizer.encode(piece)
    tokens = np.array([ids + answered])
    first, last = len(ids), tokens.shape[1]
    states = np.full(tokens.shape, State.PROMPT, dtype=np.int8)
    states[:, first:] = np.where(tokens[:, first:] == MASK, State.NOISE, State.FIXED)
    column_states, layers, edits = (np.zeros(tokens.shape, dtype=np.int8) for _ in range(3))
    tiers = (
        TierBytes(
            tier=Tier.DEVICE, accounts={Account.WEIGHTS: 4 * MIB, Account.KEY: 2 * MIB, Account.VALUE: 2 * MIB},
            peak=9 * MIB, cap=16 * MIB,
        ),
        TierBytes(tier=Tier.HOST, accounts={Account.HIDDEN: 3 * MIB, Account.SPARE: MIB}, peak=4 * MIB, cap=None),
        TierBytes(tier=Tier.DISK, accounts={}, peak=0, cap=None),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "forward": 4, "kind": "update", "block": 0, "blocks": 2, "step": 4, "correcting": False,
        "span": (first + span[0], first + span[1]), "answer": (first, last), "tokens": tokens, "states": states,
        "column_states": column_states, "layers": layers, "edits": edits, "active": (True,), "settled": (6,),
        "forwards": (4,), "seconds": 65.0, "forward_seconds": 0.5, "tiers": tiers,
        "copies": {Lane.FETCH: Copied(nbytes=MIB, busy_ns=10**9, total=3 * MIB)},
    }  # fmt: skip
    return Frame(**{**fields, **more})


@pytest.fixture
def shown(tokenizer: PreTrainedTokenizerBase) -> Frame:
    found = frame(tokenizer, "sort: Nora Ben Ivan Cleo", "Ben Cleo Ivan Nora....", (0, 4))
    first = found.answer[0]
    found.states[0, first + 1 : first + 4] = State.FRESH, State.DRAFT, State.REVISED
    found.column_states[0, 1] = ColumnState.FETCHED | ColumnState.RECOMPUTED | ColumnState.STORED
    found.column_states[0, 2] = ColumnState.STORED | ColumnState.STREAMED
    found.column_states[0, first] = ColumnState.RECOMPUTED
    found.column_states[0, first + 4] = ColumnState.STREAMED
    return found


def batch_of(one: Frame, count: int) -> Frame:
    arrays = {
        name: np.repeat(getattr(one, name), count, axis=0) for name in ("tokens", "states", "column_states", "layers")
    }
    return replace(one, **arrays, active=(True,) * count, settled=(6,) * count, forwards=(4,) * count)


def text(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def test_tokens_read_as_the_tokenizer_joins_them(tokenizer: PreTrainedTokenizerBase, words: Words):
    ids = tokenizer.encode("sort: Nora Ben Ivan 0472")
    assert "".join(map(words.of, ids)).strip() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("written", "told"), [("a\nb", "a⏎b"), ("a\r\nb", "a⏎b"), ("a\tb", "a b"), ("\x1b[2J", "�[2J"), ("\x9b1m", "�1m")]
)
def test_no_token_moves_the_cursor(written: str, told: str):
    assert printable(written) == told


def test_every_token_has_its_colour_and_its_glyph(shown: Frame, writer: TokenWriter):
    (line,) = writer.answer(shown, 0, 80)
    assert line.tokens.plain == " Ben Cleo Ivan Nora░░░░"
    assert line.glyphs.plain == " ■   +    ?    ~   ≈   "
    assert line.current
    styles = {line.tokens.plain[span.start : span.end].strip(): str(span.style) for span in line.tokens.spans}
    expected = {"Cleo": State.FRESH, "Ivan": State.DRAFT, "Nora": State.REVISED, "░": State.NOISE}
    assert {word: styles.get(word) for word in expected} == {
        word: STATES[state].style for word, state in expected.items()
    }
    assert "Ben" not in styles or not styles["Ben"], "what is settled is not coloured"


def test_looks_are_told_apart_without_colour():
    for pen in (Pen(), Pen(plain=True)):
        marks = [pen.glyph(STATES[state]) for state in (State.DRAFT, State.FRESH, State.REVISED)]
        columns = [pen.glyph(look) for state, look in COLUMNS.items() if state is not ColumnState.DEVICE]
        assert len({*marks, *columns}) == len(marks) + len(columns)
        assert len({pen.glyph(look) for look in COLUMNS.values()}) == len(COLUMNS)
        assert len({pen.glyph(group.look) for group in GROUPS}) == len(GROUPS)
    assert all(look.plain.isascii() for look in (*STATES.values(), *COLUMNS.values(), *(g.look for g in GROUPS)))
    assert {account for group in GROUPS for account in group.accounts} == set(Account), "every account is in a bar"
    assert Pen.of("utf-8") == Pen.of("UTF8") == Pen() and Pen.of("ANSI_X3.4-1968") == Pen.of("") == Pen(plain=True)


def test_lines_break_at_tokens_and_nothing_comes_behind_the_end(
    tokenizer: PreTrainedTokenizerBase, writer: TokenWriter
):
    one = frame(tokenizer, "copy: Ada", "Ben Cleo Ivan Nora Ben Cleo<|endoftext|>..", (4, 6))
    one.states[0, one.answer[0] + 7 :] = State.END
    lines = writer.answer(one, 0, 12)
    assert [line.tokens.plain for line in lines] == [" Ben Cleo", " Ivan Nora", " Ben Cleo∎"]
    assert [line.current for line in lines] == [False, False, True]
    assert all(line.glyphs.cell_len == line.tokens.cell_len for line in lines)


def test_wide_letters_and_line_breaks(tokenizer: PreTrainedTokenizerBase):
    class Strange(Words):
        def of(self, token: int) -> str:
            return {1: "漢字", 2: "end⏎", 3: "x" * 25}.get(token, " a")

    one = frame(tokenizer, "copy: Ada", "Ben Ben Ben Ben Ben", (0, 1))
    first = one.answer[0]
    one.tokens[0, first : first + 5] = 1, 1, 2, 99, 3
    lines = TokenWriter(Strange(tokenizer), Pen(), -1, -2).answer(one, 0, 10)
    assert [line.tokens.plain for line in lines] == ["漢字漢字", "end⏎", " a", "x" * 10, "x" * 10, "x" * 5]
    assert all(line.glyphs.cell_len == line.tokens.cell_len for line in lines)


@pytest.mark.parametrize("width", [14, 20, 60])
def test_the_map_shows_where_most_columns_of_a_cell_are(shown: Frame, width: int):
    per_cell = columns_per_cell(shown, width)
    line = text(column_map(shown, 0, per_cell, width, Pen()))
    assert "\n" not in line and len(line) <= width
    assert line.count("|") == line.count("[") == line.count("]") == 1
    if per_cell == 1:
        assert line == "·▲▂···|[■···]≈···"
    else:
        assert "▲" not in line or per_cell == 2


def test_of_several_columns_most_count():
    def cell(*columns: ColumnState) -> str:
        row = np.array([[*columns]], dtype=np.int8)
        blank = np.full(row.shape, State.PROMPT, dtype=np.int8)
        part = dict.fromkeys(("forward", "block", "blocks", "step"), 0) | {"kind": "", "correcting": False}
        arrays = {"tokens": row, "states": blank, "column_states": row, "layers": row, "edits": row}
        rest: dict[str, Any] = {"active": (True,), "settled": (0,), "forwards": (0,), "tiers": (), "copies": {}}
        ends = (len(columns), len(columns))
        one = Frame(**part, **arrays, **rest, span=ends, answer=ends, seconds=0.0, forward_seconds=0.0)
        return column_map(one, 0, len(columns), 20, Pen())[0].plain[0]

    stored, fetched = ColumnState.STORED, ColumnState.FETCHED | ColumnState.STORED | ColumnState.RECOMPUTED
    assert cell(stored, stored, fetched) == "▂"
    assert cell(stored, fetched) == "▲", "of equally many the most telling"
    assert cell(ColumnState.DEVICE, ColumnState.DEVICE, stored) == "·"


def test_bars_are_in_proportion(shown: Frame):
    device, host = tier_bars(shown, 80, Pen())
    bar = device.plain.partition("[")[2].partition("]")[0]
    assert bar.count("█") == round(len(bar) / 4) and bar.count("█") + bar.count("▓") == round(len(bar) / 2)
    assert device.plain.endswith("] 8.00 MiB of 16.00 MiB")
    assert host.plain.endswith("] 4.00 MiB of 4.00 MiB (peak)")
    bar = host.plain.partition("[")[2].partition("]")[0]
    assert bar.count("▒") == round(len(bar) * 3 / 4) and " " not in bar
    assert device.cell_len <= 80 and host.cell_len <= 80
    assert next(tier_bars(shown, 40, Pen())).plain.endswith("] 8.00 MiB")


def test_copies_are_a_line_of_heights(shown: Frame):
    before = [replace(shown, copies={Lane.FETCH: Copied(nbytes=size)}) for size in (0, MIB // 2, 4)]
    (line,) = copies([*before, shown], 80, Pen())
    assert line.plain.startswith(f"{'to device':<{LABEL}}")
    assert "▄▁█ 1.00 MiB now at 1.00 MiB/s, 3.00 MiB in all" in line.plain
    assert not list(copies([replace(shown, copies={Lane.FETCH: Copied()})], 80, Pen()))


def test_the_head_tells_where_the_call_is(shown: Frame, painter: Painter):
    head = painter.picture([shown], 120)[0].plain
    assert head == "model · policy  block 1/2  forward 5 update  1.50 tokens/forward  0.1 tokens/s  01:05.0"
    edits = np.zeros_like(shown.edits)
    edits[0, -3:] = 1, 2, 3
    assert "2 more than once so far" in text(painter.picture([replace(shown, edits=edits)], 120))
    told = text(painter.picture([replace(shown, forward=-1, kind="", correcting=True)], 120))
    assert "before the first forward" in told and "(correcting)" in told


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize("count", [1, 3])
def test_every_line_fits_the_width(shown: Frame, painter: Painter, width: int, count: int):
    lines = painter.picture([batch_of(shown, count)], width)
    assert all(cell_len(line.plain) <= width for line in lines)
    told = text(lines)
    assert told.count("prompt") == count and "device" in told and "legend" not in told
    for look in COLUMNS.values():
        assert look.glyph in told and look.name.split()[0] in told


@pytest.mark.parametrize("height", [3, 6, 10, 14, 24, 50])
def test_what_does_not_fit_the_height_is_left_out(tokenizer: PreTrainedTokenizerBase, painter: Painter, height: int):
    long = frame(tokenizer, "copy: Ada", " ".join(["Ada Ben Cleo Dan"] * 40), (80, 84))
    long.states[0, slice(*long.span)] = State.FRESH
    lines = painter.picture([long], 60, height)
    assert len(lines) <= height
    told = text(lines)
    assert "forward 5" in told
    fresh = [line for line in lines if any(str(span.style) == STATES[State.FRESH].style for span in line.spans)]
    assert fresh, "the current block is what stays"
    assert ("weights" in told, "streamed" in told) == (height >= 24, height >= 50)
    everything = painter.picture([long], 60)
    assert len(everything) > 24 and "weights" in text(everything)


def test_sequences_beyond_the_screen_are_counted(shown: Frame, painter: Painter):
    told = text(painter.picture([batch_of(shown, 40)], 80, 24))
    shown_now = told.count("░░░░") - told.count("░ noise")
    assert 1 < shown_now < 40 and f"and {40 - shown_now} more sequences" in told


def test_plain_glyphs_are_ascii(shown: Frame, words: Words):
    pen = Pen(plain=True)
    told = text(Painter("model", TokenWriter(words, pen, MASK, EOS), pen).picture([shown], 100))
    assert told.isascii()


def test_a_still_is_an_svg_without_network(shown: Frame, painter: Painter, tmp_path: Path):
    still = Still(painter)
    dull = replace(shown, forward=0, column_states=np.zeros_like(shown.column_states))
    for one in (dull, shown, replace(dull, forward=9)):
        still.show(one)
    still.write(tmp_path / "frame.svg")
    svg = (tmp_path / "frame.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "forward&#160;5" in svg, "the frame with something fetched"
    assert "@font-face" not in svg and "url(http" not in svg
    with pytest.raises(ValueError, match="no picture"):
        Still(painter).write(tmp_path / "none.svg")


def test_without_colour_attributes_remain(shown: Frame, painter: Painter):
    def drawn(no_color: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=no_color, width=80)
        console.print(*painter.picture([shown], 80), sep="\n")
        written = console.file
        assert isinstance(written, io.StringIO)
        return written.getvalue()

    codes = {code for run in re.findall(r"\x1b\[([\d;]*)m", drawn(True)) for code in run.split(";")}
    assert codes <= {"", "0", "1", "3"} and {"1", "3"} <= codes, "bold and italic, no colour"
    assert re.search(r"\x1b\[[\d;]*3[1-7]m", drawn(False))


def test_a_plain_line_has_every_figure(shown: Frame, writer: TokenWriter, capsys: pytest.CaptureFixture[str]):
    shown.layers[0, :3] = 2
    view = PlainView(writer)
    view.show(replace(shown, forward=-1))
    view.show(shown)
    view.close(finished=True)
    out, err = capsys.readouterr()
    line, last = err.splitlines()
    assert not out and line.startswith("watch forward=5 ")
    figures, _, told = line.partition(" text=")
    fields = dict(word.split("=") for word in figures.split()[1:])
    expected = {
        "block": "1/2", "step": "5", "kind": "update", "active": "1/1", "committed": "1", "rewritten": "1",
        "draft": "1", "noise": "4", "recomputed": "2", "fetched": "1", "stored": "2", "streamed": "2", "rows": "6",
        "device": str(8 * MIB), "host": str(4 * MIB), "disk": "0", "to_device": str(MIB), "to_host": "0",
        "tokens": "6", "tokens_per_forward": "1.500", "ms": "500.0",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert json.loads(told) == [" Ben Cleo Ivan Nora"]
    assert last.startswith("watch end forwards=5 tokens=6 ") and f"device_peak={9 * MIB}" in last
    assert f"to_device={3 * MIB}" in last
