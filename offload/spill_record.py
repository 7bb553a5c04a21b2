"""Books: a record on disk, a header of 64 bytes and then the payload.

    bytes   what
     0-15   BLAKE2b of the record's name
    16-23   version of the record
    24-31   offset of the header in the file
    32-39   bytes of the payload
    40-43   CRC-32 of the payload
    44-59   0
    60-63   CRC-32 of the 60 bytes before

Integers are little-endian. The offset finds what was written to, or read from, the wrong place.
"""

import hashlib
import struct
import zlib

HEADER_BYTES = 64
Data = bytes | bytearray | memoryview
_FIELDS = struct.Struct("<16sQQQI16x")
_CRC = struct.Struct("<I")


def pack_header(name: str | bytes, version: int, offset: int, payload: Data) -> bytes:
    """The header of `payload`, to be written at `offset`.

    Raises:
        ValueError: `version` is negative, or does not fit 64 bits.
    """
    if not 0 <= version < 1 << 64:
        raise ValueError(f"version = {version} must be 0 to {(1 << 64) - 1}")
    digest = hashlib.blake2b(name.encode() if isinstance(name, str) else name, digest_size=16).digest()
    fields = _FIELDS.pack(digest, version, offset, memoryview(payload).nbytes, zlib.crc32(payload))
    return fields + _CRC.pack(zlib.crc32(fields))


def find_fault(header: Data, name: str | bytes, version: int, offset: int, payload: Data) -> str | None:
    """What shows that `header` and `payload`, read at `offset`, are not the record asked for; None: nothing."""
    expected, packed = pack_header(name, version, offset, payload), bytes(header)
    if packed == expected:
        return None
    if not any(packed):
        return "nothing was written there"
    fields = packed[: _FIELDS.size]
    if packed[_FIELDS.size :] != _CRC.pack(zlib.crc32(fields)):
        return "the header's checksum differs"
    digest, found_version, found_offset, length, _ = _FIELDS.unpack(fields)
    if digest != expected[:16]:
        return "the record there has another name"
    if found_version != version:
        return f"the record there has version {found_version}, not {version}"
    if found_offset != offset:
        return f"the record there was written for offset {found_offset}"
    if length != memoryview(payload).nbytes:
        return f"the record there has {length} bytes, not {memoryview(payload).nbytes}"
    return "the payload's checksum differs"
