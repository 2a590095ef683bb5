"""Find photos that look alike, by perceptual hashes."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
from jaxtyping import Bool
from PIL import ImageOps

from vse.pipeline.files.images import IMAGE_FORMATS, MAX_PIXELS, BadImage, UnreadableArchive, convert_to_rgb, read_image_bytes
from vse.pipeline.progress import progress_bar

N_HASH_BITS = 64
MAX_DIFFERENT_BITS = 6  # between the hashes of a photo and of its scaled, squashed or recompressed copy
_PIXELS_PER_SIDE, _N_FREQUENCIES = 32, 8
_HASHES_PER_CHUNK = 1024
_DCT_MATRIX = np.cos(
    np.pi * np.arange(_N_FREQUENCIES)[:, None] * (2 * np.arange(_PIXELS_PER_SIDE) + 1) / (2 * _PIXELS_PER_SIDE)
)  # of the DCT-II


def compute_perceptual_hash(path: Path) -> Bool[np.ndarray, f" {N_HASH_BITS}"]:
    """Compute the perceptual hash (pHash) of an image file: 64 bits that depend on the coarse appearance only.

    The bits state which of the 8 x 8 lowest frequencies of the cosine transform of 32 x 32 grey pixels are above the median.
    Raises BadImage if the file cannot be read.
    """
    content = read_image_bytes(path)
    try:
        with PIL.Image.open(BytesIO(content), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many")
            image.draft("L", (4 * _PIXELS_PER_SIDE, 4 * _PIXELS_PER_SIDE))  # decodes a JPEG at a fraction of its size
            grey = (
                convert_to_rgb(ImageOps.exif_transpose(image))
                .convert("L")
                .resize((_PIXELS_PER_SIDE, _PIXELS_PER_SIDE), PIL.Image.Resampling.BOX)
            )
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # a broken file can raise anything
        raise BadImage(f"{path}: not a readable image ({error})") from None
    low = (_DCT_MATRIX @ np.asarray(grey, np.float64) @ _DCT_MATRIX.T).ravel()
    bits: Bool[np.ndarray, f" {N_HASH_BITS}"] = low > np.median(low)
    return bits


def find_similar_hashes(
    hashes: Bool[np.ndarray, f"n_images {N_HASH_BITS}"],
    others: Bool[np.ndarray, f"n_others {N_HASH_BITS}"],
    max_bits: int = MAX_DIFFERENT_BITS,
) -> list[tuple[int, int]]:
    """Return all pairs (i, j) of ``hashes[i]`` and ``others[j]`` that differ in at most ``max_bits`` bits."""
    signs, other_signs = (np.where(bits, np.float32(1), np.float32(-1)) for bits in (hashes, others))
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(signs), _HASHES_PER_CHUNK):
        differing = (N_HASH_BITS - signs[start : start + _HASHES_PER_CHUNK] @ other_signs.T) / 2
        pairs += [(start + int(i), int(j)) for i, j in zip(*np.nonzero(differing <= max_bits), strict=True)]
    return pairs


def group_similar_photos(paths: Sequence[Path]) -> list[list[int]]:
    """Group photos that look alike. A group is a list of indices of ``paths``; groups are in the order of their first photo.

    Two photos are in one group if their perceptual hashes differ in at most ``MAX_DIFFERENT_BITS`` bits, or if a chain of such
    photos connects them. A file that cannot be decoded is a group of its own.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    hashes, readable = [], []
    in_file_order = sorted(range(len(paths)), key=paths.__getitem__)  # archives are read from front to back
    for index in progress_bar(in_file_order, desc="compare photos", unit="image"):
        try:
            hashes.append(compute_perceptual_hash(paths[index]))
            readable.append(index)
        except UnreadableArchive:
            raise
        except BadImage:
            continue
    n = len(paths)
    pairs = np.array(find_similar_hashes(np.stack(hashes), np.stack(hashes)) if hashes else [], np.int64).reshape(-1, 2)
    first, second = np.array(readable, np.int64)[pairs].T
    _, labels = connected_components(coo_array((np.ones(len(pairs), bool), (first, second)), (n, n)), directed=False)
    groups: dict[int, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(index)
    return list(groups.values())
