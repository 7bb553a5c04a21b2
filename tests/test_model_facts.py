"""The table of docs/models.md has the numbers that the code counts, in the codecs that have a column there."""

from pathlib import Path

import pytest

from tiered.core.byte_size import format_bytes
from tiered.models.families import family_of
from tiered.models.presets import PRESETS, read_preset
from tiered.offload.codec_bytes import Codec
from tiered.planning.catalog import KnownModel, known_models
from tiered.policies.polestar.policy import Polestar

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LINES = PAGE.read_text().splitlines()
CELLS = next(line for line in LINES if line.startswith("| preset |")).split(" | ")
CODECS = [Codec(name.removeprefix("hidden, ")) for name in CELLS[CELLS.index("keys + values") + 1 : -1]]
MODELS = {model.name: model for model in known_models() if model.name in PRESETS}


def row(model: KnownModel) -> str:
    hidden = (format_bytes(model.hidden_bytes_per_token[codec]) for codec in CODECS)
    cells = (
        f"`{model.name}`", model.family, str(model.layers), format_bytes(model.kv_bytes_per_token), *hidden,
        f"{100 * model.offload_saves:.0f} %",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_the_row(name: str):
    assert row(MODELS[name]) in LINES


def test_the_page_has_the_default_codec():
    assert {Codec.RAW, Codec(Polestar().codec)} <= set(CODECS)


def test_offload_saves_the_share_of_the_layouts():
    # Keys and values of every head are twice the hidden states; Dream has 4 key heads of 28.
    saved = {name: round(model.offload_saves, 4) for name, model in MODELS.items()}
    by_hand = {
        **dict.fromkeys(("llada-8b", "gidd-unif-3b", "gidd-mask-3b", "gidd-unif-10b"), round(1 / 3, 4)),
        "dream-7b": round(28 / (28 + 2 * 4), 4),
        # Five of thirty layers keep every position: values of 2 heads of 512 elements beside rows of 2816.
        "diffusion-gemma": round(30 * 2816 / (30 * 2816 + 5 * 2 * 512), 4),
    }
    assert by_hand.items() <= saved.items()
    shapes = {name: family_of(read_preset(name)).shape(read_preset(name)) for name in PRESETS}
    del saved["diffusion-gemma"], shapes["diffusion-gemma"]
    assert saved == {name: round(s.heads / (s.heads + 2 * s.kv_heads), 4) for name, s in shapes.items()}


def test_codecs_in_bytes_of_one_row():
    # Counted by hand for Dream's 3584 elements: a byte and a scale; codes and block scales; a word of scales.
    hidden = MODELS["dream-7b"].hidden_bytes_per_token
    assert hidden[Codec.RAW] == 28 * 3584 * 2
    assert hidden[Codec.FP8] == 28 * (3584 + 4)
    assert hidden[Codec.NVFP4] == 28 * (3584 // 2 + 3584 // 16 + 4)
    assert hidden[Codec.NVFP4_DELTA] == hidden[Codec.NVFP4]
