"""Search a split or an embeddings file with a run: a text finds images, and a photo finds captions."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vse.eval.search.index import INDEX_KIND, INDEX_METADATA_KIND, metadata_file
from vse.eval.search.top_k import SearchHit
from vse.features.backbones.device import OUT_OF_MEMORY_ADVICE, wrap_memory_errors
from vse.features.cache.shards import shards_folder
from vse.features.extractors.captions import encoder_path
from vse.pipeline.dataset.photo_folder import QUERY_PHOTO_SUFFIXES
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import QUERY_IMAGE_FORMATS, decode_image
from vse.pipeline.files.inputs import FileState, read_file_state
from vse.pipeline.files.outputs import check_output
from vse.training.options import RunInputOptions, RunSearchOptions
from vse.training.use.attention import add_attention
from vse.training.use.corpus import check_has_captions, describe_searched_images, find_default_split
from vse.training.use.model import Query, TrainedRun
from vse.training.use.searcher import Searcher, SearcherOptions, load_run_for_search, set_search_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CachedSearcher:
    """A searcher, the request for which it was built, and the states of its files at that time."""

    request: Hashable
    searcher: Searcher
    file_states: Mapping[Path, FileState | None]


class LastSearcherCache:
    """A cache of the last searcher, for the next query with the same request and unchanged files."""

    def __init__(self) -> None:
        self._cached: _CachedSearcher | None = None

    def find_searcher(self, request: Hashable) -> Searcher | None:
        """Return the cached searcher if its request is equal and no file has changed. Otherwise empty the cache.

        Returns None if the cache is empty.
        """
        cached = self._cached
        unchanged = cached is not None and all(read_file_state(file) == state for file, state in cached.file_states.items())
        if cached is not None and unchanged and cached.request == request:
            return cached.searcher
        self._cached = None
        return None

    def keep(self, request: Hashable, searcher: Searcher, files: Iterable[Path], started: int) -> None:
        """Cache a searcher, unless one of its files may have changed after ``started``.

        ``files`` : files that the searcher reads in addition to the files of the run.
        ``started`` : time at which the searcher began to read its files, in nanoseconds since the epoch (``time.time_ns``).
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
        *trained.dataset.content_paths,
        *(cache.path for cache in caches),
        *(encoder_path(cache.path) for cache in caches),
        *(shards_folder(cache.path) / "manifest.json" for cache in caches),
        *(shard["features"].path for cache in caches for shard in cache.shard_arrays),
    ]


def search_run(
    run: Path,
    query: str | Path,
    request: RunSearchOptions = RunSearchOptions(),
    files: RunInputOptions = RunInputOptions(),
    device: str = "auto",
    searcher_cache: LastSearcherCache | None = None,
) -> list[SearchHit]:
    """Return the best images for a text, or the best captions for a photo. Write a report if requested.

    A query that ends in .jpg, .jpeg, .png, .webp, .gif or .bmp is the path of a photo. ``searcher_cache`` keeps the searcher
    for the next query. Without ``searcher_cache``, LAST_SEARCHER_CACHE keeps the searcher if ``request`` names an index file.
    """
    photo = Path(query) if isinstance(query, Path) or query.lower().endswith(QUERY_PHOTO_SUFFIXES) else None
    with wrap_memory_errors(OUT_OF_MEMORY_ADVICE):
        hits = _search(run, str(query) if photo is None else photo, request, files, device, searcher_cache)
    if request.html is not None:
        from vse.eval.report.pages import write_search_page

        searched = ", ".join(str(part) for part in (run, request.corpus or request.split) if part is not None)
        log.info("%s: the results as a report", write_search_page(request.html, photo or str(query), hits, searched))
    return hits


def _search(
    run: Path,
    query: str | Path,
    request: RunSearchOptions,
    files: RunInputOptions,
    device: str,
    searcher_cache: LastSearcherCache | None,
) -> list[SearchHit]:
    corpus, index, page = request.corpus, request.index, request.html
    if index is None and (request.index_type is not None or request.index_parameters):
        raise UserError("--index-type and --index-parameters describe the index file; name it with --index")
    options = SearcherOptions(corpus, index, request.index_type, request.index_parameters, request.rerank)
    cache_key, started = (Path.cwd(), run, request.split, files, device, options), time.time_ns()
    if searcher_cache is None and index is not None:
        searcher_cache = LAST_SEARCHER_CACHE
    cached = None if searcher_cache is None else searcher_cache.find_searcher(cache_key)
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
        from vse.eval.report.pages import SEARCH_PAGE_KIND  # only a search with a report needs this import

        check_output(page, SEARCH_PAGE_KIND, inputs)
    if cached is None:
        searcher = Searcher(trained, split, files.weights_dir, options)
        if corpus is None:
            log.info("searching %s", describe_searched_images(trained, split))
    else:
        searcher = cached
        set_search_device(trained)
    given: Query = decode_image(query, formats=QUERY_IMAGE_FORMATS) if isinstance(query, Path) else query
    encoded = searcher.encode(given)
    if encoded.remark:
        log.warning("%s", encoded.remark)
    answer = searcher.answer(isinstance(query, Path), encoded, request.k)
    if searcher_cache is not None and cached is None:
        index_files = [] if index is None else [index, metadata_file(index)]
        searcher_cache.keep(cache_key, searcher, [*index_files, *([corpus] if corpus else [])], started)
    if request.rerank is not None and answer.n_scored is not None:
        side, n_items = ("captions" if isinstance(query, Path) else "images"), searcher.count_items(isinstance(query, Path))
        log.info("scored: the %d of %d %s that pooled vectors find", answer.n_scored, n_items, side)
    if page is None or corpus is not None:
        return answer.hits
    return add_attention(trained, given, encoded.vectors, answer.hits, answer.rows.tolist())
