"""Books: checkpoints of torchao in safetensors: their metadata, and the parts of their weights."""

import json
from collections.abc import Mapping
from typing import Any

from tiered.kernels.weight_code import WeightCode
from tiered.models.coded_parts import FLOATS, CodedParts, Part, by_row

_INTX = "IntxUnpackedToInt8Tensor"
# Class and target dtype of what has a scale a row or one for all, with our code and safetensors' name of the dtype.
_BY_ROW = {
    ("Float8Tensor", None): (WeightCode.FP8, "F8_E4M3"),
    ("Int8Tensor", None): (WeightCode.INT8, "I8"),
    (_INTX, "int8"): (WeightCode.INT8, "I8"),
}
# Of activations, by numbers known beforehand; ours are not quantised.
_OF_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")


def torchao_parts(name: str, out: int, inner: int, metadata: Mapping[str, str]) -> CodedParts | None:
    """The parts of the weight `name`, which stand in its place; None: it is in no codes.

    Raises:
        ValueError: a tensor that no code of ours can hold, named.
    """
    described = _described(name, metadata)
    if described is None:
        return None
    kind, facts, held = described["_type"], described["_data"], described["_tensor_data_names"]
    if "act_pre_scale" in held:
        raise ValueError(f"the weight {name}: a {kind} that scales activations (act_pre_scale) is not read")
    module, _, last = name.rpartition(".")

    def part(of: str, shapes: tuple[tuple[int, ...], ...], *dtypes: str) -> Part:
        return Part(f"{module}._{last}_{of}", shapes, dtypes)

    spare = tuple(part(of, ()).name for of in _OF_ACTIVATIONS if of in held)
    block, target = facts.get("block_size"), facts.get("target_dtype")
    bits = str(target.get("_data")) if isinstance(target, Mapping) else None
    if (kind, bits) in _BY_ROW and block in ([1, inner], [out, inner]):
        code, dtype = _BY_ROW[kind, bits]
        return CodedParts(
            code=code,
            codes=part("qdata", ((out, inner),), dtype),
            scale=part("scale", by_row(out), *FLOATS),
            zeros=part("zero_point", by_row(out), "I8") if "zero_point" in held else None,
            spare=spare,
        )
    if (kind, bits, block) == (_INTX, "int4", [1, WeightCode.INT4.group]):
        groups = (out, WeightCode.INT4.groups(inner))
        return CodedParts(
            code=WeightCode.INT4,
            codes=part("qdata", ((out, inner),), "I8"),
            block_scales=part("scale", (groups,), "BF16"),
            zeros=part("zero_point", (groups,), "I8"),
            spare=spare,
        )
    if (kind, block) == ("NVFP4Tensor", WeightCode.NVFP4.group):
        swizzled, groups = bool(facts.get("is_swizzled_scales")), WeightCode.NVFP4.groups(inner)
        tiles = (32 * -(-out // 128), 16 * -(-groups // 4))
        return CodedParts(
            code=WeightCode.NVFP4,
            codes=part("qdata", ((out, WeightCode.NVFP4.code_bytes(inner)),), "U8"),
            block_scales=part("scale", (tiles if swizzled else (out, groups),), "F8_E4M3"),
            scale=part("per_tensor_scale", ((), (1,)), "F32") if "per_tensor_scale" in held else None,
            swizzled=swizzled,
            spare=spare,
        )
    raise ValueError(
        f"the weight {name} {[out, inner]}: a {kind}{f' of {bits}' if bits else ''} in blocks of {block} is not read; "
        f"allowed: Float8Tensor, Int8Tensor and {_INTX} of int8 by tensor or row, {_INTX} of int4 in groups of 32, "
        "NVFP4Tensor"
    )


def _described(name: str, metadata: Mapping[str, str]) -> Mapping[str, Any] | None:
    """What the metadata say of the weight `name`, where that is no plain tensor."""
    try:
        described = json.loads(metadata.get(name, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the weight {name}: its metadata are no JSON: {error}") from error
    if described is None or described == {"_type": "Tensor"}:
        return None
    kinds = {"_type": str, "_data": dict, "_tensor_data_names": list}
    if not isinstance(described, dict) or not all(isinstance(described.get(key), of) for key, of in kinds.items()):
        raise ValueError(f"the weight {name}: its metadata lack one of {', '.join(kinds)}: {described!r}")
    return described
