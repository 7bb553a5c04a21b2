"""Writers of weights in the layouts of quantised checkpoints, with the values that they stand for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiered.kernels.decode_rows_ref import E2M1
from tiered.kernels.row_code import WeightCode

F8 = torch.float8_e4m3fn
Parts = tuple[dict[str, Tensor], dict[str, Any] | None, Tensor]  # tensors by suffix, metadata, and what they stand for


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_tensor(weight: Tensor) -> Parts:
    scale = (weight.abs().max() / 448).view(1)
    codes = (weight / scale).to(F8)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(1)}, None, codes.float() * scale


def by_channel(weight: Tensor) -> Parts:
    scale = (weight.abs().amax(1, keepdim=True) / 440).bfloat16()
    codes = (weight / scale).to(F8)
    return {".weight": codes, ".weight_scale": scale}, None, codes.float() * scale.float()


def int8_by_channel(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, None, codes.float() * scale


def random_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes and block scales, and for each element the value of its code, and its scale."""
    out, inner = weight.shape
    codes = seeded(out, inner).mul(9).int() & 15
    scales = (seeded(out, inner // 16).abs() * 100 + 1).to(F8)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed, scales, values, scales.float().repeat_interleave(16, 1)


def nvfp4(weight: Tensor) -> Parts:
    packed, scales, values, of_element = random_nvfp4(weight)
    parts = {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": torch.tensor([760.0])}
    return parts, None, values * (of_element / 760)


def int4(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Parts:
    """Eight codes in an int32, each plus eight, the first one in the lowest bits. Scales come as bfloat16."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2) / 7.5).to(dtype)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1)
    packed = ((codes.long() + 8).unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(2)
    parts = {".weight_packed": torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int(), ".weight_scale": scale}
    parts |= {".weight_shape": torch.tensor(weight.shape)}
    return parts, None, codes * scale.bfloat16().float().repeat_interleave(32, 1)


def int4_of_halves(weight: Tensor) -> Parts:
    return int4(weight, torch.float16)


def opt_fp8(weight: Tensor) -> Parts:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(F8)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(1.0)}, None, codes.float() * scale


def opt_nvfp4(weight: Tensor) -> Parts:
    packed, scales, values, of_element = random_nvfp4(weight)
    parts = {".weight": packed, ".weight_scale": scales, ".weight_scale_2": torch.tensor(0.37)}
    return parts | {".input_scale": torch.tensor(1.0)}, None, values * (torch.tensor(0.37) * of_element)


def ao_fp8(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(F8)
    facts = {"_type": "Float8Tensor", "_data": {"block_size": [1, weight.shape[1]], "mm_config": None}}
    return {"._weight_qdata": codes, "._weight_scale": scale}, facts, codes.float() * scale


def ao_int4(weight: Tensor) -> Parts:
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1)
    facts = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, 32]}
    parts = {"._weight_qdata": codes.to(torch.int8), "._weight_scale": scale}
    parts |= {"._weight_zero_point": torch.zeros(scale.shape, dtype=torch.int8)}
    return parts, {"_type": "IntxUnpackedToInt8Tensor", "_data": facts}, codes * scale.float().repeat_interleave(32, 1)


def ao_nvfp4(weight: Tensor) -> Parts:
    """Swizzled: in tiles of 128 rows and 4 groups, 16 bytes of which are rows r, r + 32, r + 64 and r + 96."""
    packed, scales, values, of_element = random_nvfp4(weight)
    rows, groups = scales.shape
    across = -(-groups // 4)
    tiles = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for row in range(rows):
        for group in range(groups):
            tile = row // 128 * across + group // 4
            tiles[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = scales.view(torch.uint8)[row, group]
    parts = {"._weight_qdata": packed, "._weight_scale": tiles.view(F8).view(-1, 16 * across)}
    parts |= {"._weight_per_tensor_scale": torch.tensor(0.37)}
    facts = {"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": True, "block_size": 16}}
    return parts, facts, values * (torch.tensor(0.37) * of_element)


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}


def compressed(bits: int, kind: str, strategy: str, group: int | None = None, **changes: Any) -> dict[str, Any]:
    """`quantization_config`; `changes` of the scheme of its weights."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group}
    weights |= {"symmetric": True, "dynamic": False, "actorder": None, **changes}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return COMPRESSED | {"config_groups": {"group_0": {"weights": weights, "input_activations": inputs}}}


PACKED = compressed(4, "int", "group", 32) | {"format": "pack-quantized"}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "SomeConfig", "_data": {}}}}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.46.0"},
}
# By layout: its `quantization_config`, the writer of a weight, and our code of it.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Parts], WeightCode]] = {
    "FP8 by tensor": (compressed(8, "float", "tensor"), by_tensor, WeightCode.FP8),
    "FP8 by channel": (compressed(8, "float", "channel"), by_channel, WeightCode.FP8),
    "INT8 by channel": (compressed(8, "int", "channel"), int8_by_channel, WeightCode.INT8),
    "NVFP4": (compressed(4, "float", "tensor_group", 16), nvfp4, WeightCode.NVFP4),
    "INT4": (PACKED, int4, WeightCode.INT4),
    "INT4, scales in float16": (PACKED, int4_of_halves, WeightCode.INT4),
    "torchao FP8": (TORCHAO, ao_fp8, WeightCode.FP8),
    "torchao INT4": (TORCHAO, ao_int4, WeightCode.INT4),
    "torchao NVFP4": (TORCHAO, ao_nvfp4, WeightCode.NVFP4),
    "ModelOpt FP8": (MODELOPT | {"quant_algo": "FP8"}, opt_fp8, WeightCode.FP8),
    "ModelOpt FP8 by channel": (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, by_channel, WeightCode.FP8),
    "ModelOpt NVFP4": (MODELOPT, opt_nvfp4, WeightCode.NVFP4),
}
