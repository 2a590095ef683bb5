"""The phrases of a split as arrays: in which image each stands, where that shows it, and what else names the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from vse.features.cache import FeatureCache, read_sources
from vse.features.rows import sha256_bytes
from vse.pipeline.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.pipeline.phrase_lists import mentions, phrase_texts
from vse.train.data.cached import Numbers
from vse.train.phrases.region_features import BoxFeatures

_NOWHERE = (np.nan,) * 4


@dataclass(frozen=True, eq=False)
class PhrasePairs:
    """Phrases in the order of their images; one with a box is a positive pair of a region and a phrase.

    image_ids : (n_images,) the images, whose numbers are those of ``image_of``
    phrase_ids, caption_ids, image_of, text_of : (n,) of each phrase its id, its caption's, the number of its image, and the
        place of its text among all different ones of the data set
    chain_of : (n,) a number for its coreference chain; a phrase without one is a chain of its own
    truths : (n, 4) float32, the box around what it names, NaN where it has none
    types : its types, several joined by ``/``
    n_texts : how many different texts the data set has
    """

    image_ids: Numbers
    phrase_ids: Int[np.ndarray, " n"]
    caption_ids: Int[np.ndarray, " n"]
    image_of: Int[np.ndarray, " n"]
    text_of: Int[np.ndarray, " n"]
    chain_of: Int[np.ndarray, " n"]
    truths: Float[np.ndarray, "n 4"]
    types: list[str]
    n_texts: int

    def __len__(self) -> int:
        return len(self.phrase_ids)

    @property
    def has_box(self) -> NDArray[np.bool_]:
        """Which phrases have a ground-truth box (n,)."""
        located: NDArray[np.bool_] = ~np.isnan(self.truths[:, 0])
        return located


def phrase_pairs(dataset: Dataset, images: Sequence[Image], located: bool = False) -> PhrasePairs:
    """The phrases of some images of a data set; with ``located``, those that have a box.

    :class:`UserError` if there are none.
    """
    number_of = {image.imgid: number for number, image in enumerate(images)}
    text_ids = {text: number for number, text in enumerate(phrase_texts(dataset))}
    chains: dict[tuple[int, str | int], int] = {}
    rows = []
    for mention in mentions(dataset):
        phrase, image = mention.phrase, number_of.get(mention.image.imgid)
        if image is None or (located and phrase.truth is None):
            continue
        chain = chains.setdefault((image, phrase.chain or mention.number), len(chains))
        rows.append((image, mention, text_ids[mention.text], chain))
    if not rows:
        raise UserError(f"{dataset.path}: no phrase {'with a box ' if located else ''}in these images; see docs/phrases.md")
    rows.sort(key=lambda row: row[0])
    found = [mention for _, mention, _, _ in rows]
    return PhrasePairs(
        image_ids=np.asarray([image.imgid for image in images], np.int64),
        phrase_ids=_integers(mention.number for mention in found),
        caption_ids=_integers(mention.caption.sentid for mention in found),
        image_of=_integers(image for image, _, _, _ in rows),
        text_of=_integers(text for _, _, text, _ in rows),
        chain_of=_integers(chain for _, _, _, chain in rows),
        truths=np.asarray([mention.phrase.truth or _NOWHERE for mention in found], np.float32),
        types=["/".join(mention.phrase.types) for mention in found],
        n_texts=len(text_ids),
    )


def truth_regions(pairs: PhrasePairs, truths: BoxFeatures, name: str) -> Int[np.ndarray, " n"]:
    """The number of each pair's ground-truth region, the one of its image with the same box.

    :class:`UserError` names the first that the cache ``name`` lacks.
    """
    keys = zip(truths.image_of.tolist(), map(bytes, truths.boxes + np.float32(0)), strict=True)  # of -0 it makes 0
    number_of = {key: number for number, key in enumerate(keys)}
    wanted = zip(pairs.image_of.tolist(), map(bytes, pairs.truths + np.float32(0)), strict=True)
    numbers = [number_of.get(key, -1) for key in wanted]
    if -1 in numbers:
        first = numbers.index(-1)
        box = ", ".join(f"{side:g}" for side in pairs.truths[first].tolist())
        raise UserError(
            f"{name}: {numbers.count(-1)} of {len(numbers)} ground-truth boxes have no features, the first is ({box}) of "
            f"image {pairs.image_ids[pairs.image_of[first]]}; extract it with boxes: phrases, of this very dataset.json"
        )
    return np.asarray(numbers, np.int64)


def check_phrase_cache(cache: FeatureCache, dataset: Dataset) -> None:
    """:class:`UserError` if a cache of phrases is not of the texts that a data set's phrases have now, in their order."""
    texts = phrase_texts(dataset)
    if cache.ids.tolist() != list(range(len(texts))):
        raise UserError(f"{cache.path} holds {len(cache.ids)} phrases, and {dataset.path} has {len(texts)}; extract it again")
    wanted = np.stack([sha256_bytes(text.encode()) for text in texts]) if texts else np.empty((0, 32), np.uint8)
    wrong = np.flatnonzero((read_sources(cache) != wanted).any(1))
    if len(wrong):
        raise UserError(f"{cache.path}: not the phrases of {dataset.path}, the first is {texts[wrong[0]]!r}; extract it again")


def _integers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.int64)
