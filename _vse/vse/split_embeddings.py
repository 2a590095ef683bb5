"""Embeddings or scores of a split in the Python interface, from a file, a folder of arrays, or arrays in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import Array, ArrayOrPath, StrPath, as_path, check_arguments, public_api
from vse.array_inputs import to_numpy
from vse.data_files import SavableObject, build_html_summary
from vse.eval.files.phrase_scores import PhraseScores, is_phrase_score_file, read_phrase_scores
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import Text, is_path
from vse.pipeline.options import Options

if TYPE_CHECKING:
    from vse.eval.files.embeddings import Embeddings

_CAPTION_IMAGE_IDS_KEY = "caption_image_ids"  # the name of image_of_caption in files
# Whether an array has an id for each of the images or for each of the captions.
_ROW_KIND_BY_ID_ARRAY = {"image_ids": "images", "caption_ids": "captions", "image_of_caption": "captions"}


class SplitName(Options):
    """The names of the data set and of the split for embeddings in arrays, as results display them."""

    dataset: Text = "arrays"
    """The name of the data set."""
    split: Text = "test"
    """The name of the split."""

    @check_arguments
    def __init__(self, dataset: str = "arrays", split: str = "test") -> None:
        super().__init__(dataset=dataset, split=split)


class SplitEmbeddings(SavableObject):
    """Embeddings of the images and captions of a split, or scores of all pairs, by one model.

    For a model that localises phrases, the object has scores of phrases and boxes instead. The attributes from ``images`` to
    ``caption_image_ids`` then raise [`vse.UserError`][].

    Attributes:
        path (Path | None): the file or folder; None for arrays that were not saved
        name (str): the name of the model: its experiment, or the name of the file
        dataset (str): the name of the data set
        split (str): the name of the split
        frame (pandas.DataFrame): one row per caption, in the order of ``captions``: ``caption_id`` and ``image_id``; for
            phrases one row per phrase: ``phrase_id``, ``image_id``, ``caption_id``, ``types``, ``n_candidates``
        json (dict[str, Any]): the provenance of the embeddings: features, settings, versions; empty for arrays
        images (NDArray[float32] | None): the embeddings of the images, (n_images, dim); None for scores of pairs
        captions (NDArray[float32] | None): the embeddings of the captions, (n_captions, dim); None for scores of pairs
        image_ids (NDArray[int64]): the ids of the images, (n_images,)
        caption_ids (NDArray[int64]): the ids of the captions, (n_captions,)
        caption_image_ids (NDArray[int64]): the id of each caption's image, (n_captions,)
    """

    def __init__(self, path: Path | None, content: Embeddings | PhraseScores) -> None:
        self.path = path
        self.phrase_scores: PhraseScores | None = content if isinstance(content, PhraseScores) else None
        self._embeddings = None if isinstance(content, PhraseScores) else content
        self.dataset, self.split = content.dataset, content.split
        self.name = content.experiment or (path.stem if path else "arrays")
        self._provenance_json = content.provenance

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings in the form that evaluations read. Raises UserError if the model localises phrases."""
        if self._embeddings is None:
            raise UserError(f"{self.path}: holds scores of phrases and boxes, and no embeddings")
        return self._embeddings

    @property
    def images(self) -> NDArray[np.float32] | None:
        return self.embeddings.images

    @property
    def captions(self) -> NDArray[np.float32] | None:
        return self.embeddings.captions

    @property
    def image_ids(self) -> NDArray[np.int64]:
        return self.embeddings.image_ids

    @property
    def caption_ids(self) -> NDArray[np.int64]:
        return self.embeddings.caption_ids

    @property
    def caption_image_ids(self) -> NDArray[np.int64]:
        return self.embeddings.caption_image_ids

    @check_arguments
    def scores(self, direction: str = "i2t") -> NDArray[np.floating[Any]]:
        """Return the score of every pair, (n_images, n_captions), in the direction ``i2t`` or ``t2i``.

        For some models that score pairs, the scores depend on the direction. The complete matrix is held in memory. Raises
        [`vse.UserError`][] for another direction.
        """
        if direction not in ("i2t", "t2i"):
            raise UserError(f"direction {direction!r}: known are i2t and t2i")
        i2t, t2i = self.embeddings.score_blocks()
        blocks = t2i if direction == "t2i" and t2i is not None else i2t
        return np.concatenate([blocks.score(rows, None).cpu().numpy().copy() for rows in blocks.row_slices])

    @public_api
    def save(self, path: StrPath, *, force: bool = False) -> SplitEmbeddings:
        """Write the embeddings or scores to an HDF5 file (docs/formats.md), and return this object.

        ``force`` replaces a file of any kind. Raises [`vse.UserError`][] if ``path`` is the file that was opened.
        """
        from vse.eval.files.embeddings import EMBEDDINGS_KIND, write_embeddings
        from vse.pipeline.files.outputs import check_output

        out = as_path(path)
        check_output(out, EMBEDDINGS_KIND, [self.path] if self.path else [])
        self.path = write_embeddings(out, self.embeddings)
        return self

    @property
    def json(self) -> dict[str, Any]:
        provenance = json.loads(self._provenance_json or "{}")
        return dict(provenance) if isinstance(provenance, Mapping) else {"note": provenance}

    @cached_property
    def frame(self) -> pd.DataFrame:
        if self.phrase_scores is None:
            return pd.DataFrame({"caption_id": self.caption_ids, "image_id": self.caption_image_ids})
        names = {"phrase_id": "phrase_ids", "image_id": "image_ids", "caption_id": "caption_ids", "types": "types"}
        columns = {name: getattr(self.phrase_scores, field) for name, field in names.items()}
        return pd.DataFrame({**columns, "n_candidates": np.diff(self.phrase_scores.offsets)})

    @property
    def expression(self) -> str:
        """The Python expression that returned this object. Files that the object writes record this expression."""
        return f"vse.embeddings({str(self.path)!r})" if self.path else "vse.embeddings(...)"

    def __repr__(self) -> str:
        return f"SplitEmbeddings({str(self.path or self.name)!r})"

    def _repr_html_(self) -> str:
        return build_html_summary(self.path or self.name, f"{self.split} of data set {self.dataset!r}", self.frame)


@public_api
def embeddings(
    images: ArrayOrPath,
    captions: Array | None = None,
    image_of_caption: Array | None = None,
    *,
    image_ids: Array | None = None,
    caption_ids: Array | None = None,
    similarity: str = "cosine",
    name: str = "arrays",
    split: SplitName = SplitName(),
) -> SplitEmbeddings:
    """Open the embeddings of a split: arrays of numpy or torch, or a file from ``vse-embed`` or another program.

    Nothing is written to disk.

    Args:
        images: the embeddings of the images, (n_images, dim); or, as the only argument, the path of an embeddings file or of a
            folder of arrays (docs/formats.md)
        captions: the embeddings of the captions, (n_captions, dim)
        image_of_caption: the id of each caption's image, (n_captions,); without ``image_ids``, the row of each caption's image
            in ``images``
        image_ids: the ids of the images, (n_images,) whole numbers; None numbers the rows from 0
        caption_ids: the ids of the captions, (n_captions,) whole numbers; None numbers the rows from 0
        similarity: ``cosine`` or ``order``; the score of ``cosine`` is the inner product, so vectors should have length 1
        name: the name of the model in results
        split: the names of the data set and the split in results

    Raises:
        vse.UserError: if an array is missing, has another length, is not finite, or has duplicate ids; the message names the
            array

    Examples:
        ```python
        embedded = vse.embeddings("runs/demo_vsepp/seed-0/test.h5")
        embedded.images @ embedded.captions[0]
        ```
    """
    named = {"captions": captions, "image_of_caption": image_of_caption, "image_ids": image_ids, "caption_ids": caption_ids}
    given = {argument: to_numpy(array) for argument, array in named.items() if array is not None}
    if is_path(images):
        for argument in given:
            raise UserError(f"images={images!r} is a path, and the file has all arrays; leave {argument} out")
        from vse.eval.files.embeddings import read_embeddings

        path = as_path(images)  # type: ignore[arg-type]
        return SplitEmbeddings(path, read_phrase_scores(path) if is_phrase_score_file(path) else read_embeddings(path))
    return _build_split_embeddings({"images": to_numpy(images), **given}, similarity, name, split)


@public_api
def pair_scores(
    scores: Array,
    image_of_caption: Array,
    *,
    image_ids: Array | None = None,
    caption_ids: Array | None = None,
    name: str = "arrays",
    split: SplitName = SplitName(),
) -> SplitEmbeddings:
    """Open the scores of all pairs of images and captions, for a model that does not score a pair by two vectors.

    Args:
        scores: the score of each image with each caption, (n_images, n_captions)
        image_of_caption: the id of each caption's image, (n_captions,); without ``image_ids``, the row of the image in
            ``scores``
        image_ids: the ids of the images, (n_images,) whole numbers; None numbers the rows of ``scores`` from 0
        caption_ids: the ids of the captions, (n_captions,) whole numbers; None numbers the columns of ``scores`` from 0
        name: the name of the model in results
        split: the names of the data set and the split in results

    Raises:
        vse.UserError: if an array is missing, has another length, is not finite, or has duplicate ids

    Examples:
        ```python
        scored = vse.pair_scores([[0.9, 0.1], [0.2, 0.8]], image_of_caption=[0, 1])
        vse.evaluate(scored, bootstrap=0).metrics["full"]["rsum"]
        ```
    """
    named = {"scores": scores, "image_of_caption": image_of_caption, "image_ids": image_ids, "caption_ids": caption_ids}
    given = {argument: to_numpy(array) for argument, array in named.items() if array is not None}
    return _build_split_embeddings(given, "scores", name, split)


def _build_split_embeddings(arrays: dict[str, NDArray[Any]], similarity: str, name: str, split: SplitName) -> SplitEmbeddings:
    """Build embeddings or scores from arrays, and check them. If ids are missing, rows are numbered from 0."""
    from vse.eval.files.embeddings import build_embeddings

    for argument, array in arrays.items():
        axes = 1 if argument in _ROW_KIND_BY_ID_ARRAY else 2
        if array.ndim != axes:
            raise UserError(f"{argument}: an array of {axes} axes is needed, not of shape {array.shape}")
    for argument in ("captions", "image_of_caption"):
        if argument not in arrays and (argument, "scores" in arrays) != ("captions", True):
            raise UserError(f"{argument}=None: an array is needed")
    n_rows = {"images": len(arrays.get("images", arrays.get("scores", ())))}
    n_rows["captions"] = arrays["scores"].shape[1] if "scores" in arrays else len(arrays["captions"])
    for argument, side in _ROW_KIND_BY_ID_ARRAY.items():
        if argument in arrays and len(arrays[argument]) != n_rows[side]:
            origin = "scores" if "scores" in arrays else side
            raise UserError(f"{argument}: {len(arrays[argument])} ids for the {n_rows[side]} {side} in {origin}")
    content = {
        _CAPTION_IMAGE_IDS_KEY if argument == "image_of_caption" else argument: array for argument, array in arrays.items()
    }
    content.setdefault("image_ids", np.arange(n_rows["images"]))
    content.setdefault("caption_ids", np.arange(n_rows["captions"]))
    attributes = {"dataset": split.dataset, "split": split.split, "similarity": similarity, "experiment": name}
    if "images" in arrays and arrays["captions"].shape[1] != arrays["images"].shape[1]:
        dims = " and ".join(str(arrays[argument].shape[1]) for argument in ("captions", "images"))
        raise UserError(f"captions: {dims} dimensions of captions and images have no inner products")
    try:
        run = build_embeddings(Path(name), content, attributes)
    except UserError as error:
        raise UserError(str(error).replace(_CAPTION_IMAGE_IDS_KEY, "image_of_caption")) from None
    try:
        run.image_of_caption()
    except UserError as error:
        raise UserError(f"image_of_caption: {error}") from None
    return SplitEmbeddings(None, run)
