"""Ground-truth boxes of phrases as regions of images: which boxes an image has, and where a cache has them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from vse.features.cache import FeatureCache
from vse.features.feature_presets import leaves_precision_open
from vse.features.region_boxes import RegionBoxes
from vse.pipeline.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.phrase_lists import mentions

log = logging.getLogger(__name__)

SOURCE = "phrases"
"""What the setting ``boxes`` is of a cache of these boxes."""

# Settings and hashes that say which boxes are read, not how.
_WHICH_BOXES = ("boxes", "n_boxes", "train_boxes", "thin_edges", "proposer", "proposer_weights", "edge_model")
_FILES_OF_BOXES = ("proposer_sha256", "edge_model_sha256")


def truth_boxes(dataset: Dataset) -> dict[int, NDArray[np.float32]]:
    """The different ground-truth boxes (n, 4) of each image's phrases, in the order of their first phrase.

    The box of a phrase is :attr:`vse.pipeline.phrases.Phrase.truth`. Images of which no phrase has a box have no entry.
    :class:`UserError` if that is so of all.
    """
    boxes_of: dict[int, dict[tuple[float, ...], None]] = {}
    for mention in mentions(dataset):
        if (truth := mention.phrase.truth) is not None:
            box = tuple(np.asarray(truth, np.float32).tolist())
            boxes_of.setdefault(mention.image.imgid, {})[box] = None
    if not boxes_of:
        raise UserError(f"{dataset.path}: no caption marks a phrase with a box, so there are no ground-truth boxes to read")
    return {image_id: np.asarray(list(boxes), np.float32) for image_id, boxes in boxes_of.items()}


def boxes_sha256(boxes_of: Mapping[int, NDArray[np.float32]]) -> str:
    """SHA-256 of the boxes of images: of each image's id, number of boxes and boxes."""
    digest = hashlib.sha256()
    for image_id, boxes in boxes_of.items():
        digest.update(np.asarray([image_id, len(boxes)], "<i8").tobytes())
        digest.update(boxes.astype("<f4").tobytes())
    return digest.hexdigest()


def holds_truths(cache: FeatureCache) -> bool:
    """Whether the regions of a cache are the ground-truth boxes of phrases."""
    return cache.offsets is not None and cache.provenance.get("config", {}).get("boxes") == SOURCE


def check_truths(truths: FeatureCache, candidates: FeatureCache) -> None:
    """:class:`UserError` unless ``truths`` are ground-truth boxes of the same data, read as ``candidates`` were.

    The precision may differ where the presets of both leave it to the machine.
    """
    _check_holds_truths(truths)
    if truths.dataset != candidates.dataset:
        raise UserError(f"{truths.path} is of {truths.dataset!r}, {candidates.path} of {candidates.dataset!r}")
    one, other = (_network(cache) for cache in (truths, candidates))
    different = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    open_both = all(leaves_precision_open(cache.feature, cache.dataset) for cache in (truths, candidates))
    if different == ["precision"] and open_both:
        log.info("%s is in %s and %s in %s", truths.path, one["precision"], candidates.path, other["precision"])
    elif different:
        raise UserError(
            f"{truths.path} and {candidates.path} do not agree in {', '.join(different[:4])}: a box has other features in each"
        )


class TruthRows:
    """Where a cache of ground-truth boxes has the vector of a box of an image; :class:`UserError` if it is no such cache."""

    def __init__(self, cache: FeatureCache) -> None:
        _check_holds_truths(cache)
        self._cache = cache
        regions = RegionBoxes(cache)
        image_of = np.repeat(cache.ids, np.diff(regions.offsets))
        places = zip(image_of.tolist(), map(tuple, regions.boxes.tolist()), strict=True)
        self._numbers = {place: number for number, place in enumerate(places)}

    def numbers(self, image_ids: Iterable[int], boxes: Float[np.ndarray, "n 4"]) -> Int[np.ndarray, " n"]:
        """Numbers of the regions, among all of the cache, that are these boxes of these images.

        Boxes are compared as float32. :class:`UserError` names the first that the cache lacks.
        """
        places = list(zip(map(int, image_ids), map(tuple, boxes.astype(np.float32).tolist()), strict=True))
        for image_id, box in places:
            if (image_id, box) not in self._numbers:
                raise UserError(
                    f"{self._cache.path}: has no ground-truth box {list(box)} of image {image_id}; extract it again from this "
                    "very data set"
                )
        return np.asarray([self._numbers[place] for place in places], np.int64)


def _check_holds_truths(cache: FeatureCache) -> None:
    if not holds_truths(cache):
        raise UserError(f"{cache.path} holds {cache.described()}; ground-truth boxes are needed, those of boxes: {SOURCE}")


def _network(cache: FeatureCache) -> dict[str, object]:
    """What made a cache, whichever boxes it read: each setting, version and hash under its own name."""
    made = {name: value for name, value in cache.extractor.items() if name not in ("config", *_FILES_OF_BOXES)}
    config = {name: value for name, value in cache.extractor.get("config", {}).items() if name not in _WHICH_BOXES}
    return {**made, **config}
