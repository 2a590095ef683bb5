"""Find leaks from training to test: images and captions that occur in several splits of a data set, or in two data sets.

Perceptual hashes find photos that look similar.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import Bool
from PIL import ImageOps

from vse.pipeline.dataset.dataset import SPLITS, Dataset, Image, describe_splits, find_dataset_file, load_dataset_file
from vse.pipeline.dataset.preparation import list_image_file_errors, load_and_check_dataset
from vse.pipeline.errors import UserError, did_you_mean, to_printable_line
from vse.pipeline.files.images import (
    IMAGE_FORMATS,
    MAX_PIXELS,
    BadImage,
    UnreadableArchive,
    convert_to_rgb,
    image_file_size,
    read_image_bytes,
)
from vse.pipeline.files.inputs import is_valid_name
from vse.pipeline.presets.presets import list_preset_names, load_dataset_preset
from vse.pipeline.progress import progress_bar

N_HASH_BITS = 64
MAX_DIFFERENT_BITS = 6  # photos are similar if no more bits of their hashes differ; a scaled or recompressed copy is similar
_PIXELS_PER_SIDE, _N_FREQUENCIES = 32, 8
_HASHES_PER_CHUNK = 1024
_DCT_MATRIX = np.cos(
    np.pi * np.arange(_N_FREQUENCIES)[:, None] * (2 * np.arange(_PIXELS_PER_SIDE) + 1) / (2 * _PIXELS_PER_SIDE)
)  # of the DCT-II


def compute_perceptual_hash(path: Path) -> Bool[np.ndarray, f" {N_HASH_BITS}"]:
    """Compute the perceptual hash (pHash) of an image file: 64 bits that depend on the coarse appearance only.

    The image is reduced to 32 x 32 grey pixels. Each bit states whether one of the 8 x 8 lowest frequencies of their cosine
    transform is above the median of these frequencies. Raises BadImage if the file cannot be read.
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
    """Return all pairs (i, j) such that ``hashes[i]`` and ``others[j]`` differ in at most ``max_bits`` bits."""
    signs, other_signs = (np.where(bits, np.float32(1), np.float32(-1)) for bits in (hashes, others))
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(signs), _HASHES_PER_CHUNK):
        differing = (N_HASH_BITS - signs[start : start + _HASHES_PER_CHUNK] @ other_signs.T) / 2
        pairs += [(start + int(i), int(j)) for i, j in zip(*np.nonzero(differing <= max_bits), strict=True)]
    return pairs


def group_similar_photos(paths: Sequence[Path]) -> list[list[int]]:
    """Group photos that look similar. A group is a list of indices of ``paths``; groups are in the order of their first photo.

    Two photos are in one group if their perceptual hashes differ in at most ``MAX_DIFFERENT_BITS`` bits, or if a chain of
    such pairs connects them. A photo that cannot be decoded is a group of its own. Raises UnreadableArchive if the archive of
    a photo cannot be read.
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


TRAINING_SPLITS = ("train", "restval")
_FLICKR_NAME_PATTERN = re.compile(r"([1-9][0-9]{4,17})(?:_.*)?")  # 36979 is the lowest number of Flickr30K
_COCO_NAME_PATTERN = re.compile(r"(?:COCO_[a-z]+[0-9]{4}_)?0{4,11}([0-9]{1,8})")


def parse_published_id(image: Image) -> str | None:
    """Return the id of an image on Flickr or in MS-COCO, such as ``flickr 1000268201`` or ``coco 42``; None if unknown.

    The id is the field ``cocoid``, or is read from the name of the file: ``1000268201_693b08cb0e.jpg`` (Flickr8k),
    ``1000268201.jpg`` (Flickr30K), ``COCO_val2014_000000000042.jpg`` or ``000000000042.jpg`` (COCO).
    """
    if image.cocoid is not None:
        return f"coco {image.cocoid}"
    stem = Path(image.file).stem
    if match := _COCO_NAME_PATTERN.fullmatch(stem):
        return f"coco {int(match[1])}"
    match = _FLICKR_NAME_PATTERN.fullmatch(stem)
    return f"flickr {match[1]}" if match else None


def find_same_images(
    images: Iterable[Image],
    others: Iterable[Image],
    checksums: Mapping[int, bytes] | None = None,
    other_checksums: Mapping[int, bytes] | None = None,
) -> list[tuple[Image, Image]]:
    """Return pairs of an image and the first of ``others`` that has the same id on Flickr or in MS-COCO, or the same bytes.

    ``checksums`` and ``other_checksums`` map an ``imgid`` to the SHA-256 of the file. Images without a SHA-256 are compared by
    their ids on Flickr or in MS-COCO only.
    """
    known = defaultdict[str | bytes, list[Image]](list)
    for other in others:
        for key in _list_identity_keys(other, other_checksums or {}):
            known[key].append(other)
    pairs = (
        (image, next((known[key][0] for key in _list_identity_keys(image, checksums or {}) if key in known), None))
        for image in images
    )
    return [(image, other) for image, other in pairs if other is not None]


def _list_identity_keys(image: Image, checksums: Mapping[int, bytes]) -> list[str | bytes]:
    keys = (parse_published_id(image), checksums.get(image.imgid))
    return [key for key in keys if key is not None]


def report_shared_images(dataset: Dataset, other: Dataset) -> str:
    """Report how many images two data sets share, with a line for each pair of splits.

    A line ends with a remark if exactly one of its two splits is for training. Images are the same if they have the same id
    on Flickr or in MS-COCO, or if their files have the same bytes.
    """
    pairs = find_same_images(dataset.images, other.images, *_hash_files_of_common_sizes(dataset, other))
    lines = [f"{len(pairs)} images of {dataset.path} are in {other.path}, too"]
    counts = Counter((image.split, twin.split) for image, twin in pairs)
    names = f"{dataset.name!r}", f"{other.name!r}" if other.name != dataset.name else "the other one"
    for (split, twin), count in sort_by_split_pair(counts):
        lines.append(f"  {count:7d} in {split} of {names[0]} and {twin} of {names[1]}{describe_leak(split, twin)}")
    return "\n".join(lines)


def report_similar_photos(dataset: Dataset, other: Dataset | None = None) -> str:
    """Report the pairs of similar photos in different splits of a data set, or in two data sets.

    Raises BadImage if a photo cannot be decoded.
    """
    hashes = _compute_perceptual_hashes(dataset)
    images, twins = dataset.images, (dataset if other is None else other).images
    pairs = [
        (images[i], twins[j])
        for i, j in find_similar_hashes(hashes, hashes if other is None else _compute_perceptual_hashes(other))
        if other is not None or (i < j and images[i].split != twins[j].split)
    ]
    pairs_of_splits: dict[tuple[str, str], list[tuple[Image, Image]]] = defaultdict(list)
    for image, twin in pairs:
        if other is None and SPLITS.index(image.split) > SPLITS.index(twin.split):
            image, twin = twin, image
        pairs_of_splits[image.split, twin.split].append((image, twin))
    where = f"across the splits of {dataset.path}" if other is None else f"of {dataset.path} and {other.path}"
    lines = [f"{len(pairs)} pairs of photos {where} look alike (perceptual hash)"]
    for (split, twin_split), some in sort_by_split_pair(pairs_of_splits):
        example = f"e.g. {some[0][0].file} and {some[0][1].file}"
        lines.append(f"  {len(some):7d} in {split} and {twin_split}, {example}{describe_leak(split, twin_split)}")
    return "\n".join(lines)


def describe_leak(split: str, other: str) -> str:
    """Return a remark about a leak if exactly one of two splits is for training; otherwise an empty text.

    The two splits have images or captions in common. The remark is the end of a line of a report.
    """
    return "  <- trained on in one, tested on in the other" if (split in TRAINING_SPLITS) != (other in TRAINING_SPLITS) else ""


def sort_by_split_pair(values: Mapping[tuple[str, str], Any]) -> list[tuple[tuple[str, str], Any]]:
    """Return the items of a dictionary whose keys are pairs of splits, in the order of ``SPLITS``."""
    return sorted(values.items(), key=lambda item: [SPLITS.index(split) for split in item[0]])


def _hash_files_of_common_sizes(dataset: Dataset, other: Dataset) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return two dictionaries, one for each data set, from ``imgid`` to the SHA-256 of the image file.

    Files whose size does not occur in the other data set are left out: they cannot have the same bytes.
    """
    if not (dataset.has_image_files and other.has_image_files):
        return {}, {}
    sizes = [{image.imgid: image_file_size(one.image_path(image)) for image in one.images} for one in (dataset, other)]
    common = set(sizes[0].values()) & set(sizes[1].values())
    checksums: list[dict[int, bytes]] = []
    for one, its_sizes in zip((dataset, other), sizes, strict=True):
        same_size = [image for image in one.images if its_sizes[image.imgid] in common]
        bar = progress_bar(same_size, desc=f"compare files of {one.name}", unit="image")
        checksums.append({image.imgid: hashlib.sha256(read_image_bytes(one.image_path(image))).digest() for image in bar})
    return checksums[0], checksums[1]


def _compute_perceptual_hashes(dataset: Dataset) -> Any:
    bar = progress_bar(dataset.images, desc=f"hash images of {dataset.name}", unit="image")
    return np.stack([compute_perceptual_hash(dataset.image_path(image)) for image in bar])


_MAX_EXAMPLE_LENGTH = 60  # characters of a caption in the report
_DATASETS_BY_ID_SOURCE = {"coco": ("coco",), "flickr": ("f30k", "f8k")}  # published data sets by the source of their image ids


def audit_dataset(path: Path, against: Path | None = None, look_alikes: bool = True) -> str:
    """Report equal captions and similar photos in different splits of a data set, and its images in published test sets.

    ``against`` is a ``dataset.json`` to compare with, or the name of a data set in ``data/`` or next to this data set. The
    photos of a data set given by name may be missing. With ``look_alikes=False``, similar photos are not searched for. Raises
    UserError if a data set is invalid or an image file is missing.
    """
    dataset = load_and_check_dataset(path)
    others = [] if against is None else [_load_compared_dataset(against, dataset)]
    lines = [describe_splits(dataset)]
    for other in others:
        lines += [describe_splits(other), report_shared_images(dataset, other)]
    for twin in (None, *others):
        lines.append(report_shared_captions(dataset, twin))
        without = [str(one.path) for one in (dataset, twin) if one is not None and not one.has_image_files]
        if without and look_alikes:
            lines.append(f"{without[0]} has no image files, so no photos are compared")
        elif look_alikes:
            lines.append(report_similar_photos(dataset, twin))
    return "\n".join([*lines, *report_known_test_images(dataset)])


def report_shared_captions(dataset: Dataset, other: Dataset | None = None) -> str:
    """Report captions with equal tokens, regardless of case, in different splits of a data set, or in two data sets."""
    own = _count_captions_by_text(dataset)
    twins = own if other is None else _count_captions_by_text(other)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    examples: dict[tuple[str, str], str] = {}
    shared = set()
    for text, splits in own.items():
        for split, n_captions in splits.items():
            for twin, n_twins in twins.get(text, {}).items():
                if other is None and SPLITS.index(split) >= SPLITS.index(twin):
                    continue
                shared.add(text)
                counts[split, twin][0] += n_captions
                counts[split, twin][1] += n_twins
                examples.setdefault((split, twin), text)
    where = f"across the splits of {dataset.path}" if other is None else f"in {dataset.path} and {other.path}"
    lines = [f"{len(shared)} texts of captions are the same {where}"]
    for (split, twin), (n_captions, n_twins) in sort_by_split_pair(counts):
        example = to_printable_line(examples[split, twin])
        example = example if len(example) <= _MAX_EXAMPLE_LENGTH else f"{example[:_MAX_EXAMPLE_LENGTH]}..."
        count = f"{n_captions:7d} in {split} and {n_twins} in {twin}"
        lines.append(f"  {count}, e.g. {example!r}{describe_leak(split, twin)}")
    return "\n".join(lines)


def _count_captions_by_text(dataset: Dataset) -> dict[str, Counter[str]]:
    """Return the number of captions for each text and split. The text is a caption's lower-case tokens, joined by blanks."""
    splits: dict[str, Counter[str]] = defaultdict(Counter)
    for image in dataset.images:
        for caption in image.captions:
            splits[" ".join(caption.tokens).lower()][image.split] += 1
    return splits


def report_known_test_images(dataset: Dataset) -> list[str]:
    """Report how many images of a data set are test images of published data sets, by their ids on Flickr or in MS-COCO.

    A published data set is read from ``data/NAME``, or from a folder next to this data set. If this file is missing, but the
    two data sets have images from the same website, a line states that they were not compared.
    """
    lines: list[str] = []
    missing = set(_list_published_names()) - {dataset.name}
    for name in sorted(missing):
        file = _find_published_dataset_file(name, dataset)
        if file is None:
            continue
        known = load_dataset_file(file)
        missing.discard(name)
        pairs = find_same_images(dataset.images, known.splits.get("test", ()))
        lines.append(f"{len(pairs)} images of {dataset.path} have names of test images of {name!r}")
        for split, count in Counter(image.split for image, _ in pairs).items():
            lines.append(f"  {count:7d} in {split}{describe_leak(split, 'test')}")
    sources = Counter((parse_published_id(image) or "").partition(" ")[0] for image in dataset.images)
    for source, names in _DATASETS_BY_ID_SOURCE.items():
        unknown = [name for name in names if name in missing]
        if sources[source] and unknown and dataset.name not in names:
            files = " and ".join(f"data/{name}/dataset.json" for name in unknown)
            lines.append(
                f"{sources[source]} images have names as in {' and '.join(unknown)}; whether it tests on them is not known "
                f"without {files} (vse-data fetch NAME --no-images)"
            )
    return lines


def _list_published_names() -> list[str]:
    return [name for name in list_preset_names("datasets") if load_dataset_preset(name).is_published]


def _find_published_dataset_file(name: str, dataset: Dataset) -> Path | None:
    paths = map(find_dataset_file, (dataset.path.parent.parent / name, Path("data", name)))
    return next((path for path in paths if path.is_file()), None)


def _load_compared_dataset(against: Path, dataset: Dataset) -> Dataset:
    name = str(against)
    if against.exists() or not is_valid_name(name) or name.endswith((".json", ".parquet")):
        return load_and_check_dataset(against)
    file = _find_published_dataset_file(name, dataset)
    if file is not None:
        known = load_dataset_file(file)
        return replace(known, has_image_files=False) if list_image_file_errors(known) else known
    if name in _list_published_names():
        how = f"create it with vse-data fetch {name} --no-images, or from its files with vse-data prepare {name}"
    elif name in list_preset_names("datasets"):
        how = f"create it with vse-data {'demo' if load_dataset_preset(name).n_images else 'import'} --out data/{name}"
    else:
        how = f"name a dataset.json{did_you_mean(name, list_preset_names('datasets'))}"
    raise UserError(f"--against {name}: there is no data/{name}/dataset.json; {how}")
