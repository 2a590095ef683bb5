"""Whether a JPEG file holds all the data that its header promises.

libjpeg fills what is missing with grey and says so in a warning alone, which Pillow does not pass on: a file that was cut and
closed with an end marker, or whose header is of a larger image, is decoded as if it were whole.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

SOI = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_END_OF_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_EOI, _SOS, _DRI = 0xD9, 0xDA, 0xDD
_ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length
_HUFFMAN = (0xC0, 0xC1, 0xC2)  # sequential, extended sequential and progressive frames
_PROGRESSIVE = 0xC2
_N_COEFFICIENTS = 64
_NOISE = bytes(random.Random(0).randrange(255) for _ in range(1024))  # no 0xff: it is data, not a marker


@dataclass
class _Frame:
    """A frame header, and what its scans have refined so far: by component, the lowest bit known of each coefficient."""

    kind: int
    height: int
    width: int
    sampling: dict[int, tuple[int, int]]
    lowest_bits: dict[int, list[int | None]] = field(default_factory=dict)

    @classmethod
    def read(cls, kind: int, segment: bytes) -> _Frame:
        height, width = int.from_bytes(segment[1:3]), int.from_bytes(segment[3:5])
        components = [segment[6 + 3 * k : 9 + 3 * k] for k in range(segment[5])]
        sampling = {c[0]: (c[1] >> 4 or 1, c[1] & 15 or 1) for c in components}
        return cls(kind, height, width, sampling, {name: [None] * _N_COEFFICIENTS for name in sampling})

    def add_scan(self, segment: bytes) -> list[int]:
        """Note what a scan with this header refines; returns its components."""
        names = [segment[1 + 2 * k] for k in range(segment[0])]
        first, last, bits = segment[-3:]
        if self.kind != _PROGRESSIVE:
            first, last, bits = 0, _N_COEFFICIENTS - 1, 0
        for name in names:
            known = self.lowest_bits[name]
            known[first : last + 1] = [bits & 15] * len(known[first : last + 1])
        return names

    def restarts(self, names: list[int], interval: int) -> int:
        """How many restart markers a scan of these components has."""
        across, down = (max(factors[axis] for factors in self.sampling.values()) for axis in (0, 1))
        width, height = 8 * across, 8 * down
        if len(names) == 1:  # a scan of one component has no more blocks than that component
            factors = self.sampling[names[0]]
            width, height = width // factors[0], height // factors[1]
        return (-(-self.width // width) * -(-self.height // height) - 1) // interval

    @property
    def complete(self) -> bool:
        """Whether the scans bring every coefficient of every component to its last bit."""
        return not any(bit for known in self.lowest_bits.values() for bit in (1 if b is None else b for b in known))


def with_noise(content: bytes) -> bytes | None:
    """The file with noise after the data of each scan, or None if data are missing, which shows without decoding.

    Of a whole file a decoder ignores the noise, because it has all blocks of the scan by then. A decoder that lacks data
    takes the noise for them, where it would have filled the image: the two images differ. Files that are not coded as
    Huffman's are returned as they are.
    """
    frame, interval, place, parts = None, 0, 0, []
    copied = 0
    while marker := _MARKER.search(content, place):
        kind, place = marker[1][0], marker.end()
        if kind == _EOI:
            break
        if kind in _ALONE:
            continue
        length = int.from_bytes(content[place : place + 2])
        segment, place = content[place + 2 : place + length], place + length
        if kind == _DRI:
            interval = int.from_bytes(segment[:2])
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            if kind not in _HUFFMAN:
                return content
            frame = _Frame.read(kind, segment)
        elif kind == _SOS and frame is not None:
            found = _END_OF_SCAN.search(content, place)
            if found is None and content.endswith(bytes(2)):
                return None  # the end was never written: zeros are where the end marker belongs
            end = found.start() if found else len(content)
            names = frame.add_scan(segment)
            if interval and len(_RESTART.findall(content, place, end)) < frame.restarts(names, interval):
                return None
            parts += [content[copied:end], _NOISE]
            copied = place = end
    if frame is None or not frame.complete:
        return None
    return b"".join([*parts, content[copied:]])
