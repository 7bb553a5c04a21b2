"""A record on disk: a header of 64 bytes, then the payload.

    bytes   what
     0-7    "tieredRC"
     8-11   version of this format
    12-15   CRC-32 of the payload
    16-31   BLAKE2b of the record's name, 16 bytes
    32-39   version of the record
    40-47   offset of the header in the file
    48-55   bytes of the payload
    56-59   0
    60-63   CRC-32 of the 60 bytes before

Integers are little-endian. The offset finds what was written to, or read from, the wrong place.
"""

import hashlib
import struct
import zlib

from tiered.offload.file_io import Data

HEADER_BYTES = 64
FORMAT = 1
_MAGIC = b"tieredRC"
_FIELDS = struct.Struct("<8sII16sQQQI")
_CRC = struct.Struct("<I")


def pack_header(name: str | bytes, version: int, offset: int, payload: Data) -> bytes:
    """The header of `payload`, to be written at `offset`.

    Raises:
        ValueError: `version` is negative, or does not fit 64 bits.
    """
    if not 0 <= version < 1 << 64:
        raise ValueError(f"version = {version} must be 0 to {(1 << 64) - 1}")
    length = memoryview(payload).nbytes
    fields = _FIELDS.pack(_MAGIC, FORMAT, zlib.crc32(payload), _digest(name), version, offset, length, 0)
    return fields + _CRC.pack(zlib.crc32(fields))


def find_fault(header: Data, name: str | bytes, version: int, offset: int, payload: Data) -> str | None:
    """What shows that `header` and `payload`, read at `offset`, are not the record asked for; None: nothing."""
    packed = bytes(header)
    fields = packed[: _FIELDS.size]
    if not any(packed):
        return "nothing was written there"
    if packed[_FIELDS.size :] != _CRC.pack(zlib.crc32(fields)):
        return "the header's checksum differs"
    magic, form, crc, digest, found_version, found_offset, length, _ = _FIELDS.unpack(fields)
    if (magic, form) != (_MAGIC, FORMAT):
        return f"the header is {magic!r} of format {form}, not {_MAGIC!r} of format {FORMAT}"
    if digest != _digest(name):
        return "the record there has another name"
    if found_version != version:
        return f"the record there has version {found_version}, not {version}"
    if found_offset != offset:
        return f"the record there was written for offset {found_offset}"
    if length != memoryview(payload).nbytes:
        return f"the record there has {length} bytes, not {memoryview(payload).nbytes}"
    if crc != zlib.crc32(payload):
        return "the payload's checksum differs"
    return None


def _digest(name: str | bytes) -> bytes:
    return hashlib.blake2b(name.encode() if isinstance(name, str) else name, digest_size=16).digest()
