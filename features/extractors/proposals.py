"""Boxes for images: read from a file, or proposed by a method that needs no trained detector, or by a detector's RPN.

Ground-truth boxes of phrases as regions of images: which boxes an image has, and where a cache has them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import RegionBoxes
from vse.features.cache.rows import FORMAT
from vse.features.settings.presets import leaves_precision_open
from vse.pipeline.dataset.dataset import Dataset, mentions
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import WatchedFile, wrap_read_errors
from vse.pipeline.files.writing import read_json

Floats = NDArray[np.float32]
_LOCK = threading.Lock()  # selective search draws from the C library's one generator


def read_boxes(path: Path) -> dict[int, Floats]:
    """Boxes (n, 4) by image id, xyxy in pixels of the image.

    A JSON object ``{"<image id>": [[x1, y1, x2, y2], ...]}``, or an HDF5 file with ``ids`` (n,), ``offsets`` (n + 1,)
    and ``boxes`` (n_boxes, 4), which every cache of regions is.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file of boxes")
    boxes_of = _from_json(path) if path.suffix == ".json" else _from_hdf5(path)
    for identity, boxes in boxes_of.items():
        if boxes.ndim != 2 or boxes.shape[1] != 4 or not np.isfinite(boxes).all():
            raise UserError(f"{path}: the boxes of image {identity} are not rows of four numbers")
    return boxes_of


def inside(boxes: Floats, size: tuple[int, int], where: str) -> Floats:
    """Boxes clipped to an image of this width and height; :class:`UserError` if one has nothing in it."""
    clipped = np.clip(boxes, 0, np.asarray(size * 2, np.float32))
    empty = ~(clipped[:, 2:] > clipped[:, :2]).all(axis=1)  # not a number is not more, either
    if empty.any():
        bad = boxes[empty][0].tolist()
        raise UserError(f"{where}: the box {bad} (x1, y1, x2, y2) holds nothing of the image, which is {size[0]} x {size[1]}")
    return clipped


class EdgeModel:
    """A structured-edge model (Dollar and Zitnick, ICCV 2013), read once for each thread; :class:`UserError` if it is none."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such structured-edge model")
        cv2, self.path, self._of_thread, self._watched = opencv(), path, threading.local(), WatchedFile(path)
        try:
            file = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
            stride = file.getNode("options").getNode("stride").real()
            complete = all(not file.getNode(name).empty() for name in ("childs", "featureIds", "thresholds", "edgeBins"))
        except (cv2.error, SystemError) as error:
            raise UserError(f"{path}: not a structured-edge model ({error})") from None
        if not (complete and stride >= 1):  # OpenCV itself would divide by it
            raise UserError(f"{path}: not a structured-edge model")

    def edges(self, pixels: NDArray[np.uint8]) -> tuple[Floats, Floats]:
        """Edges of an image after the suppression of all but their ridges, and their orientation."""
        if not hasattr(self._of_thread, "detector"):
            self._of_thread.detector = opencv().ximgproc.createStructuredEdgeDetection(str(self.path))
            self._watched.check()
        detector = self._of_thread.detector
        edges = detector.detectEdges(pixels.astype(np.float32) / 255)
        orientation = detector.computeOrientation(edges)
        return detector.edgesNms(edges, orientation), orientation


def edge_boxes(
    pixels: NDArray[np.uint8], n_boxes: int, edge_model: EdgeModel | None = None, thin: bool = False
) -> tuple[Floats, Floats]:
    """The best EdgeBoxes (Zitnick and Dollar, ECCV 2014) of an image (height, width, 3) and their scores, best first.

    Edges come from a structured-edge model, or else are the gradient of the smoothed grey image, all of it or, if ``thin``,
    its ridges, as those of a model are. Alpha, beta and the lowest score are those of the phrase-localisation protocol (0.65,
    0.65, 0.01).
    """
    cv2 = opencv()
    if edge_model is None:
        grey = cv2.GaussianBlur(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32), (0, 0), 1.5)
        across, down = cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1)
        edges = np.hypot(across, down)
        edges /= max(float(edges.max()), 1e-6)
        orientation = np.mod(np.arctan2(down, across), np.float32(np.pi))
        edges = ridges(edges, orientation) if thin else edges
    else:
        edges, orientation = edge_model.edges(pixels)
    finder = cv2.ximgproc.createEdgeBoxes(maxBoxes=n_boxes, alpha=0.65, beta=0.65, minScore=0.01)
    boxes, scores = finder.getBoundingBoxes(edges, orientation)
    if len(boxes) == 0:  # an image without an edge
        return _whole_image(pixels)
    return _xyxy(boxes), np.asarray(scores, np.float32).reshape(-1)


def ridges(edges: Floats, orientation: Floats) -> Floats:
    """Edges (height, width) without the pixels that are weaker than a neighbour across their edge, by 1% or more.

    ``orientation`` is the angle of the gradient. Edges between pixels are interpolated, and those beyond the image are its
    border's.
    """
    cv2 = opencv()
    y, x = np.indices(edges.shape, np.float32)
    across, down = np.cos(orientation), np.sin(orientation)
    kept = np.ones(edges.shape, bool)
    for step in (-1, 1):
        neighbour = cv2.remap(edges, x + step * across, y + step * down, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        kept &= edges * np.float32(1.01) >= neighbour
    return edges * kept


def selective_search(pixels: NDArray[np.uint8], n_boxes: int) -> tuple[Floats, Floats]:
    """Boxes of selective search in its fast mode (Uijlings et al., IJCV 2013), in its order; scores fall from 1.

    The order is drawn with the C library's generator, which is seeded here, so that an image's boxes are always the same.
    """
    cv2 = opencv()
    with _LOCK:
        ctypes.CDLL(None).srand(0)
        search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
        search.setBaseImage(np.ascontiguousarray(pixels[:, :, ::-1]))
        search.switchToSelectiveSearchFast()
        boxes = search.process()[:n_boxes]
    if len(boxes) == 0:
        return _whole_image(pixels)
    return _xyxy(boxes), np.linspace(1, 0, len(boxes), endpoint=False, dtype=np.float32)


def _xyxy(boxes: NDArray[Any]) -> Floats:
    corners = np.asarray(boxes, np.float32)
    return np.concatenate([corners[:, :2], corners[:, :2] + corners[:, 2:]], axis=1)


def _whole_image(pixels: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    height, width = pixels.shape[:2]
    return np.asarray([[0, 0, width, height]], np.float32), np.zeros(1, np.float32)


def opencv() -> Any:
    """The module cv2 of opencv-contrib; :class:`UserError` says how to install it."""
    return import_extra("cv2", "a proposal of boxes (EdgeBoxes, selective search)", "edgeboxes")


def _from_json(path: Path) -> dict[int, Floats]:
    content = read_json(path)
    with wrap_read_errors(path, 'of the form {"<image id>": [[x1, y1, x2, y2], ...]}'), np.errstate(over="ignore"):
        return {int(identity): np.asarray(boxes, np.float32).reshape(-1, 4) for identity, boxes in content.items()}


def _from_hdf5(path: Path) -> dict[int, Floats]:
    with open_hdf5(path, "a file that boxes can be read from") as file:
        of_cache = str(file.attrs.get("format")) == FORMAT
        if not of_cache:
            ids, offsets, boxes = (require_hdf5_dataset(file, name)[:] for name in ("ids", "offsets", "boxes"))
            boxes = np.asarray(boxes, np.float32)
            if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (ids, offsets)):
                raise ValueError("its ids and offsets must be 1-D integer arrays")
    if of_cache:
        cache = open_cache(path)
        if cache.offsets is None or any("boxes" not in shard for shard in cache.shards):
            raise UserError(f"{path}: a cache without boxes")
        ids, offsets, boxes = cache.ids, cache.offsets, np.concatenate([shard["boxes"].read() for shard in cache.shards])
    ascending = len(offsets) and offsets[0] == 0 and (offsets[1:] >= offsets[:-1]).all()
    if len(offsets) != len(ids) + 1 or offsets[-1] != len(boxes) or not ascending:
        raise UserError(f"{path}: {len(ids)} ids, {len(offsets)} offsets and {len(boxes)} boxes do not fit together")
    return {int(i): boxes[start:end] for i, start, end in zip(ids, offsets[:-1], offsets[1:], strict=True)}


log = logging.getLogger(__name__)

SOURCE = "phrases"
"""What the setting ``boxes`` is of a cache of these boxes."""

# Settings and hashes that say which boxes are read, not how.
_WHICH_BOXES = ("boxes", "n_boxes", "train_boxes", "thin_edges", "proposer", "proposer_weights", "edge_model")
_FILES_OF_BOXES = ("proposer_sha256", "edge_model_sha256")


def truth_boxes(dataset: Dataset) -> dict[int, NDArray[np.float32]]:
    """The different ground-truth boxes (n, 4) of each image's phrases, in the order of their first phrase.

    The box of a phrase is :attr:`vse.pipeline.dataset.phrases.Phrase.truth`. Images without a phrase with a box have no entry.
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
