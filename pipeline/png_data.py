"""Check that a PNG file holds all the rows that its header promises, undamaged.

A decoder leaves missing rows black, and Pillow does not compare the checksums of the pixels.
"""

from __future__ import annotations

import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # x, y, steps
_BLOCK = 1 << 20


def lacks_rows(content: bytes) -> bool:
    """Return whether the rows of a PNG file that Pillow decoded are incomplete, or do not have their checksum."""
    stream, size, missing, place = zlib.decompressobj(), 0, 0, len(SIGNATURE)
    while place + 8 <= len(content):
        length, kind = int.from_bytes(content[place : place + 4]), content[place + 4 : place + 8]
        data = content[place + 8 : place + 8 + length]
        checksum = content[place + 8 + length : place + 12 + length]
        place += length + 12
        if kind == b"IHDR":
            missing = _raw_bytes(data)
        elif kind == b"IDAT":
            if zlib.crc32(kind + data) != int.from_bytes(checksum):
                return True
            while data and size < missing:
                size += len(stream.decompress(data, _BLOCK))
                data = stream.unconsumed_tail
            if size >= missing:
                break
    return size < missing


def _raw_bytes(header: bytes) -> int:
    """Size of all rows, each with the byte that names its filter."""
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    depth, colour, interlaced = header[8], header[9], header[12]
    bits, size = depth * _CHANNELS[colour], 0
    for x, y, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // across), -(-(height - y) // down)
        if columns > 0 and rows > 0:
            size += rows * (1 + -(-columns * bits // 8))
    return size
