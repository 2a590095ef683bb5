"""Embeddings or scores of a split, with the ids and hashes of its data, and a function that selects one language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.results import SplitIdentity, split_identity_from_ids
from vse.eval.ranking.ranks import ScoreBlocks, ScoreMatrix, blocks_from_embeddings, blocks_from_scores, shared_tensor
from vse.pipeline.dataset.identity import DataIdentity
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import InputFile, InputFolder


def split_identity(embeddings: Embeddings) -> SplitIdentity:
    """Return which images have embeddings or scores: a hash of their ids, and the published split with these images."""
    kind = "image_ids" if embeddings.coco_ids is None else "coco_ids"
    return split_identity_from_ids(embeddings.dataset, kind, getattr(embeddings, kind))


@dataclass(frozen=True)
class MeanScores:
    """The mean of score matrices of one shape. It is computed when rows are read, and has the dtype of the first matrix."""

    score_matrices: Sequence[ScoreMatrix]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.score_matrices[0].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        total: NDArray[Any] = np.array(self.score_matrices[0][rows])
        for scores in self.score_matrices[1:]:
            np.add(total, scores[rows], out=total)
        total /= np.float32(len(self.score_matrices))
        return total


@dataclass(frozen=True)
class SelectedScores:
    """Some rows (images) and columns (captions) of a score matrix. They are selected when rows are read."""

    scores: ScoreMatrix
    image_rows: NDArray[np.int64]
    caption_rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.image_rows), len(self.caption_rows)

    def __len__(self) -> int:
        return len(self.image_rows)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        selected: NDArray[Any] = self.scores[self.image_rows[rows]][:, self.caption_rows]
        return selected


SCORE_NAMES = ("scores", "scores_i2t", "scores_t2i")
POOLED_VECTOR_NAMES = ("pooled_images", "pooled_captions")
BANK_SCORE_NAMES = ("bank_scores_images", "bank_scores_captions")
VECTOR_NAMES = ("images", "captions", *POOLED_VECTOR_NAMES, *BANK_SCORE_NAMES)
MATRIX_NAMES = (*VECTOR_NAMES, *SCORE_NAMES)
_IMAGE_FIELDS = ("image_ids", "coco_ids", "n_regions", "photo_hashes")
_CAPTION_FIELDS = ("caption_ids", "caption_image_ids", "n_phrases", "caption_hashes", "caption_languages")
ROW_FIELDS = (*_IMAGE_FIELDS, *_CAPTION_FIELDS)  # the arrays with a row per image or per caption, other than the matrices


@dataclass(frozen=True)
class Embeddings:
    """Embeddings or scores of a split.

    Embeddings are the vectors ``images`` and ``captions``; their ``similarity`` gives the score of an image and a caption.
    Scores of all pairs are ``scores`` or, if the score of a pair depends on the direction, ``scores_i2t`` and ``scores_t2i``.
    A split with scores can also have ``captions``: vectors that only caption-to-caption retrieval uses.

    Attributes
    ----------
    image_ids, caption_ids : (n_images,) and (n_captions,)
    caption_image_ids : (n_captions,) id of each caption's image
    dataset, split : names of the data set and of its split
    images, captions : (n_images, dim) and (n_captions, dim) vectors
    scores, scores_i2t, scores_t2i : (n_images, n_captions)
    pooled_images, pooled_captions : (n_images, dim) and (n_captions, dim) vectors by which a search selects the candidates
        that the model scores
    bank_scores_images, bank_scores_captions : (n_images, n_bank_captions) and (n_captions, n_bank_images) scores with captions
        and images of the training split, the bank; they show which candidates are hubs, that is, near many queries
    experiment, seed : experiment and seed of the model, or None
    similarity : name of the similarity: ``cosine`` or ``order`` for embeddings, any text for scores
    provenance : JSON text with features, settings and versions
    trained_on : name of the data set of the training; None if it is ``dataset``
    fold : if the images are the test images of a fold of a cross-validation, its name such as ``0 of 5``; else None
    coco_ids : (n_images,) ids of the images in MS-COCO, or None
    n_phrases, n_regions : (n_captions,) number of phrases of each caption, and (n_images,) number of regions of each image, if
        the scores compare phrases with regions; the score of a pair without phrases or without regions has no meaning
    photo_hashes, caption_hashes : (n_images, 32) SHA-256 of image files, and (n_captions, 8) hashes of captions
        (:func:`vse.pipeline.dataset.identity.hash_caption`); None if they are unknown
    caption_languages, languages : (n_captions,) index of each caption's language in ``languages``, a list as a text such as
        ``en,de``; both are None if the languages are unknown
    source : file or folder that was read, or None
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
    bank_scores_images: NDArray[np.float32] | None = None
    bank_scores_captions: NDArray[np.float32] | None = None
    experiment: str | None = None
    seed: int | None = None
    similarity: str = "cosine"
    provenance: str = "{}"
    trained_on: str | None = None
    fold: str | None = None
    coco_ids: NDArray[np.int64] | None = None
    n_phrases: NDArray[np.int64] | None = None
    n_regions: NDArray[np.int64] | None = None
    photo_hashes: NDArray[np.uint8] | None = None
    caption_hashes: NDArray[np.uint8] | None = None
    caption_languages: NDArray[np.int64] | None = None
    languages: str | None = None
    source: InputFile | InputFolder | None = field(default=None, compare=False, repr=False)

    @property
    def identity(self) -> DataIdentity:
        return DataIdentity(self.image_ids, self.caption_ids, self.photo_hashes, self.caption_hashes)

    @property
    def has_directional_scores(self) -> bool:
        return self.scores is None and self.scores_i2t is not None

    @property
    def is_from_phrase_model(self) -> bool:
        """True if the scores compare the phrases of a caption with the regions of an image."""
        return self.n_phrases is not None

    @property
    def vectors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """The vectors of images and captions; None if there are scores instead."""
        if self.direction_scores("i2t") is not None or self.images is None or self.captions is None:
            return None
        return self.images, self.captions

    @property
    def pooled_vectors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        if self.pooled_images is None or self.pooled_captions is None:
            return None
        return self.pooled_images, self.pooled_captions

    def direction_scores(self, direction: str) -> ScoreMatrix | None:
        """Return the stored scores (n_images, n_captions) of a direction; None if there are embeddings instead of scores."""
        if self.scores is not None:
            return self.scores
        return self.scores_i2t if direction == "i2t" else self.scores_t2i

    def score_blocks(self) -> tuple[ScoreBlocks, ScoreBlocks | None]:
        """Return the image-to-text scores and the text-to-image scores, in blocks of image rows.

        The second item is None if both directions have the same scores.
        """
        image_of_caption = torch.from_numpy(self.image_of_caption())
        if self.vectors is not None:
            images, captions = map(shared_tensor, self.vectors)
            return blocks_from_embeddings(images, captions, image_of_caption, self.similarity), None
        i2t, t2i = self.direction_scores("i2t"), self.direction_scores("t2i")
        if i2t is None or t2i is None:
            raise ValueError("neither embeddings of images and captions nor scores of both directions")
        blocks = blocks_from_scores(i2t, image_of_caption)
        return blocks, blocks_from_scores(t2i, image_of_caption) if self.has_directional_scores else None

    def select(self, images: NDArray[np.int64], captions: NDArray[np.int64]) -> Embeddings:
        """Return the embeddings or scores of the images and captions with the given rows.

        Score matrices are not copied: their rows and columns are selected when they are read.
        """
        selected: dict[str, Any] = {}
        for name in MATRIX_NAMES:
            matrix = getattr(self, name)
            if matrix is not None:
                rows = captions if name.endswith("captions") else images
                selected[name] = SelectedScores(matrix, images, captions) if name in SCORE_NAMES else matrix[rows]
        for rows, names in ((images, _IMAGE_FIELDS), (captions, _CAPTION_FIELDS)):
            selected |= {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        return replace(self, **selected)

    def image_of_caption(self) -> NDArray[np.int64]:
        """Return for each caption the row of its image. Raises UserError if a caption belongs to an unknown image."""
        order = np.argsort(self.image_ids, kind="stable")
        places = np.searchsorted(self.image_ids[order], self.caption_image_ids).clip(max=len(order) - 1)
        rows: NDArray[np.int64] = order[places]
        unknown = self.image_ids[rows] != self.caption_image_ids
        if unknown.any():
            image_id = self.caption_image_ids[unknown][0]
            raise UserError(f"a caption belongs to image {image_id}, but there is no such image id")
        return rows


def select_language(path: Path, embeddings: Embeddings, language: str) -> Embeddings:
    """Return the images that have captions in every language of the file, and their captions in ``language``.

    The results of all languages are therefore measured on the same images. Raises UserError if the file has no captions in
    ``language``, or if no image has captions in all languages.
    """
    names = (embeddings.languages or "").split(",")
    if embeddings.caption_languages is None:
        raise UserError(f"{path}: does not have the languages of its captions, so --language and --pairs cannot select some")
    if language not in names:
        raise UserError(f"{path}: has no caption in the language {language!r}{did_you_mean(language, names)}")
    image_of_caption = embeddings.image_of_caption()
    has_language = np.zeros((len(embeddings.image_ids), len(names)), bool)
    has_language[image_of_caption, embeddings.caption_languages] = True
    has_all = np.logical_and.reduce(has_language, axis=1)
    if not has_all.any():
        raise UserError(f"{path}: no image has captions in all of its languages, {', '.join(names)}")
    captions = (embeddings.caption_languages == names.index(language)) & has_all[image_of_caption]
    selected = embeddings.select(np.flatnonzero(has_all), np.flatnonzero(captions))
    return replace(selected, caption_languages=np.zeros(len(selected.caption_ids), np.int64), languages=language)
