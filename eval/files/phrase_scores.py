"""Reader and writer of phrase scores (the score of each phrase with each candidate box), and the ranks of the right boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from vse.eval import DEFAULT_KS
from vse.eval.ranking.metrics import MeasuredQueries
from vse.pipeline.dataset.identity import CAPTION_HASH_BYTES, PHOTO_HASH_BYTES, DataIdentity, check_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import (
    HASH_ATTRIBUTE,
    check_content_hash,
    check_same_attributes,
    find_hdf5_dataset,
    hash_array,
    hash_content,
    parse_attribute,
    parse_floats,
    parse_hashes,
    parse_ids,
)
from vse.pipeline.files.inputs import InputFile, wrap_read_errors
from vse.pipeline.files.outputs import hdf5_kind
from vse.pipeline.files.writing import write_bytes

PHRASE_SCORES_FORMAT, PHRASE_SCORES_VERSION = "vse-phrase-scores", 1
PHRASE_SCORES_KIND = hdf5_kind("a file of phrase scores", lambda file: file.attrs.get("format") == PHRASE_SCORES_FORMAT)
_ID_NAMES = ("phrase_ids", "image_ids", "caption_ids")
_ARRAY_NAMES = (*_ID_NAMES, "offsets", "scores", "boxes", "truth", "types")
_BYTES_BY_HASH_NAME = {"photo_hashes": PHOTO_HASH_BYTES, "caption_hashes": CAPTION_HASH_BYTES}
_ATTRIBUTE_NAMES = ("dataset", "split", "experiment", "seed", "provenance", "trained_on")
_REQUIRED_ATTRIBUTES = ("dataset", "split")
_MAX_ROWS = 100_000_000  # candidates or phrases in a file
_MAX_TYPES = 1000  # different types of phrases in a file


@dataclass(frozen=True, eq=False)
class PhraseScores:
    """The phrases of a split, with the scores and boxes of the candidates of each phrase.

    Boxes are x1, y1, x2, y2 in pixels of the original image, with x2 and y2 exclusive.

    Attributes
    ----------
    phrase_ids : (n_phrases,) index of each phrase among all phrases of the data set, in the order of ``dataset.json``
    image_ids, caption_ids : (n_phrases,) ids of the image and of the caption of each phrase
    offsets : (n_phrases + 1,) row in ``scores`` and ``boxes`` of each phrase's first candidate; the last number is
        n_candidates
    scores, boxes : (n_candidates,) score and (n_candidates, 4) box of each candidate
    truth : (n_phrases, 4) ground-truth box of each phrase; NaN for a phrase without such a box
    types : (n_phrases,) texts such as ``people``; several types of a phrase are joined by ``/``
    dataset, split : names of the data set and of its split
    experiment, seed : experiment and training seed of the model, or None
    provenance : JSON text with features, settings and versions
    trained_on : name of the data set of the training; None if it is ``dataset``
    photo_hashes, caption_hashes : (n_phrases, 32) SHA-256 of the image file and (n_phrases, 8) hash of the caption of each
        phrase (:func:`vse.pipeline.dataset.identity.hash_caption`); None if they are unknown
    """

    phrase_ids: NDArray[np.int64]
    image_ids: NDArray[np.int64]
    caption_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    scores: NDArray[np.float32] | NDArray[np.float64]
    boxes: NDArray[np.float32]
    truth: NDArray[np.float32]
    types: NDArray[Any]
    dataset: str
    split: str
    experiment: str | None = None
    seed: int | None = None
    provenance: str = "{}"
    trained_on: str | None = None
    photo_hashes: NDArray[np.uint8] | None = None
    caption_hashes: NDArray[np.uint8] | None = None
    source: InputFile | None = field(default=None, repr=False)

    @property
    def identity(self) -> DataIdentity:
        """The ids and hashes of the images and captions that have phrases."""
        images, image_rows = np.unique(self.image_ids, return_index=True)
        captions, caption_rows = np.unique(self.caption_ids, return_index=True)
        photos = None if self.photo_hashes is None else self.photo_hashes[image_rows]
        return DataIdentity(
            images, captions, photos, None if self.caption_hashes is None else self.caption_hashes[caption_rows]
        )

    @property
    def true_box_mask(self) -> NDArray[np.bool_]:
        """A mask (n_phrases,) of the phrases with a ground-truth box."""
        return np.asarray(~np.isnan(self.truth).any(1))

    def candidate_slice(self, phrase: int) -> slice:
        return slice(int(self.offsets[phrase]), int(self.offsets[phrase + 1]))


def write_phrase_scores(path: Path, scores: PhraseScores) -> Path:
    """Write phrase scores to a file atomically, and return ``path``. Raises ValueError if the reader would reject the file."""
    try:
        _check_values(path, scores)
    except UserError as error:
        raise ValueError(str(error)) from None
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        names = [*_ARRAY_NAMES, *(name for name in _BYTES_BY_HASH_NAME if getattr(scores, name) is not None)]
        arrays = {name: np.asarray(getattr(scores, name)) for name in names}
        for name, values in arrays.items():
            if name != "types":
                file.create_dataset(name, data=values)
        file.create_dataset("types", data=arrays["types"].astype(object), dtype=h5py.string_dtype())
        file.attrs.update(format=PHRASE_SCORES_FORMAT, version=PHRASE_SCORES_VERSION)
        file.attrs.update({name: value for name, value in _collect_attributes(scores).items() if value is not None})
        file.attrs[HASH_ATTRIBUTE] = _hash_content(arrays, _collect_attributes(scores))
    return write_bytes(path, buffer.getbuffer())


def read_phrase_scores(path: Path) -> PhraseScores:
    """Read and check a file of phrase scores.

    Raises UserError if an array is missing, not finite or of a wrong shape, or if ids are duplicate.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    source = InputFile(path)
    with wrap_read_errors(path, "a readable HDF5 file of phrase scores"), h5py.File(source.stream, "r") as file:
        _check_format(path, file)
        items = {name: find_hdf5_dataset(file, name, path=path) for name in _ARRAY_NAMES}
        missing = [name for name, item in items.items() if item is None]
        missing += [f"the attribute {name}" for name in _REQUIRED_ATTRIBUTES if name not in file.attrs]
        if missing:
            raise UserError(f"{path}: not a complete file of phrase scores, it lacks {', '.join(missing)} (docs/formats.md)")
        items |= {name: item for name in _BYTES_BY_HASH_NAME if (item := find_hdf5_dataset(file, name, path=path)) is not None}
        arrays = {name: _read_array(path, name, item) for name, item in items.items() if item is not None}
        attributes = {name: parse_attribute(path, name, file.attrs[name]) for name in _ATTRIBUTE_NAMES if name in file.attrs}
        content_sha256 = file.attrs.get(HASH_ATTRIBUTE)
    fields: dict[str, Any] = {name: parse_ids(path, name, arrays[name]) for name in (*_ID_NAMES, "offsets")}
    fields |= {name: parse_floats(path, name, arrays[name]) for name in ("scores", "boxes", "truth")}
    n = len(fields["phrase_ids"])
    fields |= {
        name: parse_hashes(path, name, arrays[name], n, width) for name, width in _BYTES_BY_HASH_NAME.items() if name in arrays
    }
    types = arrays["types"]
    if not isinstance(types, np.ndarray) or types.dtype != object or not all(isinstance(text, str) for text in types.flat):
        raise UserError(f"{path}: types must be texts (UTF-8)")
    run = PhraseScores(**fields, types=types.astype(np.str_), **attributes, source=source)
    _check_values(path, run)
    check_content_hash(path, content_sha256, lambda: _hash_content(arrays, _collect_attributes(run)))
    return run


def is_phrase_score_file(path: Path) -> bool:
    """Return whether a file has the format of phrase scores; False if it is not an HDF5 file, or does not exist."""
    try:
        source = InputFile(path)
        with wrap_read_errors(path, "a readable HDF5 file"), h5py.File(source.stream, "r") as file:
            return _decode_attribute(file.attrs.get("format")) == PHRASE_SCORES_FORMAT
    except UserError:
        return False


def check_same_phrases(
    first_path: Path, first: PhraseScores, path: Path, run: PhraseScores, attributes: Sequence[str] = ()
) -> None:
    """Raise UserError if two files differ in their phrases or ground-truth boxes.

    The files must also have the same values of ``attributes``, such as ``experiment``.
    """
    check_same_attributes(first_path, first, path, run, ("dataset", "split", *attributes))
    for name in (*_ID_NAMES, "types", "truth"):
        if not np.array_equal(getattr(first, name), getattr(run, name), equal_nan=name == "truth"):
            raise UserError(f"{path} and {first_path} differ in {name}; files that are evaluated together must have the same")
    check_same_data(path, run.identity, first_path, first.identity)


def _collect_attributes(scores: PhraseScores) -> dict[str, Any]:
    return {name: getattr(scores, name) for name in _ATTRIBUTE_NAMES}


def _hash_content(arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> str:
    """Return the SHA-256 of arrays and attributes. ``types`` are hashed as UTF-8, with a line feed after each text."""
    texts = np.frombuffer("".join(f"{text}\n" for text in arrays["types"].tolist()).encode(), np.uint8)
    return hash_content({name: hash_array(values) for name, values in {**arrays, "types": texts}.items()}, attributes)


def _check_format(path: Path, file: h5py.File) -> None:
    found = _decode_attribute(file.attrs.get("format"))
    if found != PHRASE_SCORES_FORMAT:
        reason = "it has no attribute format" if found is None else f"its attribute format is {found!r}"
        raise UserError(f"{path}: not a file of phrase scores: {reason}, expected {PHRASE_SCORES_FORMAT!r} (docs/formats.md)")
    version = file.attrs.get("version")
    if not isinstance(version, int | np.integer) or version != PHRASE_SCORES_VERSION:
        raise UserError(
            f"{path}: phrase scores in version {version} of their format; this program reads version {PHRASE_SCORES_VERSION}"
        )


def _decode_attribute(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)


def _read_array(path: Path, name: str, item: h5py.Dataset) -> NDArray[Any] | h5py.Empty:
    if item.size is not None and item.size > 4 * _MAX_ROWS:
        raise UserError(f"{path}: {name} has shape {item.shape}, more values than any file of phrase scores")
    if name == "types" and h5py.check_string_dtype(item.dtype) is not None:
        try:
            return np.asarray(item.asstr()[()], dtype=object)
        except UnicodeDecodeError:
            raise UserError(f"{path}: types are not UTF-8") from None
    values = item[()]
    return values if isinstance(values, h5py.Empty) else np.asarray(values)


def _check_values(path: Path, run: PhraseScores) -> None:
    n_phrases, n_candidates = len(run.phrase_ids), len(run.scores) if run.scores.ndim == 1 else -1
    if not n_phrases:
        raise UserError(f"{path}: no phrases")
    expected: dict[str, tuple[int, ...]] = {"image_ids": (n_phrases,), "caption_ids": (n_phrases,), "types": (n_phrases,)}
    expected |= {"truth": (n_phrases, 4), "offsets": (n_phrases + 1,)}
    if n_candidates < 0:
        raise UserError(f"{path}: scores has shape {run.scores.shape}, expected (n_candidates,)")
    for name, shape in (expected | {"boxes": (n_candidates, 4)}).items():
        if getattr(run, name).shape != shape:
            raise UserError(f"{path}: {name} has shape {getattr(run, name).shape}, expected {shape}")
    _check_ids(path, run)
    _check_offsets(path, run.offsets, n_candidates)
    if len(np.unique(run.types)) > _MAX_TYPES:
        raise UserError(f"{path}: types has more than {_MAX_TYPES} different texts; they are categories such as people")
    _raise_if_wrong(path, "scores", ~np.isfinite(run.scores), "is not finite (NaN or infinite)", run)
    _check_boxes(path, run)


def _check_ids(path: Path, run: PhraseScores) -> None:
    values, counts = np.unique(run.phrase_ids, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{path}: duplicate phrase id {values[counts > 1][0]}")
    captions, first, which = np.unique(run.caption_ids, return_index=True, return_inverse=True)
    other = run.image_ids != run.image_ids[first][which]
    if other.any():
        raise UserError(f"{path}: phrases of caption {captions[which[other][0]]} are of different images")


def _check_offsets(path: Path, offsets: NDArray[np.int64], n_candidates: int) -> None:
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])
    if offsets[0] != 0 or offsets[-1] != n_candidates or falling.size:
        where = f"falls after phrase row {falling[0]}" if falling.size else f"goes from {offsets[0]} to {offsets[-1]}"
        raise UserError(f"{path}: offsets must rise from 0 to the number of scores, {n_candidates}, and {where}")


def _check_boxes(path: Path, run: PhraseScores) -> None:
    """Raise UserError if the corners of a box are in the wrong order; a ground-truth box must also have an area."""
    _raise_if_wrong(path, "boxes", np.asarray(~np.isfinite(run.boxes).all(1)), "is not finite (NaN or infinite)", run)
    swapped = np.asarray((run.boxes[:, 2:] < run.boxes[:, :2]).any(1))
    _raise_if_wrong(path, "boxes", swapped, "is not x1, y1, x2, y2: x2 < x1 or y2 < y1", run)
    missing = np.isnan(run.truth)
    _raise_if_wrong(
        path, "truth", (missing.any(1) != missing.all(1)) | np.isinf(run.truth).any(1), "is neither a box nor NaN", run
    )
    empty = np.asarray((run.truth[:, 2:] <= run.truth[:, :2]).any(1))
    _raise_if_wrong(path, "truth", empty, "is not x1, y1, x2, y2: x2 <= x1 or y2 <= y1", run)


def _raise_if_wrong(path: Path, name: str, wrong: NDArray[np.bool_], why: str, run: PhraseScores) -> None:
    for row in np.flatnonzero(wrong)[:1]:
        phrase = row if name == "truth" else np.searchsorted(run.offsets, row, "right") - 1
        raise UserError(f"{path}: {name} row {row}, of phrase {run.phrase_ids[phrase]}, {why}")


MISSED_RANK = np.iinfo(np.int64).max  # the rank of a phrase without a right candidate
_MAX_CANDIDATES = 2**19  # candidates of the phrases that are ranked at once


class PhraseRanks(NamedTuple):
    """The rank of each phrase's right box, and the IoU (intersection over union) of its best-scoring box with the true box.

    Attributes
    ----------
    ranks : (n_phrases,) number of wrong candidates that score at least as high as the best right candidate; ``MISSED_RANK``,
        the largest int64, if no candidate is right
    best_iou : (n_phrases,) IoU of the best-scoring candidate with the true box; the lowest IoU if several candidates tie for
        the best score, and 0 without candidates
    """

    ranks: Int[np.ndarray, " n_phrases"]
    best_iou: Float[np.ndarray, " n_phrases"]

    def build_queries(self, images: NDArray[np.int64]) -> MeasuredQueries:
        """Return the phrases as queries, with the values of their metrics in percent.

        The metrics are R@K, ``bound`` (100 if a candidate is right, else 0) and ``mean_iou``, whose value is the IoU
        (intersection over union) of the best-scoring candidate with the true box. ``images`` (n_phrases,) has the index of
        each phrase's image; a bootstrap resamples these images.
        """
        values = {f"r{k}": np.where(self.ranks < k, 100.0, 0.0) for k in DEFAULT_KS}
        return MeasuredQueries(
            images, values | {"bound": np.where(self.ranks < MISSED_RANK, 100.0, 0.0), "mean_iou": 100 * self.best_iou}
        )


def rank_phrases(
    scores: Float[np.ndarray, " n"],
    boxes: Float[np.ndarray, "n 4"],
    offsets: Int[np.ndarray, " n_phrases_and_one"],
    truth: Float[np.ndarray, "n_phrases 4"],
    iou: float,
) -> PhraseRanks:
    """Return the rank of the right box of each phrase, and the IoU (intersection over union) of its best-scoring box.

    The candidates of phrase k are at ``offsets[k]:offsets[k + 1]`` in ``scores`` and ``boxes``. A candidate is right if its
    IoU with the phrase's true box in ``truth`` is at least ``iou``. A phrase without a true box (NaN in ``truth``) has no
    right candidate. Its rank is ``MISSED_RANK``, the largest int64.
    """
    parts = [
        _rank_block(
            scores[candidates],
            boxes[candidates],
            offsets[phrases.start : phrases.stop + 1] - offsets[phrases.start],
            truth[phrases],
            iou,
        )
        for phrases, candidates in _split_into_blocks(offsets)
    ]
    return PhraseRanks(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def rowwise_iou(boxes: Float[np.ndarray, "n 4"], others: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, " n"]:
    """Return the intersection over union of box k of ``boxes`` and box k of ``others``, for each k, in float64.

    The result is 0 if one of the two boxes has no area or is NaN.
    """
    first, second = (values.astype(np.float64) for values in (boxes, others))
    width, height = (np.minimum(first[:, k + 2], second[:, k + 2]) - np.maximum(first[:, k], second[:, k]) for k in (0, 1))
    shared = np.where((width > 0) & (height > 0), width * height, 0.0)
    areas = [(sides[:, 2] - sides[:, 0]) * (sides[:, 3] - sides[:, 1]) for sides in (first, second)]
    return np.divide(shared, areas[0] + areas[1] - shared, out=np.zeros(len(shared)), where=shared > 0)


def _split_into_blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of phrases, in order, each with the slice of the candidates of these phrases.

    The candidates of phrase k are at ``offsets[k]:offsets[k + 1]``. A slice has at most ``_MAX_CANDIDATES`` candidates,
    unless it is a single phrase with more candidates.
    """
    start, n_phrases = 0, len(offsets) - 1
    while start < n_phrases:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _MAX_CANDIDATES, "right")) - 1)
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))
        start = stop


def _rank_block(
    scores: NDArray[np.floating],
    boxes: NDArray[np.floating],
    offsets: NDArray[np.int64],
    truth: NDArray[np.floating],
    iou: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    counts = np.diff(offsets)
    overlaps = rowwise_iou(boxes, np.repeat(truth, counts, axis=0))
    right: Bool[np.ndarray, " n"] = overlaps >= iou
    best_right = _reduce_slices(np.maximum, np.where(right, scores, -np.inf), offsets, -np.inf)
    before = ~right & (scores >= np.repeat(best_right, counts))
    ranks = np.where(np.isfinite(best_right), _reduce_slices(np.add, before.astype(np.int64), offsets, 0), MISSED_RANK)
    highest = np.repeat(_reduce_slices(np.maximum, scores.astype(np.float64), offsets, -np.inf), counts)
    best = _reduce_slices(np.minimum, np.where(scores == highest, overlaps, np.inf), offsets, 0.0)
    return ranks, best


def _reduce_slices(function: np.ufunc, values: NDArray[Any], offsets: NDArray[np.int64], empty: float) -> NDArray[Any]:
    """Reduce ``values[offsets[k]:offsets[k + 1]]`` with ``function`` for each k; the result of an empty slice is ``empty``."""
    reduced = np.full(len(offsets) - 1, empty, values.dtype)
    filled = offsets[1:] > offsets[:-1]
    if filled.any():
        reduced[filled] = function.reduceat(values, offsets[:-1][filled])
    return reduced
