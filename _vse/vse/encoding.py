"""Encoding of photos, texts and vectors by trained models in the Python interface.

:class:`FittedRun` is a run that was trained on arrays and is kept in memory, without a run folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import public_api
from vse.array_inputs import (
    VectorsOrPaths,
    VectorsOrTexts,
    are_texts,
    read_array_data,
    read_caption_input,
    read_image_input,
    read_image_rows,
    read_query_vectors,
    read_texts,
)
from vse.eval.search.top_k import SearchHit
from vse.features.exchange.embeddings import ARRAYS_DATASET_NAME, ArrayData
from vse.pipeline.dataset.preparation import check_dataset_output
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import lock_for_writing, write_bytes
from vse.pipeline.option_types import PositiveInteger
from vse.pipeline.options import format_value
from vse.pipeline.presets.preset_files import read_yaml
from vse.split_embeddings import SplitEmbeddings, embeddings

if TYPE_CHECKING:
    from vse.training.kinds import PackedEmbeddings
    from vse.training.use.arrays import ArrayEncoder
    from vse.training.use.searcher import Searcher


EncodedArrays = NDArray[np.float32] | list[NDArray[np.float32]]
DEFAULT_BATCH_SIZE = 512


class EncodingModel:
    """A base class with the methods by which a trained model encodes images and captions."""

    @property
    def expression(self) -> str:
        """The Python expression that returned this object. Files that the object writes record this expression."""
        raise NotImplementedError

    @property
    def encoder(self) -> InputEncoder:
        """The loaded model, which encodes photos, texts and vectors. Raises UserError if the model is not fitted yet."""
        raise NotImplementedError

    def permit_own_code(self) -> AbstractContextManager[None]:
        """Return a context in which the user's own Python code, e.g. an encoder in a file, may run if the user allowed it."""
        raise NotImplementedError

    @public_api
    def encode_images(
        self,
        images: VectorsOrPaths,
        *,
        batch_size: PositiveInteger = DEFAULT_BATCH_SIZE,
        show_progress_bar: bool = False,
        normalize_embeddings: bool = False,
    ) -> EncodedArrays:
        """Return the embeddings of photos (JPEG, PNG or WebP files), or of vectors such as the rows of the feature cache.

        The result is (n_images, dim), or (dim,) for a single path. A model that compares sets of vectors returns a list of
        arrays (n_vectors, dim). Raises [`vse.UserError`][] if a photo cannot be read, or if the model does not read such
        images.

        Args:
            images: the path of a photo, a list of paths, or an array (n_images, dim_of_features)
            batch_size: the number of vectors that are encoded at once; photos are encoded one by one
            show_progress_bar: whether to display a progress bar
            normalize_embeddings: whether to divide embeddings by their length
        """
        with self.permit_own_code():
            return self.encoder.encode(images, False, batch_size, show_progress_bar, normalize_embeddings)

    @public_api
    def encode_captions(
        self,
        captions: VectorsOrTexts,
        *,
        batch_size: PositiveInteger = DEFAULT_BATCH_SIZE,
        show_progress_bar: bool = False,
        normalize_embeddings: bool = False,
    ) -> EncodedArrays:
        """Return the embeddings of captions: (n_captions, dim), or (dim,) for a single text.

        A model that compares sets of vectors returns a list of arrays (n_vectors, dim). Raises [`vse.UserError`][] if a text
        has no word that the model can read, or if the model does not read such captions.

        Args:
            captions: a text, a list of texts, or an array (n_captions, dim_of_features)
            batch_size: the number of captions that are encoded at once
            show_progress_bar: whether to display a progress bar
            normalize_embeddings: whether to divide embeddings by their length
        """
        with self.permit_own_code():
            return self.encoder.encode(captions, True, batch_size, show_progress_bar, normalize_embeddings)


class InputEncoder:
    """A loaded model, which encodes photos, texts, and vectors that another program computed.

    ``photo_features`` computes vectors from a list of paths of photos, and ``text_features`` from a list of texts. Each of the
    functions is None if the model itself reads photos or texts, or cannot read them.
    """

    def __init__(
        self,
        array_encoder: ArrayEncoder,
        photo_features: Callable[[list[str]], Any] | None = None,
        text_features: Callable[[list[str]], Any] | None = None,
    ) -> None:
        self.array_encoder, self.photo_features, self.text_features = array_encoder, photo_features, text_features

    def encode(
        self, items: Any, are_captions: bool, batch_size: int, show_progress_bar: bool, normalize_embeddings: bool
    ) -> EncodedArrays:
        """Return the embeddings of captions or images. A single text or path has a single embedding."""
        single = isinstance(items, str | os.PathLike)
        packed = self.encode_packed([items] if single else items, are_captions, batch_size, not show_progress_bar)
        vectors = packed.vectors.float().numpy()
        if normalize_embeddings:
            vectors = _scale_to_unit_length(vectors)
        if packed.lengths is None:
            return vectors[0] if single else vectors
        sets = np.split(vectors, np.cumsum(packed.lengths.numpy())[:-1])
        return sets[0] if single else sets

    def encode_packed(
        self, items: Any, are_captions: bool, batch_size: int = DEFAULT_BATCH_SIZE, hide_progress_bar: bool = True
    ) -> PackedEmbeddings:
        """Return the embeddings of captions or images as tensors.

        For a model that compares sets of vectors, one tensor has the vectors of all sets, and another the length of each set.
        ``batch_size`` is the number of vectors or texts that are encoded at once.
        """
        return self._encode(self._read_input(items, are_captions), are_captions, batch_size, hide_progress_bar)

    def encode_query(self, query: Any, are_captions: bool) -> PackedEmbeddings:
        """Return the embedding of a text, of the photo at a path, or of a vector."""
        if isinstance(query, str | os.PathLike):
            return self.encode_packed([query], are_captions)
        vectors = read_query_vectors(query, self.array_encoder.reads_sets(are_captions))
        try:
            self.array_encoder.check_vectors("query", vectors, are_captions)
        except UserError as error:
            side = "caption" if are_captions else "image"
            raise UserError(f"{error}; it is read as that of {side}s (by={side!r})") from None
        return self._encode(vectors, are_captions)

    def embed(self, images: Any, captions: Any, image_of_caption: Any) -> SplitEmbeddings:
        """Return the embeddings of images and captions, as an object that :func:`vse.evaluate` accepts."""
        inputs = self._read_input(images, are_captions=False), self._read_input(captions, are_captions=True)
        rows = read_image_rows("image_of_caption", image_of_caption, *map(len, inputs))
        encoded_images = self._encode(inputs[0], are_captions=False)
        encoded_captions = self._encode(inputs[1], are_captions=True, allow_unknown=True)
        return SplitEmbeddings(None, self.array_encoder.build_embeddings(encoded_images, encoded_captions, rows))

    def _read_input(self, items: Any, are_captions: bool) -> NDArray[np.float32] | list[str]:
        """Return captions or images as vectors or, if the model itself reads texts or photos, as texts or paths of photos."""
        name = "captions" if are_captions else "images"
        if isinstance(items, list | tuple) and not items:
            raise UserError(f"{name}={items!r}: at least one {'text' if are_captions else 'path'} or vector is needed")
        compute = self.text_features if are_captions else self.photo_features
        vectors: NDArray[np.float32] | None
        if are_captions:
            vectors, texts = read_caption_input(name, items, compute)
        elif compute is None and are_texts(items):
            vectors, texts = None, read_texts(name, items)
        else:
            vectors, texts = read_image_input(name, items, compute)
        if vectors is not None:
            self.array_encoder.check_vectors(name, vectors, are_captions)
            return vectors
        assert texts is not None
        if (dim := self.array_encoder.find_imported_dim(are_captions)) is not None:
            kind, function = ("texts", "text_features") if are_captions else ("paths", "photo_features")
            raise UserError(
                f"{name}={format_value(texts[:1])}: {kind}, but the model was fitted on vectors of {name}; pass the vectors "
                f"(n, {dim}) that the same program computes, or pass the program to vse.Model as {function}"
            )
        return texts

    def _encode(
        self,
        items: NDArray[np.float32] | list[str],
        are_captions: bool,
        batch_size: int = DEFAULT_BATCH_SIZE,
        hide_progress_bar: bool = True,
        allow_unknown: bool = False,
    ) -> PackedEmbeddings:
        if isinstance(items, np.ndarray):
            return self.array_encoder.encode_vectors(items, are_captions, batch_size, hide_progress_bar)
        if are_captions:
            return self.array_encoder.encode_texts(items, batch_size, hide_progress_bar, allow_unknown)
        return self.array_encoder.encode_photos([Path(path) for path in items], hide_progress_bar)


def build_cosine_embeddings(images: Any, captions: Any, image_of_caption: Any) -> SplitEmbeddings:
    """Return vectors of images and captions as embeddings of unit length, so that their scores are cosines."""
    data, _ = read_array_data(images, captions, image_of_caption)
    if data.captions is None:
        raise UserError("captions: texts, but no model is given to encode them; call vse.evaluate(model, images, captions)")
    shapes = data.images.shape, data.captions.shape
    if shapes[0][1:] != shapes[1][1:] or data.images.ndim != 2:
        raise UserError(
            f"captions: arrays of shape {shapes[0]} and {shapes[1]} have no cosines; fit a model to both, "
            "vse.fit(images, captions), or evaluate the scores of all pairs, vse.evaluate(vse.pair_scores(scores, rows))"
        )
    unit_images, unit_captions = (_scale_to_unit_length(vectors) for vectors in (data.images, data.captions))
    return embeddings(unit_images, unit_captions, data.image_of_caption, name="cosine")


def _scale_to_unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True).clip(np.finfo(np.float32).tiny)
    scaled: NDArray[np.float32] = vectors / lengths
    return scaled


DATA_FOLDER = "data"  # subfolder of a run, with its images and captions


@dataclass(frozen=True)
class FittedRun:
    """A run in memory, which was trained on arrays.

    ``record``, ``settings`` : the content of ``run.json`` and of ``config.yaml``.
    ``frame`` : the metrics, one row per epoch.
    ``array_encoder`` : the loaded model, which encodes arrays of vectors.
    ``files`` : maps the path of each file in the run folder, except the checkpoint, to its content.
    ``photo_paths`` : the path of each image's photo; empty if the paths are unknown.
    ``has_texts`` : whether the captions are texts.
    """

    record: dict[str, Any]
    settings: dict[str, Any]
    frame: pd.DataFrame
    array_encoder: ArrayEncoder
    files: Mapping[Path, bytes]
    photo_paths: Sequence[str]
    has_texts: bool

    @classmethod
    def read(
        cls,
        folder: Path,
        data: ArrayData,
        photos: Sequence[str] | None,
        device: str,
    ) -> FittedRun:
        """Read from ``folder`` a run that was trained on the arrays ``data``. The folder is not needed afterwards.

        ``photos`` are the paths of the images' photos; None if they are unknown.
        """
        from vse.training.run.folder import RunFolder
        from vse.training.use.arrays import load_array_encoder

        run = RunFolder(folder)
        files = {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path != run.checkpoint_file and not path.name.startswith(".")
        }
        return cls(
            record=run.read_record(),
            settings=read_yaml(run.config_file),
            frame=pd.read_csv(run.metrics_file),
            array_encoder=load_array_encoder(folder, data, device),
            files=files,
            photo_paths=photos or (),
            has_texts=data.texts is not None,
        )

    def search(self, query: PackedEmbeddings, k: int, by_image: bool) -> list[SearchHit]:
        """Return the best ``k`` captions for an image if ``by_image`` is True, else the best ``k`` images for a caption."""
        from vse.training.use.model import EncodedQuery

        hits = self._searcher.answer(by_image, EncodedQuery(query.unpack_all()), k).hits
        return [replace(hit, photo=self._find_photo(hit), captions=hit.captions if self.has_texts else ()) for hit in hits]

    def _find_photo(self, hit: SearchHit) -> Path | None:
        return Path(self.photo_paths[hit.image_id]) if hit.image_id < len(self.photo_paths) else None

    @cached_property
    def _searcher(self) -> Searcher:
        from vse.training.use.searcher import Searcher

        return Searcher(self.array_encoder.trained, None)

    def write(self, folder: Path) -> None:
        """Write the run to ``folder``, and replace a run that is already in the folder."""
        from vse.training.run.folder import RunFolder

        out = RunFolder(folder)
        with lock_for_writing(folder, folder=True):
            out.check_output_folder([])
            check_dataset_output(folder / DATA_FOLDER, ARRAYS_DATASET_NAME)
            for old in out.output_files:
                old.unlink(missing_ok=True)
            record = out.record_file.relative_to(folder)
            # run.json is written last, because a folder without run.json does not count as a run.
            for name in sorted(self.files, key=lambda name: name == record):
                write_bytes(folder / name, self.files[name])
