"""Books: the readable kinds of quantised checkpoints, and the tensors of their files that make up each weight. Layouts
are those of compressed-tensors 0.20, of torchao 0.18 (its safetensors support) and of NVIDIA's ModelOpt 0.46.

    files                                                        code
    compressed-tensors, float of 8 bits, by tensor or channel    fp8
    compressed-tensors, int of 8 bits, by tensor or channel      int8
    compressed-tensors, float of 4 bits in groups of 16          nvfp4
    compressed-tensors, int of 4 bits in groups of 32            int4
    torchao, Float8Tensor by tensor or row                       fp8
    torchao, Int8Tensor or Intx… of int8, by tensor or row       int8
    torchao, Intx… of int4 in groups of 32, bfloat16 scales      int4
    torchao, NVFP4Tensor, block scales swizzled or not           nvfp4
    ModelOpt, FP8 by tensor or channel                           fp8
    ModelOpt, NVFP4                                              nvfp4

Codes and scales are kept exactly, with two exceptions in files of compressed-tensors. The scale of a tensor in NVFP4
is a divisor, and its reciprocal is rounded to float32. Scales of int4 in float16 are rounded to bfloat16. Activations
are not quantised, even if the checkpoint says so; nor is the cache, if ModelOpt says so.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiered.kernels.row_code import WeightCode

_COMPRESSED, _TORCHAO, _MODELOPT, _INTX = "compressed-tensors", "torchao", "modelopt", "IntxUnpackedToInt8Tensor"
_METHODS = (_COMPRESSED, _TORCHAO, _MODELOPT)
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "pack-quantized")
_FORMATS += ("mixed-precision",)
# Of the weights in a compressed-tensors config: bits, type, strategy, group size.
_SCHEMES = {
    (8, "float", "tensor", None): "FP8 by tensor",
    (8, "float", "channel", None): "FP8 by channel",
    (8, "int", "tensor", None): "INT8 by tensor",
    (8, "int", "channel", None): "INT8 by channel",
    (4, "float", "tensor_group", 16): "NVFP4",
    (4, "int", "group", 32): "INT4 in groups of 32",
}
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")  # `quant_algo` of ModelOpt
# Tensors of activations that may come with a weight; they are not read.
_OF_ACTIVATIONS = {
    _COMPRESSED: ("input_scale", "input_global_scale"),
    _TORCHAO: ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale"),
    _MODELOPT: ("input_scale",),
}
_OF_CACHE = (".k_proj.k_scale", ".v_proj.v_scale")  # how ModelOpt's names of the cache's scales end; not read either


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the files: its name, and the shapes and dtypes (safetensors' names) that it may have."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedParts:
    """The tensors of a coded weight.

    Attributes:
        codes: elements, one or two a byte by `code`; one a byte for int4, or eight in four bytes if `shifted`.
        scale: scale of each row, or one for all rows; None if it is 1.
        block_scales: scale of each group of a row.
        zeros: zero points, which must be zeros.
        divides: True if the product of code and block scale is divided by `scale`.
        swizzled: True if the block scales are in the order of NVIDIA's tensor cores.
        shifted: True if codes of int4 have eight added to them.
        spare: names of tensors that come with the weight and are not read.
    """

    code: WeightCode
    codes: Part
    scale: Part | None
    block_scales: Part | None
    zeros: Part | None
    divides: bool = False
    swizzled: bool = False
    shifted: bool = False
    spare: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.codes, self.scale, self.block_scales, self.zeros) if part)


class _Layout(NamedTuple):
    """A library's layout of a code: for each part the suffix of its name and its dtypes, or (). `optional`: suffixes of
    parts that may be missing."""

    code: WeightCode
    codes: tuple[str, ...]
    scale: tuple[str, ...] = ()
    block_scales: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def parts(
        self, shape: tuple[int, int], named: Callable[[str], str], held: Container[str] = (), **facts: Any
    ) -> CodedParts:
        """The parts of a weight of `shape`. `named`: full name of a suffix; `held`: suffixes of the optional parts that
        the files have; `facts`: other fields of `CodedParts`."""
        out, inner = shape
        packed, groups = self.code is WeightCode.NVFP4, self.code.groups(inner)
        stored = self.code.code_bytes(inner) if packed else -(-inner // 8) if facts.get("shifted") else inner
        # One scale for each row, or one for all rows; NVFP4 has only the latter.
        rows = ((1,), ()) if packed else ((out, 1), (out,), (1, 1), (1,), ())
        blocks = (32 * -(-out // 128), 16 * -(-groups // 4)) if facts.get("swizzled") else (out, groups)

        def part(of: tuple[str, ...], *shapes: tuple[int, ...]) -> Part | None:
            there = of and (of[0] not in self.optional or of[0] in held)
            return Part(named(of[0]), shapes, of[1:]) if there else None

        return CodedParts(
            code=self.code,
            codes=Part(named(self.codes[0]), ((out, stored),), self.codes[1:]),
            scale=part(self.scale, *rows),
            block_scales=part(self.block_scales, blocks),
            zeros=part(self.zeros, *([(out, groups)] if self.block_scales else rows)),
            **facts,
        )


_FLOATS = ("F32", "BF16", "F16")  # dtypes of scales that a float32 holds
_SCALE, _ZEROS, _OF_TENSOR = ("scale", *_FLOATS), ("zero_point", "I8"), ("per_tensor_scale", "F32")
_COMPRESSED_LAYOUTS = {
    "I8": _Layout(WeightCode.INT8, ("", "I8"), ("_scale", *_FLOATS)),
    "F8_E4M3": _Layout(WeightCode.FP8, ("", "F8_E4M3"), ("_scale", *_FLOATS)),
    "U8": _Layout(WeightCode.NVFP4, ("_packed", "U8"), ("_global_scale", "F32"), ("_scale", "F8_E4M3")),
    "I32": _Layout(WeightCode.INT4, ("_packed", "I32"), (), ("_scale", "BF16", "F16")),
}
# By the dtype of the codes.
_MODELOPT_LAYOUTS = {
    "F8_E4M3": _COMPRESSED_LAYOUTS["F8_E4M3"],
    "U8": _Layout(WeightCode.NVFP4, ("", "U8"), ("_scale_2", "F32"), ("_scale", "F8_E4M3")),
}
_INT8 = _Layout(WeightCode.INT8, ("qdata", "I8"), _SCALE, zeros=_ZEROS, optional=_ZEROS[:1])
# By class, target dtype and block size: "row" for a row or the whole weight.
_TORCHAO_LAYOUTS = {
    ("Float8Tensor", None, "row"): _Layout(WeightCode.FP8, ("qdata", "F8_E4M3"), _SCALE),
    ("Int8Tensor", None, "row"): _INT8,
    (_INTX, "int8", "row"): _INT8,
    (_INTX, "int4", "32 columns"): _Layout(WeightCode.INT4, ("qdata", "I8"), (), ("scale", "BF16"), _ZEROS),
    ("NVFP4Tensor", None, "16"): _Layout(
        WeightCode.NVFP4, ("qdata", "U8"), _OF_TENSOR, ("scale", "F8_E4M3"), optional=_OF_TENSOR[:1]
    ),
}


def require_readable(config: Mapping[str, object]) -> str | None:
    """The method that quantised the weights, by config.json; None if they are not quantised. Raises `ValueError`, which
    names it, for a method, format or scheme that does not fit any of our codes."""
    wanted: Any = config.get("quantization_config")
    if wanted is None or wanted is False:
        return None
    method = wanted.get("quant_method") if isinstance(wanted, Mapping) else wanted
    if method not in _METHODS:
        raise ValueError(f"config.json: quantization_config = {method!r}; allowed: {', '.join(map(repr, _METHODS))}")
    problems = _compressed_problems(wanted) if method == _COMPRESSED else []
    if method == _MODELOPT and (algorithm := wanted.get("quant_algo")) not in _ALGORITHMS:
        problems = [f"quant_algo = {algorithm!r} (allowed: {', '.join(map(repr, _ALGORITHMS))})"]
    if problems:
        raise ValueError(f"config.json: quantization_config of {method} asks for {'; '.join(problems)}")
    return method


def unread_ends(config: Mapping[str, object]) -> tuple[str, ...]:
    """How names end that belong to no weight, coded or not, and are not read. Raises as `require_readable`."""
    return _OF_CACHE if require_readable(config) == _MODELOPT else ()


def coded_parts(
    config: Mapping[str, object],
    found: Mapping[str, str],
    metadata: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, CodedParts]:
    """The parts of each coded weight in the files, by its official name.

    Args:
        found: dtype of every tensor of the files, by name.
        shapes: shape of every weight, by its official name.

    Raises:
        ValueError: as `require_readable`; a tensor of torchao that does not fit any of our codes, named; no coded
            weight.
    """
    method = require_readable(config)
    if method is None:
        return {}
    matrices = {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
    if method == _TORCHAO:
        parts = {name: _torchao_parts(name, shape, metadata) for name, shape in matrices.items()}
    else:
        parts_of = _compressed_parts if method == _COMPRESSED else _modelopt_parts
        parts = {name: parts_of(name, shape, found) for name, shape in matrices.items()}
    coded = {name: of for name, of in parts.items() if of}
    if not coded:
        raise ValueError(f"config.json says that {method} quantised the weights, but no weight in the files is coded")
    return coded


def _compressed_problems(wanted: Mapping[str, Any]) -> list[str]:
    problems = [f"{key} = {wanted[key]!r}" for key in ("kv_cache_scheme", "transform_config") if wanted.get(key)]
    if wanted.get("format") not in _FORMATS:
        problems.append(f"format = {wanted.get('format')!r} (allowed: {', '.join(map(repr, _FORMATS))})")
    sparsity = wanted.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
        problems.append(f"sparsity_config = {sparsity!r} (allowed: format 'dense')")
    if (status := wanted.get("quantization_status", "compressed")) != "compressed":
        problems.append(f"quantization_status = {status!r} (allowed: 'compressed')")
    groups = wanted.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return [*problems, f"config_groups = {groups!r} (allowed: schemes by name)"]
    for name, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            problems.append(f"weights = {weights!r} in {name}, only activations (allowed: a scheme of weights)")
            continue
        scheme = tuple(weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
        if scheme not in tuple(_SCHEMES):  # no set, because values of other types may be unhashable
            problems.append(
                f"weights of num_bits, type, strategy, group_size = {scheme} in {name} (allowed: "
                f"{', '.join(f'{what} {fields}' for fields, what in _SCHEMES.items())})"
            )
        problems += [
            f"{key} = {weights[key]!r} of the weights in {name} (allowed: {allowed!r})"
            for key, allowed in (("symmetric", True), ("dynamic", False))
            if weights.get(key, allowed) is not allowed
        ]
        if group.get("output_activations"):
            problems.append(f"output_activations in {name} (allowed: null)")
    return problems


def _compressed_parts(name: str, shape: tuple[int, int], found: Mapping[str, str]) -> CodedParts | None:
    packed = found.get(f"{name}_packed")
    if packed is None and f"{name}_scale" not in found:
        return None
    shifted = packed == "I32"
    layout = _COMPRESSED_LAYOUTS[
        "I32" if shifted else "U8" if packed else "I8" if found.get(name) == "I8" else "F8_E4M3"
    ]
    spare = (*_of_activations(_COMPRESSED, name, found), *({f"{name}_shape"} & found.keys()))
    divides = layout.code is WeightCode.NVFP4
    return layout.parts(shape, lambda end: name + end, divides=divides, shifted=shifted, spare=spare)


def _modelopt_parts(name: str, shape: tuple[int, int], found: Mapping[str, str]) -> CodedParts | None:
    packed = found.get(name) == "U8" or f"{name}_scale_2" in found
    if not packed and f"{name}_scale" not in found:
        return None
    spare = _of_activations(_MODELOPT, name, found)
    return _MODELOPT_LAYOUTS["U8" if packed else "F8_E4M3"].parts(shape, lambda end: name + end, spare=spare)


def _of_activations(method: str, name: str, found: Container[str]) -> tuple[str, ...]:
    module = name.removesuffix(".weight")
    return tuple(each for of in _OF_ACTIVATIONS[method] if (each := f"{module}.{of}") in found)


def _torchao_parts(name: str, shape: tuple[int, int], metadata: Mapping[str, str]) -> CodedParts | None:
    described = _described(name, metadata)
    if described is None:
        return None
    kind, facts, held = described["_type"], described["_data"], described["_tensor_data_names"]
    if "act_pre_scale" in held:
        raise ValueError(f"the weight {name}: a {kind} that scales activations (act_pre_scale) is not read")
    (out, inner), block, target = shape, facts.get("block_size"), facts.get("target_dtype")
    bits = str(target.get("_data")) if isinstance(target, Mapping) else None
    blocks = {"row": ([1, inner], [out, inner]), "32 columns": ([1, 32],), "16": (16,)}
    layouts = [of for key, of in _TORCHAO_LAYOUTS.items() if key[:2] == (kind, bits) and block in blocks[key[2]]]
    if not layouts:
        raise ValueError(
            f"the weight {name} {[out, inner]}: a {kind}{f' of {bits}' if bits else ''} in blocks of {block} is not "
            f"read; allowed: Float8Tensor, Int8Tensor and {_INTX} of int8 by tensor or row, {_INTX} of int4 in groups "
            "of 32, NVFP4Tensor"
        )
    module, _, last = name.rpartition(".")

    def named(end: str) -> str:
        return f"{module}._{last}_{end}"

    spare = tuple(named(of) for of in _OF_ACTIVATIONS[_TORCHAO] if of in held)
    swizzled = kind == "NVFP4Tensor" and bool(facts.get("is_swizzled_scales"))
    return layouts[0].parts(shape, named, held, swizzled=swizzled, spare=spare)


def _described(name: str, metadata: Mapping[str, str]) -> Mapping[str, Any] | None:
    try:
        described = json.loads(metadata.get(name, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the weight {name}: its metadata are not JSON: {error}") from error
    if described is None or described == {"_type": "Tensor"}:
        return None
    kinds = {"_type": str, "_data": dict, "_tensor_data_names": list}
    if not isinstance(described, dict) or not all(isinstance(described.get(key), of) for key, of in kinds.items()):
        raise ValueError(f"the weight {name}: its metadata lack one of {', '.join(kinds)}: {described!r}")
    return described
