"""Reading a Hugging Face checkpoint: every weight is checked from the headers of its safetensors files, then read one
by one. No pickle is ever opened."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tiered.core.buffers import dtype_name
from tiered.core.errors import NonFiniteError
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.encode_rows_ref import pack, paired
from tiered.kernels.row_code import WeightCode, chunks
from tiered.models.locate import read_object
from tiered.models.quantised import CodedParts, Part, coded_parts, unread_ends
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

# safetensors' names of the dtypes that weights may have.
WEIGHT_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**WEIGHT_DTYPES, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32}
_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn}
_NEGATIVE = 0x80  # sign bit of E4M3
_SHIFT = 0x88  # between two codes of int4 and the same plus eight: addition without a carry
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8  # length of the header, in front of it
# All experts of a layer in one tensor. In the first of these, each expert's gate lies before its up projection.
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its shape, safetensors' name of its dtype, its first byte and its number of bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int

    def read(self) -> Tensor:
        """A view of the file, which stays mapped while the tensor lives. Only these bytes are mapped: a system may
        refuse to map a file that is larger than its memory, and safetensors reads the whole header for each tensor."""
        try:
            mapped = np.memmap(self.file, np.uint8, "c", self.start, (self.nbytes,))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.file} has changed since its header was read: {error}") from error
        return torch.from_numpy(mapped).view(_DTYPES[self.dtype]).view(self.shape)

    def parts(self, halves: int) -> Iterator["StoredTensor"]:
        """Each expert's matrix of a stack; with `halves` = 2, its two halves apart."""
        (count, rows, width), nbytes = self.shape, self.nbytes // (self.shape[0] * halves)
        for place in range(count * halves):
            shape = rows // halves, width
            yield StoredTensor(self.file, shape, self.dtype, self.start + place * nbytes, nbytes)


class Checkpoint:
    """The weights of a model in safetensors files, one tensor at a time.

    Attributes:
        codes: code of each coded weight in the files, by its official name.
    """

    def __init__(self, directory: Path, shape: ModelShape, config: Mapping[str, object]) -> None:
        """Read the headers of the files in `directory`, and check them against `shape` and `config`. A head that
        config.json ties to the embedding may be there once more, in the embedding's shape and dtype.

        Raises:
            FileNotFoundError: no weights, or a shard that the index names is missing.
            ValueError: a file is truncated or not safetensors, the index names files elsewhere, or codes do not fit
                any of ours. Weights are missing, unexpected or duplicate, or have another shape or a dtype that is not
                floating point; names each of them.
        """
        self._shapes, self._unread, self._unread_ends = shape.weight_shapes, shape.unread, unread_ends(config)
        stored, metadata = _read_headers(_shards_in(directory))
        self._stored = _unstacked(stored, self._shapes)
        self._tables = (shape.vocab_size, shape.width)
        first, again = (self._stored.get(name) for name in shape.tied or ("", ""))
        alike = first and again and (first.shape, first.dtype) == (again.shape, again.dtype)
        self._tied = shape.tied if alike else None
        dtypes = {name: stored.dtype for name, stored in self._stored.items()}
        self._coded = coded_parts(config, dtypes, metadata, self._shapes)
        self._check()
        self.codes: Mapping[str, WeightCode] = {name: parts.code for name, parts in self._coded.items()}

    def order(self) -> Iterator[str]:
        """Official names in the order of files and of bytes within a file."""
        official = {parts.codes.name: name for name, parts in self._coded.items()} | {name: name for name in self._raw}
        yield from (official[name] for name in self._stored if name in official)

    def extent(self, name: str, dtype: torch.dtype) -> tuple[Path, int, int] | None:
        """File, first byte and number of bytes of the weight `name`; None unless the file holds it as `dtype`."""
        if name in self._coded or WEIGHT_DTYPES[self._stored[name].dtype] != dtype:
            return None
        stored = self._stored[name]
        return stored.file, stored.start, stored.nbytes

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        code: WeightCode | None = None,
        into: UInt8[Tensor, " nbytes"] | None = None,
    ) -> Tensor | CodedRows:
        """The weight `name` on `device`, as `dtype`, or in `code`, encoded there from its values in `dtype`. A weight
        that is coded in the files keeps its code. `into`: memory for it, on any device; None to allocate it.

        Raises:
            NonFiniteError: it holds NaN or infinity, in the file or because `dtype` cannot hold its values.
            ValueError: the weight is not a matrix but has a `code`, codes in the file fit none of ours, or an embedding
                or a head holds only zeros. Or a tied head is there too, and differs.
        """
        if name in self._coded:
            return self._read_coded(name, self._coded[name], dtype, device, into)
        stored = self._stored[name]
        if code is not None and len(stored.shape) != 2:
            raise ValueError(f"the weight {name} {list(stored.shape)} is not a matrix, so {code} does not fit it")
        values = stored.read()
        # Copied even if dtype and device are the same, because the values are the mapped file.
        if into is None or code is not None:
            weight = torch.empty(stored.shape, dtype=dtype, device=device)
        else:
            weight = into.view(dtype).view(stored.shape)
        ends = torch.stack(weight.copy_(values).aminmax())  # one pass without a copy; NaN makes both ends NaN
        if not ends.isfinite().all():
            raise _not_finite(name, stored.file, values, dtype)
        if stored.shape == self._tables and not ends.any():
            raise ValueError(
                f"the weight {name} holds only zeros, so all tokens would be equal: {stored.file} is damaged, or was "
                "never filled"
            )
        if self._tied and name == self._tied[0] and not torch.equal(values, self._stored[self._tied[1]].read()):
            raise ValueError(f"the weight {self._tied[1]} differs from {name}, but config.json ties them: one is wrong")
        if code is None:
            return weight
        return CodedRows.of(weight, code, None if into is None else into.view(len(weight), -1))

    def _read_coded(
        self,
        name: str,
        parts: CodedParts,
        dtype: torch.dtype,
        device: torch.device,
        into: UInt8[Tensor, " nbytes"] | None,
    ) -> CodedRows:
        out, inner = self._shapes[name]
        coded = _coded_bytes(parts, (out, inner), lambda part: self._stored[part.name].read().to(device))
        if into is not None:
            coded = into.view(out, -1).copy_(coded)
        weight = CodedRows(coded, parts.code, inner, dtype)
        if not all(_is_finite(weight[rows].values()) for rows in chunks(out, inner)):
            raise NonFiniteError(
                f"the weight {name}",
                f"a code or a scale in {self._stored[parts.codes.name].file} is NaN, or a decoded value is beyond "
                + dtype_name(dtype),
            )
        return weight

    @property
    def _raw(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._shapes.items() if name not in self._coded}

    def _check(self) -> None:
        wanted = [Part(name, (shape,), tuple(WEIGHT_DTYPES)) for name, shape in self._raw.items()]
        wanted += [part for parts in self._coded.values() for part in parts.read]
        known = {part.name for part in wanted} | {name for parts in self._coded.values() for name in parts.spare}
        known |= {*(self._tied or ())}
        other = [name for name in self._stored if not name.startswith(self._unread)]
        other = [name for name in other if name not in known and not name.endswith(self._unread_ends)]
        problems: dict[str, list[str]] = {"unexpected": other}
        for part in wanted:
            stored = self._stored.get(part.name)
            if stored is None:
                problems.setdefault("missing", []).append(part.name)
                continue
            if stored.shape not in part.shapes:
                allowed = " or ".join(str(list(shape)) for shape in part.shapes)
                found = f"{part.name} {list(stored.shape)} instead of {allowed}"
                problems.setdefault("of another shape", []).append(found)
            if stored.dtype not in part.dtypes:
                kind = f"of another dtype than {', '.join(part.dtypes)}"
                problems.setdefault(kind, []).append(f"{part.name} {stored.dtype}")
        lines = [f"{len(names)} {what}: {', '.join(names)}" for what, names in problems.items() if names]
        if lines:
            raise ValueError("the weights do not fit config.json; " + "; ".join(lines))


def assign(model: nn.Module, path: str, weight: Tensor | CodedRows | None) -> None:
    """Replace the parameter, or coded weight, at `path` by `weight`; None removes it."""
    module, _, name = path.rpartition(".")
    owner = model.get_submodule(module)
    if isinstance(weight, Tensor):
        setattr(owner, name, nn.Parameter(weight, requires_grad=False))
    else:
        owner._parameters.pop(name, None)  # a module accepts only parameters under the name of one
        setattr(owner, name, weight)


def _coded_bytes(
    parts: CodedParts, shape: tuple[int, int], read: Callable[[Part], Tensor]
) -> UInt8[Tensor, "out row_bytes"]:
    """A weight of `shape` in the layout of row_code.py, on the device of the `parts` from `read`."""
    out, inner = shape
    if parts.zeros and read(parts.zeros).any():
        raise ValueError(f"{parts.zeros.name} is not all zeros: weights in asymmetric codes are not read")
    codes = read(parts.codes)
    if parts.shifted:  # eight to an int32, the first one in its lowest bits
        codes = codes.view(torch.uint8)[:, : parts.code.code_bytes(inner)] ^ _SHIFT
    elif parts.code is WeightCode.INT4:
        if codes.min() < -8 or codes.max() > 7:
            raise ValueError(f"{parts.codes.name} has codes out of the range of int4, -8 to 7")
        codes = paired(codes)
    block_scales = None
    if parts.block_scales:
        scales = read(parts.block_scales)
        block_scales = (scales.bfloat16() if scales.dtype is torch.float16 else scales).view(torch.uint8)
        if parts.code is WeightCode.NVFP4 and block_scales.max() >= _NEGATIVE:
            raise ValueError(f"{parts.block_scales.name} has scales below zero")
        if parts.swizzled:
            block_scales = _unswizzled(block_scales, out, parts.code.groups(inner))
    rows = torch.empty(out, parts.code.row_bytes(inner), dtype=torch.uint8, device=codes.device)
    pack(rows, parts.code, inner, (codes.view(torch.uint8), block_scales, _row_scale(parts, out, codes.device, read)))
    return rows


def _unswizzled(scales: UInt8[Tensor, "padded groups_padded"], out: int, groups: int) -> UInt8[Tensor, "out groups"]:
    """Block scales by row. They are stored in tiles of 128 rows and 4 groups (cuBLAS, layout of 1D block scaling
    factors). Rows r, r + 32, r + 64 and r + 96 are adjacent."""
    down, across = -(-out // 128), -(-groups // 4)
    tiles = scales.reshape(down, across, 32, 4, 4).transpose(2, 3)
    return tiles.reshape(down, across, 128, 4).transpose(1, 2).reshape(down * 128, across * 4)[:out, :groups]


def _row_scale(
    parts: CodedParts, out: int, device: torch.device, read: Callable[[Part], Tensor]
) -> Float[Tensor, " out"] | None:
    if parts.code is WeightCode.INT4:
        return None
    if parts.scale is None:
        return torch.ones(out, device=device)
    scale = read(parts.scale).float().flatten().expand(out)
    return scale.reciprocal() if parts.divides else scale


def _is_finite(weight: Tensor) -> bool:
    # One pass over the weight on its device without a copy; NaN makes both ends NaN.
    return bool(torch.stack(weight.aminmax()).isfinite().all())


def _not_finite(name: str, file: Path, stored: Tensor, dtype: torch.dtype) -> NonFiniteError:
    hint = f"so it is in {file}: the file is damaged, or the training failed"
    if _is_finite(stored):
        most = float(torch.stack(stored.aminmax()).abs().max())
        wide = [name for name in BYTES_PER_ELEMENT if torch.finfo(getattr(torch, name)).max > most]
        hint = (
            f"up to {most:.3g} in {file}, it is beyond {dtype_name(dtype)}, which ends at "
            f"{torch.finfo(dtype).max:.3g}: dtype = {' or '.join(map(repr, wide))} holds it"
        )
    return NonFiniteError(f"the weight {name}", hint)


def _shards_in(directory: Path) -> list[Path]:
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(f"no weights in {directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        if not single.is_file():
            raise ValueError(f"{single} is not a file")
        return [single]
    by_weight = read_object(index).get("weight_map")
    names = list(by_weight.values()) if isinstance(by_weight, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is damaged: its 'weight_map' is not an object of weights and names of files")
    elsewhere = [name for name in names if name in ("", "..") or name != Path(name).name]
    if elsewhere:
        raise ValueError(f"{index} names {elsewhere[0]!r}; the name of a file in the same folder is allowed")
    files = [directory / name for name in sorted(set(names))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{len(absent)} of {len(files)} shards are missing in {directory}: {', '.join(absent)}")
    return files


def _read_headers(files: list[Path]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of all files by name, in the order of files and bytes; and the files' metadata, merged."""
    found: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, first = _header(file)
        metadata |= header.pop("__metadata__", {})
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if name in found:
                raise ValueError(f"weight {name} is in two files: {found[name].file.name} and {file.name}")
            start, stop = entry["data_offsets"]
            found[name] = StoredTensor(file, tuple(entry["shape"]), entry["dtype"], first + start, stop - start)
    return found, metadata


def _unstacked(found: Mapping[str, StoredTensor], shapes: Mapping[str, object]) -> dict[str, StoredTensor]:
    """`found` with each expert of a stack under its own official name, if `shapes` has such names."""
    alone: dict[str, StoredTensor] = {}
    twice: list[str] = []
    for name, stored in found.items():
        by_name, match = {name: stored}, _STACK.fullmatch(name)
        if match is not None and len(stored.shape) == 3:
            kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
            if f"{match[1]}.0.{kinds[0]}.weight" in shapes:
                if stored.dtype not in WEIGHT_DTYPES:
                    raise ValueError(f"{name} is a stack of experts in {stored.dtype}; codes are read one by one")
                names = (f"{match[1]}.{number}.{kind}.weight" for number in range(stored.shape[0]) for kind in kinds)
                by_name = dict(zip(names, stored.parts(len(kinds)), strict=True))
        twice += [each for each in by_name if each in alone]
        alone |= by_name
    if twice:
        raise ValueError(f"{len(twice)} weights are there both alone and in a stack of experts: {', '.join(twice)}")
    return alone


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of `file`, and the first byte of its tensors. safetensors opens the file first and checks it."""
    try:
        with safe_open(file, framework="np"), file.open("rb") as raw:
            length = int.from_bytes(raw.read(_LENGTH_BYTES), "little")
            return json.loads(raw.read(length)), _LENGTH_BYTES + length
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors (truncated or damaged): {error}") from error
