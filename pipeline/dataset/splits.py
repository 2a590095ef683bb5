"""Sample splits for an imported data set, or split a data set into folds for a cross-validation.

Each fold is a data set with the same images and other splits. For n folds, the images are divided into n parts. In fold k,
part k is the test split, part (k + 1) modulo n the validation split, and the other parts are the training split. A model is
trained on each fold, so that each image is tested by one of the n models. The folds read the caches of image features of the
original data set, their *parent*.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.duplicates import group_similar_photos
from vse.pipeline.dataset.preparation import check_dataset_name, link_images, load_and_check_dataset, read_content
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import OutputKind, check_output, read_json_object
from vse.pipeline.files.writing import lock_for_writing, remove_temporary_files, write_json

log = logging.getLogger(__name__)

MIN_FOLDS = 3  # test, validation and training need a part each


def write_folds(
    dataset_file: Path, out: Path, count: int = 5, seed: int = 0, name: str | None = None, only: int | None = None
) -> list[Path]:
    """Write ``fold-0.json``, ``fold-1.json`` and so on to the folder ``out``, link ``out/images``, and return the paths.

    Each file is a ``dataset.json`` with all images of ``dataset_file``; it also has the keys ``fold``, such as ``0 of 5``, and
    ``parent``, the name of the original data set. The parts differ in size by one image at most. The same ``seed`` gives the
    same parts on every machine. The data set of the folds is called ``name``, or like the folder ``out``. With ``only``, only
    the fold of this index is written. Raises UserError for fewer than 3 folds, for fewer images than folds, for an index that
    is too large, and for a data set that is a fold itself.
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
    part_of = assign_parts([image.imgid for image in dataset.images], count, seed)
    content = read_content(dataset_file)
    paths = {number: out / f"fold-{number}.json" for number in (range(count) if only is None else [only])}
    for path in paths.values():
        check_output(path, OutputKind(f"a fold of the data set {name!r}", _is_fold_of(name)), [dataset_file])
    with lock_for_writing(out, folder=True):
        remove_temporary_files(out)
        if dataset.has_image_files:
            link_images(out / "images", (dataset_file.parent / "images").resolve())
        for number, path in paths.items():
            splits = {number: "test", (number + 1) % count: "val"}
            images = [{**image, "split": splits.get(part_of[image["imgid"]], "train")} for image in content["images"]]
            about = {"dataset": name, "fold": f"{number} of {count}", "parent": dataset.parent or dataset.name}
            write_json(path, {**content, **about, "images": images})
    sizes = [sum(part == number for part in part_of.values()) for number in range(count)]
    log.info("%d folds of %s images", count, f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} or {max(sizes)}")
    return list(paths.values())


def assign_parts(imgids: list[int], count: int, seed: int) -> dict[int, int]:
    """Return the part of each image, from 0 to ``count`` - 1.

    Images are sorted by the SHA-256 of the seed and their id; image k in this order gets the part k modulo ``count``. So the
    parts depend neither on the order of the images nor on the version of a random number generator.
    """
    ordered = sorted(imgids, key=lambda imgid: hashlib.sha256(f"{seed} {imgid}".encode()).digest())
    return {imgid: place % count for place, imgid in enumerate(ordered)}


def _is_fold_of(name: str) -> Any:
    def is_fold(path: Path) -> bool:
        content = read_json_object(path)
        return content.get("dataset") == name and "fold" in content

    return is_fold


def sample_splits(files: Sequence[str], val: float, test: float, seed: int, images_folder: Path | None) -> dict[str, str]:
    """Return a random split for each file: ``train``, ``val`` or ``test``. It does not depend on the order of the files.

    Photos that look similar get the same split, unless a split would then lack over half of its images.

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
    """Return the split of each index in ``groups``. ``sizes`` is the number of places of each split except ``train``.

    A group goes to the first split with enough free places for all its members, or else to ``train``.
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
