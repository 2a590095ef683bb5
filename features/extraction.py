"""Extract the shards of a feature (files of consecutive rows), merge shards to a cache, and verify a cache."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache, read_input_hashes, verify_cache
from vse.features.cache.rows import (
    CacheIdentity,
    ExtractorInput,
    FeatureKind,
    Ids,
    TextUnit,
    find_text_unit,
    list_extractor_inputs,
    list_row_ids,
)
from vse.features.cache.shards import (
    concatenate_offsets,
    find_other_precision_shards,
    get_network_precision,
    mixed_precision_error,
    read_arrays,
    read_intact_shard_record,
    read_shard_record,
    shard_path,
    shard_slice,
    shards_folder,
    write_shard,
)
from vse.features.data_checks import describe_text_differences, is_current_text_shard
from vse.features.exchange.embeddings import read_backbone
from vse.features.extractors.proposals import TRUTH_BOXES_SETTING, collect_truth_boxes, has_truth_boxes, hash_boxes
from vse.features.settings import find_extractor_settings
from vse.features.settings.base import Extractor
from vse.pipeline.dataset.dataset import SPLITS, Dataset, Mention, list_mentions, load_dataset_file
from vse.pipeline.dataset.identity import N_PHOTOS_COMPARED, DataIdentity, describe_data_differences, hash_available_photos
from vse.pipeline.dataset.images import iou
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5
from vse.pipeline.files.images import BadImage, image_exists
from vse.pipeline.files.writing import lock_for_writing

log = logging.getLogger(__name__)

MIN_RIGHT_BOX_IOU = 0.5
"""Minimum IoU of a correct box, as in the evaluation of Flickr30K Entities."""


def count_covered_phrases(
    dataset: Dataset,
    ids: Ids,
    offsets: NDArray[np.int64],
    boxes: Float[np.ndarray, "n_boxes 4"],
    image_ids: Collection[int] | None = None,
    threshold: float = MIN_RIGHT_BOX_IOU,
) -> dict[str, dict[str, int]]:
    """Count the phrases that have a ground-truth box, and the phrases among them that a candidate box covers.

    A candidate covers a phrase if its IoU with the smallest box around all boxes of the phrase is at least ``threshold``. The
    candidates of image ``ids[k]`` are ``boxes[offsets[k]:offsets[k + 1]]``. Only phrases of the images ``image_ids`` are
    counted; None: of all images. The result is ``{split: {"phrases": n, "covered": n}}``, without splits that have no phrase
    with a box.
    """
    rows = {int(identity): k for k, identity in enumerate(ids)}
    counts: dict[str, dict[str, int]] = {}
    for image_id, image_phrases in _collect_boxed_phrases(dataset).items():
        if image_ids is not None and image_id not in image_ids:
            continue
        truths = np.asarray([mention.phrase.truth_box for mention in image_phrases], np.float64)
        row = rows.get(image_id)
        candidates = boxes[:0] if row is None else boxes[offsets[row] : offsets[row + 1]]
        covered = (iou(truths, candidates) >= threshold).any(axis=1).sum()
        split_counts = counts.setdefault(image_phrases[0].image.split, {"phrases": 0, "covered": 0})
        split_counts["phrases"] += len(truths)
        split_counts["covered"] += int(covered)
    return counts


def _build_upper_bound_entry(
    dataset: Dataset, config: Mapping[str, Any], shards: Sequence[Path], image_ids: Collection[int] | None = None
) -> dict[str, Any]:
    """Return the provenance entry ``upper_bound``: each split's share of phrases that a box in ``shards`` covers (IoU >= 0.5).

    The result is empty if the shards or the phrases have no boxes, or if the boxes are the ground truth. ``config`` holds the
    extractor's settings. Only phrases of the images ``image_ids`` count; None: of all images.
    """
    with open_hdf5(shards[0], "a readable shard") as first:
        if config.get("boxes") == TRUTH_BOXES_SETTING or not {"boxes", "offsets"} <= first.keys():
            return {}
    ids, offsets, boxes = zip(*(read_arrays(path, "ids", "offsets", "boxes") for path in shards), strict=True)
    splits = count_covered_phrases(
        dataset, np.concatenate(ids), concatenate_offsets(offsets), np.concatenate(boxes), image_ids
    )
    shares = {name: {**counts, "share": counts["covered"] / counts["phrases"]} for name, counts in splits.items()}
    return {"upper_bound": {"iou": MIN_RIGHT_BOX_IOU, "splits": shares}} if splits else {}


def _describe_upper_bound(bound: Mapping[str, Any]) -> str:
    """Return the provenance entry ``bound`` as a text: ``phrases with a box of IoU >= 0.5: train 69.5% of 77,911, ...``."""
    splits = [f"{name} {100 * n['share']:.1f}% of {n['phrases']:,}" for name in SPLITS if (n := bound["splits"].get(name))]
    return f"phrases with a box of IoU >= {bound['iou']:g}: {', '.join(splits)}"


def _collect_boxed_phrases(dataset: Dataset) -> dict[int, list[Mention]]:
    by_image: dict[int, list[Mention]] = defaultdict(list)
    for mention in list_mentions(dataset):
        if mention.phrase.boxes:
            by_image[mention.image.imgid].append(mention)
    return by_image


def extract_shards(
    dataset_file: Path, extractor: Extractor, out: Path, n_shards: int, only_index: int | None = None, skip_bad: bool = False
) -> Path:
    """Extract the unfinished shards of a feature and return the folder of the shards.

    ``only_index`` is the index (from 0) of a single shard to extract; the result is then the path of this shard. Without
    ``skip_bad``, a finished shard with skipped images is extracted again. Raises UserError if images or captions of a finished
    shard have changed.

    With ``precision: auto``, finished shards are kept even if another machine computed them in another precision. Because a
    cache has one precision, UserError is then raised if a shard is still missing.
    """
    dataset = load_dataset_file(dataset_file)
    if extractor.kind == "image" and not dataset.has_image_files:
        raise UserError(f"{dataset_file}: a data set without images (its features were imported)")
    input_form = extractor.kind, extractor.config.reads_raw_text, extractor.config.text_unit
    identity = extractor.build_cache_identity(dataset)
    dataset = extractor.config.restrict_dataset(dataset)
    n_rows = len(list_row_ids(dataset, extractor.kind, extractor.config.text_unit))
    if not 1 <= n_shards <= n_rows:
        raise UserError(f"{n_shards} shards for {n_rows} rows")
    if only_index is not None and not 0 <= only_index < n_shards:
        raise UserError(f"shard {only_index} is not one of 0-{n_shards - 1}")
    other_precision_shards = (
        find_other_precision_shards(out, n_shards, identity) if extractor.requested_precision == "auto" else {}
    )
    for index in range(n_shards) if only_index is None else [only_index]:
        path = shard_path(out, index, n_shards)
        items = list_extractor_inputs(dataset, *input_form, shard_slice(n_rows, index, n_shards))
        with lock_for_writing(path):
            shard_identity = other_precision_shards.get(path, identity)
            if _is_finished_shard(path, shard_identity, dataset, items, extractor.config.text_unit, skip_bad):
                suffix = (
                    f" in {get_network_precision(shard_identity)}, the precision of another machine"
                    if path in other_precision_shards
                    else ""
                )
                log.info("%s: finished, kept%s", path, suffix)
                continue
            if other := next(
                (identity for other_path, identity in other_precision_shards.items() if other_path != path), None
            ):
                raise mixed_precision_error(path.parent, other, identity)
            extractor.shard_label = f"shard {index + 1} of {n_shards}"
            log.info("%s: %d rows", extractor.progress_label, len(items))
            started = time.perf_counter()
            rows = extractor.extract(items, skip_bad)
            axes, declared = rows.features.ndim + (rows.offsets is not None), extractor.config.row_kind
            if axes != (2 if declared == "vectors" else 3):
                raise ValueError(f"rows of {type(extractor).__name__} have {axes} axes, but its settings declare {declared}")
            write_shard(path, identity, rows, extractor.provenance, started, dataset.sha256)
            ids, settings = {item.id for item in items}, extractor.config.list_cache_key_settings()
            if n_shards > 1 and (entry := _build_upper_bound_entry(dataset, settings, [path], ids)):
                log.info("%s: %s", path, _describe_upper_bound(entry["upper_bound"]))
    return shards_folder(out) if only_index is None else shard_path(out, only_index, n_shards)


def _is_finished_shard(
    path: Path,
    identity: CacheIdentity,
    dataset: Dataset,
    inputs: Sequence[ExtractorInput],
    text_unit: TextUnit,
    skip_bad: bool,
) -> bool:
    """Return whether a shard is complete and can be kept; False if it has skipped images and ``skip_bad`` is False.

    ``inputs`` are those of the shard's rows. Raises UserError if an image or text has changed since the extraction.
    """
    finished = read_intact_shard_record(path, identity)
    if finished is None or (finished.skipped and not skip_bad):
        return False
    if is_current_text_shard(finished, dataset):
        return True
    ids, input_hashes = read_arrays(path, "ids", "sources")
    changed = describe_changed_input(inputs, ids, input_hashes, text_unit)
    if changed is not None:
        raise UserError(f"{path} was made from another {changed}; delete that shard to regenerate it")
    return True


def merge_feature(dataset_file: Path, out: Path, n_shards: int) -> Path:
    """Merge the finished shards of a feature to the cache ``out``; return ``out``.

    Raises UserError if a shard is missing or damaged, or if the data set has changed since the extraction.
    """
    first = read_shard_record(shard_path(out, 0, n_shards))
    kind = first.identity.kind if first is not None else "image"
    recorded = first.identity.content.get("config") if first is not None else None
    config = recorded if isinstance(recorded, Mapping) else {}
    dataset = load_dataset_file(dataset_file)
    with lock_for_writing(out):
        row_dataset = dataset.keep_splits(splits) if (splits := config.get("splits")) else dataset
        ids = list_row_ids(row_dataset, kind, find_text_unit(config))
        for index in range(n_shards):
            rows = shard_slice(len(ids), index, n_shards)
            _check_inputs_unchanged(shard_path(out, index, n_shards), dataset, kind, config, rows)
        path = merge_shards(
            out, n_shards, dataset_file, ids, lambda files: _build_upper_bound_entry(dataset, config, files), dataset
        )
    provenance = open_cache(path).provenance
    if precision := provenance.get("config", {}).get("precision"):
        log.info("%s: computed in %s", path, precision)
    if "upper_bound" in provenance:
        log.info("%s: %s", path, _describe_upper_bound(provenance["upper_bound"]))
    for description, count in provenance["counts"].items():
        if count:
            log.warning("%s: %d %s", path, count, description)
    if ", " in (devices := str(provenance.get("device", ""))):
        log.warning("%s: its shards were computed on several devices (%s), whose vectors differ by rounding", path, devices)
    return path


def verify_feature(path: Path, correct_checksums: bool = False) -> FeatureCache:
    """Verify a cache: its shards by their hashes, and its ids and input hashes. Raises UserError, which names the first fault.

    With ``correct_checksums``, the cache is locked, and wrong block checksums in its manifest (list of shards) are corrected.
    """
    with lock_for_writing(path) if correct_checksums else nullcontext():
        return verify_cache(path, correct_checksums)


def _check_inputs_unchanged(path: Path, dataset: Dataset, kind: FeatureKind, config: Mapping[str, Any], rows: slice) -> None:
    record = read_shard_record(path)
    if record is None or is_current_text_shard(record, dataset):
        return
    ids, input_hashes = read_arrays(path, "ids", "sources")
    if kind == "text":
        differences = describe_text_differences(dataset, ids, input_hashes, config, rows)
    else:
        recorded = DataIdentity(ids, ids[:0], input_hashes if input_hashes.any() else None)
        found, photos = hash_available_photos(dataset, recorded, N_PHOTOS_COMPARED)
        differences = describe_data_differences(DataIdentity(found, ids[:0], photos), recorded)
    if differences:
        raise UserError(
            f"{path}: the data set {dataset.path} has changed since the shard was made: {differences[0]}; give the data set "
            "of the shard, or delete that shard and extract it again"
        )


def describe_changed_input(
    inputs: Sequence[ExtractorInput], ids: Ids, input_hashes: NDArray[np.uint8], text_unit: TextUnit
) -> str | None:
    """Describe the first row whose image or text has changed or is unreadable; return None if no row has changed.

    ``inputs`` are the present inputs. ``ids`` (n,) and ``input_hashes`` (n, 32) are the recorded ids and hashes. A row whose
    id is not in ``inputs`` counts as changed.
    """
    by_id = {item.id: item for item in inputs}
    for identity, input_hash in zip(ids.tolist(), input_hashes, strict=True):
        item = by_id.get(identity)
        if item is None:
            return f"data set: it has no id {identity}"
        label = f"image {identity} ({item.path})" if item.path is not None else f"{text_unit.removesuffix('s')} {identity}"
        try:
            if not np.array_equal(item.hash_input(), input_hash):
                return f"{label}: its SHA-256 differs"
        except BadImage as error:
            return f"{label}: {error}"
    return None


def verify_inputs(cache: FeatureCache) -> str:
    """Hash the images or texts of a cache again; return ``unchanged``, or the reason why they cannot be hashed.

    Raises UserError, which names the first image or text that has changed.
    """
    if not cache.dataset_file.is_file():
        return f"not at hand ({cache.dataset_file} is not there)"
    dataset = load_dataset_file(cache.dataset_file)
    if "imported" in cache.provenance:
        return "not at hand (imported features)"
    if read_backbone(cache) is not None:
        return "not at hand (embeddings of a model)"
    kind: FeatureKind = "image" if cache.kind == "image" else "text"
    extractor = find_extractor_settings(cache.provenance.get("config", {}).get("extractor"))
    raw = extractor is not None and extractor.reads_raw_text
    items = list_extractor_inputs(dataset, kind, raw, cache.text_unit)
    if kind == "image" and not any(item.path is not None and image_exists(item.path) for item in items):
        return f"not at hand (all images of {dataset.path} are missing)"
    changed = describe_changed_input(items, cache.ids, read_input_hashes(cache), cache.text_unit)
    boxes = hash_boxes(collect_truth_boxes(dataset)) if changed is None and has_truth_boxes(cache) else None
    if boxes is not None and boxes != cache.provenance.get("boxes_sha256"):
        changed = "data set: boxes of its phrases differ"
    if changed is not None:
        raise UserError(f"{cache.path} was made from another {changed}")
    return "unchanged"
