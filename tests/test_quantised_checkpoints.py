"""Checkpoints that are quantised already: a weight has the values that its writer means, or is refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from quantised_weights import (
    F8,
    LAYOUTS,
    MODELOPT,
    PACKED,
    TORCHAO,
    Parts,
    ao_fp8,
    ao_int4,
    by_channel,
    compressed,
    int4,
    nvfp4,
    opt_nvfp4,
)
from safetensors.torch import save_file
from torch import Tensor

import tiered
from tiered.core.errors import NonFiniteError
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import WeightCode
from tiered.models.checkpoint import Checkpoint
from tiered.models.llada import LLaDA

CPU = torch.device("cpu")
# 160 rows and 10 groups of 16: a tile of swizzled scales and a part of one, down as across.
SIZES = {"d_model": 64, "n_layers": 1, "n_heads": 4, "mlp_hidden_size": 160, "max_sequence_length": 64}
TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125}
CONFIG: dict[str, Any] = {"model_type": "llada", "torch_dtype": "float32", **SIZES, **TOKENS}
BLOCK = "model.transformer.blocks.0"
QUANTISED = [f"{BLOCK}.{name}_proj.weight" for name in ("q", "k", "v", "ff", "up")] + [
    f"{BLOCK}.{name}_out.weight" for name in ("attn", "ff")
]
IDS = torch.arange(40).view(2, 20)


@pytest.fixture
def written(tmp_path: Path, random_weights: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Writes a checkpoint whose projections are in a layout; returns the values of all its weights."""

    def write(
        quantization: Mapping[str, Any],
        layout: Callable[[Tensor], Parts],
        *,
        change: Mapping[str, Callable[[Any], Tensor | None]] = MappingProxyType({}),
        described: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor | None] = {}
        metadata, values = {}, {}
        for name, weight in random_weights(CONFIG).items():
            stem = name.removesuffix(".weight")
            facts: Any = {"_type": "Tensor"}
            if name in QUANTISED:
                parts, facts, values[name] = layout(weight)
                tensors |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
                held = {"_tensor_data_names": [suffix.removeprefix("._weight_") for suffix in parts]}
                facts = facts and held | facts | described.get(name, {})
            else:
                tensors[name] = values[name] = weight
            metadata |= {name: json.dumps(facts)} if facts else {}
        for name, to in change.items():
            tensors[name] = to(tensors.get(name))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(there, tmp_path / "model.safetensors", metadata)
        return values

    return write


def opened(directory: Path) -> Checkpoint:
    config = json.loads((directory / "config.json").read_text())
    return Checkpoint(directory, LLaDA.read_config(config).shape, config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_what_their_writer_means(written: Callable[..., dict[str, Tensor]], layout: str, tmp_path: Path):
    quantization, writer, code = LAYOUTS[layout]
    values = written(quantization, writer)
    checkpoint = opened(tmp_path)
    assert checkpoint.codes == dict.fromkeys(QUANTISED, code)
    assert sorted(checkpoint.order()) == sorted(values)
    for name, expected in values.items():
        weight = checkpoint.read(
            name, dtype=torch.float32, device=CPU, code=WeightCode.INT8 if expected.dim() > 1 else None
        )
        assert isinstance(weight, CodedRows) == (expected.dim() > 1)
        if name in QUANTISED:
            assert isinstance(weight, CodedRows) and weight.code is code and weight.shape == expected.shape
            assert checkpoint.extent(name, torch.float32) is None
            # The one scale that is not kept is off by its rounding.
            torch.testing.assert_close(weight.values(), expected, rtol=2**-22 if writer is nvfp4 else 0, atol=0)


@pytest.mark.parametrize("raw", [False, True])
def test_scales_of_the_cache_are_not_read(written: Callable[..., dict[str, Tensor]], raw: bool, tmp_path: Path):
    """Of ModelOpt, where projections are coded and where they are excluded."""
    change: dict[str, Any] = {f"{BLOCK}.{name}_proj.{name}_scale": lambda _: torch.tensor(0.5) for name in "kv"}
    if raw:
        change |= {f"{BLOCK}.{name}_proj.weight": lambda _: torch.ones(64, 64) for name in "kv"}
        change |= {f"{BLOCK}.{name}_proj.{of}_scale": lambda _: None for name in "kv" for of in ("weight", "input")}
    written(*LAYOUTS["ModelOpt FP8"][:2], change=change)
    assert len(opened(tmp_path).codes) == len(QUANTISED) - 2 * raw


@pytest.mark.parametrize(
    "made", [tiered.from_pretrained, lambda directory, **how: tiered.plan(directory, context=64, **how)]
)
def test_no_other_code_than_that_of_the_files_is_taken(
    written: Callable[..., dict[str, Tensor]], made: Callable[..., Any], tmp_path: Path
):
    quantization, writer, code = LAYOUTS["FP8 by channel"]
    written(quantization, writer)
    for form in ("raw", code.value):
        made(tmp_path, weights=form)
    for form in ("int4", code + "+head"):
        with pytest.raises(ValueError, match=f"the checkpoint has them in {code}: 'raw' keeps that code"):
            made(tmp_path, weights=form)


def test_a_plan_without_the_weights_takes_any_code(written: Callable[..., dict[str, Tensor]], tmp_path: Path):
    written(*LAYOUTS["FP8 by channel"][:2])
    (tmp_path / "model.safetensors").unlink()
    assert tiered.plan(tmp_path, context=64, weights="int4").fits
    with pytest.raises(ValueError, match="only the files say how"):
        tiered.plan(tmp_path, context=64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_answers_as_with_these_values(written: Callable[..., dict[str, Tensor]], layout: str, tmp_path: Path):
    quantization, writer, _ = LAYOUTS[layout]
    values = written(quantization, writer)
    found = tiered.from_pretrained(tmp_path).logits(IDS)
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.testing.assert_close(found, tiered.from_pretrained(tmp_path).logits(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int8 by tensor", "intx", "int4", "nvfp4"])
def test_files_of_torchao_are_read(written: Callable[..., dict[str, Tensor]], kind: str, tmp_path: Path):
    """By its own quantisation, its own writer, and its own values."""
    ao = pytest.importorskip("torchao.quantization")
    mx = pytest.importorskip("torchao.prototype.mx_formats")
    flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    int4 = getattr(torch, "int4")  # noqa: B009 (of which torch tells type checkers nothing)
    configs: dict[str, Any] = {
        "fp8": lambda: ao.Float8WeightOnlyConfig(),
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "int8 by tensor": lambda: ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor()),
        "intx": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0)),
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(32)),
        "nvfp4": lambda: mx.NVFP4WeightOnlyConfig(),
    }

    def layout(weight: Tensor) -> Parts:
        out, inner = weight.shape
        linear = torch.nn.Linear(inner, out, bias=False, dtype=torch.bfloat16)
        linear.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        ao.quantize_(linear, configs[kind]())
        tensors, metadata = flatten({"it.weight": linear.weight})
        parts = {name.removeprefix("it"): tensor for name, tensor in tensors.items()}
        facts = json.loads(metadata["it.weight"])
        held = {name.removeprefix("._weight_") for name in parts}
        assert set(facts.pop("_tensor_data_names")) == held
        value: Any = linear.weight
        return parts, facts, value.dequantize()

    values = written(TORCHAO, layout)
    checkpoint = opened(tmp_path)
    assert set(checkpoint.codes) == set(QUANTISED)
    for name in QUANTISED:
        weight = checkpoint.read(name, dtype=torch.bfloat16, device=CPU)
        assert isinstance(weight, CodedRows) and torch.equal(weight.values(), values[name])


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "W8A8", "W4A16", "NVFP4A16", "NVFP4"])
def test_files_of_compressed_tensors_are_read(written: Callable[..., dict[str, Tensor]], preset: str, tmp_path: Path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    ct = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    scheme = ct.preset_name_to_scheme(preset, ["Linear"])
    packed, ints = "NVFP4" in preset, preset == "W4A16"
    if ints:
        scheme.weights.group_size = 32
    format_ = "nvfp4-pack-quantized" if packed else "pack-quantized" if ints else "naive-quantized"
    compressor = compressors.BaseCompressor.get_value_from_registry(format_)

    def layout(weight: Tensor) -> Parts:
        groups = weight.unflatten(1, (-1, scheme.weights.group_size)) if packed or ints else weight
        dims = () if preset == "FP8" else (-1,)
        keepdim = not packed and not ints
        least, most = (of(dims, keepdim=keepdim) if dims else of().view(1) for of in (groups.amin, groups.amax))
        whole = {"weight_global_scale": utils.generate_gparam(weight.min(), weight.max())} if packed else {}
        scale, _ = utils.calculate_qparams(least, most, scheme.weights, global_scale=whole.get("weight_global_scale"))
        scale = scale.bfloat16() if ints else scale
        tensors = compressor.compress({"weight": weight, "weight_scale": scale, **whole}, scheme)
        value = compressor.decompress(dict(tensors), scheme)["weight"]
        return {f".{name}": tensor for name, tensor in tensors.items()}, None, value

    quantization = ct.QuantizationConfig(
        config_groups={"group_0": scheme}, format=format_, quantization_status="compressed", ignore=["lm_head"]
    )
    values = written(json.loads(quantization.model_dump_json()), layout)
    checkpoint = opened(tmp_path)
    assert set(checkpoint.codes) == set(QUANTISED)
    for name in QUANTISED:
        weight = checkpoint.read(name, dtype=torch.float32, device=CPU)
        assert isinstance(weight, CodedRows)
        # Of packed codes it makes bfloat16 values.
        torch.testing.assert_close(weight.values(), values[name].float(), rtol=2**-8 if packed or ints else 0, atol=0)


Q = QUANTISED[0].removesuffix(".weight")
FP8, AO_CODES = compressed(8, "float", "channel"), f"{Q}._weight_qdata"
OPT_SCALES = ("weight_scale", "weight_scale_2")
# Written checkpoints: a configuration, a layout, changes of tensors and of metadata.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": (
        {"quantization": {"quant_method": "gptq"}},
        "'gptq'; allowed: 'compressed-tensors', 'torchao', ",
    ),
    "no method": ({"quantization": {"bits": 4}}, "quantization_config = None"),
    "another format": ({"quantization": FP8 | {"format": "marlin-24"}}, "format = 'marlin-24'"),
    "a cache in codes": ({"quantization": FP8 | {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme = "),
    "turned weights": ({"quantization": FP8 | {"transform_config": {"R1": {}}}}, "transform_config = "),
    "sparse weights": ({"quantization": FP8 | {"sparsity_config": {"format": "sparse-24"}}}, "sparse-24"),
    "not compressed": ({"quantization": FP8 | {"quantization_status": "frozen"}}, "quantization_status = 'frozen'"),
    "no schemes": ({"quantization": FP8 | {"config_groups": {"FP8": ["Linear"]}}}, "config_groups = "),
    "activations alone": (
        {"quantization": FP8 | {"config_groups": {"g": {"weights": None}}}},
        "weights = None in g, only activations",
    ),
    "asymmetric": ({"quantization": compressed(8, "int", "channel", symmetric=False)}, "symmetric = False"),
    "groups of 128": ({"quantization": compressed(4, "int", "group", 128)}, r"\(4, 'int', 'group', 128\) in group_0"),
    "blocks": ({"quantization": compressed(8, "float", "block")}, r"\(8, 'float', 'block', None\)"),
    "a list of bits": ({"quantization": compressed(8, "float", "tensor", num_bits=[8])}, r"\(\[8\], 'float'"),
    "no codes": ({"layout": lambda weight: ({".weight": weight}, None, weight)}, "no weight in the files is coded"),
    "no scale": ({"change": {f"{Q}.weight_scale": lambda _: None}}, f"F32, F16, BF16: {Q}.weight F8_E4M3"),
    "scales of another shape": (
        {"change": {f"{Q}.weight_scale": lambda scale: scale[1:].clone()}},
        r"weight_scale \[63, 1\] instead of \[64, 1\] or",
    ),
    "codes of another shape": (
        {"change": {f"{Q}.weight": lambda codes: codes[:, 1:].clone()}},
        rf"{Q}.weight \[64, 63\] instead of \[64, 64\]",
    ),
    "another FP8": (
        {"change": {f"{Q}.weight": lambda codes: codes.to(torch.float8_e5m2)}},
        f"dtype than F8_E4M3: {Q}.weight F8_E5M2",
    ),
    "a tensor beside them": ({"change": {f"{Q}.weight_g_idx": lambda _: IDS}}, f"1 unexpected: {Q}.weight_g_idx"),
    "torchao, groups of 128": (
        {"layout": ao_int4, "described": {QUANTISED[0]: {"_data": {"block_size": [1, 128]}}}},
        r"IntxUnpackedToInt8Tensor in blocks of \[1, 128\] is not read; allowed: .*groups of 32",
    ),
    "torchao, another class": (
        {"layout": ao_fp8, "described": {QUANTISED[0]: {"_type": "Int4TilePackedTo4dTensor"}}},
        f"{Q}.weight .* a Int4TilePackedTo4dTensor in blocks",
    ),
    "torchao, activations scaled": (
        {"layout": ao_fp8, "described": {QUANTISED[0]: {"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}}},
        "act_pre_scale",
    ),
    "torchao, no facts": ({"layout": ao_fp8, "described": {QUANTISED[0]: {"_data": None}}}, "metadata lack one of"),
    "INT4, no codes": (
        {"quantization": PACKED, "layout": int4, "change": {f"{Q}.weight_packed": lambda _: None}},
        f"1 missing: {Q}.weight; 1 of another shape: {Q}.weight_scale",
    ),
    "INT4, scales of another shape": (
        {"quantization": PACKED, "layout": int4, "change": {f"{Q}.weight_scale": lambda of: of[:, 1:].clone()}},
        rf"{Q}.weight_scale \[64, 1\] instead of \[64, 2\]",
    ),
    "INT4, another dtype of scales": (
        {"quantization": PACKED, "layout": int4, "change": {f"{Q}.weight_scale": lambda of: of.float()}},
        f"dtype than BF16, F16: {Q}.weight_scale F32",
    ),
    "INT4, in another order": (
        {"quantization": PACKED, "layout": int4, "change": {f"{Q}.weight_g_idx": lambda _: torch.zeros(64).int()}},
        f"1 unexpected: {Q}.weight_g_idx",
    ),
    "INT4, zero points": (
        {
            "quantization": PACKED,
            "layout": int4,
            "change": {f"{Q}.weight_zero_point": lambda _: torch.zeros(8, 2).int()},
        },
        f"1 unexpected: {Q}.weight_zero_point",
    ),
    "INT8 in packs": (
        {"quantization": PACKED, "layout": int4, "change": {f"{Q}.weight_packed": lambda of: of.repeat(1, 2)}},
        rf"{Q}.weight_packed \[64, 16\] instead of \[64, 8\]",
    ),
    "ModelOpt, another algorithm": (
        {"quantization": MODELOPT | {"quant_algo": "NVFP4_AWQ"}},
        "quant_algo = 'NVFP4_AWQ'",
    ),
    "ModelOpt, no algorithm": ({"quantization": {"quant_method": "modelopt"}}, "quant_algo = None"),
    "ModelOpt, no scale of a tensor": (
        {"quantization": MODELOPT, "layout": opt_nvfp4, "change": {f"{Q}.weight_scale_2": lambda _: None}},
        f"1 missing: {Q}.weight_scale_2",
    ),
    "ModelOpt, no scale at all": (
        {"quantization": MODELOPT, "layout": opt_nvfp4, "change": {f"{Q}.{of}": lambda _: None for of in OPT_SCALES}},
        f"2 missing: {Q}.weight_scale_2, {Q}.weight_scale",
    ),
    "ModelOpt, scales of another shape": (
        {"quantization": MODELOPT, "layout": opt_nvfp4, "change": {f"{Q}.weight_scale": lambda of: of[1:].clone()}},
        rf"{Q}.weight_scale \[63, 4\] instead of \[64, 4\]",
    ),
    "ModelOpt, channels scaled": (
        {"quantization": MODELOPT, "layout": opt_nvfp4, "change": {f"{Q}.pre_quant_scale": lambda _: torch.ones(64)}},
        f"1 unexpected: {Q}.pre_quant_scale",
    ),
    "ModelOpt, an offset of the cache": (
        {"quantization": MODELOPT, "layout": opt_nvfp4, "change": {f"{BLOCK}.k_proj.k_bias": lambda _: torch.ones(1)}},
        f"1 unexpected: {BLOCK}.k_proj.k_bias",
    ),
    "torchao, scales of a cache": (
        {"layout": ao_fp8, "change": {f"{BLOCK}.k_proj.k_scale": lambda _: torch.ones(1)}},
        f"1 unexpected: {BLOCK}.k_proj.k_scale",
    ),
    "torchao, a part is missing": ({"layout": ao_fp8, "change": {AO_CODES: lambda _: None}}, f"1 missing: {AO_CODES}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_no_code_holds_are_refused(written: Callable[..., dict[str, Tensor]], case: str, tmp_path: Path):
    """By name, before any weight is read."""
    asked, message = REFUSED[case]
    layout = asked.get("layout", by_channel)
    written(**{"quantization": TORCHAO if layout in (ao_fp8, ao_int4) else FP8, "layout": layout} | asked)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("layout", "name", "change", "error", "message"),
    [
        (
            by_channel,
            f"{Q}.weight",
            lambda codes: codes.view(torch.uint8).fill_(0x7F).view(F8),
            NonFiniteError,
            "is NaN",
        ),
        (by_channel, f"{Q}.weight_scale", lambda scale: scale.fill_(torch.inf), NonFiniteError, f"weight {Q}.weight"),
        (
            nvfp4,
            f"{Q}.weight_scale",
            lambda scale: (-scale.float()).to(F8),
            ValueError,
            "weight_scale has scales below zero",
        ),
        (ao_int4, f"{Q}._weight_zero_point", lambda zeros: zeros + 1, ValueError, "zero_point is not all zeros"),
        (ao_int4, AO_CODES, lambda codes: codes + 8, ValueError, "qdata has codes out of the range of int4"),
    ],
)
def test_values_outside_a_code_are_found_when_they_are_read(
    written: Callable[..., dict[str, Tensor]],
    layout: Callable[[Tensor], Parts],
    name: str,
    change: Callable[[Tensor], Tensor],
    error: type[Exception],
    message: str,
    tmp_path: Path,
):
    quantization = next(quantization for quantization, writer, _ in LAYOUTS.values() if writer is layout)
    written(quantization, layout, change={name: change})
    with pytest.raises(error, match=message):
        opened(tmp_path).read(QUANTISED[0], dtype=torch.float32, device=CPU)


def test_codes_that_a_dtype_cannot_hold_are_found(written: Callable[..., dict[str, Tensor]], tmp_path: Path):
    written(FP8, by_channel, change={f"{Q}.weight_scale": lambda scale: scale * 1e6})
    assert isinstance(opened(tmp_path).read(QUANTISED[0], dtype=torch.bfloat16, device=CPU), CodedRows)
    with pytest.raises(NonFiniteError, match="beyond float16"):
        opened(tmp_path).read(QUANTISED[0], dtype=torch.float16, device=CPU)


def test_a_file_that_is_cut_after_it_was_opened_is_named(written: Callable[..., dict[str, Tensor]], tmp_path: Path):
    written(FP8, by_channel)
    checkpoint, file = opened(tmp_path), tmp_path / "model.safetensors"
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size // 4)
    with pytest.raises(ValueError, match=r"model.safetensors has changed since its header was read"):
        for name in checkpoint.order():
            checkpoint.read(name, dtype=torch.float32, device=CPU)
    file.unlink()
    with pytest.raises(ValueError, match=r"has changed since its header was read: .* No such file"):
        checkpoint.read(QUANTISED[0], dtype=torch.float32, device=CPU)
