"""What a data set has in more than one split, or shares with a data set that others test on.

Photos that look alike: a perceptual hash of each, and which hashes are near.

Images that two data sets, or two splits of one, have in common: what one trains on, the other would test on.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import Bool
from PIL import ImageOps

from vse.pipeline.dataset.dataset import SPLITS, Dataset, Image, count_splits, load_dataset_file, missing_images
from vse.pipeline.dataset.sources import checked_dataset
from vse.pipeline.errors import UserError, did_you_mean, printable
from vse.pipeline.files.images import IMAGE_FORMATS, MAX_PIXELS, BadImage, convert_to_rgb, read_image_bytes
from vse.pipeline.files.inputs import is_name
from vse.pipeline.presets.presets import known_presets, load_dataset
from vse.pipeline.progress import progress_bar

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
    content = read_image_bytes(path)
    try:
        with PIL.Image.open(BytesIO(content), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many")
            image.draft("L", (4 * _SIDE, 4 * _SIDE))  # a JPEG is decoded at a fraction of its size
            grey = convert_to_rgb(ImageOps.exif_transpose(image)).convert("L").resize((_SIDE, _SIDE), PIL.Image.Resampling.BOX)
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

    :class:`vse.pipeline.files.images.BadImage` names a photo that cannot be read.
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
        sums.append({image.imgid: hashlib.sha256(read_image_bytes(one.image_path(image))).digest() for image in bar})
    return sums[0], sums[1]


def _hashes(dataset: Dataset) -> Any:
    """The perceptual hashes of all images, (n_images, 64)."""
    bar = progress_bar(dataset.images, desc=f"look at images of {dataset.name}", unit="image")
    return np.stack([perceptual_hash(dataset.image_path(image)) for image in bar])


_LONGEST = 60  # characters of a caption that is shown
_NUMBERED = {"coco": ("coco",), "flickr": ("f30k", "f8k")}  # published data sets by whose numbers their files are called


def audit_dataset(path: Path, against: Path | None = None, look_alikes: bool = True) -> str:
    """A report of equal captions and of photos that look alike across splits, and of images that known test sets have.

    With ``against`` also of images, captions and photos that another data set has, which is given as its file or by the name
    under which it lies beside this one or in ``data/``, there without its photos, too. Without ``look_alikes`` no photo is
    read.
    :class:`vse.pipeline.errors.UserError` if a data set is not valid or an image file is missing.
    """
    dataset = checked_dataset(path)
    others = [] if against is None else [_other(against, dataset)]
    lines = [count_splits(dataset)]
    for other in others:
        lines += [count_splits(other), shared_report(dataset, other)]
    for twin in (None, *others):
        lines.append(caption_report(dataset, twin))
        without = [str(one.path) for one in (dataset, twin) if one is not None and not one.pictures]
        if without and look_alikes:
            lines.append(f"{without[0]} has no image files, so no photos are compared")
        elif look_alikes:
            lines.append(near_report(dataset, twin))
    return "\n".join([*lines, *known_test_images(dataset)])


def caption_report(dataset: Dataset, other: Dataset | None = None) -> str:
    """How many captions have the words of one in another split of the data set, or in any split of another data set.

    Case and punctuation do not count, where the tokens of the data set have none.
    """
    mine = _splits_of_texts(dataset)
    twins = mine if other is None else _splits_of_texts(other)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    examples: dict[tuple[str, str], str] = {}
    shared = set()
    for text, splits in mine.items():
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
    for (split, twin), (n_captions, n_twins) in by_splits(counts):
        example = printable(examples[split, twin])
        example = example if len(example) <= _LONGEST else f"{example[:_LONGEST]}..."
        count = f"{n_captions:7d} in {split} and {n_twins} in {twin}"
        lines.append(f"  {count}, e.g. {example!r}{leak_mark(split, twin)}")
    return "\n".join(lines)


def _splits_of_texts(dataset: Dataset) -> dict[str, Counter[str]]:
    """How many captions of each split have a text, as words with blanks between them."""
    splits: dict[str, Counter[str]] = defaultdict(Counter)
    for image in dataset.images:
        for caption in image.captions:
            splits[" ".join(caption.tokens).lower()][image.split] += 1
    return splits


def known_test_images(dataset: Dataset) -> list[str]:
    """Which images published data sets test on, by the names of files: a line each, and where lists are not at hand, one too.

    Those lists are the ``dataset.json`` of published data sets beside this one or in ``data/``.
    """
    lines: list[str] = []
    lacking = set(_published()) - {dataset.name}
    for name in sorted(lacking):
        known = _known(name, dataset)
        if known is None:
            continue
        lacking.discard(name)
        pairs = same_images(dataset.images, known.splits.get("test", ()))
        lines.append(f"{len(pairs)} images of {dataset.path} have names of test images of {name!r}")
        for split, count in Counter(image.split for image, _ in pairs).items():
            lines.append(f"  {count:7d} in {split}{leak_mark(split, 'test')}")
    named = Counter((published_id(image) or "").partition(" ")[0] for image in dataset.images)
    for kind, names in _NUMBERED.items():
        asked = [name for name in names if name in lacking]
        if named[kind] and asked and dataset.name not in names:
            files = " and ".join(f"data/{name}/dataset.json" for name in asked)
            lines.append(
                f"{named[kind]} images have names as in {' and '.join(asked)}; whether it tests on them is not known without "
                f"{files} (vse-data fetch NAME --no-images)"
            )
    return lines


def _published() -> list[str]:
    return [name for name in known_presets("datasets") if load_dataset(name).is_published]


def _known(name: str, dataset: Dataset) -> Dataset | None:
    """A published data set that is at hand; None if it is not."""
    file = _file_of(name, dataset)
    return None if file is None else load_dataset_file(file)


def _file_of(name: str, dataset: Dataset) -> Path | None:
    """The ``dataset.json`` of a data set by its name, beside another one or in ``data/``."""
    places = (dataset.path.parent.parent / name / "dataset.json", Path("data", name, "dataset.json"))
    return next((place for place in places if place.is_file()), None)


def _other(against: Path, dataset: Dataset) -> Dataset:
    """A data set by its file or its name; :class:`UserError` says how one is made that is not there.

    One by name may lack its images, of which only names and captions are compared then.
    """
    name = str(against)
    if against.exists() or not is_name(name) or name.endswith(".json"):
        return checked_dataset(against)
    file = _file_of(name, dataset)
    if file is not None:
        known = load_dataset_file(file)
        return replace(known, pictures=False) if missing_images(known) else known
    if name in _published():
        how = f"vse-data fetch {name} --no-images, or vse-data prepare {name} where its files are, makes it"
    elif name in known_presets("datasets"):
        how = f"vse-data {'demo' if load_dataset(name).n_images else 'import'} --out data/{name} makes it"
    else:
        how = f"name a dataset.json{did_you_mean(name, known_presets('datasets'))}"
    raise UserError(f"--against {name}: there is no data/{name}/dataset.json; {how}")
