"""Books: which checkpoints that are quantised already can be read, and of which tensors of their files each weight is
made. Layouts as compressed-tensors 0.20 and torchao 0.18 (its safetensors support) write them.

    files                                                        code
    compressed-tensors, float of 8 bits, by tensor or channel    fp8
    compressed-tensors, int of 8 bits, by tensor or channel      int8
    compressed-tensors, float of 4 bits in groups of 16          nvfp4
    torchao, Float8Tensor by tensor or row                       fp8
    torchao, Int8Tensor or Intx… of int8, by tensor or row       int8
    torchao, Intx… of int4 in groups of 32, bfloat16 scales      int4
    torchao, NVFP4Tensor, block scales swizzled or not           nvfp4

Codes and scales are kept exactly, but for the scale of a tensor in the NVFP4 of compressed-tensors: there it is a
divisor, and its reciprocal is rounded to float32. Activations stay as they are, whatever was to become of them.
"""

from collections.abc import Mapping
from typing import Any

from tiered.models.coded_parts import CodedParts
from tiered.models.quantised_compressed import compressed_parts, compressed_problems
from tiered.models.quantised_torchao import torchao_parts

_COMPRESSED, _TORCHAO = "compressed-tensors", "torchao"


def require_readable(config: Mapping[str, object]) -> str | None:
    """The method by which config.json says that weights are quantised; None: they are not.

    Raises:
        ValueError: a method, format or scheme that no code of ours can hold, named.
    """
    wanted: Any = config.get("quantization_config")
    if wanted is None or wanted is False:
        return None
    method = wanted.get("quant_method") if isinstance(wanted, Mapping) else wanted
    if method not in (_COMPRESSED, _TORCHAO):
        raise ValueError(f"config.json: quantization_config = {method!r}; allowed: {_COMPRESSED!r}, {_TORCHAO!r}")
    problems = compressed_problems(wanted) if method == _COMPRESSED else []
    if problems:
        raise ValueError(f"config.json: quantization_config of {method} asks for {'; '.join(problems)}")
    return method


def coded_parts(
    config: Mapping[str, object],
    found: Mapping[str, str],
    metadata: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, CodedParts]:
    """Of what the weights that files hold in codes are made, by their official names.

    Args:
        found: dtype of every tensor of the files, by name.
        metadata: of the files.
        shapes: of every weight, by its official name.

    Raises:
        ValueError: as `require_readable`; a tensor of torchao that no code of ours can hold, named; none in codes.
    """
    method = require_readable(config)
    if method is None:
        return {}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    if method == _COMPRESSED:
        parts = {name: compressed_parts(name, *shape, found) for name, shape in matrices.items()}
    else:
        parts = {name: torchao_parts(name, *shape, metadata) for name, shape in matrices.items()}
    coded = {name: of for name, of in parts.items() if of}
    if not coded:
        raise ValueError(f"config.json says that {method} has quantised the weights, but the files hold none in codes")
    return coded
