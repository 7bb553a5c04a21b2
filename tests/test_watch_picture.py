"""The live view as a reader sees it: the canvas by state, the bars, the moves; at any size, and in a file."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import watch_picture
from rich.cells import cell_len
from rich.text import Text

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.features import ColumnState, Tier
from tiered.observe.watch.frame import Frame, TokenState, Words
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.watcher import Watcher
from tiered.offload.lane import Lane
from tiered.runtime import Runtime

PROMPTS = ["sort: Nora Ben Ivan Cleo", "copy: Zoe Ben Ivan Ada Pia"]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    budget = MemoryBudget(device="64MiB")
    return tiered.from_pretrained("embedded", policy="polestar", update_threshold=0, memory=budget)


@pytest.fixture(scope="module")
def frames(runtime: Runtime) -> list[Frame]:
    found: list[Frame] = []
    watcher = Watcher(runtime.ledger, found.append, lambda error: None, True)
    runtime.generate(PROMPTS, max_new_tokens=32, block_length=8, streamer=watcher, inspector=watcher)
    assert not watcher.failed
    return found


@pytest.fixture(scope="module")
def painter(runtime: Runtime) -> Painter:
    assert runtime.tokenizer is not None
    return Painter("model · policy", Words(runtime.tokenizer, runtime.model.mask_token_id, runtime.model.ends))


def styled(text: Text, style: str) -> list[str]:
    return [text.plain[span.start : span.end] for span in text.spans if span.style == style]


def test_the_canvas_by_state(frames: list[Frame], painter: Painter):
    first, half, last = (painter.picture(frame, 100) for frame in (frames[0], frames[4], frames[-1]))
    assert "model · policy  before the first forward  block 1/4" in first.plain
    assert "sort: Nora Ben Ivan Cleo" in first.plain and first.plain.count("░" * 32) >= 2
    assert f"forward 5 ({frames[5].kind})" in painter.picture(frames[5], 100).plain
    assert len(styled(half, "bold green")) >= 1 and styled(half, "italic cyan")
    assert f"{frames[4].count(TokenState.DRAFT)} draft" in half.plain
    assert "\n Ben Cleo Ivan Nora∎\n" in last.plain


def test_the_map_has_a_cell_for_every_column(frames: list[Frame], painter: Painter):
    frame = replace(frames[2], column_states=frames[2].column_states.copy(), states=frames[2].states.copy())
    frame.column_states[0, :3] = ColumnState.FETCHED | ColumnState.STORED, ColumnState.STREAMED, ColumnState.DEVICE
    frame.states[0, :4], frame.states[1, -2:] = TokenState.PROMPT, TokenState.END
    maps = [line for line in painter.picture(frame, 100).plain.split("\n") if re.fullmatch(r"[ ▲■▂≈·]+", line)]
    assert len(maps) == 2 and maps[0].startswith("▲≈·") and len(maps[0]) == frame.tokens.shape[1]
    assert maps[1].rstrip() == maps[1][:-2]
    # A narrow map shows the first state of any of its columns.
    narrow = painter.picture(frame, 20).plain.split("\n")
    assert next(line[0] for line in narrow if re.fullmatch(r"[ ▲■▂≈·]+", line)) == "▲"


def test_tiers_are_bars_and_moves_a_line(frames: list[Frame], painter: Painter):
    frame = replace(frames[3], moved={Lane.FETCH: 1 << 20}, moved_in_all={Lane.FETCH: 3 << 20})
    picture = painter.picture(frame, 160).plain
    device = next(line for line in picture.split("\n") if line.startswith("device"))
    assert device.count("█") == round(32 * frame.tiers[Tier.DEVICE].current / (64 << 20))
    assert "of 64.00 MiB" in device and "weights 7." in device and "(peak)" not in device
    host = next(line for line in picture.split("\n") if line.startswith("host"))
    assert host.count("█") + host.count("░") == 32 and "(peak)" in host and "hidden" in host
    assert "disk " not in picture.split("caches")[0]
    assert "moves   to device 1.00 MiB (3.00 MiB in all)\n" in picture
    assert "moves   nothing\n" in painter.picture(replace(frame, moved={}, moved_in_all={}), 160).plain


@pytest.mark.parametrize("width", [20, 33, 80, 200])
@pytest.mark.parametrize("height", [3, 8, 14, 40])
def test_a_picture_fits(width: int, height: int, frames: list[Frame], painter: Painter):
    for frame in (frames[0], frames[3], frames[-1]):
        lines = painter.picture(frame, width, height).plain.split("\n")
        assert len(lines) <= height and max(map(cell_len, lines)) <= width


def test_a_long_answer_is_shown_around_the_current_block(frames: list[Frame], painter: Painter):
    repeated: dict[str, Any] = {
        name: np.concatenate([getattr(frames[2], name)] * 40, axis=1) for name in ("tokens", "column_states", "layers")
    }
    batch, columns = repeated["tokens"].shape
    states = np.full((batch, columns), TokenState.FIXED)
    states[:, columns // 2 :] = TokenState.NOISE
    fresh = columns // 2 - 1
    states[:, fresh] = TokenState.FRESH
    frame = replace(
        frames[2], **repeated, states=states, answer=(0, columns), span=(fresh - 7, fresh + 1), settled=np.zeros(2)
    )
    for width, height in ((60, 20), (60, 9), (25, 30)):
        picture = painter.picture(frame, width, height)
        assert styled(picture, "bold green"), "the current block is in the picture"
    assert len(styled(painter.picture(frame, 60, 20), "bold green")) >= 2, "of both sequences"


def test_no_token_moves_the_cursor(runtime: Runtime):
    class Tokenizer:
        all_special_ids = (0,)
        texts = ("", "x", "a\nb", "a\r\nb", "a\tb", "\x1b[2J", "\x9b1m")

        def __len__(self) -> int:
            return len(self.texts)

        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(self.texts[token] for token in tokens)

    words = Words(Tokenizer(), 0, [0])  # pyright: ignore[reportArgumentType]
    assert [words[token] for token in range(1, 7)] == ["x", "a⏎b", "a⏎b", "a b", "�[2J", "�1m"]
    assert runtime.tokenizer is not None
    ids = runtime.tokenizer.encode("sort: Nora Ben Ivan 0472")
    ours = Words(runtime.tokenizer, 3, [0])
    assert "".join(ours[token] for token in ids).strip() == runtime.tokenizer.decode(ids)


def test_a_picture_in_a_file(tmp_path: Path, frames: list[Frame], painter: Painter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")  # of the terminal, not of the file
    painter.write_svg(tmp_path / "watch.svg", frames[3])
    svg = (tmp_path / "watch.svg").read_text(encoding="utf-8")
    text = "".join(ElementTree.fromstring(svg).itertext())
    assert "Ben" in text and "weights" in text and len(set(re.findall(r"fill: #(\w{6})", svg))) > 4
    assert "font-face" not in svg and "http" not in svg.replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )
    assert [path.name for path in tmp_path.iterdir()] == ["watch.svg"]


def test_the_picture_of_the_pages_moves_and_explains():
    """If this fails: `python bench/watch_picture.py`."""
    shown = watch_picture.PAGE.read_text(encoding="utf-8")
    for text in (shown, watch_picture.picture()):
        ElementTree.fromstring(text)
        assert text.count("<g ") > 10
        assert all(escape(caption) in text for caption in watch_picture.CAPTIONS.values())
