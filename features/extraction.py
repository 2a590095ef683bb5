"""Making a cache: shards that are made once, joined at the end, and refused when their sources changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features import cache, shards
from vse.features.backbone_cache import backbone_of
from vse.features.cache_data import source_differences
from vse.features.extractors import EXTRACTORS
from vse.features.extractors.extractor import Extractor
from vse.features.rows import Ids, Item, Kind, Rows, TextRows, items_of, row_ids, text_rows_of
from vse.features.truth_boxes import SOURCE, boxes_sha256, holds_truths, truth_boxes
from vse.features.upper_bound import bounds_of_shards, described_bounds
from vse.pipeline.data_at_hand import COMPARED_PHOTOS, photos_at_hand
from vse.pipeline.data_identity import DataIdentity, data_differences
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.image_files import BadImage
from vse.pipeline.locks import only_writer

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
    if extractor.kind == "image" and not dataset.pictures:
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
        with only_writer(path):
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
    with only_writer(out):
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
    """Check a cache as :func:`vse.features.cache.verify_cache` does; nobody else writes it meanwhile if ``write`` is given."""
    if not write:
        return cache.verify_cache(path)
    with only_writer(path):
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
        found, photos = photos_at_hand(dataset, recorded, COMPARED_PHOTOS)
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
