"""Read boxes from files, propose boxes, and collect ground-truth boxes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.rows import CACHE_FORMAT
from vse.features.settings import has_auto_precision
from vse.pipeline.dataset.dataset import Dataset, list_mentions
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import WatchedFile, wrap_read_errors
from vse.pipeline.files.writing import read_json

Floats = NDArray[np.float32]
TRUTH_BOXES_SETTING = "phrases"  # value of the setting ``boxes`` for ground-truth boxes

# Settings and hashes that determine which boxes an extractor reads, but not how it computes the vector of a box.
_BOX_SETTING_NAMES = ("boxes", "n_boxes", "train_boxes", "thin_edges", "proposer", "proposer_weights", "edge_model")
_BOX_HASH_NAMES = ("proposer_sha256", "edge_model_sha256")
_RANDOM_LOCK = threading.Lock()  # all threads share the C library's random generator, which selective search uses

log = logging.getLogger(__name__)


def read_boxes(path: Path) -> dict[int, Floats]:
    """Read the boxes of images from a file: (n, 4) by image id, x1, y1, x2, y2 in pixels of the image.

    The file is a JSON object ``{"<image id>": [[x1, y1, x2, y2], ...]}``, or an HDF5 file with ``ids`` (n,), ``offsets`` (n +
    1,) and ``boxes`` (n_boxes, 4), such as a cache of regions. Raises UserError for another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file of boxes")
    if path.suffix == ".json":
        content = read_json(path)
        with wrap_read_errors(path, 'of the form {"<image id>": [[x1, y1, x2, y2], ...]}'), np.errstate(over="ignore"):
            boxes_by_id = {int(key): np.asarray(boxes, np.float32).reshape(-1, 4) for key, boxes in content.items()}
    else:
        boxes_by_id = _read_hdf5_boxes(path)
    for image_id, boxes in boxes_by_id.items():
        if boxes.ndim != 2 or boxes.shape[1] != 4 or not np.isfinite(boxes).all():
            raise UserError(f"{path}: the boxes of image {image_id} are not rows of four numbers")
    return boxes_by_id


class EdgeModel:
    """A structured-edge model (Dollar and Zitnick, ICCV 2013), loaded once per thread.

    Raises UserError if ``path`` is not the file of such a model.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such structured-edge model")
        cv2, self.path, self._local, self._watched = import_opencv(), path, threading.local(), WatchedFile(path)
        try:
            file = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
            stride = file.getNode("options").getNode("stride").real()
            complete = all(not file.getNode(name).empty() for name in ("childs", "featureIds", "thresholds", "edgeBins"))
        except (cv2.error, SystemError) as error:
            raise UserError(f"{path}: not a structured-edge model ({error})") from None
        if not (complete and stride >= 1):  # OpenCV divides by the stride
            raise UserError(f"{path}: not a structured-edge model")

    def find_edges(self, pixels: NDArray[np.uint8]) -> tuple[Floats, Floats]:
        """Return edge strengths, thinned to ridges by non-maximum suppression, and edge orientations of an image."""
        if not hasattr(self._local, "detector"):
            self._local.detector = import_opencv().ximgproc.createStructuredEdgeDetection(str(self.path))
            self._watched.check_unchanged()
        detector = self._local.detector
        edges = detector.detectEdges(pixels.astype(np.float32) / 255)
        orientation = detector.computeOrientation(edges)
        return detector.edgesNms(edges, orientation), orientation


def find_edge_boxes(
    pixels: NDArray[np.uint8], n_boxes: int, edge_model: EdgeModel | None = None, thin: bool = False
) -> tuple[Floats, Floats]:
    """Return the EdgeBoxes (Zitnick and Dollar, ECCV 2014) of an image (height, width, 3) and their scores, best first.

    At most ``n_boxes`` boxes are returned. Without a model, edges are the gradient of the smoothed grey image, thinned to
    ridges if ``thin``. Alpha, beta and the minimum score are 0.65, 0.65 and 0.01, as in the phrase-localisation protocol. If
    the image has no edges, the only box is the complete image.
    """
    cv2 = import_opencv()
    if edge_model is None:
        grey = cv2.GaussianBlur(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32), (0, 0), 1.5)
        across, down = cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1)
        edges = np.hypot(across, down)
        edges /= max(float(edges.max()), 1e-6)
        orientation = np.mod(np.arctan2(down, across), np.float32(np.pi))
        edges = suppress_non_ridges(edges, orientation) if thin else edges
    else:
        edges, orientation = edge_model.find_edges(pixels)
    finder = cv2.ximgproc.createEdgeBoxes(maxBoxes=n_boxes, alpha=0.65, beta=0.65, minScore=0.01)
    boxes, scores = finder.getBoundingBoxes(edges, orientation)
    if len(boxes) == 0:  # an image without an edge
        return _build_whole_image_box(pixels)
    return _convert_xywh_to_corners(boxes), np.asarray(scores, np.float32).reshape(-1)


def suppress_non_ridges(edges: Floats, orientation: Floats) -> Floats:
    """Return edge strengths (height, width), set to 0 where a neighbour across the edge is more than 1% stronger.

    ``orientation`` is the angle of the gradient. The neighbours lie one pixel away in this direction and are interpolated.
    """
    cv2 = import_opencv()
    y, x = np.indices(edges.shape, np.float32)
    across, down = np.cos(orientation), np.sin(orientation)
    kept = np.ones(edges.shape, bool)
    for step in (-1, 1):
        neighbour = cv2.remap(edges, x + step * across, y + step * down, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        kept &= edges * np.float32(1.01) >= neighbour
    return edges * kept


def run_selective_search(pixels: NDArray[np.uint8], n_boxes: int) -> tuple[Floats, Floats]:
    """Return the first ``n_boxes`` boxes of selective search (Uijlings et al., IJCV 2013, fast mode), and their scores.

    The order of the boxes is random, but always the same for an image. The algorithm gives no scores; the scores here decrease
    linearly with the rank, from 1. If the algorithm finds no box, the only box is the complete image.
    """
    cv2 = import_opencv()
    with _RANDOM_LOCK:
        ctypes.CDLL(None).srand(0)  # makes the order of the boxes repeatable
        search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
        search.setBaseImage(np.ascontiguousarray(pixels[:, :, ::-1]))
        search.switchToSelectiveSearchFast()
        boxes = search.process()[:n_boxes]
    if len(boxes) == 0:
        return _build_whole_image_box(pixels)
    return _convert_xywh_to_corners(boxes), np.linspace(1, 0, len(boxes), endpoint=False, dtype=np.float32)


def _convert_xywh_to_corners(boxes: NDArray[Any]) -> Floats:
    corners = np.asarray(boxes, np.float32)
    return np.concatenate([corners[:, :2], corners[:, :2] + corners[:, 2:]], axis=1)


def _build_whole_image_box(pixels: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    height, width = pixels.shape[:2]
    return np.asarray([[0, 0, width, height]], np.float32), np.zeros(1, np.float32)


def import_opencv() -> Any:
    """Return the module cv2 of opencv-contrib. Raises UserError, with the command that installs it, if cv2 is missing."""
    return import_extra("cv2", "a proposal of boxes (EdgeBoxes, selective search)", "edgeboxes")


def _read_hdf5_boxes(path: Path) -> dict[int, Floats]:
    with open_hdf5(path, "a file that boxes can be read from") as file:
        is_cache = str(file.attrs.get("format")) == CACHE_FORMAT
        if not is_cache:
            ids, offsets, boxes = (require_hdf5_dataset(file, name)[:] for name in ("ids", "offsets", "boxes"))
            boxes = np.asarray(boxes, np.float32)
            if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (ids, offsets)):
                raise ValueError("its ids and offsets must be 1-D integer arrays")
    if is_cache:
        cache = open_cache(path)
        if cache.offsets is None or any("boxes" not in shard for shard in cache.shard_arrays):
            raise UserError(f"{path}: a cache without boxes")
        ids, offsets, boxes = cache.ids, cache.offsets, np.concatenate([shard["boxes"].read() for shard in cache.shard_arrays])
    ascending = len(offsets) and offsets[0] == 0 and (offsets[1:] >= offsets[:-1]).all()
    if len(offsets) != len(ids) + 1 or offsets[-1] != len(boxes) or not ascending:
        raise UserError(f"{path}: {len(ids)} ids, {len(offsets)} offsets and {len(boxes)} boxes do not fit together")
    return {int(i): boxes[start:end] for i, start, end in zip(ids, offsets[:-1], offsets[1:], strict=True)}


def collect_truth_boxes(dataset: Dataset) -> dict[int, NDArray[np.float32]]:
    """Return the distinct ground-truth boxes (n, 4) of each image by image id, in the order of the phrases.

    The ground-truth box of a phrase is its ``truth_box``, the smallest box around all boxes that the data set gives for the
    phrase. An image has no entry if its phrases have no boxes. Raises UserError if no image has an entry.
    """
    boxes_by_id: dict[int, dict[tuple[float, ...], None]] = {}
    for mention in list_mentions(dataset):
        if (truth := mention.phrase.truth_box) is not None:
            box = tuple(np.asarray(truth, np.float32).tolist())
            boxes_by_id.setdefault(mention.image.imgid, {})[box] = None
    if not boxes_by_id:
        raise UserError(f"{dataset.path}: no caption marks a phrase with a box, so there are no ground-truth boxes to read")
    return {image_id: np.asarray(list(boxes), np.float32) for image_id, boxes in boxes_by_id.items()}


def hash_boxes(boxes_by_id: Mapping[int, NDArray[np.float32]]) -> str:
    """Return one SHA-256 of the ids and boxes (n, 4) of all images, in the order of the dictionary."""
    digest = hashlib.sha256()
    for image_id, boxes in boxes_by_id.items():
        digest.update(np.asarray([image_id, len(boxes)], "<i8").tobytes())
        digest.update(boxes.astype("<f4").tobytes())
    return digest.hexdigest()


def has_truth_boxes(cache: FeatureCache) -> bool:
    """Return whether the regions of a cache are the ground-truth boxes of phrases."""
    return cache.offsets is not None and cache.provenance.get("config", {}).get("boxes") == TRUTH_BOXES_SETTING


def check_truth_cache(truths: FeatureCache, candidates: FeatureCache) -> None:
    """Raise UserError unless ``truths`` holds ground-truth boxes that can be compared with the boxes in ``candidates``.

    The two caches must belong to one data set, and the same settings and weights must have computed their vectors. The
    precision may differ if the presets of both caches have ``precision: auto``, so that each machine chooses it.
    """
    _check_has_truth_boxes(truths)
    if truths.dataset != candidates.dataset:
        raise UserError(f"{truths.path} belongs to {truths.dataset!r}, {candidates.path} to {candidates.dataset!r}")
    one, other = (_collect_vector_settings(cache) for cache in (truths, candidates))
    different = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    both_auto = all(has_auto_precision(cache.feature, cache.dataset) for cache in (truths, candidates))
    if different == ["precision"] and both_auto:
        log.info("%s is in %s and %s in %s", truths.path, one["precision"], candidates.path, other["precision"])
    elif different:
        raise UserError(
            f"{truths.path} and {candidates.path} differ in {', '.join(different[:4])}, so the same box has different features"
        )


def _check_has_truth_boxes(cache: FeatureCache) -> None:
    if not has_truth_boxes(cache):
        raise UserError(
            f"{cache.path} holds {cache.describe()}; ground-truth boxes are needed (a preset with "
            f"boxes: {TRUTH_BOXES_SETTING})"
        )


def _collect_vector_settings(cache: FeatureCache) -> dict[str, object]:
    """Return the settings and hashes that determine how an extractor computes the vector of a box."""
    extractor = {name: value for name, value in cache.extractor_identity.items() if name not in ("config", *_BOX_HASH_NAMES)}
    config = {
        name: value for name, value in cache.extractor_identity.get("config", {}).items() if name not in _BOX_SETTING_NAMES
    }
    return {**extractor, **config}
