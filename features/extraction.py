"""Making a cache: shards that are made once, joined at the end, and refused when their sources changed.

What no ranking of an image's boxes can exceed: the share of phrases of which a box overlaps the ground truth enough.

The state of a data set's images, by which a workflow notices that some were replaced.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vse.features.cache import feature_cache as cache
from vse.features.cache import shards
from vse.features.cache.rows import Ids, Item, Kind, Rows, TextRows, items_of, row_ids, text_rows_of
from vse.features.cache.shards import read_record, read_rows, shard_path, shard_slice
from vse.features.data_checks import source_differences
from vse.features.exchange.embeddings import backbone_of
from vse.features.extractors.proposals import SOURCE, boxes_sha256, holds_truths, truth_boxes
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import Extractor
from vse.pipeline.dataset.dataset import SPLITS, Dataset, Mention, load_dataset_file, mentions
from vse.pipeline.dataset.identity import COMPARED_PHOTOS, DataIdentity, data_differences, hash_available_photos
from vse.pipeline.dataset.phrases import iou
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5
from vse.pipeline.files.images import BadImage
from vse.pipeline.files.writing import lock_for_writing

IOU = 0.5
"""What an overlap has to be, as the evaluation of Flickr30K Entities has it."""


def bounds_of_splits(
    dataset: Dataset,
    ids: Ids,
    offsets: Ids,
    boxes: Float[np.ndarray, "n_boxes 4"],
    of_images: Collection[int] | None = None,
    threshold: float = IOU,
) -> dict[str, dict[str, int]]:
    """How many phrases with a box each split has, and how many of these have a candidate whose IoU is the ``threshold``.

    The box of a phrase is the one around all of its boxes. Image ``ids[k]`` has the candidates
    ``boxes[offsets[k]:offsets[k + 1]]``; the phrases of an image without any count, too, and are not covered. ``of_images``
    are the images whose phrases are looked at; none: all. Splits without such phrases are left out.
    """
    rows = {int(identity): k for k, identity in enumerate(ids)}
    counts: dict[str, dict[str, int]] = {}
    for image_id, of_image in _with_truth(dataset).items():
        if of_images is not None and image_id not in of_images:
            continue
        truths = np.asarray([mention.phrase.truth for mention in of_image], np.float64)
        row = rows.get(image_id)
        candidates = boxes[:0] if row is None else boxes[offsets[row] : offsets[row + 1]]
        covered = (iou(truths, candidates) >= threshold).any(axis=1).sum()
        of_split = counts.setdefault(of_image[0].image.split, {"phrases": 0, "covered": 0})
        of_split["phrases"] += len(truths)
        of_split["covered"] += int(covered)
    return counts


def bounds_of_shards(dataset: Dataset, shards: Sequence[Path], of_images: Collection[int] | None = None) -> dict[str, Any]:
    """What a cache's provenance says of the boxes in its ``shards``: ``upper_bound``, with the share for each split.

    Empty where there are no boxes, or no phrases with boxes. ``of_images`` as :func:`bounds_of_splits` takes it.
    """
    with open_hdf5(shards[0], "a readable shard") as first:
        if not {"boxes", "offsets"} <= first.keys():
            return {}
    ids, counts, boxes = zip(*(_of_shard(path) for path in shards), strict=True)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts), dtype=np.int64)])
    splits = bounds_of_splits(dataset, np.concatenate(ids), offsets, np.concatenate(boxes), of_images)
    shares = {name: {**of_split, "share": of_split["covered"] / of_split["phrases"]} for name, of_split in splits.items()}
    return {"upper_bound": {"iou": IOU, "splits": shares}} if splits else {}


def described_bounds(bound: Mapping[str, Any]) -> str:
    """The ``upper_bound`` of a provenance for a person: ``phrases with a box of IoU >= 0.5: train 69.5% of 77,911, ...``."""
    splits = [f"{name} {100 * n['share']:.1f}% of {n['phrases']:,}" for name in SPLITS if (n := bound["splits"].get(name))]
    return f"phrases with a box of IoU >= {bound['iou']:g}: {', '.join(splits)}"


def _with_truth(dataset: Dataset) -> dict[int, list[Mention]]:
    """The phrases with a box, by their image."""
    by_image: dict[int, list[Mention]] = defaultdict(list)
    for mention in mentions(dataset):
        if mention.phrase.boxes:
            by_image[mention.image.imgid].append(mention)
    return by_image


def _of_shard(path: Path) -> tuple[Ids, Ids, NDArray[np.float32]]:
    """Ids, number of boxes of each, and boxes."""
    ids, offsets, boxes = read_rows(path, "ids", "offsets", "boxes")
    return ids, np.diff(offsets), boxes


def images_sha256(dataset_file: Path, cache: Path, index: int, n_shards: int) -> str:
    """SHA-256 of the images of a shard, of their bytes in order.

    An image that has not changed since the shard was written (by the times of both files) is not read again, because the
    shard holds its SHA-256. Empty if there is no data set yet.
    """
    if not dataset_file.is_file():
        return ""
    status = dataset_file.stat()
    items = _items(dataset_file, status.st_mtime_ns, status.st_size)
    shard = shard_path(cache, index, n_shards)
    known: dict[int, bytes] = {}
    written = 0
    if read_record(shard) is not None:
        ids, sources = read_rows(shard, "ids", "sources")
        known = {identity: source.tobytes() for identity, source in zip(ids.tolist(), sources, strict=True)}
        written = shard.stat().st_mtime_ns
    digest = hashlib.sha256()
    for item in items[shard_slice(len(items), index, n_shards)]:
        digest.update(_source(item, known, written))
    return digest.hexdigest()


def _source(item: Item, known: dict[int, bytes], written: int) -> bytes:
    """SHA-256 of an image, from the shard if it has not changed since."""
    assert item.path is not None
    try:
        if item.id in known and item.path.stat().st_ctime_ns < written:
            return known[item.id]
        return item.source().tobytes()
    except (OSError, BadImage):
        return bytes(32)


@lru_cache(maxsize=4)
def _items(dataset_file: Path, mtime_ns: int, size: int) -> list[Item]:
    """The images of a data set; a changed file is read again."""
    return items_of(load_dataset_file(dataset_file), "image")


log = logging.getLogger(__name__)


def extract_shards(
    dataset_file: Path, extractor: Extractor, out: Path, n_shards: int, only: int | None = None, skip_bad: bool = False
) -> Path:
    """Make the shards of a feature, or ``only`` one of them, that are not finished yet.

    Without ``skip_bad`` a finished shard that left images out is made again: they may be readable by now.
    A finished shard whose images or captions changed since is refused. Where the precision is ``auto``, shards that another
    machine has made in another precision are kept, but no shard is added to them.
    Returns the folder of the shards, or the one shard; :func:`merge` joins them to the cache ``out``.
    """
    dataset = load_dataset_file(dataset_file)
    if extractor.kind == "image" and not dataset.has_image_files:
        raise UserError(f"{dataset_file}: a data set without images (its features were imported)")
    as_read = extractor.kind, extractor.config.reads_raw, extractor.config.text_rows
    n_rows = len(row_ids(dataset, extractor.kind, extractor.config.text_rows))
    if not 1 <= n_shards <= n_rows:
        raise UserError(f"{n_shards} shards for {n_rows} rows")
    if only is not None and not 0 <= only < n_shards:
        raise UserError(f"shard {only} is not one of 0-{n_shards - 1}")
    identity = extractor.identity(dataset)
    others = shards.shards_in_other_precision(out, n_shards, identity) if extractor.asked_precision == "auto" else {}
    for index in range(n_shards) if only is None else [only]:
        path = shards.shard_path(out, index, n_shards)
        mine = items_of(dataset, *as_read, shards.shard_slice(n_rows, index, n_shards))
        with lock_for_writing(path):
            own = others.get(path, identity)
            finished = shards.finished_shard(path, own)
            if finished is not None and (skip_bad or not finished.skipped):
                ids, sources = shards.read_rows(path, "ids", "sources")
                changed = changed_source(mine, ids, sources, extractor.config.text_rows)
                if changed is not None:
                    raise UserError(f"{path} was made from another {changed}; delete that shard to regenerate it")
                made_in = f" in {shards.precision_of(own)}, the precision of another machine" if path in others else ""
                log.info("%s: finished, kept%s", path, made_in)
                continue
            if other := next((of for there, of in others.items() if there != path), None):
                raise shards.mixed_precisions(path.parent, other, identity)
            extractor.part = f"shard {index + 1} of {n_shards}"
            log.info("%s: %d rows", extractor.described, len(mine))
            started = time.perf_counter()
            rows = extractor.extract(mine, skip_bad)
            _check_kind(extractor, rows)
            shards.write_shard(path, identity, rows, extractor.notes, round(time.perf_counter() - started, 4))
            if n_shards > 1 and (bounds := _bounds(dataset, extractor.config.content(), [path], {item.id for item in mine})):
                log.info("%s: %s", path, described_bounds(bounds["upper_bound"]))
    return shards.shards_folder(out) if only is None else shards.shard_path(out, only, n_shards)


def merge(dataset_file: Path, out: Path, n_shards: int) -> Path:
    """Join the finished shards of a feature to the cache ``out``."""
    first = shards.read_record(shards.shard_path(out, 0, n_shards))
    kind = first.identity.kind if first is not None else "image"
    recorded = first.identity.content.get("config") if first is not None else None
    config = recorded if isinstance(recorded, Mapping) else {}
    dataset = load_dataset_file(dataset_file)
    with lock_for_writing(out):
        ids = row_ids(dataset, kind, text_rows_of(config))
        for index in range(n_shards):
            _check_shard(shards.shard_path(out, index, n_shards), dataset, kind, config)
        path = cache.merge_shards(out, n_shards, dataset_file, ids, lambda files: _bounds(dataset, config, files), dataset)
    provenance = cache.open_cache(path).provenance
    if precision := provenance.get("config", {}).get("precision"):
        log.info("%s: computed in %s", path, precision)
    if "upper_bound" in provenance:
        log.info("%s: %s", path, described_bounds(provenance["upper_bound"]))
    for what, count in provenance["counts"].items():
        if count:
            log.warning("%s: %d %s", path, count, what)
    if ", " in (devices := str(provenance.get("device", ""))):
        log.warning("%s: its shards were computed on several devices (%s), whose vectors differ by rounding", path, devices)
    return path


def verify(path: Path, write: bool = False) -> cache.FeatureCache:
    """Check a cache with :func:`vse.features.cache.feature_cache.verify_cache`; with ``write``, lock it meanwhile."""
    if not write:
        return cache.verify_cache(path)
    with lock_for_writing(path):
        return cache.verify_cache(path, write=True)


def _check_shard(path: Path, dataset: Dataset, kind: Kind, config: Mapping[str, Any]) -> None:
    """Raise UserError if a shard was made from other texts than those of the data set, or from other photographs.

    All texts are compared, and some of the photographs, as far as they are at hand.
    """
    if shards.read_record(path) is None:
        return
    ids, sources = shards.read_rows(path, "ids", "sources")
    if kind == "text":
        differences = source_differences(dataset, ids, sources, config)
    else:
        recorded = DataIdentity(ids, ids[:0], sources if sources.any() else None)
        found, photos = hash_available_photos(dataset, recorded, COMPARED_PHOTOS)
        differences = data_differences(DataIdentity(found, ids[:0], photos), recorded)
    if differences:
        raise UserError(
            f"{path}: the data set {dataset.path} has changed since the shard was made: {differences[0]}; give the data set "
            "of the shard, or delete that shard and extract it again"
        )


def changed_source(items: Sequence[Item], ids: Ids, sources: NDArray[np.uint8], of: TextRows = "captions") -> str | None:
    """What changed since rows with these ``ids`` were made: the first image or text whose hash differs, or None."""
    by_id = {item.id: item for item in items}
    for identity, source in zip(ids.tolist(), sources, strict=True):
        item = by_id.get(identity)
        if item is None:
            return f"data set: it has no id {identity}"
        what = f"image {identity} ({item.path})" if item.path is not None else f"{of.removesuffix('s')} {identity}"
        try:
            if not np.array_equal(item.source(), source):
                return f"{what}: its SHA-256 differs"
        except BadImage as error:
            return f"{what}: {error}"
    return None


def verify_sources(checked: cache.FeatureCache) -> str:
    """Hash again what a cache was made from: ``unchanged``, or why that cannot be told; :class:`UserError` if it changed."""
    if not checked.captions.is_file():
        return f"not at hand ({checked.captions} is not there)"
    dataset = load_dataset_file(checked.captions)
    if "imported" in checked.provenance:
        return "not at hand (imported features)"
    if backbone_of(checked) is not None:
        return "not at hand (embeddings of a model)"
    kind: Kind = "image" if checked.kind == "image" else "text"
    made_by = checked.provenance.get("config", {}).get("extractor")
    raw = made_by in EXTRACTORS and EXTRACTORS[made_by].reads_raw
    items = items_of(dataset, kind, raw, checked.text_rows)
    if kind == "image" and not any(item.path is not None and item.path.is_file() for item in items):
        return f"not at hand (none of the images of {dataset.path} is there)"
    changed = changed_source(items, checked.ids, cache.read_sources(checked), checked.text_rows)
    boxes = boxes_sha256(truth_boxes(dataset)) if changed is None and holds_truths(checked) else None
    if boxes is not None and boxes != checked.provenance.get("boxes_sha256"):
        changed = "data set: boxes of its phrases differ"
    if changed is not None:
        raise UserError(f"{checked.path} was made from another {changed}")
    return "unchanged"


def _bounds(
    dataset: Dataset, config: Mapping[str, Any], files: Sequence[Path], of_images: Collection[int] | None = None
) -> dict[str, Any]:
    """The upper bound of the boxes in some shards; of the ground-truth boxes themselves there is none."""
    return {} if config.get("boxes") == SOURCE else bounds_of_shards(dataset, files, of_images)


def _check_kind(extractor: Extractor, rows: Rows) -> None:
    """:class:`ValueError` if an extractor's rows are not what its settings say, which others rely on."""
    axes = rows.features.ndim + (rows.offsets is not None)
    if axes != (2 if extractor.config.row_kind == "vectors" else 3):
        raise ValueError(f"rows of {type(extractor).__name__} have {axes} axes, its settings say {extractor.config.row_kind}")
