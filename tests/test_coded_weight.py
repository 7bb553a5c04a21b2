"""Weights in codes: their bytes, their errors, their products, and models that have them."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiered.kernels import weight_product_ref
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.projection import project
from tiered.kernels.row_code import CHUNK_ELEMENTS, WeightCode
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import Checkpoint, assign
from tiered.models.families import family_of
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

FP8, INT8, INT4, NVFP4 = WeightCode
TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125, "torch_dtype": "float32"}
OFFICIAL = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
LLADA = {"d_model": 40, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 56, "max_sequence_length": 64}
OFFICIAL |= {"max_position_embeddings": 64, **TOKENS}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {"model_type": "llada", **LLADA, **TOKENS},
    "llada, tied": {"model_type": "llada", "weight_tying": True, **LLADA, **TOKENS},
    "dream": {"model_type": "Dream", "num_key_value_heads": 2, **OFFICIAL},
    "gidd": {"model_type": "gidd", "attention_bias": True, **OFFICIAL},
    "gidd, no sinks": {"model_type": "gidd", **OFFICIAL},
}
IDS = torch.arange(40).view(2, 20)


def random_weight(out: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of many sizes; one of zeros, one almost of zeros, and one whose groups differ by orders."""
    weight = torch.randn(out, inner, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 3, out)[:, None]
    weight[1], weight[2, 1:] = 0, 0
    weight[3] *= torch.logspace(-6, 0, inner)
    return weight.to(dtype)


@pytest.mark.parametrize(
    ("code", "elements", "parts", "total"),
    [
        (FP8, 4096, (4096, 4096), 4112),
        (INT8, 4096, (4096, 4096), 4112),
        (INT4, 4096, (2048, 2304), 2304),
        (NVFP4, 4096, (2048, 2304), 2320),
        (FP8, 30, (30, 32), 48),
        (INT8, 30, (30, 32), 48),
        (INT4, 33, (32, 36), 48),
        (NVFP4, 33, (24, 28), 32),
    ],
)
def test_sizes_and_offsets_of_the_parts_of_a_row(code: WeightCode, elements: int, parts: tuple[int, int], total: int):
    assert (code.code_bytes(elements), code.scale_at(elements)) == parts
    assert code.row_bytes(elements) == total


def test_the_bytes_are_those_of_the_layout():
    """Written out by hand."""
    scale, one = torch.tensor([0.5]).view(torch.uint8).tolist(), torch.tensor([1.0]).view(torch.uint8).tolist()
    row = torch.tensor([[224.0, -1.0, 0.5]])
    assert CodedRows.of(row, FP8).bytes.tolist() == [[0x7E, 0xC0, 0x38, 0, *scale, *[0] * 8]]
    row = torch.tensor([[63.5, -1.0, 0.5]])
    assert CodedRows.of(row, INT8).bytes.tolist() == [[127, 254, 1, 0, *scale, *[0] * 8]]
    row = torch.tensor([[4.0, -0.5, 3.5]])  # a scale of -0.5, so that 4 is -8
    assert CodedRows.of(row, INT4).bytes.tolist() == [[0x18, 0x09, *[0] * 14, 0x00, 0xBF, *[0] * 14]]
    row = torch.tensor([[2688.0, -448.0, 672.0]])  # 6 · 448, so that the scale of the row is 1
    assert CodedRows.of(row, NVFP4).bytes.tolist() == [[0xA7, 0x03, *[0] * 6, 0x7E, 0, 0, 0, *one]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("code", "least", "most"), [(FP8, 0.02, 0.03), (INT8, 0.005, 0.009), (INT4, 0.07, 0.095), (NVFP4, 0.085, 0.105)]
)
def test_the_error_is_that_of_the_format(code: WeightCode, least: float, most: float, dtype: torch.dtype):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    coded = CodedRows.of(weight, code)
    assert (coded.shape, coded.dtype, coded.device, coded.nbytes) == (
        weight.shape,
        dtype,
        weight.device,
        64 * coded.bytes.shape[1],
    )
    assert coded.values().dtype == dtype
    assert least < float((coded.values() - weight).float().norm() / weight.float().norm()) < most


@pytest.mark.parametrize("code", WeightCode)
def test_each_row_is_alone(code: WeightCode):
    """Other rows of a weight, and the number of rows that are coded at once, change no byte of a row."""
    inner = CHUNK_ELEMENTS // 8 - 5
    weight = random_weight(20, inner)
    coded = CodedRows.of(weight, code)
    for row in (0, 1, 2, 3, 9, 19):
        assert torch.equal(CodedRows.of(weight[row : row + 1], code).bytes[0], coded.bytes[row])
    values, index = coded.values(), torch.tensor([19, 0, 3, 3])
    assert torch.equal(coded[3:18].values(), values[3:18])
    assert torch.equal(coded[index].values(), values[index])
    assert not values[1].any() and values[2, 0] != 0 and not values[2, 1:].any()


@pytest.mark.parametrize("scale", [1e-44, 1e-36, 1.0, 1e38])
@pytest.mark.parametrize("code", WeightCode)
def test_numbers_of_every_size_stay_numbers(code: WeightCode, scale: float):
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * scale
    values = CodedRows.of(weight, code).values()
    assert values.isfinite().all()
    assert scale < 1e-35 or (values - weight).abs().max() <= weight.abs().max() / 5.9


# By name: rows, output rows, elements of a row, and the dtype.
PRODUCTS: dict[str, tuple[int, int, int, torch.dtype]] = {
    "whole tiles": (16, 64, 128, torch.float32),
    "one row": (1, 33, 64, torch.float32),
    "parts of tiles": (19, 40, 80, torch.float32),
    "less than a group": (3, 5, 10, torch.float32),
    "an odd width": (5, 7, 67, torch.float32),
    "several tiles, bfloat16": (40, 70, 160, torch.bfloat16),
    "float16": (7, 33, 96, torch.float16),
    "no rows": (0, 8, 64, torch.float32),
    "split columns": (5, 33, 1050, torch.float32),
    "split columns, bfloat16": (3, 70, 1600, torch.bfloat16),
    "many rows": (256, 70, 80, torch.float32),
    "many rows, an odd width": (300, 39, 67, torch.float16),
}
# Of the largest entry. The interpreter cuts bfloat16 instead of rounding it; and see weight_product.py.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}


def product_by(implementation: str) -> Callable[[Tensor, CodedRows], Tensor]:
    """The reference anywhere; the Triton kernel on a GPU if there is one, else in the interpreter."""
    if implementation == "reference":
        return weight_product_ref.weight_product
    pytest.importorskip("triton")
    from tiered.kernels import weight_product

    return weight_product.weight_product


@pytest.mark.covering(2)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("code", WeightCode)
def test_a_product_is_that_of_the_values(
    implementation: str, shape: str, code: WeightCode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_product_ref, "TILE_ELEMENTS", 300)  # several tiles, the last of them smaller
    monkeypatch.setattr(weight_product_ref, "DECODED_ELEMENTS", 2600)
    count, out, inner, dtype = PRODUCTS[shape]
    device = "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, inner, generator=generator).to(device, dtype)
    values = torch.randn(out, inner, generator=generator) * torch.logspace(-2, 0, out)[:, None]
    weight = CodedRows.of(values.to(device, dtype), code)
    product = product_by(implementation)(rows, weight)
    assert product.shape == (count, out) and product.dtype == dtype
    expected = rows.double() @ weight.values().double().T
    # Row by row of the weight, whose sizes differ.
    most = (rows.double().abs() @ weight.values().double().abs().T).amax(0) if count else expected
    assert ((product.double() - expected).abs() <= TOLERANCE[dtype] * most).all()


@pytest.mark.parametrize("code", WeightCode)
def test_every_code_becomes_its_value(code: WeightCode):
    """In the kernel: each output row has one code in all of its columns, and the rows are units."""
    kernel, inner = product_by("triton"), 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = CodedRows.of(torch.randn(256, inner), code)
    bytes_ = weight.bytes.clone()
    codes = torch.arange(256, dtype=torch.uint8)
    if code is FP8:
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    bytes_[:, : code.code_bytes(inner)] = codes[:, None]
    weight = replace(weight, bytes=bytes_.to(device))
    product = kernel(torch.eye(inner, device=device)[:16], weight)
    torch.testing.assert_close(product, weight.values().T[:16], rtol=2e-7, atol=0)


@pytest.mark.parametrize("rows", [(0,), (1,), (3, 7), (40,), (300,)])
def test_a_projection_takes_it(rows: tuple[int, ...]):
    weight, hidden = CodedRows.of(torch.randn(53, 40), INT8), torch.randn(*rows, 40)
    product = project(hidden, weight)
    assert product.shape == (*rows, 53)
    torch.testing.assert_close(product, hidden @ weight.values().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    "change", [lambda rows: rows[:, 1:], lambda rows: rows.bfloat16(), lambda rows: rows.to("meta")]
)
def test_factors_that_do_not_fit_are_refused(implementation: str, change: Callable[[Tensor], Tensor]):
    weight, rows = CodedRows.of(torch.randn(8, 40), FP8), torch.randn(3, 40)
    with pytest.raises(ValueError, match=r"do not fit the fp8 weight \[8, 40\] of torch.float32 on cpu"):
        product_by(implementation)(change(rows), weight)


def opened(directory: Path, config: Mapping[str, Any]) -> tuple[Checkpoint, DiffusionModel]:
    """The checkpoint, and its model on the meta device."""
    family = family_of(config)
    with torch.device("meta"):
        model = family.resolve_loader().from_config(config)
    return Checkpoint(directory, model.shape, config), model


def filled(
    checkpoint: Checkpoint, model: DiffusionModel, codes: Mapping[str, WeightCode], decoded: bool
) -> DiffusionModel:
    """`model` with the weights in `codes`, as codes or as the values that they stand for."""
    for name in checkpoint.order():
        weight = checkpoint.read(name, dtype=torch.float32, device=torch.device("cpu"), code=codes.get(name))
        if isinstance(weight, CodedRows) and decoded:
            weight = weight.values()
        assign(model, model.config.parameter_names[name], weight)
    return model


@pytest.mark.parametrize("code", WeightCode)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_coded_weights_is_that_of_their_values(
    write_checkpoint: Callable[..., Path],
    random_weights: Callable[..., dict[str, Tensor]],
    family: str,
    code: WeightCode,
):
    """Of all its matrices, embedding and head among them; whichever was there before."""
    config = FAMILIES[family]
    weights = random_weights(config)
    checkpoint, coded = opened(write_checkpoint(config, weights), config)
    codes = {name: code for name, weight in weights.items() if name.endswith(".weight") and weight.dim() == 2}
    assert len(codes) >= 14
    filled(checkpoint, coded, codes, decoded=False)
    decoded = filled(checkpoint, deepcopy(coded), codes, decoded=True)
    assert isinstance(coded.wte.weight, CodedRows) and isinstance(decoded.wte.weight, nn.Parameter)
    expected, found = (Runtime(model, policy=make_policy("none")).logits(IDS) for model in (decoded, coded))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert isinstance(filled(checkpoint, decoded, codes, decoded=False).wte.weight, CodedRows)


def test_the_extent_of_a_tensor_holds_its_bytes(write_checkpoint: Callable[..., Path], tiny_config: Mapping[str, Any]):
    directory = write_checkpoint(shards=3)
    checkpoint, model = opened(directory, tiny_config)
    names = list(checkpoint.order())
    assert sorted(names) == sorted(model.shape.weight_shapes) and not checkpoint.codes
    places = [checkpoint.extent(name, torch.float32) for name in names]
    assert (
        places == sorted(place for place in places if place) and len({file for file, _, _ in filter(None, places)}) == 3
    )
    for name, place in zip(names, places, strict=True):
        assert place and checkpoint.extent(name, torch.bfloat16) is None
        file, first, count = place
        weight = checkpoint.read(name, dtype=torch.float32, device=torch.device("cpu"))
        assert isinstance(weight, Tensor)
        assert file.read_bytes()[first : first + count] == weight.view(torch.uint8).numpy().tobytes()


def test_codes_are_made_of_values_of_the_dtype(write_checkpoint: Callable[..., Path], tiny_config: Mapping[str, Any]):
    checkpoint, _ = opened(write_checkpoint(), tiny_config)
    name, device = "model.transformer.blocks.0.q_proj.weight", torch.device("cpu")
    raw = checkpoint.read(name, dtype=torch.bfloat16, device=device)
    coded = checkpoint.read(name, dtype=torch.bfloat16, device=device, code=INT4)
    assert isinstance(raw, Tensor) and isinstance(coded, CodedRows)
    assert torch.equal(coded.bytes, CodedRows.of(raw, INT4).bytes) and coded.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"ln_f.weight \[32\] is not a matrix, so int4 does not fit it"):
        checkpoint.read("model.transformer.ln_f.weight", dtype=torch.bfloat16, device=device, code=INT4)
