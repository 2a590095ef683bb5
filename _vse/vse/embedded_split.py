"""The embeddings of a split as the Python interface opens them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import StrPath, checked
from vse.eval.files.phrase_scores import PhraseScores, is_phrase_scores, read_phrase_scores
from vse.handles import OpenFile
from vse.pipeline.errors import UserError

if TYPE_CHECKING:
    from vse.eval.files.embeddings import Embeddings


class EmbeddedSplit(OpenFile):
    """Embeddings, or scores of all pairs, of a split by a model; or, of a model that localises phrases, their scores.

    Attributes
    ----------
    path : Path
        the file
    dataset : str
        name of the data set
    split : str
        name of the split
    frame : pandas.DataFrame
        a row per caption, in the order of ``captions``: ``caption_id`` and ``image_id``; or a row per phrase: ``phrase_id``,
        ``image_id``, ``caption_id``, ``types``, ``n_candidates``
    json : dict[str, Any]
        what it was made from: features, settings, versions
    images : NDArray[float32] | None
        (n_images, dim), what is compared with ``captions``; None of a model that scores pairs
    captions : NDArray[float32] | None
        (n_captions, dim); None of a model that scores pairs
    image_ids : NDArray[int64]
        (n_images,)
    caption_ids : NDArray[int64]
        (n_captions,)
    caption_image_ids : NDArray[int64]
        (n_captions,), of each caption the id of its image
    """

    @checked
    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self.phrases: PhraseScores | None = read_phrase_scores(self.path) if is_phrase_scores(self.path) else None
        described = self._read if self.phrases is None else self.phrases
        self.dataset, self.split = described.dataset, described.split
        self._provenance = described.provenance

    @property
    def images(self) -> NDArray[np.float32] | None:
        """Embeddings of images."""
        return self._read.images

    @property
    def captions(self) -> NDArray[np.float32] | None:
        """Embeddings of captions."""
        return self._read.captions

    @property
    def image_ids(self) -> NDArray[np.int64]:
        """Ids of the images."""
        return self._read.image_ids

    @property
    def caption_ids(self) -> NDArray[np.int64]:
        """Ids of the captions."""
        return self._read.caption_ids

    @property
    def caption_image_ids(self) -> NDArray[np.int64]:
        """Of each caption the id of its image."""
        return self._read.caption_image_ids

    @checked
    def scores(self, direction: str = "i2t") -> NDArray[np.floating[Any]]:
        """The score of every pair, (n_images, n_captions), in the direction ``i2t`` or ``t2i``; they may differ.

        Of embeddings it is computed, of a model that scores pairs it is read; all of it is held in memory.
        """
        if direction not in ("i2t", "t2i"):
            raise UserError(f"direction {direction!r}: known are i2t and t2i")
        i2t, t2i = self._read.score_blocks()
        blocks = t2i if direction == "t2i" and t2i is not None else i2t
        spans = (slice(start, min(start + blocks.rows, blocks.n_images)) for start in range(0, blocks.n_images, blocks.rows))
        return np.concatenate([blocks.score(span, None).cpu().numpy().copy() for span in spans])

    @property
    def json(self) -> dict[str, Any]:
        """What it was made from."""
        said = json.loads(self._provenance or "{}")
        return dict(said) if isinstance(said, Mapping) else {"note": said}

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per caption, or per phrase."""
        if self.phrases is None:
            return pd.DataFrame({"caption_id": self.caption_ids, "image_id": self.caption_image_ids})
        names = {"phrase_id": "phrase_ids", "image_id": "image_ids", "caption_id": "caption_ids", "types": "types"}
        columns = {name: getattr(self.phrases, field) for name, field in names.items()}
        return pd.DataFrame({**columns, "n_candidates": np.diff(self.phrases.offsets)})

    @cached_property
    def _read(self) -> Embeddings:
        from vse.eval.files.embeddings import read_embeddings

        if self.phrases is not None:
            raise UserError(f"{self.path}: holds how phrases score boxes (phrases), and no embeddings")
        return read_embeddings(self.path)

    def _repr_html_(self) -> str:
        return self._head(f"{self.split} of data set {self.dataset!r}", self.frame)
