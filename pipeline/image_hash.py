"""Photos that look alike: a perceptual hash of each, and which hashes are near."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageOps

from vse.pipeline.image_files import FORMATS, MAX_PIXELS, BadImage, as_rgb, read_bytes

N_BITS = 64
NEAR = 6  # bits, at most, in which the hashes of one photo differ that was scaled, squashed or compressed again
_SIDE, _LOWEST = 32, 8
_CHUNK = 1024
_WAVES = np.cos(np.pi * np.arange(_LOWEST)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE))  # DCT-II


def perceptual_hash(path: Path) -> Bool[np.ndarray, f" {N_BITS}"]:
    """64 bits of what an image file looks like from afar (pHash); :class:`BadImage` if it cannot be read.

    The image is shrunk to 32 x 32 grey pixels, whatever its shape; of its cosine transform the 8 x 8 lowest frequencies are
    compared with their median.
    """
    content = read_bytes(path)
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many")
            image.draft("L", (4 * _SIDE, 4 * _SIDE))  # a JPEG is decoded at a fraction of its size
            grey = as_rgb(ImageOps.exif_transpose(image)).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # a broken file can raise anything
        raise BadImage(f"{path}: not a readable image ({error})") from None
    low = (_WAVES @ np.asarray(grey, np.float64) @ _WAVES.T).ravel()
    bits: Bool[np.ndarray, f" {N_BITS}"] = low > np.median(low)
    return bits


def near_pairs(
    hashes: Bool[np.ndarray, f"n_images {N_BITS}"], others: Bool[np.ndarray, f"n_others {N_BITS}"], most: int = NEAR
) -> list[tuple[int, int]]:
    """All pairs (i, j) of a hash and another one that differ in ``most`` bits at most."""
    signs, other_signs = (np.where(bits, np.float32(1), np.float32(-1)) for bits in (hashes, others))
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(signs), _CHUNK):
        differing = (N_BITS - signs[start : start + _CHUNK] @ other_signs.T) / 2
        pairs += [(start + int(i), int(j)) for i, j in zip(*np.nonzero(differing <= most), strict=True)]
    return pairs
