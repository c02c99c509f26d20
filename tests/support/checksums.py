"""Checksums of changed files."""

from __future__ import annotations

import re
import zlib


def signed(data: bytes) -> bytes:
    """Return a manifest, or a file of safetensors, with the checksum of its bytes, if it has a
    place for one."""
    match = re.search(rb'"crc32": ?"([0-9a-f]{8})"', data)
    if match is None:
        return data
    begin, end = match.span(1)
    checksum = zlib.crc32(data[:begin] + b"0" * 8 + data[end:])
    return data[:begin] + b"%08x" % checksum + data[end:]


def flipped(data: bytes, bit: int) -> bytes:
    """Return bytes with another value of a bit."""
    at = bit // 8
    return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]
