"""PNG with few colours, a third of what a browser writes: flat areas and text need no more."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

COLOURS = 128
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEYWORD = b"Source\0"
Pixels = NDArray[np.uint8]


def pixels(png: bytes) -> Pixels:
    """Height x width x 4 bytes (red, green, blue, opacity), of a PNG as browsers write it: 8 bits, not interlaced."""
    chunks = list(_chunks(png))
    width, height, depth, kind = struct.unpack_from(">IIBB", chunks[0][1])
    assert (depth, kind) == (8, 6), f"a PNG of kind {kind} with {depth} bits is not what a browser writes"
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    rows, above = [], bytearray(4 * width + 4)  # four bytes of nothing at the left of each row
    for y in range(height):
        start = y * (4 * width + 1)
        above = _unfiltered(data[start], data[start + 1 : start + 1 + 4 * width], above)
        rows.append(above[4:])
    return np.frombuffer(b"".join(rows), np.uint8).reshape(height, width, 4)


def _unfiltered(kind: int, row: bytes, above: bytearray) -> bytearray:
    """PNG stores the difference from a neighbor: 0 none, 1 left, 2 above, 3 their mean, 4 Paeth's choice."""
    made = bytearray(4)
    for i, byte in enumerate(row):
        left, up, corner = made[i], above[i + 4], above[i]
        if kind == 4:
            guess = left + up - corner
            made.append((byte + min((left, up, corner), key=lambda one: abs(guess - one))) & 255)
        else:
            made.append((byte + (0, left, up, (left + up) // 2)[kind]) & 255)
    return made


def written(image: Pixels, source: str) -> bytes:
    """The PNG of an image in its most frequent colours; the text `source` is kept in it."""
    colours, index, counts = np.unique(image.reshape(-1, 4), axis=0, return_inverse=True, return_counts=True)
    kept = np.argsort(-counts)[:COLOURS]
    seen = np.c_[colours[:, :3] * (colours[:, 3:] / 255), colours[:, 3]]
    nearest = np.abs(seen[:, None] - seen[kept]).sum(2).argmin(1)
    height, width, _ = image.shape
    rows = np.c_[np.zeros(height, np.uint8), nearest[index.reshape(height, width)].astype(np.uint8)]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": colours[kept, :3].tobytes(),
        b"tRNS": colours[kept, 3].tobytes(),
        b"tEXt": _KEYWORD + source.encode("latin-1"),
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    return _SIGNATURE + b"".join(map(_packed, chunks, chunks.values()))


def source(png: bytes) -> str:
    """The text that `written` has put into a PNG; empty where there is none."""
    found = (body for _, body in _chunks(png) if body.startswith(_KEYWORD))
    return next(found, b"").removeprefix(_KEYWORD).decode("latin-1")


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at < len(png):
        length, name = struct.unpack_from(">I4s", png, at)
        yield name, png[at + 8 : at + 8 + length]
        at += 12 + length


def _packed(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
