"""Layers with a sliding window: rows see the columns of the definition, and logits are those of transformers' models
with masks of their own. The exact cache equals the uncached model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_models import NEMOTRON, SIZES, batch, ministral3, prompt, prompts
from torch import Tensor
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from tiered.core.rows import Rows
from tiered.forward.parts import CanvasLimits
from tiered.kernels.row_code import RowCode
from tiered.models.attention import Limits
from tiered.models.base import DiffusionModel
from tiered.models.families import family_of
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

CONFIGS: dict[str, dict[str, Any]] = {
    # A window in the middle layer alone.
    "blocks": {
        **SIZES,
        "model_type": "sdar",
        "mask_token_id": 159,
        "eos_token_id": 2,
        "block_size": 4,
        "sliding_window": 7,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "context": {**NEMOTRON, "sliding_window": 7},
}
WINDOWS = {"blocks": (None, 7, None), "context": (7, 7, 7)}


def sees(sight: str, row: int, column: int, *, block: int, clean: int, window: int | None, first: int = 0) -> bool:
    """The definition, of positions."""
    begin = row - (row - first) % block
    if sight == "context" and row < clean:
        begin, end = row, row + 1
    else:
        end = begin + block
    return column < end and (window is None or column > begin - window)


def seen(sight: str, length: int, **sizes: Any) -> Tensor:
    """[rows, columns]."""
    return torch.tensor([[sees(sight, row, column, **sizes) for column in range(length)] for row in range(length)])


@pytest.fixture(scope="module")
def runtimes(random_model: Callable[..., DiffusionModel]) -> dict[str, Runtime]:
    return {
        sight: Runtime(random_model(config), policy=make_policy("auto"), name="small")
        for sight, config in CONFIGS.items()
    }


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 6, 50])
@pytest.mark.parametrize("sight", WINDOWS)
def test_columns_that_rows_see(runtimes: dict[str, Runtime], sight: str, window: int | None, first: int):
    # A canvas that ends within a block, spans that begin and end within blocks, and rows that are apart.
    length, block, shape = 21, 4, runtimes[sight].model.shape
    for clean in (0, 6, 12, length):
        expected = seen(sight, length, block=block, clean=clean, window=window, first=first)
        of_columns = CanvasLimits(shape, length, block, first=first, final=clean)
        for start, stop in ((0, length), (4, 8), (5, 15), (19, 21)):
            found = torch.zeros(length, length, dtype=torch.bool)
            for some, columns, limits in of_columns.of_rows(Rows.span(start, stop), 1, window):
                found[start:stop][some, columns] = between(limits, columns.stop - columns.start)[0]
            assert torch.equal(found[start:stop], expected[start:stop])
        apart = torch.randperm(length)
        [(_, _, limits)] = of_columns.of_rows(Rows.at(apart[None]), 1, window)
        assert torch.equal(between(limits, length)[0], expected[apart])


def between(limits: Limits, length: int) -> Tensor:
    """[batch, rows, columns], True between the limits of each row."""
    column, found = torch.arange(length), torch.ones(1, 1, length, dtype=torch.bool)
    found = found if limits.stop is None else column < limits.stop[..., None]
    return found if limits.start is None else found & (column >= limits.start[..., None])


@pytest.mark.parametrize("sight", WINDOWS)
def test_windows_count_from_each_sequence_s_first_token(runtimes: dict[str, Runtime], sight: str):
    pads, length = (5, 0), 21
    positions = torch.stack([(torch.arange(length) - pad).clamp(min=0) for pad in pads])
    clean = torch.tensor([11, 6])
    of_positions = CanvasLimits(runtimes[sight].model.shape, length, 4, positions, final=clean)
    [(_, _, limits)] = of_positions.of_rows(Rows.span(0, length), 2, 6)
    found = between(limits, length)
    for sequence, pad in enumerate(pads):
        own = length - pad
        expected = seen(sight, own, block=4, clean=int(clean[sequence]) - pad, window=6)
        assert torch.equal(found[sequence, pad:, pad:], expected)


def official(sight: str, random_weights: Callable[..., dict[str, Tensor]]) -> Any:
    """transformers' model of the same weights."""
    config, weights = CONFIGS[sight], random_weights(CONFIGS[sight])
    if sight == "context":
        return ministral3(config, weights)
    names = (*SIZES, "sliding_window", "use_sliding_window", "layer_types")
    given: dict[str, Any] = {name: config[name] for name in names} | {"attn_implementation": "eager"}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**given)).eval()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("length", [3, 21, 40])
@pytest.mark.parametrize("sight", WINDOWS)
def test_logits_of_transformers_model(
    runtimes: dict[str, Runtime], random_weights: Callable[..., dict[str, Tensor]], sight: str, length: int
):
    runtime, model = runtimes[sight], official(sight, random_weights)
    assert runtime.model.shape.windows == WINDOWS[sight]
    ids = prompt(length)
    clean = (length - 1) // 4 * 4
    masks = {
        kind: torch.zeros(1, 1, length, length).masked_fill(
            ~seen(sight, length, block=4, clean=clean, window=window), -torch.inf
        )
        for kind, window in (("full_attention", None), ("sliding_attention", 7))
    }
    with torch.no_grad():
        given: Any = masks if sight == "blocks" else masks["sliding_attention"]
        expected = model(input_ids=ids, attention_mask=given, use_cache=False).logits
    torch.testing.assert_close(runtime.logits(ids), expected, atol=1e-4, rtol=1e-4)
    padded, mask = (torch.nn.functional.pad(each, (5, 3)) for each in (ids, torch.ones_like(ids)))
    torch.testing.assert_close(runtime.logits(padded, mask)[:, 5:-3], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "kv"), [(4, None), (12, None), (512, None), (512, RowCode.FP8)])
@pytest.mark.parametrize("sight", WINDOWS)
def test_the_exact_cache_changes_no_token(
    random_model: Callable[..., DiffusionModel], sight: str, rows: int, kv: RowCode | None
):
    runtime = Runtime(random_model(CONFIGS[sight]), policy=make_policy("none"), name="small", kv=kv)
    ids, mask = batch(left=True)
    call: dict[str, Any] = {"max_new_tokens": 14, "stop_at_eos": False}
    plain = runtime.generate(ids, attention_mask=mask, **call)
    cached = runtime.with_policy("block_causal", prefill_rows=rows)
    assert torch.equal(cached.generate(ids, attention_mask=mask, **call).sequences, plain.sequences)
    for number, row in enumerate(prompts()):
        alone = cached.generate(row[None], **call).sequences[0, len(row) :]
        assert torch.equal(alone, plain.sequences[number, ids.shape[1] :][: len(alone)])


def test_a_layer_with_a_window_works_less():
    shape = family_of(CONFIGS["blocks"]).read(CONFIGS["blocks"]).shape
    row = 2 * shape.kv_width
    assert shape.kv_read(100) == row * (100 + 7 + 100) and shape.kv_read(5) == row * 15


@pytest.mark.parametrize(
    ("sight", "changes", "message"),
    [
        ("blocks", {"use_sliding_window": False}, "has 'sliding_attention', but no sliding_window is in use"),
        ("blocks", {"use_sliding_window": 1}, "use_sliding_window = 1; true or false"),
        ("blocks", {"layer_types": ["full_attention"] * 2}, "layer_types = .* each of 3 layers"),
        ("blocks", {"layer_types": ["chunked_attention"] * 3}, "layer_types = .*chunked_attention"),
        ("blocks", {"max_window_layers": -1}, "max_window_layers = -1"),
        ("context", {"layer_types": "sliding_attention"}, "layer_types = 'sliding_attention'"),
    ],
)
def test_a_bad_window_is_named(sight: str, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        family_of(CONFIGS[sight]).read({**CONFIGS[sight], **changes})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "layer_types": None}, ()),
        ({"layer_types": None}, ()),  # from layer 28 on
        ({"layer_types": None, "max_window_layers": 1}, (None, 7, 7)),
        ({"layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_which_layers_have_windows(changes: dict[str, Any], windows: tuple[int | None, ...]):
    assert family_of(CONFIGS["blocks"]).read({**CONFIGS["blocks"], **changes}).shape.windows == windows
