"""The moving picture of the live view, docs/watch.svg: `python bench/watch_picture.py`. Needs the extra `watch`.

A call is watched, and each of its frames is drawn as `tiered generate --watch` draws it, with a caption at each line.
"""

import argparse
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME as THEME
from rich.text import Text

import tiered
from tiered.core.whole_file import write_then_rename
from tiered.observe.watch.frame import Frame, Words
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.watcher import Watcher

PAGE = Path(__file__).resolve().parents[1] / "docs" / "watch.svg"
PROMPT = "sort: Nora Ben Ivan Cleo Hana Uma Tara Max Eva Pia Lena Gus"
MEMORY = "5MiB"  # the weights alone are 7.2 MiB
CALL: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8}
CELLS, CELL, LINE = 76, 9.0, 24  # cells of a line; pixels of a cell's width and of a line's height
SIDE, SECONDS = 350, 0.9  # pixels for captions; seconds of a frame
# Captions by the first word of a line, or by the line's number.
CAPTIONS = {
    "0": "model, policy, step, block",
    "1": "the prompt",
    "2": "the answer: green is new, blue a guess",
    "3": "each token: what the step did (see caches)",
    "device": "device memory: never above its 5 MiB",
    "host": "host memory: what the device cannot hold",
    "moves": "copies of this step, beside its compute",
}


def frames_of() -> tuple[list[Frame], Painter]:
    """Every frame of the call, and the painter that draws them."""
    frames: list[Frame] = []
    with tiered.from_pretrained("embedded", policy="polestar", memory=MEMORY, update_threshold=2) as runtime:
        assert runtime.tokenizer is not None
        words = Words(runtime.tokenizer, runtime.model.mask_token_id, runtime.model.ends)
        watcher = Watcher(runtime.ledger, frames.append, lambda error=None: None, stop_at_eos=True)
        runtime.generate(PROMPT, streamer=watcher, inspector=watcher, **CALL)
    return frames, Painter("embedded · polestar", words)


def drawn(lines: Sequence[Text], console: Console) -> str:
    """The lines of a frame as SVG, with their captions."""
    parts = []
    for row, line in enumerate(lines):
        y, x = (row + 1) * LINE + 10, 0
        words = line.plain.split("  ")[0].split(" ")[0]
        for piece in line.render(console):
            if piece.text.strip():
                style = piece.style
                color = style.color.get_truecolor(THEME) if style and style.color else THEME.foreground_color
                look = f'fill="{color.hex}"'
                look += ' font-weight="bold"' if style and style.bold else ""
                look += ' font-style="italic"' if style and style.italic else ""
                look += ' text-decoration="underline"' if style and style.underline else ""
                place = f'x="{20 + x * CELL:.0f}" y="{y}" textLength="{len(piece.text) * CELL:.0f}"'
                parts.append(f"<text {place} {look}>{escape(piece.text)}</text>")
            x += len(piece.text)
        if caption := CAPTIONS.get(words, CAPTIONS.get(str(row))):
            parts.append(f'<text class="c" x="{40 + CELLS * CELL:.0f}" y="{y}">← {caption}</text>')
    return "\n".join(parts)


def picture() -> str:
    frames, painter = frames_of()
    console = Console(file=io.StringIO(), width=CELLS, force_terminal=True, color_system="truecolor")
    shown = [list(painter.picture(frame, CELLS).split("\n")) for frame in frames]
    for lines in shown:
        lines[0].truncate(lines[0].plain.index("block") + len("block 1/2"))
        del lines[1]  # rates of the machine, as the end of the first line
    width, height = 40 + CELLS * CELL + SIDE, max(map(len, shown)) * LINE + 30
    last, each = len(shown) - 1, 100 / len(shown)
    styles = [
        f".f{number} {{ animation: f{number} {len(shown) * SECONDS:.1f}s step-end infinite }}\n"
        f"@keyframes f{number} {{ 0% {{ visibility: {'visible' if number == 0 else 'hidden'} }} "
        f"{number * each:.2f}% {{ visibility: visible }} {(number + 1) * each:.2f}% {{ visibility: hidden }} }}"
        for number in range(len(shown))
    ]
    groups = [
        f'<g class="f{number}" visibility="{"visible" if number == last else "hidden"}">\n{drawn(lines, console)}\n</g>'
        for number, lines in enumerate(shown)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
            "<title>tiered generate --watch: an answer is denoised under a budget of bytes</title>",
            "<style>",
            "text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 15px; white-space: pre }",
            ".c { font-family: system-ui, sans-serif; font-size: 14px; fill: #e6db74 }",
            *styles,
            "</style>",
            f'<rect width="{width:.0f}" height="{height}" rx="10" fill="#1e1f1c"/>',
            *groups,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    text = picture()
    write_then_rename(PAGE, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"{PAGE}: {len(text)} bytes")
