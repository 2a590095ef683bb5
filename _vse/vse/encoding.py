"""Encode photos, texts and vectors with a trained model in the Python interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vse.arguments import public_api
from vse.array_inputs import (
    VectorsOrPaths,
    VectorsOrTexts,
    are_texts,
    read_array_data,
    read_caption_input,
    read_image_input,
    read_texts,
)
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import PositiveInteger
from vse.split_embeddings import SplitEmbeddings

if TYPE_CHECKING:
    from vse.training.kinds import PackedEmbeddings
    from vse.training.use.arrays import ArrayEncoder

EncodedArrays = NDArray[np.float32] | list[NDArray[np.float32]]
DEFAULT_BATCH_SIZE = 512


class EncodingModel:
    """The methods with which a trained model encodes images and captions."""

    @property
    def expression(self) -> str:
        """The Python expression that returned this object, for the provenance of files."""
        raise NotImplementedError

    @property
    def encoder(self) -> InputEncoder:
        """The loaded model, which encodes photos, texts and vectors. Raises UserError if there is none yet."""
        raise NotImplementedError

    def permit_own_code(self) -> AbstractContextManager[None]:
        """Return a context in which Python code that the model names, such as an encoder, may run if the user allowed it."""
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
            normalize_embeddings: whether to divide each embedding by its length
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
        """Return the embeddings of texts or of vectors of captions, (n_captions, dim), or (dim,) for a single text.

        A model that compares sets of vectors returns a list of arrays (n_vectors, dim). Raises [`vse.UserError`][] if a text
        has no word that the model can read, or if the model does not read such captions.

        Args:
            captions: a text, a list of texts, or an array (n_captions, dim_of_features)
            batch_size: the number of captions that are encoded at once
            show_progress_bar: whether to display a progress bar
            normalize_embeddings: whether to divide each embedding by its length
        """
        with self.permit_own_code():
            return self.encoder.encode(captions, True, batch_size, show_progress_bar, normalize_embeddings)


class InputEncoder:
    """A loaded model, which encodes photos, texts, and vectors that another program computed.

    ``photo_features`` and ``text_features`` : functions from a list of paths or texts to their vectors, or None if the model
    reads photos or texts itself, or cannot read them.
    """

    def __init__(
        self,
        arrays: ArrayEncoder,
        photo_features: Callable[[list[str]], Any] | None = None,
        text_features: Callable[[list[str]], Any] | None = None,
    ) -> None:
        self.arrays, self.photo_features, self.text_features = arrays, photo_features, text_features

    def encode(
        self, given: Any, of_captions: bool, batch_size: int, show_progress_bar: bool, normalize_embeddings: bool
    ) -> EncodedArrays:
        """Return the embeddings of captions or images. A single text or path has a single embedding."""
        single = isinstance(given, str | os.PathLike)
        packed = self.encode_packed([given] if single else given, of_captions, batch_size, not show_progress_bar)
        vectors = packed.vectors.float().numpy()
        if normalize_embeddings:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        if packed.lengths is None:
            return vectors[0] if single else vectors
        sets = np.split(vectors, np.cumsum(packed.lengths.numpy())[:-1])
        return sets[0] if single else sets

    def encode_packed(
        self, given: Any, of_captions: bool, batch_size: int = DEFAULT_BATCH_SIZE, hidden: bool = True
    ) -> PackedEmbeddings:
        """Return the embeddings of captions or images as tensors."""
        if hasattr(given, "__len__") and not len(given):
            name = "captions" if of_captions else "images"
            raise UserError(f"{name}={given!r}: at least one {'text' if of_captions else 'path'} or vector is needed")
        if not of_captions and self.photo_features is None and are_texts(given):
            return self._encode_photos(read_texts("images", given), hidden)
        if not of_captions:
            vectors, _ = read_image_input("images", given, self.photo_features)
            self.arrays.check_vectors("images", vectors, of_captions)
            return self.arrays.encode_vectors(vectors, of_captions, batch_size, hidden)
        caption_vectors, texts = read_caption_input("captions", given, self.text_features)
        if caption_vectors is not None:
            self.arrays.check_vectors("captions", caption_vectors, of_captions)
            return self.arrays.encode_vectors(caption_vectors, of_captions, batch_size, hidden)
        assert texts is not None
        self._check_reads_texts(texts)
        return self.arrays.encode_texts(texts, batch_size, hidden)

    def embed(self, images: Any, captions: Any, image_of_caption: Any) -> SplitEmbeddings:
        """Return the embeddings of images and captions, to evaluate them."""
        data, _ = read_array_data(images, captions, image_of_caption, self.photo_features, self.text_features)
        self.arrays.check_vectors("images", data.images, False)
        if data.captions is not None:
            self.arrays.check_vectors("captions", data.captions, True)
        else:
            self._check_reads_texts(data.texts)
        return SplitEmbeddings(None, self.arrays.embed(data))

    def _check_reads_texts(self, texts: Any) -> None:
        if self.arrays.reads_caption_vectors:
            dim = self.arrays.trained.caption_cache.dim  # type: ignore[union-attr]
            raise UserError(
                f"captions={texts[:1]!r}: texts, but the model was fitted on vectors of captions; pass the vectors (n, {dim}) "
                "that the same program computes, or pass the program to vse.Model as text_features"
            )

    def _encode_photos(self, paths: list[str], hidden: bool) -> PackedEmbeddings:
        from vse.pipeline.files.images import decode_image
        from vse.pipeline.progress import progress_bar
        from vse.training.kinds import pack_embeddings

        cache = self.arrays.trained.image_cache
        if "imported" in cache.provenance:
            raise UserError(
                f"images={paths[:1]!r}: paths, but the model was fitted on vectors of images; pass the vectors "
                f"(n, {cache.dim}) that the same program computes, or pass the program to vse.Model as photo_features"
            )
        shown = progress_bar(paths, desc="encode images", unit="image", hidden=hidden)
        return pack_embeddings([self.arrays.queries.encode(decode_image(Path(path))).vectors for path in shown])
