"""Split a data set at random or into folds, and write, read and apply noise files: lists of wrong training pairs.

A noise file lists the changes by id, so that any program can train on the same wrong pairs. The data set itself is not
changed: validation and test always read the correct pairs.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vse.pipeline.dataset.columns import caption_ids, count_captions_per_image, image_ids
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.duplicates import group_similar_photos
from vse.pipeline.dataset.images import Caption, Image
from vse.pipeline.dataset.preparation import (
    check_dataset_name,
    link_images,
    load_and_check_dataset,
    read_dataset_content,
    write_dataset_file,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, wrap_read_errors
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, read_json_object
from vse.pipeline.files.writing import lock_for_writing, parse_json, remove_temporary_files, write_json

log = logging.getLogger(__name__)

NoiseKind = Literal["caption", "image", "word"]
_TRAINING_SPLITS = ("train", "restval")
_NonEmptyTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Noise(BaseModel):
    """The content of a noise file.

    ``captions_sha256`` : SHA-256 of the ``dataset.json`` whose captions are changed.
    ``splits`` : the training splits: ``train`` and, if the data set has it, ``restval``.
    ``kind`` : ``caption`` if single captions have a wrong image; ``image`` if all captions of an image have the same wrong
    image; ``word`` if captions have wrong words.
    ``rate`` : the share of changed captions, images or words.
    ``seed`` : the random seed of the changes; None if they were read from a published index file.
    ``index_sha256`` : SHA-256 of the published index file; None if the changes are random.
    ``n_captions`` : the number of captions of ``splits``.
    ``sentids`` : the ids of the changed captions.
    ``imgids`` : the id of the wrong image of each changed caption; empty for wrong words.
    ``tokens`` : all words of each changed caption after the change; empty for wrong images.

    ``imgids`` and ``tokens`` are in the order of ``sentids``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["vse-noise"] = "vse-noise"
    version: Literal[1] = 1
    dataset: str
    captions_sha256: str
    splits: list[str]
    kind: NoiseKind
    rate: Annotated[float, Field(ge=0, le=1)]
    seed: int | None = None
    index_sha256: str | None = None
    n_captions: int
    sentids: list[int] = []
    imgids: list[int] = []
    tokens: list[_NonEmptyTexts] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        wrong, other = (self.tokens, self.imgids) if self.kind == "word" else (self.imgids, self.tokens)
        if len(wrong) != len(self.sentids) or other:
            raise ValueError("sentids needs one entry of tokens for each wrong caption, or one of imgids for each wrong image")
        if len(set(self.sentids)) != len(self.sentids):
            raise ValueError("sentids names a caption twice")
        return self

    @property
    def label(self) -> str:
        """The name of the noise in tables, such as ``caption 0.4 seed 0``."""
        origin = f"seed {self.seed}" if self.seed is not None else f"index {str(self.index_sha256)[:8]}"
        return f"{self.kind} {self.rate:g} {origin}"


def write_noise(dataset_file: Path, out: Path, rate: float, kind: NoiseKind = "caption", seed: int = 0) -> Path:
    """Draw wrong images or wrong words for a random share ``rate`` of the training data; write them to the noise file ``out``.

    ``kind`` states whether ``rate`` is a share of captions, images or words (:class:`Noise`). Returns ``out``. Raises
    UserError if the changes are impossible, for example if more than half of the chosen captions belong to one image.
    """
    dataset = load_dataset_file(dataset_file)
    splits = _list_training_splits(dataset)
    images = [image for split in splits for image in dataset.split(split)]
    rng = np.random.default_rng(seed)
    changes: dict[str, Any]
    if kind == "word":
        changes = _draw_wrong_words([caption for image in images for caption in image.captions], rate, rng)
    else:
        wrong_image_of_caption = np.repeat(np.arange(len(images)), count_captions_per_image(images))
        if kind == "image":
            wrong_image_of_caption = _shuffle_images(np.arange(len(images)), rate, rng, "images")[wrong_image_of_caption]
        else:
            wrong_image_of_caption = _shuffle_images(wrong_image_of_caption, rate, rng, "captions")
        changes = _list_changed_images(images, wrong_image_of_caption)
    return _write_noise_file(
        _build_dataset_fields(dataset, splits) | {"kind": kind, "rate": rate, "seed": seed} | changes, dataset, out
    )


def import_noise_index(dataset_file: Path, index_file: Path, out: Path) -> Path:
    """Convert published noise, an index file of the methods NCR or DECL, to a noise file, and return its path.

    The index is an array of image positions in a ``.npy`` file. In an index of NCR, element k is the position of the image
    that is paired with training caption k. In an index of DECL, element k is the position of the image that is paired with all
    captions of training image k. Captions and images are counted from 0, in the order of the training splits. Raises UserError
    if the array has another length or refers to images that do not exist.
    """
    dataset = load_dataset_file(dataset_file)
    splits = _list_training_splits(dataset)
    images = [image for split in splits for image in dataset.split(split)]
    counts = count_captions_per_image(images)
    file = InputFile(index_file)
    with wrap_read_errors(index_file, "an array of integers (.npy)"):
        index = np.load(index_file, allow_pickle=False)
    if index.ndim != 1 or index.dtype.kind not in "iu" or len(index) not in (len(images), counts.sum()):
        raise UserError(
            f"{index_file}: an array of shape {index.shape} and type {index.dtype}; {dataset_file} needs whole numbers, one "
            f"for each of its {counts.sum()} training captions (NCR) or {len(images)} training images (DECL)"
        )
    if len(index) and not 0 <= index.min() <= index.max() < len(images):
        raise UserError(f"{index_file}: refers to image {index.max()}, but {dataset_file} has {len(images)} training images")
    kind: NoiseKind = "image" if len(index) == len(images) else "caption"
    image_of_caption = np.repeat(np.arange(len(images)), counts)
    own = np.arange(len(images)) if kind == "image" else image_of_caption
    moved = index[image_of_caption] if kind == "image" else index
    about = {"kind": kind, "rate": round(float((index != own).mean()), 6), "index_sha256": file.sha256}
    return _write_noise_file(
        _build_dataset_fields(dataset, splits) | about | _list_changed_images(images, moved), dataset, out, [index_file]
    )


def read_noise(path: Path, dataset: Dataset) -> tuple[Noise, str]:
    """Return the content of a noise file of a data set, and the SHA-256 of the file.

    Raises UserError if the file is not a noise file, if it was written for another ``dataset.json``, or if it names captions
    or images that are not in the splits that it lists.
    """
    file = InputFile(path)
    try:
        noise = Noise.model_validate(parse_json(path, file.read()))
    except ValidationError as error:
        fault = error.errors()[0]
        reason = ": ".join([*map(str, fault["loc"]), fault["msg"]])
        raise UserError(f"{path}: not a noise file ({reason}); vse-data noise writes one") from None
    if noise.captions_sha256 != dataset.sha256:
        raise UserError(
            f"{path}: was written for another version of the data set {noise.dataset!r} than {dataset.path}; write it again: "
            f"vse-data noise {dataset.path}"
        )
    images = [image for split in noise.splits for image in dataset.split(split)]
    for name, listed, known in (("caption", noise.sentids, caption_ids(images)), ("image", noise.imgids, image_ids(images))):
        unknown = np.setdiff1d(listed, known)
        if len(unknown):
            raise UserError(f"{path}: {name} {unknown[0]:.0f} is not in {' or '.join(noise.splits)} of {dataset.path}")
    return noise, file.sha256


def apply_noise(dataset: Dataset, noise: Noise) -> Dataset:
    """Return a copy of the data set with the changes of ``noise``.

    A caption with a wrong image becomes a caption of that image. A caption with wrong words has these words as text, and
    loses its phrases.
    """
    if not noise.sentids:
        return dataset
    new_image = dict(zip(noise.sentids, noise.imgids, strict=False))
    new_words = dict(zip(noise.sentids, noise.tokens, strict=False))
    captions_by_image: dict[int, list[Caption]] = {}
    for split in noise.splits:
        for image in dataset.split(split):
            for caption in image.captions:
                imgid = new_image.get(caption.sentid, image.imgid)
                captions_by_image.setdefault(imgid, []).append(_change_caption(caption, imgid, new_words.get(caption.sentid)))
    images = tuple(
        replace(image, captions=tuple(captions_by_image.get(image.imgid, ()))) if image.split in noise.splits else image
        for image in dataset.images
    )
    return replace(dataset, images=images)


def _change_caption(caption: Caption, imgid: int, words: Sequence[str] | None) -> Caption:
    if words is None:
        return caption if imgid == caption.imgid else replace(caption, imgid=imgid)
    return replace(caption, raw=" ".join(words), tokens=tuple(words), phrases=())


def _list_training_splits(dataset: Dataset) -> list[str]:
    dataset.split("train")  # raises UserError if the split train has no images
    return [split for split in _TRAINING_SPLITS if split in dataset.splits]


def _build_dataset_fields(dataset: Dataset, splits: Sequence[str]) -> dict[str, Any]:
    n_captions = sum(int(count_captions_per_image(dataset.split(split)).sum()) for split in splits)
    return {
        "dataset": dataset.name,
        "captions_sha256": dataset.sha256,
        "splits": list(splits),
        "n_captions": n_captions,
    }


def _write_noise_file(content: Mapping[str, Any], dataset: Dataset, out: Path, inputs: Sequence[Path] = ()) -> Path:
    noise = Noise.model_validate(content)
    check_output(out, json_kind("a noise file", "format", "sentids", "rate"), [*dataset.input_paths, *inputs])
    with lock_for_writing(out):
        write_json(out, noise.model_dump(exclude_none=True))
    change = "have wrong words" if noise.tokens else "belong to a wrong image"
    log.info("%s: %d of %d training captions %s", out, len(noise.sentids), noise.n_captions, change)
    return out


def _shuffle_images(image_of_item: NDArray[np.int64], rate: float, rng: np.random.Generator, noun: str) -> NDArray[np.int64]:
    """Return the image of each item after a random share ``rate`` of the items has exchanged images.

    An item is a caption, or the set of all captions of an image. ``image_of_item`` (n_items,) is the index of the image of
    each item. Each chosen item gets another image than before, and each image keeps its number of items. Raises UserError if
    this is impossible; the message calls the items ``noun``, such as ``captions``.
    """
    chosen = rng.permutation(len(image_of_item))[: round(rate * len(image_of_item))]
    own = image_of_item[chosen]
    if len(own) and 2 * np.unique(own, return_counts=True)[1].max() > len(own):
        raise UserError(
            f"a rate of {rate:g} changes {len(own)} of {len(image_of_item)} {noun}, and more than half of them belong to one "
            "image, so that they cannot exchange their images; give a higher rate"
        )
    new = rng.permutation(own)
    for k in np.flatnonzero(new == own):  # rare: exchange with a random item for which both get another image
        if new[k] == own[k]:
            other = rng.choice(np.flatnonzero((new != own[k]) & (own != own[k])))
            new[k], new[other] = new[other], new[k]
    moved = image_of_item.copy()
    moved[chosen] = new
    return moved


def _list_changed_images(images: Sequence[Image], new_image_of_caption: NDArray[np.int64]) -> dict[str, list[int]]:
    """Return the ids of the captions whose image changes as ``sentids``, and the ids of their new images as ``imgids``.

    ``new_image_of_caption`` (n_captions,) is the index of each caption's image in ``images`` after the changes.
    """
    changed = new_image_of_caption != np.repeat(np.arange(len(images)), count_captions_per_image(images))
    return {
        "sentids": caption_ids(images)[changed].tolist(),
        "imgids": image_ids(images)[new_image_of_caption[changed]].tolist(),
    }


def _draw_wrong_words(captions: Sequence[Caption], rate: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return the fields ``sentids`` and ``tokens`` of :class:`Noise` for a random share ``rate`` of wrong words.

    The wrong words are drawn from all words of the captions in proportion to their frequency.
    """
    words = np.asarray([word for caption in captions for word in caption.tokens], object)
    chosen = rng.permutation(len(words))[: round(rate * len(words))]
    if len(chosen) and (words == words[0]).all():
        raise UserError("the training captions have one word only, so that no word can be replaced by another")
    wrong = words.copy()
    while len(same := chosen[wrong[chosen] == words[chosen]]):
        wrong[same] = rng.choice(words, len(same))
    ends = np.cumsum([len(caption.tokens) for caption in captions])
    changed = np.unique(np.searchsorted(ends, chosen, side="right"))
    return {
        "sentids": [captions[k].sentid for k in changed],
        "tokens": [wrong[ends[k] - len(captions[k].tokens) : ends[k]].tolist() for k in changed],
    }


MIN_FOLDS = 3  # test, validation and training need a part each


def write_folds(
    dataset_file: Path, out: Path, count: int = 5, seed: int = 0, name: str | None = None, only: int | None = None
) -> list[Path]:
    """Write ``fold-0.json``, ``fold-1.json`` and so on to the folder ``out``, link ``out/images``, and return the paths.

    Each file is a ``dataset.json`` with all images of ``dataset_file``; it also has the keys ``fold``, such as ``0 of 5``,
    and ``parent``, the name of the original data set. The images are divided at random into ``count`` parts, whose sizes
    differ by one image at most: fold k tests on part k, validates on the next part, and trains on the rest. The same ``seed``
    gives the same parts on every machine. The data set of the folds is called ``name``, or like the folder ``out``. With
    ``only``, only the fold of this index is written. Raises UserError for fewer than 3 folds, for fewer images than folds,
    for an index that is too large, and for a data set that is a fold itself.
    """
    dataset = load_and_check_dataset(dataset_file)
    name = name or out.resolve().name
    check_dataset_name(name)
    if dataset.fold:
        raise UserError(f"{dataset_file}: is a fold itself; give the data set {dataset.parent!r}")
    if name == dataset.name:
        raise UserError(f"{out}: the folds need another name than their data set {name!r}; give another --out or --name")
    if not MIN_FOLDS <= count <= len(dataset.images):
        raise UserError(
            f"{count} folds: give at least {MIN_FOLDS} (test, validation and training need a part each) and at most as many "
            f"as there are images, {len(dataset.images)}"
        )
    if only is not None and only >= count:
        raise UserError(f"--only {only}: there are {count} folds, counted from 0")
    part_of = assign_images_to_parts([image.imgid for image in dataset.images], count, seed)
    content = read_dataset_content(dataset_file)
    paths = {number: out / f"fold-{number}.json" for number in (range(count) if only is None else [only])}
    for path in paths.values():
        check_output(path, OutputKind(f"a fold of the data set {name!r}", _build_fold_recogniser(name)), [dataset_file])
    with lock_for_writing(out, folder=True):
        remove_temporary_files(out)
        if dataset.has_image_files:
            link_images(out / "images", (dataset_file.parent / "images").resolve())
        for number, path in paths.items():
            splits = {number: "test", (number + 1) % count: "val"}
            images = [{**image, "split": splits.get(part_of[image["imgid"]], "train")} for image in content["images"]]
            about = {"dataset": name, "fold": f"{number} of {count}", "parent": dataset.parent or dataset.name}
            write_dataset_file(path, {**content, **about, "images": images})
    sizes = [sum(part == number for part in part_of.values()) for number in range(count)]
    log.info("%d folds of %s images", count, f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} or {max(sizes)}")
    return list(paths.values())


def assign_images_to_parts(imgids: list[int], count: int, seed: int) -> dict[int, int]:
    """Divide images into ``count`` parts for a cross-validation; return the part, from 0 to ``count`` - 1, of each image id.

    Images are sorted by the SHA-256 of the seed and their id; image k in this order gets the part k modulo ``count``. So the
    parts depend neither on the order of the images nor on the version of a random number generator.
    """
    ordered = sorted(imgids, key=lambda imgid: hashlib.sha256(f"{seed} {imgid}".encode()).digest())
    return {imgid: place % count for place, imgid in enumerate(ordered)}


def _build_fold_recogniser(name: str) -> Any:
    def is_fold(path: Path) -> bool:
        content = read_json_object(path)
        return content.get("dataset") == name and "fold" in content

    return is_fold


def sample_splits(files: Sequence[str], val: float, test: float, seed: int, images_folder: Path | None) -> dict[str, str]:
    """Return a random split for each file: ``train``, ``val`` or ``test``. The order of the files makes no difference.

    Photos that look similar get the same split, unless this leaves a split with less than half of its images.

    Parameters
    ----------
    files : paths of the photos in ``images_folder``
    val, test : the share of the photos for this split; together below 1
    images_folder : the folder of the photos; None if there are no photos to compare
    """
    if val + test >= 1:
        raise UserError(f"--val {val} and --test {test} leave no images for training")
    order = sorted(files, key=lambda file: hashlib.sha256(f"{seed} {file}".encode()).digest())
    sizes = {"val": round(val * len(order)), "test": round(test * len(order))}
    single = [[index] for index in range(len(order))]
    groups = single
    if images_folder is not None and any(sizes.values()):
        groups = group_similar_photos([images_folder / file for file in order])
    sampled = _fill_splits(groups, sizes)
    counts = Counter(sampled)
    n_alike = sum(len(group) for group in groups if len(group) > 1)
    if any(counts[split] < size / 2 for split, size in sizes.items()):
        log.warning("%d of %d photos look like others, too many to keep each group in one split", n_alike, len(order))
        sampled = _fill_splits(single, sizes)
    elif n_alike:
        log.info("%d photos look like others; each group of such photos is in one split", n_alike)
    return dict(zip(order, sampled, strict=True))


def _fill_splits(groups: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> list[str]:
    """Return a split for each photo. ``groups`` holds the indices of similar photos, which get the same split.

    ``sizes`` has the sizes of ``val`` and ``test``. A group goes to the first split with enough free places, or to ``train``.
    """
    splits = ["train"] * sum(map(len, groups))
    room = dict(sizes)
    for group in groups:
        split = next((split for split in room if len(group) <= room[split]), None)
        if split is not None:
            room[split] -= len(group)
            for index in group:
                splits[index] = split
    return splits
