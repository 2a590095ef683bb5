"""Encode NumPy arrays of vectors, texts and photos with a trained run that is completely in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.features.exchange.embeddings import ARRAYS_DATASET_NAME, ArrayData, Vectors
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import QUERY_IMAGE_FORMATS, decode_image
from vse.pipeline.progress import progress_bar
from vse.training.data.pairs import CaptionsEncodedOnRead, RetrievalSplit
from vse.training.kinds import BatchVectors, InputKind, PackedEmbeddings, add_full_mask, pack_embeddings
from vse.training.solvers.encode import PairScores, build_embeddings_fields
from vse.training.use.model import QueryEncoder, TrainedRun, load_run

DEFAULT_BATCH_SIZE = 512


class ArrayFeatures:
    """Vectors in memory as inputs of a model.

    ``vectors`` : (n, dim), or sets of vectors (n, n_vectors, dim).
    ``rows`` : for each image (or each caption), its row in ``vectors``.
    """

    def __init__(self, vectors: Vectors, rows: NDArray[np.int64], device: torch.device) -> None:
        self.kind = InputKind.VECTORS if vectors.ndim == 2 else InputKind.SETS
        self._vectors, self._rows, self._device = vectors, rows, device

    def read(self, indices: NDArray[np.int64]) -> BatchVectors:
        """Return the vectors of the images or captions at these indices."""
        vectors = torch.from_numpy(self._vectors[self._rows[indices]]).to(self._device)
        return add_full_mask(vectors) if self.kind == InputKind.SETS else (vectors,)

    def read_images(self, images: NDArray[np.int64]) -> BatchVectors:
        return self.read(images)


class ArrayEncoder:
    """A trained run that encodes image vectors, caption vectors, texts and photos.

    ``query_encoder`` : encoder of texts and photos.
    """

    def __init__(self, trained: TrainedRun, query_encoder: QueryEncoder) -> None:
        self.trained, self.query_encoder = trained, query_encoder

    def find_imported_dim(self, of_captions: bool) -> int | None:
        """Return the length of the feature vectors that the run reads. Return None if vse computed these vectors.

        ``of_captions`` : True for caption vectors, False for image vectors. If the run reads captions as words, the result
            for captions is None.
        """
        cache = self.trained.caption_cache if of_captions else self.trained.image_cache
        return cache.dim if cache is not None and "imported" in cache.provenance else None

    def reads_sets(self, of_captions: bool) -> bool:
        """Return whether the run reads a set of vectors for each caption (``of_captions``) or for each image."""
        cache = self.trained.caption_cache if of_captions else self.trained.image_cache
        return cache is not None and cache.row_kind == "sets"

    def check_vectors(self, argument: str, vectors: Vectors, of_captions: bool) -> None:
        """Raise UserError if the model does not read vectors of this shape for captions (``of_captions``) or for images.

        ``argument`` : name of the vectors in the error message.
        """
        cache = self.trained.caption_cache if of_captions else self.trained.image_cache
        if cache is None:
            raise UserError(f"{argument}: an array, but the model reads captions as texts; pass a list of texts")
        if self.trained.model.cnn is not None and not of_captions:
            raise UserError(f"{argument}: an array, but the model reads photos; pass the paths of their files")
        shape = ("n_vectors", cache.dim) if cache.row_kind == "sets" else (cache.dim,)
        if (vectors.ndim, vectors.shape[-1]) != (len(shape) + 1, cache.dim):
            expected = ", ".join(map(str, ("n", *shape)))
            raise UserError(f"{argument}: an array of shape {vectors.shape}, but the model reads arrays of shape ({expected})")

    def encode_vectors(
        self, vectors: Vectors, of_captions: bool, batch_size: int = DEFAULT_BATCH_SIZE, hidden: bool = True
    ) -> PackedEmbeddings:
        """Return the embeddings of caption vectors (``of_captions``) or image vectors. ``hidden`` hides the progress bar."""
        features = ArrayFeatures(vectors, np.arange(len(vectors)), self.trained.device)
        model = self.trained.model.eval()
        embed = model.embed_captions if of_captions else model.embed_images

        def encode(part: slice) -> BatchVectors:
            with torch.inference_mode():
                return tuple(tensor.cpu() for tensor in embed(*features.read(np.arange(part.start, part.stop))))

        return _encode_batches(len(vectors), encode, batch_size, "captions" if of_captions else "images", hidden)

    def encode_texts(
        self,
        texts: Sequence[str],
        batch_size: int = DEFAULT_BATCH_SIZE,
        hidden: bool = True,
        allow_unknown: bool = False,
    ) -> PackedEmbeddings:
        """Return the embeddings of texts. ``hidden`` hides the progress bar.

        Raises UserError if a text has no word. Also raises UserError if the run's caption feature, such as TF-IDF, knows no
        word of a text, unless ``allow_unknown`` is set.
        """

        def encode(part: slice) -> BatchVectors:
            return self.query_encoder.encode_texts(texts[part], allow_unknown).vectors

        return _encode_batches(len(texts), encode, batch_size, "captions", hidden)

    def encode_photos(self, paths: Sequence[Path], hidden: bool = True) -> PackedEmbeddings:
        """Return the embeddings of photo files. Raises UserError if a photo cannot be read, or if the network is missing."""
        photos = progress_bar(paths, desc="encode images", unit="image", hidden=hidden)
        return pack_embeddings(
            [self.query_encoder.encode(decode_image(path, formats=QUERY_IMAGE_FORMATS)).vectors for path in photos]
        )

    def build_embeddings(
        self, images: PackedEmbeddings, captions: PackedEmbeddings, image_of_caption: NDArray[np.int64]
    ) -> Embeddings:
        """Return the content of an embeddings file: vectors and, for a model that scores every pair, all scores.

        The ids of images and captions are their indices. ``image_of_caption`` has the image index of each caption.
        """
        trained = self.trained
        scores: dict[str, Any] = {}
        if trained.model.scores_every_pair:
            blocks = PairScores(trained.model, images, captions).score_blocks(torch.from_numpy(image_of_caption))
            names = ("scores",) if blocks[1] is None else ("scores_i2t", "scores_t2i")
            scores = {
                name: torch.cat([side.score(rows, None).cpu() for rows in side.row_slices]).numpy()
                for name, side in zip(names, blocks, strict=False)
                if side is not None
            }
        return Embeddings(
            image_ids=np.arange(len(images)),
            caption_ids=np.arange(len(captions)),
            caption_image_ids=image_of_caption,
            dataset=ARRAYS_DATASET_NAME,
            split="test",
            experiment=trained.experiment.name,
            seed=trained.record["seed"],
            **build_embeddings_fields(trained.model, images, captions),
            **scores,
        )


def load_array_encoder(run: Path, data: ArrayData, device: str) -> ArrayEncoder:
    """Load a run that was trained on ``data`` into memory. Later, no file of the run or of its caches is read."""
    trained = load_run(run, None, device=device)
    queries, pairs = QueryEncoder(trained, None), trained.split.pairs
    images = ArrayFeatures(data.images, pairs.image_ids, trained.device)
    captions = trained.split.caption_inputs
    if data.captions is not None:
        captions = ArrayFeatures(data.captions, pairs.caption_ids, trained.device)
    else:
        queries.load(by_photo=False)
        if trained.caption_cache is not None:
            captions = CaptionsEncodedOnRead(
                pairs.captions, queries.require_caption_encoder(), trained.caption_cache, trained.device
            )
    return ArrayEncoder(replace(trained, split=RetrievalSplit(pairs, images, captions)), queries)


def _encode_batches(
    n: int, encode: Callable[[slice], BatchVectors], batch_size: int, name: str, hidden: bool
) -> PackedEmbeddings:
    starts = progress_bar(range(0, n, batch_size), desc=f"encode {name}", unit="batch", hidden=hidden)
    return pack_embeddings([encode(slice(start, min(start + batch_size, n))) for start in starts])
