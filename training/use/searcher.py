"""A trained run that answers queries: a text finds images, and a photo finds captions or similar images."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from PIL import Image as PhotoImage

from vse.eval.ranking.answers import Corpus, Vectors
from vse.eval.search.gpu import choose_faiss_device
from vse.eval.search.index import IndexVectors, set_search_parameters
from vse.eval.search.matrix import VectorMatrix
from vse.eval.search.top_k import (
    N_RESCORED_CANDIDATES,
    Attention,
    RowIndices,
    Scores,
    SearchHit,
    TopK,
    search_corpus,
    sort_by_exact_scores,
)
from vse.pipeline.errors import UserError
from vse.training.kinds import BatchVectors, PackedEmbeddings, pack_embeddings
from vse.training.options import RunInputOptions
from vse.training.solvers.encode import MAX_TILE_IMAGES, PairScores, pool_embeddings
from vse.training.use.attention import AttentionComputer, compute_query_attention
from vse.training.use.corpus import (
    SearchTarget,
    build_checked_index,
    build_file_target,
    build_split_target,
    check_has_captions,
    embed_and_pool_items,
    encode_items,
    find_default_split,
    find_vector_similarity,
    read_or_build_index,
)
from vse.training.use.model import EncodedQuery, Query, QueryEncoder, TrainedRun, load_opened_run
from vse.training.use.open_run import find_unfinished_state, open_run
from vse.training.use.stored_correction import extend_queries, read_correction

log = logging.getLogger(__name__)
_BLANK_PHOTO_SIZE = (64, 64)  # width and height of the photo that Searcher.load uses as a first query


@dataclass(frozen=True)
class SearcherOptions:
    """The options of a search. None stands for the default of an option.

    ``corpus_file`` : embeddings file that the run wrote (the corpus), to search instead of the split.
    ``index_file`` : FAISS index file for one combination of weights, features, split and corpus. A missing file is written.
    ``index_type`` : FAISS factory string, see :mod:`vse.eval.search.index`; by default the type of the file, or Flat.
    ``index_parameters`` : search parameters of the index, see :func:`vse.eval.search.index.set_search_parameters`.
    ``n_reranked`` : number of candidates that get exact scores; None: 200 for order embeddings, all items for scores of pairs.
    ``expects_many_queries`` : True to keep an index and the embeddings of all items in memory for many queries.
    ``max_held_bytes`` : memory limit for the embeddings of all items. Above the limit, each query embeds its candidates again.
    """

    corpus_file: Path | None = None
    index_file: Path | None = None
    index_type: str | None = None
    index_parameters: str = ""
    n_reranked: int | None = None
    expects_many_queries: bool = False
    max_held_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class SearchAnswer:
    """The hits of a query, best first, and ``rows``, the position of each hit among all items.

    ``n_ranked`` : number of items that the search can rank: all items, or only the candidates that get exact scores.
    ``n_scored`` : number of items that the model scored pair by pair; None for a model that compares vectors.
    """

    hits: list[SearchHit]
    rows: RowIndices
    n_ranked: int
    n_scored: int | None = None


@dataclass(frozen=True)
class SearchQuery:
    """An encoded query. Its answer has ``k`` hits, after the first ``start`` hits."""

    encoded: EncodedQuery
    k: int
    start: int = 0


@dataclass(frozen=True)
class _Gallery:
    """The images or captions to search, with their vectors or their sets of vectors.

    ``target`` : the items.
    ``vectors`` : one vector for each item; None if the model scores all items pair by pair.
    ``index``, ``matrix`` : FAISS index or matrix for a fast search in the vectors. Without them, a query reads all vectors.
    ``packed_sets`` : embeddings of all items for a model that scores pairs. If None, each query embeds its candidates.
    """

    target: SearchTarget
    vectors: Corpus | None = None
    index: Any = None
    matrix: VectorMatrix | None = None
    packed_sets: PackedEmbeddings | None = None

    def search(self, queries: Vectors, ks: Sequence[int]) -> list[TopK]:
        """Return, for query i of ``queries`` (m, dim), the ``ks[i]`` vectors with the highest inner products."""
        if self.matrix is not None:
            return self.matrix.search(queries, ks)
        assert self.vectors is not None
        # An index rounds the scores of a query differently if it searches several queries at once.
        return [search_corpus(self.vectors, query[None], k, index=self.index) for query, k in zip(queries, ks, strict=True)]


class Searcher:
    """A run that answers queries. Raises UserError if ``options`` do not fit the similarity of the model.

    A text finds images, and a photo finds captions. The images are embedded at the first text, the captions at the first
    photo, or both in :meth:`load`. For order embeddings, FAISS finds candidates, and exact scores re-rank them, see
    :func:`vse.eval.search.top_k.search_corpus`. A model that scores every pair, such as SCAN, scores all items. With
    ``n_reranked``, such a model scores only the candidates that FAISS finds by one vector for each item.
    """

    def __init__(
        self,
        trained: TrainedRun,
        split: str | None,
        weights_dir: Path | None = None,
        options: SearcherOptions = SearcherOptions(),
    ) -> None:
        self.trained, self.split = trained, split
        self._options = options
        self._query_encoder = QueryEncoder(trained, split, weights_dir)
        self._galleries: dict[bool, _Gallery] = {}
        self._correction = None
        if find_vector_similarity(trained) == "cosine" and not trained.model.scores_every_pair:
            self._correction = read_correction(trained.folder, trained.weights_sha256)
        self._check_options()

    def load(self, by_photo: bool) -> None:
        """Load the networks for photos (``by_photo``) or for texts, and embed the items that such a query searches.

        Raises UserError if networks are missing. In a split without captions, nothing is embedded for photos, but
        :meth:`find_similar_images` can still use the networks.
        """
        self._query_encoder.load(by_photo)
        if self._options.expects_many_queries and not by_photo:
            log.debug("texts are encoded together: %s", self._query_encoder.encodes_texts_together)
        query: Query = PhotoImage.new("RGB", _BLANK_PHOTO_SIZE) if by_photo else self.choose_sample_text()
        encoded = self.encode(query)
        if not by_photo or self.count_items(by_photo):
            self.answer(by_photo, encoded, 1)

    def encode(self, query: Query) -> EncodedQuery:
        """Return the embedding of a query. Raises UserError if a text has no word, or no word that the model knows."""
        return self._query_encoder.encode(query)

    def encode_all(self, queries: Sequence[Query]) -> list[EncodedQuery | UserError]:
        """Return the embedding of each query, or the error that :meth:`encode` raises for the query."""
        return self._query_encoder.encode_all(queries)

    def answer(self, by_photo: bool, encoded: EncodedQuery, k: int, start: int = 0) -> SearchAnswer:
        """Return ``k`` hits for a query, best first: captions for a photo (``by_photo``), images for a text.

        ``encoded`` is the embedding of the query. The first ``start`` hits are skipped.
        """
        return self.answer_all(by_photo, [SearchQuery(encoded, k, start)])[0]

    def answer_all(self, by_photo: bool, queries: Sequence[SearchQuery]) -> list[SearchAnswer]:
        """Return the hits for each query: captions if all queries are photos (``by_photo``), images if all are texts."""
        if by_photo and self._options.corpus_file is None:
            check_has_captions(self.trained, self.split)
        gallery = self._open_gallery(by_photo, queries[0].encoded.vectors[0].shape[-1])
        n_items, is_cosine = len(gallery.target.item_ids), find_vector_similarity(self.trained) == "cosine"
        n_candidates = [min(n_items, max(query.k, self._options.n_reranked or N_RESCORED_CANDIDATES)) for query in queries]
        if self.trained.model.scores_every_pair:
            candidates: list[RowIndices | None] = [None] * len(queries)
            if gallery.vectors is not None:
                pooled = np.concatenate([_pool_query(query.encoded) for query in queries])
                candidates = [rows for _, rows in self._find_nearest(gallery, pooled, n_candidates, by_photo)]
            n_ranked = [n_items if rows is None else len(rows) for rows in candidates]
            found = [
                self._find_best_pairs(gallery, query.encoded.vectors, query.start + query.k, by_photo, rows)
                for query, rows in zip(queries, candidates, strict=True)
            ]
        else:
            n_ranked = [n_items] * len(queries) if is_cosine else n_candidates
            vectors = np.concatenate([query.encoded.vectors[0].numpy() for query in queries])
            n_found = [min(query.start + query.k, most) for query, most in zip(queries, n_ranked, strict=True)]
            found = self._find_nearest(gallery, vectors, n_found, by_photo)
        answers = []
        for query, (scores, rows), most in zip(queries, found, n_ranked, strict=True):
            hits = self._to_hits(gallery.target, scores[query.start :], rows[query.start :], by_photo)
            n_scored = most if self.trained.model.scores_every_pair else None
            answers.append(SearchAnswer(hits, rows[query.start :], most, n_scored))
        return answers

    def find_similar_images(
        self, encoded: EncodedQuery, k: int, start: int = 0, excluded_row: int | None = None
    ) -> SearchAnswer:
        """Return ``k`` images that are similar to a photo, best first. The first ``start`` images are skipped.

        The similarity of two images is the inner product of their vectors or, for sets, of the means of the sets.

        ``encoded`` : embedding of the photo.
        ``excluded_row`` : position of an image to leave out, such as the query itself; None: no image.

        Raises UserError if no vectors are searched, because the model scores every pair.
        """
        gallery = self._open_gallery(False, encoded.vectors[0].shape[-1])
        if gallery.vectors is None:
            raise UserError(f"{self.trained.folder.path}: has no pooled vectors to compare photos; add --rerank")
        n_ranked = len(gallery.target.item_ids) - (excluded_row is not None)
        end = min(start + k, n_ranked)
        n_found = end + (excluded_row is not None)
        query = _pool_query(encoded)
        if self._correction is not None:
            query = extend_queries(query, corrected=False)
        (found,) = gallery.search(query, [n_found])
        scores, rows = (values[0][(found.rows[0] >= 0) & (found.rows[0] != excluded_row)] for values in found)
        scores, rows = scores[start:end], rows[start:end]
        return SearchAnswer(self._to_hits(gallery.target, scores, rows, by_photo=False), rows, n_ranked)

    def encode_image_of_split(self, row: int) -> EncodedQuery:
        """Compute the embedding of the image at ``row`` of the split from the features of the image."""
        return EncodedQuery(encode_items(self.trained, False, np.asarray([row])).unpack(torch.zeros(1, dtype=torch.int64)))

    def count_items(self, by_photo: bool) -> int:
        """Return the number of items to search: captions for a photo (``by_photo``), images for a text."""
        gallery = self._galleries.get(by_photo)
        pairs = self.trained.split.pairs
        return len(gallery.target.item_ids) if gallery else len(pairs) if by_photo else len(pairs.images)

    def compute_attention(self, query: Query, encoded: EncodedQuery, rows: Sequence[int]) -> list[Attention | None]:
        """Return the attention between a query and each hit. None stands for a hit whose photo or regions are unknown.

        ``encoded`` is the embedding of the query. ``rows`` are the positions of the hits among all items. Raises UserError if
        the model has no attention, or reads captions from a cache.
        """
        return compute_query_attention(self._pair_attention, query, encoded.vectors, rows)

    @cached_property
    def _pair_attention(self) -> AttentionComputer:
        if self.trained.experiment.model.similarity.attention_direction is None:
            raise UserError(f"{self.trained.folder.path}: its model does not attend")
        return AttentionComputer(self.trained)

    def choose_sample_text(self) -> str:
        """Return a text that the run can read: a caption of its data set, or a word of its vocabulary."""
        captions = (caption.raw for image in self.trained.dataset.images for caption in image.captions)
        return next(captions, None) or self.trained.vocabulary.words[-1]

    def _check_options(self) -> None:
        run, options, is_cosine = self.trained.folder.path, self._options, find_vector_similarity(self.trained) == "cosine"
        if not self.trained.model.scores_every_pair:
            if options.n_reranked is not None and is_cosine and not options.expects_many_queries:
                raise UserError(
                    f"{run}: its scores are inner products, and FAISS finds the highest of them; leave --rerank out"
                )
        elif options.corpus_file is not None:
            raise UserError(f"{run}: its model scores every pair; leave --corpus out")
        elif options.index_file is not None and options.n_reranked is None:
            raise UserError(
                f"{run}: its model scores every pair; leave --index out, or add --rerank with a number of candidates"
            )

    def _open_gallery(self, by_photo: bool, dim: int) -> _Gallery:
        if by_photo not in self._galleries:
            self._galleries[by_photo] = self._build_gallery(by_photo, dim)
        return self._galleries[by_photo]

    def _build_gallery(self, by_photo: bool, dim: int) -> _Gallery:
        trained, options, similarity = self.trained, self._options, find_vector_similarity(self.trained)
        if options.corpus_file is not None:
            target = build_file_target(trained, options.corpus_file, by_photo, dim)
        else:
            target = build_split_target(trained, self.split, by_photo)
        if self._correction is not None:
            target, dim = target.correct(self._correction, by_photo), dim + 1
        pairwise, packed_sets = trained.model.scores_every_pair, None
        if pairwise and options.n_reranked is None:
            return _Gallery(target, packed_sets=encode_items(trained, by_photo))
        if similarity != "cosine":
            log.info(
                "%s scores are no inner products: by these FAISS finds %d candidates, exact scores re-rank",
                similarity,
                options.n_reranked or N_RESCORED_CANDIDATES,
            )
        if options.index_file is not None:
            index = read_or_build_index(options.index_file, target, similarity, dim, options.index_type).index
        elif options.expects_many_queries:
            vectors: Corpus
            if pairwise:
                vectors, packed_sets = embed_and_pool_items(trained, by_photo, options.max_held_bytes)
            else:
                vectors = target.compute_vectors()
            if options.index_type in (None, "Flat"):
                matrix = VectorMatrix(np.asarray(vectors))
                set_search_parameters(faiss.IndexFlatIP(dim), options.index_parameters)  # UserError: Flat has none
                return _Gallery(target, matrix.vectors, matrix=matrix, packed_sets=packed_sets)
            index = build_checked_index(vectors, target.item_type, similarity, options.index_type).index
        else:
            return _Gallery(target, target.compute_vectors())
        set_search_parameters(index, options.index_parameters)
        return _Gallery(target, IndexVectors(index), index, packed_sets=packed_sets)

    def _find_nearest(
        self, gallery: _Gallery, queries: Vectors, ks: Sequence[int], by_photo: bool
    ) -> list[tuple[Scores, RowIndices]]:
        """Return the scores and positions of the best items for each query: ``ks[i]`` items for the query i.

        An approximate index may find fewer items.
        """
        assert gallery.vectors is not None
        similarity, direction = find_vector_similarity(self.trained), "i2t" if by_photo else "t2i"
        if self._correction is not None:
            queries = extend_queries(queries)
        if similarity == "cosine":
            found = gallery.search(queries, ks)
        else:
            n_candidates = [max(k, self._options.n_reranked or N_RESCORED_CANDIDATES) for k in ks]
            found = [
                sort_by_exact_scores(gallery.vectors, query[None], near.rows, k, similarity, direction)
                for query, near, k in zip(queries, gallery.search(queries, n_candidates), ks, strict=True)
            ]
        nearest = []
        for (scores,), (rows,) in found:
            is_found = rows >= 0
            if not is_found.all():
                log.warning("the index found %d of %d; a higher nprobe or efSearch finds more", is_found.sum(), len(rows))
            nearest.append((scores[is_found], rows[is_found]))
        return nearest

    def _find_best_pairs(
        self, gallery: _Gallery, encoded_query: BatchVectors, k: int, by_photo: bool, candidate_rows: RowIndices | None
    ) -> tuple[Scores, RowIndices]:
        """Score the items at ``candidate_rows`` (None: all items). Return the scores and positions of the ``k`` best items."""
        model, candidates = self.trained.model, gallery.packed_sets
        if candidate_rows is not None:
            if not len(candidate_rows):
                return np.empty(0, np.float32), candidate_rows
            candidate_rows = np.sort(candidate_rows)  # items with equal scores are then ordered by position
            if candidates is None:
                candidates = encode_items(self.trained, by_photo, candidate_rows)
            else:
                candidates = candidates.select_rows(torch.from_numpy(candidate_rows))
        assert candidates is not None
        if by_photo:
            scores = PairScores(model, pack_embeddings([encoded_query]), candidates)(slice(0, 1), None)[0][0]
        else:
            pairs = PairScores(model, candidates, pack_embeddings([encoded_query]))
            n = len(candidates)
            slices = (slice(start, min(start + MAX_TILE_IMAGES, n)) for start in range(0, n, MAX_TILE_IMAGES))
            scores = torch.cat([pairs(part, None)[1][:, 0] for part in slices])
        best = torch.sort(scores, descending=True, stable=True)
        rows = best.indices[:k].numpy()
        return best.values[:k].numpy(), rows if candidate_rows is None else candidate_rows[rows]

    def _to_hits(self, target: SearchTarget, scores: Scores, rows: RowIndices, by_photo: bool) -> list[SearchHit]:
        dataset = self.trained.dataset
        hits = []
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            image_id, caption_id = int(target.image_ids[row]), int(target.item_ids[row]) if by_photo else None
            image = dataset.find_image(image_id) if target.is_in_dataset else None
            file = Path(os.path.normpath(dataset.image_path(image))) if image and dataset.has_image_files else None
            texts = tuple(c.raw for c in image.captions if caption_id in (None, c.sentid)) if image else ()
            hits.append(SearchHit(score, image_id, file, texts, caption_id))
        return hits


def load_run_for_search(run: Path, split: str | None, files: RunInputOptions, device: str) -> TrainedRun:
    """Load a run and a split (None: the default split) for a search, and set the device of FAISS to that of the run."""
    opened = open_run(run, files, device, allow_unfinished=True)
    trained = load_opened_run(opened, split or find_default_split(opened.dataset), files)
    set_search_device(trained)
    return trained


def set_search_device(trained: TrainedRun) -> None:
    """Set the device of FAISS to the device of a run. Also log a warning if the training of the run did not finish."""
    if state := find_unfinished_state(trained.record):
        run = trained.folder.path
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    choose_faiss_device(str(trained.device) if trained.device.type == "cuda" else "cpu")


def _pool_query(encoded: EncodedQuery) -> Vectors:
    return pool_embeddings(pack_embeddings([encoded.vectors]))
