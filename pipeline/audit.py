"""Images that two data sets, or two splits of one, have in common: what one trains on, the other would test on."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vse.pipeline.dataset import SPLITS, Dataset, Image
from vse.pipeline.image_files import read_bytes
from vse.pipeline.image_hash import near_pairs, perceptual_hash
from vse.pipeline.progress import progress_bar

TRAINED = ("train", "restval")
_FLICKR = re.compile(r"([1-9][0-9]{4,17})(?:_.*)?")  # 36979 is the lowest number of Flickr30K
_COCO = re.compile(r"(?:COCO_[a-z]+[0-9]{4}_)?0{4,11}([0-9]{1,8})")


def published_id(image: Image) -> str | None:
    """What an image is called wherever it was published: its number on Flickr or in MS-COCO; None if its name has none.

    Flickr8k has ``1000268201_693b08cb0e.jpg``, Flickr30K ``1000268201.jpg``; COCO ``COCO_val2014_000000000042.jpg``, or
    ``000000000042.jpg``, or the field ``cocoid``.
    """
    if image.cocoid is not None:
        return f"coco {image.cocoid}"
    stem = Path(image.file).stem
    if match := _COCO.fullmatch(stem):
        return f"coco {int(match[1])}"
    match = _FLICKR.fullmatch(stem)
    return f"flickr {match[1]}" if match else None


def same_images(
    images: Iterable[Image],
    others: Iterable[Image],
    sums: Mapping[int, bytes] | None = None,
    other_sums: Mapping[int, bytes] | None = None,
) -> list[tuple[Image, Image]]:
    """Each of ``images`` that is also among ``others``, with that one: by its published id or by the sum of its file's bytes.

    ``sums`` and ``other_sums`` have the SHA-256 of files by ``imgid``, as far as they are known.
    """
    known = defaultdict[str | bytes, list[Image]](list)
    for other in others:
        for key in _keys(other, other_sums or {}):
            known[key].append(other)
    pairs = ((image, next((known[key][0] for key in _keys(image, sums or {}) if key in known), None)) for image in images)
    return [(image, other) for image, other in pairs if other is not None]


def _keys(image: Image, sums: Mapping[int, bytes]) -> list[str | bytes]:
    keys = (published_id(image), sums.get(image.imgid))
    return [key for key in keys if key is not None]


def shared_report(dataset: Dataset, other: Dataset) -> str:
    """How many images two data sets share, a line for each pair of splits; it says where one trains on what the other tests.

    Files are compared by their bytes, too, if they have the same size.
    """
    pairs = same_images(dataset.images, other.images, *_sums_of_equal_sizes(dataset, other))
    lines = [f"{len(pairs)} images of {dataset.path} are in {other.path}, too"]
    counts = Counter((image.split, twin.split) for image, twin in pairs)
    names = f"{dataset.name!r}", f"{other.name!r}" if other.name != dataset.name else "the other one"
    for (split, twin), count in by_splits(counts):
        lines.append(f"  {count:7d} in {split} of {names[0]} and {twin} of {names[1]}{leak_mark(split, twin)}")
    return "\n".join(lines)


def near_report(dataset: Dataset, other: Dataset | None = None) -> str:
    """How many photos look like one of another split of the data set, or of any split of another data set.

    :class:`vse.pipeline.image_files.BadImage` names a photo that cannot be read.
    """
    hashes = _hashes(dataset)
    images, twins = dataset.images, (dataset if other is None else other).images
    pairs = [
        (images[i], twins[j])
        for i, j in near_pairs(hashes, hashes if other is None else _hashes(other))
        if other is not None or (i < j and images[i].split != twins[j].split)
    ]
    seen: dict[tuple[str, str], list[tuple[Image, Image]]] = defaultdict(list)
    for image, twin in pairs:
        if other is None and SPLITS.index(image.split) > SPLITS.index(twin.split):
            image, twin = twin, image
        seen[image.split, twin.split].append((image, twin))
    where = f"across the splits of {dataset.path}" if other is None else f"of {dataset.path} and {other.path}"
    lines = [f"{len(pairs)} pairs of photos {where} look alike (perceptual hash)"]
    for (split, twin_split), some in by_splits(seen):
        example = f"e.g. {some[0][0].file} and {some[0][1].file}"
        lines.append(f"  {len(some):7d} in {split} and {twin_split}, {example}{leak_mark(split, twin_split)}")
    return "\n".join(lines)


def leak_mark(split: str, other: str) -> str:
    """What is wrong with images or captions in both splits, if something is."""
    return "  <- trained on in one, tested on in the other" if (split in TRAINED) != (other in TRAINED) else ""


def by_splits(of_splits: Mapping[tuple[str, str], Any]) -> list[tuple[tuple[str, str], Any]]:
    """What there is of each pair of splits, in the order of the splits."""
    return sorted(of_splits.items(), key=lambda item: [SPLITS.index(split) for split in item[0]])


def _sums_of_equal_sizes(dataset: Dataset, other: Dataset) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """SHA-256 of the image files of both data sets for which the other one has a file of the same size."""
    if not (dataset.pictures and other.pictures):
        return {}, {}
    sizes = [{image.imgid: one.image_path(image).stat().st_size for image in one.images} for one in (dataset, other)]
    both = set(sizes[0].values()) & set(sizes[1].values())
    sums: list[dict[int, bytes]] = []
    for one, of_one in zip((dataset, other), sizes, strict=True):
        same_size = [image for image in one.images if of_one[image.imgid] in both]
        bar = progress_bar(same_size, desc=f"compare files of {one.name}", unit="image")
        sums.append({image.imgid: hashlib.sha256(read_bytes(one.image_path(image))).digest() for image in bar})
    return sums[0], sums[1]


def _hashes(dataset: Dataset) -> Any:
    """The perceptual hashes of all images, (n_images, 64)."""
    bar = progress_bar(dataset.images, desc=f"look at images of {dataset.name}", unit="image")
    return np.stack([perceptual_hash(dataset.image_path(image)) for image in bar])
