"""The phrases of a split as arrays, the regions of images as inputs of a model, and operations on lists of unequal lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.features.backbones.device import move_tensor
from vse.features.cache.feature_cache import FeatureCache, read_input_hashes
from vse.features.cache.reader import FeatureReader, RegionBoxes
from vse.features.cache.rows import sha256_bytes
from vse.pipeline.dataset.dataset import Dataset, Image, list_mentions, list_phrase_texts
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedFeatures, Indices

CoordinateUse = Literal["none", "appended", "alone"]
N_COORDINATES = 5


class RegionFeatures(CachedFeatures):
    """The regions of some images in a cache, image after image, with their boxes.

    ``memory_gb`` limits the memory of features, in units of 1e9 bytes. Other features already use ``used_gb`` of this memory.
    Raises UserError if the cache has no boxes, or if a box is not finite.

    ``boxes`` : (n_regions, 4) x1, y1, x2, y2 in pixels of the original image.
    ``image_indices`` : (n_regions,) index of each region's image.
    ``region_starts`` : (n_images,) index of each image's first region.
    ``region_counts`` : (n_images,) number of regions of each image.
    ``image_sizes`` : (n_images, 2) width and height of each image in pixels.
    """

    def __init__(
        self, cache: FeatureCache, image_ids: Indices, device: torch.device, memory_gb: float = 0, used_gb: float = 0
    ) -> None:
        if cache.offsets is None:
            raise UserError(f"{cache.path} holds {cache.describe()}; regions with boxes are needed (vse-extract boxes)")
        super().__init__(FeatureReader(cache, 0, mapped=False), image_ids, device, memory_gb, used_gb)
        self.dim = cache.dim
        self.region_starts, self.region_counts = self._vector_starts, self._vector_counts
        self.image_indices = np.repeat(np.arange(len(image_ids)), self._vector_counts)
        within = np.arange(len(self.image_indices)) - self._vector_starts[self.image_indices]
        cache_boxes = RegionBoxes(cache)
        self.boxes = cache_boxes.boxes[cache_boxes.offsets[self._cache_rows][self.image_indices] + within]
        self.image_sizes = cache_boxes.image_size[self._cache_rows]
        if not np.isfinite(self.boxes).all():
            raise UserError(f"{cache.path}: has boxes that are not finite (NaN); extract it again")

    def __len__(self) -> int:
        return len(self.image_indices)

    def read_region_vectors(self, regions: Indices) -> Float[Tensor, "n dim"]:
        """Return the vectors of the regions with these indices. Vectors that are not in memory are read image by image."""
        if self._in_memory:
            return self._take_vectors(torch.from_numpy(regions))
        images, positions = np.unique(self.image_indices[regions], return_inverse=True)
        rows = self._cache_rows[images]
        sets = self._reader.read_padded_regions(rows).features
        vectors = sets[positions, regions - self.region_starts[images][positions]].reshape(-1, self.dim)
        return move_tensor(self._check_finite(torch.from_numpy(vectors).float(), rows), self._device)

    def compute_coordinates(self, regions: Indices) -> Float[np.ndarray, "n 5"]:
        """Return x1, y1, x2, y2 and the area of the boxes with these indices, as fractions of the image's size."""
        sides = np.tile(self.image_sizes[self.image_indices[regions]], 2).clip(min=1)
        relative = self.boxes[regions].astype(np.float64) / sides
        area = (relative[:, 2:] - relative[:, :2]).prod(1, keepdims=True)
        return np.concatenate([relative, area], 1)


class RegionInputs:
    """Regions as inputs of a model. Indices below ``len(candidates)`` are candidates; higher ones are ground-truth regions.

    ``candidates`` : candidate regions. The model ranks them for a phrase.
    ``truths`` : ground-truth regions of phrases; None if only candidates are read.
    ``coordinates`` : whether the coordinates of boxes are ``appended`` to the vectors of regions, replace the vectors
        (``alone``), or are not used (``none``).
    ``device`` : device of the inputs.
    """

    def __init__(
        self, candidates: RegionFeatures, truths: RegionFeatures | None, coordinates: CoordinateUse, device: torch.device
    ) -> None:
        if truths is not None and truths.dim != candidates.dim:
            raise UserError(
                f"regions have {candidates.dim} numbers, ground-truth regions {truths.dim}; extract both with one setting"
            )
        self.candidates, self.truths, self._coordinates, self._device = candidates, truths, coordinates, device

    @property
    def dim(self) -> int:
        return compute_region_input_dim(self.candidates.dim, self._coordinates)

    def read(self, regions: Indices) -> Float[Tensor, "n dim"]:
        is_truth = regions >= len(self.candidates)
        if self.truths is None or not is_truth.any():
            return self._read_from(self.candidates, regions)
        vectors = torch.empty(len(regions), self.dim, device=self._device)
        for source, chosen, first in ((self.candidates, ~is_truth, 0), (self.truths, is_truth, len(self.candidates))):
            vectors[torch.from_numpy(chosen).to(self._device)] = self._read_from(source, regions[chosen] - first)
        return vectors

    def _read_from(self, source: RegionFeatures, regions: Indices) -> Tensor:
        if self._coordinates == "none":
            return source.read_region_vectors(regions)
        coordinates = move_tensor(torch.from_numpy(source.compute_coordinates(regions)).float(), self._device)
        return (
            coordinates if self._coordinates == "alone" else torch.cat([source.read_region_vectors(regions), coordinates], 1)
        )


def compute_region_input_dim(dim: int, coordinates: CoordinateUse) -> int:
    """Return the length of a model's input for a region: ``dim`` numbers of its vector, coordinates of its box, or both."""
    return {"none": dim, "appended": dim + N_COORDINATES, "alone": N_COORDINATES}[coordinates]


_NO_BOX = (np.nan,) * 4


def flatten_ranges(
    starts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " total"], Int[np.ndarray, " total"]]:
    """Join ranges of integers. Range k starts at ``starts[k]`` and has ``counts[k]`` integers.

    Returns the index k of each integer's range, and the integers.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def sample_one_per_row(rows: Int[np.ndarray, " total"], n_rows: int, rng: np.random.Generator) -> Int[np.ndarray, " n_rows"]:
    """Choose a random element of each row. Return the position of each choice, or -1 for a row without elements.

    Element k of an array, at the position k, belongs to the row ``rows[k]``.
    """
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=n_rows)
    drawn = np.cumsum(counts) - counts + rng.integers(0, np.maximum(counts, 1))
    positions = np.full(n_rows, -1, np.int64)
    has_elements = counts > 0
    positions[has_elements] = order[drawn[has_elements]]
    return positions


def sample_mask_per_row(
    rows: Int[np.ndarray, " total"], max_per_row: int | None, rng: np.random.Generator
) -> Bool[np.ndarray, " total"]:
    """Choose at most ``max_per_row`` random elements of each row (None: all). Return the mask of these elements.

    Element k of an array belongs to the row ``rows[k]``.
    """
    if max_per_row is None:
        return np.ones(len(rows), bool)
    order = np.lexsort((rng.random(len(rows)), rows))
    counts = np.bincount(rows)
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank < max_per_row


def pad_lists(
    rows: Int[np.ndarray, " total"], values: Int[np.ndarray, " total"], n_rows: int
) -> tuple[Int[np.ndarray, "n_rows longest"], Bool[np.ndarray, "n_rows longest"]]:
    """Return a matrix with a list in each row, padded with 0, and a mask that is False for the padding.

    ``values`` holds the values of all lists, and ``rows`` the row of each value, in ascending order.
    """
    counts = np.bincount(rows, minlength=n_rows)
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = values
    return padded, mask


class KeyedSets:
    """A set of values for each key, with look-ups of many keys at once.

    ``keys``, ``values`` : the set of ``keys[k]`` contains ``values[k]``. Pairs may repeat. All are integers from 0.
    """

    def __init__(self, keys: Int[np.ndarray, " n"], values: Int[np.ndarray, " n"]) -> None:
        self._value_bound = int(values.max(initial=0)) + 1
        self._pair_codes = np.unique(keys * self._value_bound + values)
        self._counts = np.bincount(self._pair_codes // self._value_bound, minlength=int(keys.max(initial=0)) + 1)
        self._starts = np.cumsum(self._counts) - self._counts

    def contain(self, keys: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the set of each key contains the value. Keys and values are broadcast against each other."""
        codes = keys * self._value_bound + values
        positions = np.searchsorted(self._pair_codes, codes).clip(max=len(self._pair_codes) - 1)
        is_contained: NDArray[np.bool_] = (self._pair_codes[positions] == codes) & (values < self._value_bound)
        return is_contained

    def sample_other_values(
        self, keys: Int[np.ndarray, " n"], values: Int[np.ndarray, " n"], rng: np.random.Generator
    ) -> Int[np.ndarray, " n"]:
        """Return a random value from the set of each key, different from the one in ``values``; -1 if there is no other."""
        counts, starts = self._counts[keys], self._starts[keys]
        own = np.searchsorted(self._pair_codes, keys * self._value_bound + values) - starts
        steps = rng.integers(1, np.maximum(counts, 2))  # steps in the circular list of a key's values
        others = self._pair_codes[starts + (own + steps) % counts] % self._value_bound
        return np.where(counts > 1, others, -1)


@dataclass(frozen=True, eq=False)
class PhraseArrays:
    """The phrases of some images as arrays, in the order of the images.

    ``image_ids`` : ids of the images.
    ``phrase_ids``, ``caption_ids`` : id of each phrase, and id of its caption.
    ``image_indices`` : index of each phrase's image in ``image_ids``.
    ``text_indices`` : index of each phrase's text among the ``n_phrase_texts`` different phrase texts of the data set.
    ``chain_indices`` : index of each phrase's coreference chain (the phrases of an image that mention one object).
    ``truth_boxes`` : ground-truth box of each phrase in float32, or NaN for a phrase without a box.
    ``phrase_types`` : types of each phrase, joined by ``/``, such as ``people/clothing``.
    """

    image_ids: Indices
    phrase_ids: Int[np.ndarray, " n"]
    caption_ids: Int[np.ndarray, " n"]
    image_indices: Int[np.ndarray, " n"]
    text_indices: Int[np.ndarray, " n"]
    chain_indices: Int[np.ndarray, " n"]
    truth_boxes: Float[np.ndarray, "n 4"]
    phrase_types: list[str]
    n_phrase_texts: int

    def __len__(self) -> int:
        return len(self.phrase_ids)

    @property
    def true_box_mask(self) -> NDArray[np.bool_]:
        """The mask of phrases with a ground-truth box."""
        located: NDArray[np.bool_] = ~np.isnan(self.truth_boxes[:, 0])
        return located


def build_phrase_arrays(dataset: Dataset, images: Sequence[Image], only_with_box: bool = False) -> PhraseArrays:
    """Return the phrases of some images, all or those with a box. Raises UserError if there are no such phrases."""
    index_of_image = {image.imgid: index for index, image in enumerate(images)}
    text_ids = {text: index for index, text in enumerate(list_phrase_texts(dataset))}
    chains: dict[tuple[int, str | int], int] = {}
    rows = []
    for mention in list_mentions(dataset):
        phrase, image = mention.phrase, index_of_image.get(mention.image.imgid)
        if image is None or (only_with_box and phrase.truth_box is None):
            continue
        chain = chains.setdefault((image, phrase.chain or mention.phrase_id), len(chains))
        rows.append((image, mention, text_ids[mention.text], chain))
    if not rows:
        kind = "phrase with a box" if only_with_box else "phrase"
        raise UserError(f"{dataset.path}: no {kind} in these images; see docs/phrases.md")
    rows.sort(key=lambda row: row[0])
    found = [mention for _, mention, _, _ in rows]
    return PhraseArrays(
        image_ids=np.asarray([image.imgid for image in images], np.int64),
        phrase_ids=_to_int64_array(mention.phrase_id for mention in found),
        caption_ids=_to_int64_array(mention.caption.sentid for mention in found),
        image_indices=_to_int64_array(image for image, _, _, _ in rows),
        text_indices=_to_int64_array(text for _, _, text, _ in rows),
        chain_indices=_to_int64_array(chain for _, _, _, chain in rows),
        truth_boxes=np.asarray([mention.phrase.truth_box or _NO_BOX for mention in found], np.float32),
        phrase_types=["/".join(mention.phrase.types) for mention in found],
        n_phrase_texts=len(text_ids),
    )


def find_truth_regions(phrases: PhraseArrays, truths: RegionFeatures, cache_name: str) -> Int[np.ndarray, " n"]:
    """Return the index in ``truths`` of each phrase's ground-truth region.

    Raises UserError if a phrase's box is not in ``truths``. The message names the cache of ``truths`` as ``cache_name``.
    """
    keys = zip(truths.image_indices.tolist(), map(bytes, truths.boxes + np.float32(0)), strict=True)  # + 0 turns -0 into 0
    index_of_box = {key: index for index, key in enumerate(keys)}
    phrase_keys = zip(phrases.image_indices.tolist(), map(bytes, phrases.truth_boxes + np.float32(0)), strict=True)
    indices = [index_of_box.get(key, -1) for key in phrase_keys]
    if -1 in indices:
        first = indices.index(-1)
        box = ", ".join(f"{side:g}" for side in phrases.truth_boxes[first].tolist())
        raise UserError(
            f"{cache_name}: {indices.count(-1)} of {len(indices)} ground-truth boxes have no features, the first is ({box}) "
            f"of image {phrases.image_ids[phrases.image_indices[first]]}; extract it with boxes: phrases, of this very "
            "dataset.json"
        )
    return np.asarray(indices, np.int64)


def check_phrase_cache(cache: FeatureCache, dataset: Dataset) -> None:
    """Raise :class:`UserError` if a cache does not hold the phrases of the data set, in their order and with their texts."""
    texts = list_phrase_texts(dataset)
    if cache.ids.tolist() != list(range(len(texts))):
        raise UserError(f"{cache.path} holds {len(cache.ids)} phrases, and {dataset.path} has {len(texts)}; extract it again")
    text_hashes = np.stack([sha256_bytes(text.encode()) for text in texts]) if texts else np.empty((0, 32), np.uint8)
    wrong = np.flatnonzero((read_input_hashes(cache) != text_hashes).any(1))
    if len(wrong):
        raise UserError(f"{cache.path}: not the phrases of {dataset.path}, the first is {texts[wrong[0]]!r}; extract it again")


def _to_int64_array(values: Iterable[int]) -> Indices:
    return np.fromiter(values, np.int64)
