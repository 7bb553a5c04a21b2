"""Books: checkpoints of compressed-tensors: what their config.json may ask for, and the parts of their weights."""

from collections.abc import Mapping
from typing import Any

from tiered.kernels.weight_code import WeightCode
from tiered.models.coded_parts import FLOATS, CodedParts, Part, by_row

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision")
# Of weights: bits, type, strategy, group size.
_WEIGHTS = {
    (8, "float", "tensor", None): "FP8 by tensor",
    (8, "float", "channel", None): "FP8 by channel",
    (8, "int", "tensor", None): "INT8 by tensor",
    (8, "int", "channel", None): "INT8 by channel",
    (4, "float", "tensor_group", 16): "NVFP4",
}
# Of activations, by numbers known beforehand; ours are not quantised.
_OF_ACTIVATIONS = ("input_scale", "input_global_scale")


def compressed_problems(wanted: Mapping[str, Any]) -> list[str]:
    """What `quantization_config` asks for and no code of ours can hold."""
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
            problems.append(f"weights = {weights!r} in {name}, activations alone (allowed: a scheme of weights)")
            continue
        scheme = tuple(weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
        if scheme not in tuple(_WEIGHTS):  # what is no number or word may have no hash
            problems.append(
                f"weights of num_bits, type, strategy, group_size = {scheme} in {name} (allowed: "
                f"{', '.join(f'{what} {fields}' for fields, what in _WEIGHTS.items())})"
            )
        problems += [
            f"{key} = {weights[key]!r} of the weights in {name} (allowed: {allowed!r})"
            for key, allowed in (("symmetric", True), ("dynamic", False))
            if weights.get(key, allowed) is not allowed
        ]
        if group.get("output_activations"):
            problems.append(f"output_activations in {name} (allowed: null)")
    return problems


def compressed_parts(name: str, out: int, inner: int, found: Mapping[str, str]) -> CodedParts | None:
    """The parts of the weight `name`, which stand beside it or in its place; None: it is in no codes. `found` has the
    dtype of every tensor."""
    module = name.removesuffix(".weight")
    scale, spare = f"{name}_scale", tuple(f"{module}.{of}" for of in _OF_ACTIVATIONS if f"{module}.{of}" in found)
    if f"{name}_packed" in found:
        return CodedParts(
            code=WeightCode.NVFP4,
            codes=Part(f"{name}_packed", ((out, WeightCode.NVFP4.code_bytes(inner)),), ("U8",)),
            block_scales=Part(scale, ((out, WeightCode.NVFP4.groups(inner)),), ("F8_E4M3",)),
            scale=Part(f"{name}_global_scale", ((1,), ()), ("F32",)),
            divides=True,
            spare=spare,
        )
    if scale not in found:
        return None
    code, dtype = (WeightCode.INT8, "I8") if found.get(name) == "I8" else (WeightCode.FP8, "F8_E4M3")
    codes = Part(name, ((out, inner),), (dtype,))
    return CodedParts(code=code, codes=codes, scale=Part(scale, by_row(out), FLOATS), spare=spare)
