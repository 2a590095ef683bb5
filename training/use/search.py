"""Search a split or an embeddings file with a run: a text finds images, and a photo finds captions."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PhotoImage

from vse.eval.search.gpu import choose_faiss_device
from vse.eval.search.index import INDEX_KIND, INDEX_METADATA_KIND, IndexVectors, metadata_file, set_search_parameters
from vse.eval.search.top_k import N_RESCORED_CANDIDATES, Attention, Corpus, RowIndices, Scores, SearchHit, Vectors, search
from vse.features.backbones.device import OUT_OF_MEMORY_ADVICE, wrap_memory_errors
from vse.features.cache.shards import shards_folder
from vse.features.extractors.captions import encoder_path
from vse.pipeline.dataset.photo_folder import PHOTO_SUFFIXES
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.pipeline.files.inputs import FileState, read_file_state
from vse.pipeline.files.outputs import check_output
from vse.training.kinds import BatchVectors, PackedEmbeddings, pack_embeddings
from vse.training.options import RunFileOptions, SearchRequest
from vse.training.solvers.encode import MAX_TILE_IMAGES, PairScores, pool_embeddings
from vse.training.use.attention import PairAttention, add_attention, compute_query_attention
from vse.training.use.corpus import (
    SearchTarget,
    build_checked_index,
    build_file_target,
    build_split_target,
    check_has_captions,
    encode_side,
    find_default_split,
    pool_side,
    read_or_build_index,
    vector_similarity_name,
)
from vse.training.use.model import TrainedRun, load_opened_run
from vse.training.use.open_run import open_run, unfinished_state
from vse.training.use.queries import EncodedQuery, Query, QueryEncoder

log = logging.getLogger(__name__)
_BLANK_PHOTO_SIZE = (64, 64)  # of the blank photo that Searcher.load uses as a first query


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search.

    ``corpus_file`` : embeddings file of the run to search instead of the split.
    ``index_file`` : FAISS index file, valid for one set of weights, features, split and corpus; a missing file is built.
    ``index_type`` : factory string, see :mod:`vse.eval.search.index`; by default that of the file, or Flat for a new index.
    ``index_parameters`` : search parameters of the index, see :func:`vse.eval.search.index.set_search_parameters`.
    ``n_reranked`` : number of candidates to score, at least the number of results.
    ``expects_many_queries`` : True if many queries follow, so that an index in memory and the embeddings of all items pay off.
    ``max_held_bytes`` : limit on memory for the embeddings of all items; above it, each query encodes its candidates again.
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
    """The hits of a query, best first, and their ``rows`` among all items. ``n_scored`` items were scored exactly."""

    hits: list[SearchHit]
    rows: RowIndices
    n_scored: int | None = None


@dataclass(frozen=True)
class _Gallery:
    """The images or captions to search, with their vectors, an index of the vectors, or their sets of vectors."""

    target: SearchTarget
    vectors: Corpus | None = None
    index: Any = None
    packed_sets: PackedEmbeddings | None = None


class Searcher:
    """A run that answers queries. Raises UserError if ``options`` do not fit the similarity of the model.

    Texts search images, and photos search captions. The first query of each kind, or :meth:`load`, embeds the items to search.
    For order embeddings, FAISS finds candidates and the exact scores re-rank the candidates, see
    :func:`vse.eval.search.top_k.search`. A model that scores every pair, such as SCAN, scores all items. With
    ``n_reranked`` it scores only candidates that FAISS finds by pooled vectors.
    """

    def __init__(
        self, trained: TrainedRun, split: str | None, weights_dir: Path | None = None, options: SearchOptions = SearchOptions()
    ) -> None:
        self.trained, self.split = trained, split
        self._options = options
        self._query_encoder = QueryEncoder(trained, split, weights_dir)
        self._galleries: dict[bool, _Gallery] = {}
        self._check_options()

    def load(self, by_photo: bool) -> None:
        """Load the networks for photos or texts, and embed the items to search. Raises UserError if networks are missing."""
        self._query_encoder.load(by_photo)
        query: Query = PhotoImage.new("RGB", _BLANK_PHOTO_SIZE) if by_photo else self.choose_sample_text()
        self.answer(by_photo, self.encode(query), 1)

    def encode(self, query: Query) -> EncodedQuery:
        """Return the embedding of a query. Raises UserError if the query has nothing to search for."""
        return self._query_encoder.encode(query)

    def answer(self, by_photo: bool, encoded: EncodedQuery, k: int) -> SearchAnswer:
        """Return the ``k`` best captions for a photo, or images for a text. ``encoded`` is the embedding of the query."""
        trained, rerank = self.trained, self._options.n_reranked
        if by_photo and self._options.corpus_file is None:
            check_has_captions(trained, self.split)
        side = self._open_gallery(by_photo, encoded.vectors[0].shape[-1])
        scored = None
        if trained.model.scores_every_pair:
            among = None
            if side.vectors is not None:
                candidates = max(k, rerank or 0)
                among = self._find_nearest(side, pool_embeddings(pack_embeddings([encoded.vectors])), candidates, by_photo)[1]
            scored = len(side.target.item_ids) if among is None else len(among)
            scores, rows = self._find_best_pairs(side, encoded.vectors, k, by_photo, among)
        else:
            scores, rows = self._find_nearest(side, encoded.vectors[0].numpy(), k, by_photo)
        return SearchAnswer(self._to_hits(side.target, scores, rows, by_photo), rows, scored)

    def count_items(self, by_photo: bool) -> int:
        """Return the number of captions (for a photo) or images (for a text) to search."""
        side = self._galleries.get(by_photo)
        pairs = self.trained.split.pairs
        return len(side.target.item_ids) if side else len(pairs) if by_photo else len(pairs.images)

    def attention(self, query: Query, encoded: EncodedQuery, rows: Sequence[int]) -> list[Attention | None]:
        """Return the attention between a query and the hits at ``rows``. Raises UserError if the run has no attention."""
        return compute_query_attention(self._pair_attention, query, encoded.vectors, rows)

    @cached_property
    def _pair_attention(self) -> PairAttention:
        if self.trained.experiment.model.similarity.attention_direction is None:
            raise UserError(f"{self.trained.folder.path}: its model does not attend")
        return PairAttention(self.trained)

    def choose_sample_text(self) -> str:
        """Return a text that the run can read: a caption of its data set, or a word of its vocabulary."""
        captions = (caption.raw for image in self.trained.dataset.images for caption in image.captions)
        return next(captions, None) or self.trained.vocabulary.words[-1]

    def _check_options(self) -> None:
        run, options, is_cosine = self.trained.folder.path, self._options, vector_similarity_name(self.trained) == "cosine"
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
        trained, options, similarity = self.trained, self._options, vector_similarity_name(self.trained)
        if options.corpus_file is not None:
            target = build_file_target(trained, options.corpus_file, by_photo, dim)
        else:
            target = build_split_target(trained, self.split, by_photo)
        pairwise, packed_sets = trained.model.scores_every_pair, None
        if pairwise and options.n_reranked is None:
            return _Gallery(target, packed_sets=encode_side(trained, by_photo))
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
                vectors, packed_sets = pool_side(trained, by_photo, options.max_held_bytes)
            else:
                vectors = target.compute_vectors()
            index = build_checked_index(vectors, target.item_type, similarity, options.index_type).index
        else:
            return _Gallery(target, target.compute_vectors())
        set_search_parameters(index, options.index_parameters)
        return _Gallery(target, IndexVectors(index), index, packed_sets)

    def _find_nearest(self, side: _Gallery, encoded_query: Vectors, k: int, by_photo: bool) -> tuple[Scores, RowIndices]:
        """Return scores and rows of the ``k`` vectors nearest to the query. An approximate index may find fewer vectors."""
        assert side.vectors is not None
        scores, rows = (
            values[0]
            for values in search(
                side.vectors,
                encoded_query,
                k,
                vector_similarity_name(self.trained),
                direction="i2t" if by_photo else "t2i",
                candidates=max(k, self._options.n_reranked or N_RESCORED_CANDIDATES),
                index=side.index,
            )
        )
        there = rows >= 0
        if not there.all():
            log.warning("the index found %d of %d; a higher nprobe or efSearch finds more", there.sum(), len(rows))
        return scores[there], rows[there]

    def _find_best_pairs(
        self, side: _Gallery, encoded_query: BatchVectors, k: int, by_photo: bool, among: RowIndices | None
    ) -> tuple[Scores, RowIndices]:
        """Return scores and rows of the ``k`` items with the best scores. ``among`` holds the rows to score; None is all."""
        model, candidates = self.trained.model, side.packed_sets
        if among is not None:
            if not len(among):
                return np.empty(0, np.float32), among
            among = np.sort(among)  # so that items with equal scores are in the order of rows
            if candidates is None:
                candidates = encode_side(self.trained, by_photo, among)
            else:
                candidates = candidates.select_rows(torch.from_numpy(among))
        assert candidates is not None
        if by_photo:
            every = PairScores(model, pack_embeddings([encoded_query]), candidates)(slice(0, 1), None)[0][0]
        else:
            pairs = PairScores(model, candidates, pack_embeddings([encoded_query]))
            ends = len(candidates)
            spans = (slice(start, min(start + MAX_TILE_IMAGES, ends)) for start in range(0, ends, MAX_TILE_IMAGES))
            every = torch.cat([pairs(span, None)[1][:, 0] for span in spans])
        best = torch.sort(every, descending=True, stable=True)
        rows = best.indices[:k].numpy()
        return best.values[:k].numpy(), rows if among is None else among[rows]

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


@dataclass(frozen=True)
class _CachedSearcher:
    """A searcher, the request that it serves, and the states of its files when it was built."""

    request: Hashable
    searcher: Searcher
    file_states: Mapping[Path, FileState | None]


class LastSearcherCache:
    """A cache of the last searcher, for the same request with unchanged files."""

    def __init__(self) -> None:
        self._cached: _CachedSearcher | None = None

    def find_searcher(self, request: Hashable) -> Searcher | None:
        """Return the cached searcher for an equal request. Otherwise empty the cache and return None."""
        cached = self._cached
        unchanged = cached is not None and all(read_file_state(file) == state for file, state in cached.file_states.items())
        if cached is not None and unchanged and cached.request == request:
            return cached.searcher
        self._cached = None
        return None

    def keep(self, request: Hashable, searcher: Searcher, files: Iterable[Path], started: int) -> None:
        """Cache a searcher that was built at ``started`` (ns), unless one of its files may have changed since then.

        ``files`` : files of the searcher, besides the files of the run.
        """
        states = {file: read_file_state(file) for file in (*_list_run_input_files(searcher.trained), *files)}
        if all(state is None or state.detects_writes_after(started) for state in states.values()):
            self._cached = _CachedSearcher(request, searcher, states)


LAST_SEARCHER_CACHE = LastSearcherCache()


def _list_run_input_files(trained: TrainedRun) -> list[Path]:
    caches = [cache for cache in (trained.image_cache, trained.caption_cache) if cache is not None]
    return [
        *trained.folder.output_files,
        *trained.folder.code_folder.glob("*"),
        trained.dataset.path,
        *trained.dataset.listed_files,
        *(cache.path for cache in caches),
        *(encoder_path(cache.path) for cache in caches),
        *(shards_folder(cache.path) / "manifest.json" for cache in caches),
        *(shard["features"].path for cache in caches for shard in cache.shard_arrays),
    ]


def search_run(
    run: Path,
    query: str | Path,
    request: SearchRequest = SearchRequest(),
    files: RunFileOptions = RunFileOptions(),
    device: str = "auto",
    last: LastSearcherCache | None = None,
) -> list[SearchHit]:
    """Return the best images for a text, or the best captions for a photo. Write a report if requested.

    A query with a suffix in :data:`PHOTO_SUFFIXES` is the path of a photo. ``last`` caches the searcher for the next query.
    """
    photo = Path(query) if isinstance(query, Path) or query.lower().endswith(PHOTO_SUFFIXES) else None
    with wrap_memory_errors(OUT_OF_MEMORY_ADVICE):
        hits = _search(run, str(query) if photo is None else photo, request, files, device, last)
    if request.html is not None:
        from vse.eval.report.pages import write_search_page

        searched = ", ".join(str(part) for part in (run, request.corpus or request.split) if part is not None)
        log.info("%s: the results as a report", write_search_page(request.html, photo or str(query), hits, searched))
    return hits


def _search(
    run: Path, query: str | Path, request: SearchRequest, files: RunFileOptions, device: str, last: LastSearcherCache | None
) -> list[SearchHit]:
    corpus, index, page = request.corpus, request.index, request.html
    if index is None and (request.index_type is not None or request.index_parameters):
        raise UserError("--index-type and --index-parameters describe the index file; name it with --index")
    options = SearchOptions(corpus, index, request.index_type, request.index_parameters, request.rerank)
    cache_key, started = (Path.cwd(), run, request.split, files, device, options), time.time_ns()
    if last is None and index is not None:
        last = LAST_SEARCHER_CACHE
    cached = None if last is None else last.find_searcher(cache_key)
    trained = load_run_for_search(run, request.split, files, device) if cached is None else cached.trained
    split = request.split or find_default_split(trained.dataset)
    if isinstance(query, Path) and corpus is None:
        check_has_captions(trained, split)
    inputs = [*trained.input_paths, *([query] if isinstance(query, Path) else []), *([corpus] if corpus else [])]
    if index is not None:
        check_output(index, INDEX_KIND, inputs)
        check_output(metadata_file(index), INDEX_METADATA_KIND, inputs)
        inputs += [index, metadata_file(index)]
    if page is not None:
        from vse.eval.report.pages import SEARCH_PAGE_KIND  # a search without a report does not need it

        check_output(page, SEARCH_PAGE_KIND, inputs)
    if cached is None:
        searcher = Searcher(trained, split, files.weights_dir, options)
    else:
        searcher = cached
        _set_search_device(trained)
    given: Query = decode_image(query) if isinstance(query, Path) else query
    encoded = searcher.encode(given)
    if encoded.remark:
        log.warning("%s", encoded.remark)
    answer = searcher.answer(isinstance(query, Path), encoded, request.k)
    if last is not None and cached is None:
        index_files = [] if index is None else [index, metadata_file(index)]
        last.keep(cache_key, searcher, [*index_files, *([corpus] if corpus else [])], started)
    if request.rerank is not None and answer.n_scored is not None:
        side, n_items = ("captions" if isinstance(query, Path) else "images"), searcher.count_items(isinstance(query, Path))
        log.info("scored: the %d of %d %s that pooled vectors find", answer.n_scored, n_items, side)
    if page is None or corpus is not None:
        return answer.hits
    return add_attention(trained, given, encoded.vectors, answer.hits, answer.rows.tolist())


def load_run_for_search(run: Path, split: str | None, files: RunFileOptions, device: str) -> TrainedRun:
    """Load a run for a search in a split, or (None) in the default split. Log a warning if the training did not finish."""
    opened = open_run(run, files, device, allow_unfinished=True)
    trained = load_opened_run(opened, split or find_default_split(opened.dataset), files)
    _set_search_device(trained)
    return trained


def _set_search_device(trained: TrainedRun) -> None:
    if state := unfinished_state(trained.record):
        run = trained.folder.path
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    choose_faiss_device(str(trained.device) if trained.device.type == "cuda" else "cpu")
