"""Embeddings or scores of a split, with the ids and the identity of its data.

Which images a split has: a hash of their ids, and the name that ``config/published/splits.yaml`` gives to it.

Score matrices that are read some rows at a time: the mean of several, and a selection of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from vse.eval.defaults import published_folder
from vse.eval.ranking.ranks import ScoreBlocks, ScoreMatrix, blocks_from_embeddings, blocks_from_scores, shared_tensor
from vse.pipeline.dataset.identity import DataIdentity
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, InputFolder
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.preset_files import read_yaml


class SplitIdentity(BaseModel):
    """The images of a split.

    Attributes
    ----------
    ids : what the images were known by: ``coco_ids`` or ``image_ids``
    sha256 : of the sorted ids as a canonical JSON list
    name : what this split of the data set is called, e.g. ``karpathy``; None if it is not known
    """

    ids: str
    sha256: str
    name: str | None = None


def split_identity(run: Embeddings) -> SplitIdentity:
    """The identity of the split that embeddings or scores are of."""
    ids, values = ("image_ids", run.image_ids) if run.coco_ids is None else ("coco_ids", run.coco_ids)
    return identity_of(run.dataset, ids, values)


def identity_of(dataset: str, ids: str, values: NDArray[np.int64]) -> SplitIdentity:
    """The identity of the images of a data set whose ``ids``, which are ``image_ids`` or ``coco_ids``, are ``values`` (n,)."""
    sha256 = sha256_json(sorted(values.tolist()))
    return SplitIdentity(ids=ids, sha256=sha256, name=split_name(dataset, sha256))


def split_name(dataset: str, sha256: str) -> str | None:
    """The name of a data set's split by the hash of its ids; a folder of presets (``VSE_PRESETS``) may name further ones."""
    return next((name for name, known in _named_splits(dataset) if known == sha256), None)


def _named_splits(dataset: str) -> Iterator[tuple[str, str]]:
    """Name and hash of each split of a data set that has a name."""
    own = os.environ.get("VSE_PRESETS")
    for folder in [*([Path(own, "published")] if own else []), published_folder()]:
        path = folder / "splits.yaml"
        if not path.is_file():
            continue
        splits = _mapping(path, read_yaml(path)).get(dataset)
        for name, hashes in _mapping(path, splits).items():
            for sha256 in hashes if isinstance(hashes, list) else [hashes]:
                yield str(name), str(sha256)


def _mapping(path: Path, content: Any) -> dict[str, Any]:
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{path}: names splits as DATASET: {{ NAME: SHA-256 }}")
    return content or {}


@dataclass(frozen=True)
class MeanScores:
    """The mean of several score matrices of one shape, computed where it is read, in the precision of the first."""

    members: Sequence[ScoreMatrix]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.members[0].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        total: NDArray[Any] = np.array(self.members[0][rows])
        for scores in self.members[1:]:
            np.add(total, scores[rows], out=total)
        total /= np.float32(len(self.members))
        return total


@dataclass(frozen=True)
class _SelectedScores:
    scores: ScoreMatrix
    images: NDArray[np.int64]
    captions: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.images), len(self.captions)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        selected: NDArray[Any] = self.scores[self.images[rows]][:, self.captions]
        return selected


def selected_scores(scores: ScoreMatrix, images: NDArray[np.int64], captions: NDArray[np.int64]) -> ScoreMatrix:
    """The scores of some images with some captions, by their rows and columns; selected where they are read."""
    return _SelectedScores(scores, images, captions)


SCORES = ("scores", "scores_i2t", "scores_t2i")
POOLED = ("pooled_images", "pooled_captions")
VECTORS = ("images", "captions", *POOLED)
MATRICES = (*VECTORS, *SCORES)
_OF_IMAGES = ("image_ids", "coco_ids", "n_regions", "photo_hashes")
_OF_CAPTIONS = ("caption_ids", "caption_image_ids", "n_phrases", "caption_hashes")


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of a split: ``images`` (n_images, dim) and ``captions`` (n_captions, dim), or scores of all pairs.

    Scores (n_images, n_captions) are ``scores``, or ``scores_i2t`` and ``scores_t2i`` if the score depends on which side
    queries. Where there are any, images and captions are compared by them alone; ``captions``, if they are there as well,
    serve to compare captions. ``pooled_images`` (n_images, dim) and ``pooled_captions`` (n_captions, dim), of a file of
    scores, are single vectors by whose inner products a search may choose what is scored. The attributes name the
    ``dataset``, the ``split`` and the ``similarity`` (without scores one of
    :data:`vse.eval.ranking.scores.SIMILARITIES`), and the ``experiment`` and ``seed`` unless the writer did not say;
    ``trained_on`` names the data set that the model was trained on, if that is another one than ``dataset``.
    ``provenance`` (JSON) tells of features, settings and versions. ``coco_ids`` (n_images,) are the images' numbers in
    MS-COCO, if they are of it. ``n_phrases`` (n_captions,) and ``n_regions`` (n_images,) are there if the scores are those of
    phrases with regions: how many there were, 0 where a score says nothing. ``photo_hashes`` (n_images, 32) and
    ``caption_hashes`` (n_captions, 8) are those of :class:`vse.pipeline.dataset.identity.DataIdentity`, if they are known.
    ``source`` is the file that they were read from, if there is one.
    """

    image_ids: NDArray[np.int64]
    caption_ids: NDArray[np.int64]
    caption_image_ids: NDArray[np.int64]
    dataset: str
    split: str
    images: NDArray[np.float32] | None = None
    captions: NDArray[np.float32] | None = None
    scores: ScoreMatrix | None = None
    scores_i2t: ScoreMatrix | None = None
    scores_t2i: ScoreMatrix | None = None
    pooled_images: NDArray[np.float32] | None = None
    pooled_captions: NDArray[np.float32] | None = None
    experiment: str | None = None
    seed: int | None = None
    similarity: str = "cosine"
    provenance: str = "{}"
    trained_on: str | None = None
    coco_ids: NDArray[np.int64] | None = None
    n_phrases: NDArray[np.int64] | None = None
    n_regions: NDArray[np.int64] | None = None
    photo_hashes: NDArray[np.uint8] | None = None
    caption_hashes: NDArray[np.uint8] | None = None
    source: InputFile | InputFolder | None = field(default=None, compare=False, repr=False)

    @property
    def identity(self) -> DataIdentity:
        """The identity of the split."""
        return DataIdentity(self.image_ids, self.caption_ids, self.photo_hashes, self.caption_hashes)

    @property
    def directional(self) -> bool:
        """Whether each direction has scores of its own."""
        return self.scores is None and self.scores_i2t is not None

    @property
    def of_phrases(self) -> bool:
        """Whether the scores are those of the captions' phrases with regions of the images."""
        return self.n_phrases is not None

    @property
    def vectors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """The embeddings of images and captions if it is these that are compared; None if scores are."""
        if self.scores_of("i2t") is not None or self.images is None or self.captions is None:
            return None
        return self.images, self.captions

    @property
    def pooled(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """The single vectors of images and captions beside scores; None if there are none."""
        if self.pooled_images is None or self.pooled_captions is None:
            return None
        return self.pooled_images, self.pooled_captions

    def scores_of(self, direction: Literal["i2t", "t2i"]) -> ScoreMatrix | None:
        """The scores (n_images, n_captions) of a direction; None if vectors are compared."""
        if self.scores is not None:
            return self.scores
        return self.scores_i2t if direction == "i2t" else self.scores_t2i

    def score_blocks(self) -> tuple[ScoreBlocks, ScoreBlocks | None]:
        """What :func:`vse.eval.ranking.ranks.ranks_from_blocks` takes; the second is None if both directions share scores."""
        image_of_caption = torch.from_numpy(self.image_of_caption())
        if self.vectors is not None:
            images, captions = map(shared_tensor, self.vectors)
            return blocks_from_embeddings(images, captions, image_of_caption, self.similarity), None
        i2t, t2i = self.scores_of("i2t"), self.scores_of("t2i")
        if i2t is None or t2i is None:
            raise ValueError("neither embeddings of images and captions nor scores of both directions")
        blocks = blocks_from_scores(i2t, image_of_caption)
        return blocks, blocks_from_scores(t2i, image_of_caption) if self.directional else None

    def select(self, images: NDArray[np.int64], captions: NDArray[np.int64]) -> Embeddings:
        """Some rows, in their order; scores are not copied, but selected where they are read."""
        selected: dict[str, Any] = {}
        for name in MATRICES:
            matrix = getattr(self, name)
            if matrix is not None:
                rows = captions if name.endswith("captions") else images
                selected[name] = selected_scores(matrix, images, captions) if name in SCORES else matrix[rows]
        for rows, names in ((images, _OF_IMAGES), (captions, _OF_CAPTIONS)):
            selected |= {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        return replace(self, **selected)

    def image_of_caption(self) -> NDArray[np.int64]:
        """For each caption the row of its image; :class:`UserError` if an id has no image."""
        order = np.argsort(self.image_ids, kind="stable")
        places = np.searchsorted(self.image_ids[order], self.caption_image_ids).clip(max=len(order) - 1)
        rows: NDArray[np.int64] = order[places]
        lost = self.image_ids[rows] != self.caption_image_ids
        if lost.any():
            imgid = self.caption_image_ids[lost][0]
            raise UserError(f"a caption belongs to image {imgid}, which is not among the image ids")
        return rows
