"""The items (images or captions) that a search compares with the query, their vectors, and an index of these vectors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import read_embeddings
from vse.eval.ranking.answers import Corpus
from vse.eval.search.index import (
    BuiltIndex,
    IndexSource,
    build_index,
    has_index_to_read,
    hash_ids,
    read_index,
    stores_corpus_exactly,
    write_index,
)
from vse.pipeline.dataset.dataset import ALL_SPLITS, Dataset
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json
from vse.training.kinds import PackedEmbeddings, pack_embeddings
from vse.training.solvers.encode import encode_captions, encode_images, pool_embeddings
from vse.training.use.model import TrainedRun
from vse.training.use.stored_correction import StoredCorrection

log = logging.getLogger(__name__)

_ROWS_PER_BLOCK = 4096  # items that are embedded and pooled at once, so that the sets of all items need not fit in memory


@dataclass(frozen=True)
class SearchTarget:
    """The items (images or captions of a split or of an embeddings file) that a search compares with the query.

    ``item_type`` : ``images`` or ``captions``.
    ``item_ids``, ``image_ids`` : (n,) id of each item, and id of each item's image.
    ``compute_vectors`` : function that returns the embeddings of the items, (n, dim).
    ``describe_source`` : function that returns everything on which the embeddings depend, such as the hash of the weights. An
        index file records the result.
    ``is_in_dataset`` : True if the items are in the run's ``dataset.json``.
    """

    item_type: str
    item_ids: NDArray[np.int64]
    image_ids: NDArray[np.int64]
    compute_vectors: Callable[[], Corpus]
    describe_source: Callable[[], dict[str, str]]
    is_in_dataset: bool = True

    def correct(self, correction: StoredCorrection, by_photo: bool) -> SearchTarget:
        """Return the same items with one additional number in each vector. This number lowers the scores of hubs.

        Hubs are items that rank high for many queries, see :class:`StoredCorrection`.
        """
        compute, describe = self.compute_vectors, self.describe_source
        return replace(
            self,
            compute_vectors=lambda: correction.append_corrections(compute(), by_photo),
            describe_source=lambda: {**describe(), "correction": correction.sha256},
        )


def find_default_split(dataset: Dataset) -> str:
    """Return the split that a search reads by default: ``test``, or ``all`` if there is no such split."""
    return "test" if "test" in dataset.splits or not dataset.images else ALL_SPLITS


def check_has_captions(trained: TrainedRun, split: str | None) -> None:
    """Raise UserError if the loaded split has no captions. A search by a photo could find nothing in such a split.

    ``split`` : name of the loaded split, for the message; None if all splits are loaded.
    """
    if not len(trained.split.pairs):
        name = "the data set" if split in (None, ALL_SPLITS) else f"the split {split!r}"
        raise UserError(f"{trained.dataset.path}: no image of {name} has a caption for a photo to find")


def describe_searched_images(trained: TrainedRun, split: str) -> str:
    """Return a text such as ``1,000 of the 8,091 images of flickr8k (split test)``, which describes the images to search."""
    n_images, dataset = len(trained.split.pairs.images), trained.dataset
    splits = dataset.parse_splits(split)
    names = "all splits" if split == ALL_SPLITS else f"split{'s' * (len(splits) > 1)} {' and '.join(splits)}"
    share = "all" if n_images == len(dataset.images) else f"{n_images:,} of the"
    return f"{share} {len(dataset.images):,} images of {dataset.name} ({names})"


def build_split_target(trained: TrainedRun, split: str | None, by_photo: bool) -> SearchTarget:
    """Return the items of the loaded split for a search: captions if the query is a photo (``by_photo``), images otherwise.

    ``split`` : name of the loaded split, to be stored in an index file; None if all splits are loaded.
    """
    pairs = trained.split.pairs

    def describe_source() -> dict[str, str]:
        raw = trained.transformer is not None
        words = [[caption.raw] if raw else caption.tokens for caption in pairs.captions] if by_photo else []
        return {
            "side": "captions" if by_photo else "images",
            "data set": trained.dataset.name,
            "split": split or "all",
            "weights": trained.weights_sha256,
            "model": sha256_json(trained.experiment.model.model_dump(mode="json")),
            "vocabulary": trained.vocabulary_sha256,
            **({} if trained.transformer is None else {"tokenizer": trained.transformer.tokenizer_sha256}),
            "features": trained.image_cache.key,
            "caption features": trained.caption_cache.key if trained.caption_cache else "",
            "captions": sha256_json(words),
        }

    def compute_vectors() -> Corpus:
        return pool_embeddings(encode_items(trained, by_photo))

    if by_photo:
        return SearchTarget("captions", pairs.caption_ids, pairs.caption_image_ids, compute_vectors, describe_source)
    return SearchTarget("images", pairs.image_ids, pairs.image_ids, compute_vectors, describe_source)


def build_file_target(trained: TrainedRun, file: Path, by_photo: bool, dim: int) -> SearchTarget:
    """Return the items of an embeddings file for a search: captions for a photo (``by_photo``), images for a text.

    Raises UserError if the file has only scores of pairs, or if its vectors do not have the similarity of the run and the
    length ``dim``. A warning is logged if the file states another data set, experiment or seed than the run.
    """
    embeddings = read_embeddings(file)
    name = "captions" if by_photo else "images"
    vectors = embeddings.captions if by_photo else embeddings.images
    if vectors is None:
        raise UserError(f"{file}: has scores of pairs, and no embeddings of {name} to search")
    similarity = find_vector_similarity(trained)
    if embeddings.similarity != similarity or vectors.shape[1] != dim:
        in_file, in_run = f"{vectors.shape[1]} dimensions by {embeddings.similarity}", f"{dim} by {similarity}"
        raise UserError(f"{file}: not embeddings of {trained.folder.path}, which has {in_run} (the file: {in_file})")
    origin = (embeddings.dataset, embeddings.experiment, embeddings.seed)
    own_origin = (trained.image_cache.dataset, trained.experiment.name, trained.record["seed"])
    is_in_dataset = embeddings.dataset == trained.dataset.name
    if is_in_dataset:
        try:
            check_recorded_data(trained.dataset, embeddings.identity)
        except UserError as error:
            log.warning("%s; so its ids are shown without files", error)
            is_in_dataset = False
    if any(value not in (None, own_value) for value, own_value in zip(origin, own_origin, strict=True)):
        unknown = "" if is_in_dataset else f"; its ids are none of {trained.dataset.path}"
        log.warning("%s says that it is of %s %s, seed %s, not of %s%s", file, *origin, trained.folder.path, unknown)
    corpus_sha256 = embeddings.source.sha256 if embeddings.source else ""
    ids, image_ids = (embeddings.caption_ids, embeddings.caption_image_ids) if by_photo else [embeddings.image_ids] * 2
    source = {"side": name, "corpus": corpus_sha256}
    return SearchTarget(name, ids, image_ids, lambda: vectors, lambda: source, is_in_dataset)


def encode_items(trained: TrainedRun, by_photo: bool, rows: NDArray[np.int64] | None = None) -> PackedEmbeddings:
    """Return the embeddings of the items of a split for a search: captions if ``by_photo``, images otherwise.

    ``rows`` are the positions of the items to embed; None embeds all items.
    """
    if by_photo:
        return encode_captions(trained.model, trained.split, rows)
    return encode_images(trained.model, trained.split, trained.device, rows)


def embed_and_pool_items(
    trained: TrainedRun, by_photo: bool, max_held_bytes: int
) -> tuple[NDArray[np.float32], PackedEmbeddings | None]:
    """Return one vector for each caption (``by_photo``) or each image of a split, and the complete embeddings.

    If an embedding is a set of vectors, the one vector is the normalised mean of the set. A fast search compares these
    vectors to choose candidates. The embeddings are None if they need more than ``max_held_bytes``.
    """
    pairs = trained.split.pairs
    n_rows, n_bytes = len(pairs) if by_photo else len(pairs.images), 0
    vectors: list[NDArray[np.float32]] = []
    held: list[PackedEmbeddings] | None = []
    for start in range(0, n_rows, _ROWS_PER_BLOCK):
        block = encode_items(trained, by_photo, np.arange(start, min(start + _ROWS_PER_BLOCK, n_rows)))
        vectors.append(pool_embeddings(block))
        n_bytes += block.vectors.nbytes
        held = None if held is None or n_bytes > max_held_bytes else [*held, block]
    return np.concatenate(vectors), None if held is None else _join_blocks(held)


def find_vector_similarity(trained: TrainedRun) -> str:
    """Return the name of the similarity by which a search compares vectors, such as ``cosine`` or ``order``.

    For a model that scores pairs, the name is ``cosine``: the vectors only choose the candidates that the model scores.
    """
    return trained.model.config.similarity.ranking_similarity or "cosine"


def read_or_build_index(file: Path, target: SearchTarget, similarity: str, dim: int, factory: str | None) -> BuiltIndex:
    """Read the index in ``file``. If the file is missing, build an index, and write it to ``file``.

    ``similarity``, ``dim`` : name of the similarity that compares the vectors, and length of the vectors.
    ``factory`` : FAISS string for the type of the index; None: the type of the file, or ``Flat`` for a new index.

    Raises UserError if the file is an index of other vectors or of another type.
    """
    indexed = IndexSource(len(target.item_ids), dim, similarity, hash_ids(target.item_ids), target.describe_source())
    if has_index_to_read(file, indexed):
        return read_index(file, indexed, factory)
    built = build_checked_index(target.compute_vectors(), target.item_type, similarity, factory)
    log.info("%s: built a %s index of %d %s", file, built.factory, len(target.item_ids), target.item_type)
    write_index(file, built, indexed)
    return built


def build_checked_index(vectors: Corpus, item_type: str, similarity: str, factory: str | None) -> BuiltIndex:
    """Build an index in memory. Raises UserError if the index is approximate but the similarity needs exact vectors.

    ``item_type`` : kind of the items, ``images`` or ``captions``, for messages.
    ``similarity`` : name of the similarity that compares the vectors. All except ``cosine`` need exact vectors.
    ``factory`` : FAISS string for the type of the index; None: ``Flat``.
    """
    built = build_index(vectors, factory or "Flat", name=item_type)
    if similarity != "cosine" and not stores_corpus_exactly(built.index, vectors):
        raise UserError(
            f"{built.factory}: approximates vectors, but {similarity} scores need them exactly, as Flat keeps them"
        )
    return built


def _join_blocks(blocks: list[PackedEmbeddings]) -> PackedEmbeddings:
    if len(blocks) == 1:
        return blocks[0]
    if any(block.lengths is None for block in blocks):
        return pack_embeddings([(block.vectors,) for block in blocks])
    lengths = torch.cat([block.lengths for block in blocks if block.lengths is not None])
    return PackedEmbeddings(torch.cat([block.vectors for block in blocks]), lengths)
