"""Search a split, or a file of embeddings, with a run: a text finds images, an image file finds captions."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vse.eval.search.gpu import use_device
from vse.eval.search.index import INDEX, INDEX_METADATA, metadata_file
from vse.eval.search.top_k import PhraseHit, SearchHit
from vse.features.backbones.device import MEMORY_ADVICE, memory_guard
from vse.features.cache.shards import shards_folder
from vse.features.extractors.captions import encoder_path
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.pipeline.files.inputs import FileState, read_file_state
from vse.pipeline.files.outputs import check_output
from vse.train.options import RunFiles, SearchRequest
from vse.train.use.attention import with_attention
from vse.train.use.localise import localise_phrase
from vse.train.use.model import TrainedRun, load_run
from vse.train.use.queries import Query
from vse.train.use.searcher import Searcher, SearchOptions
from vse.train.use.trained_run import unfinished_state

log = logging.getLogger(__name__)
PHOTOS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class _Kept:
    """A cached searcher, with the request for which it was built and the states of its files at that time."""

    request: Hashable
    searcher: Searcher
    states: Mapping[Path, FileState | None]


class LastSearcher:
    """Cache one searcher, and return it for the same request as long as its files do not change."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def searcher(self, request: Hashable) -> Searcher | None:
        """Return the cached searcher if it fits the request; otherwise drop it and return None."""
        kept = self._kept
        unchanged = kept is not None and all(read_file_state(file) == state for file, state in kept.states.items())
        if kept is not None and unchanged and kept.request == request:
            return kept.searcher
        self._kept = None
        return None

    def keep(self, request: Hashable, searcher: Searcher, files: Iterable[Path], started: int) -> None:
        """Cache a searcher that was built since ``started``, unless one of its files has changed recently."""
        states = {file: read_file_state(file) for file in (*_list_files(searcher.trained), *files)}
        if all(state is None or state.is_settled(started) for state in states.values()):
            self._kept = _Kept(request, searcher, states)


LAST = LastSearcher()


def _list_files(trained: TrainedRun) -> list[Path]:
    caches = [cache for cache in (trained.cache, trained.caption_cache) if cache is not None]
    return [
        *trained.folder.files,
        *trained.folder.code_folder.glob("*"),
        trained.dataset.path,
        *(cache.path for cache in caches),
        *(encoder_path(cache.path) for cache in caches),
        *(shards_folder(cache.path) / "manifest.json" for cache in caches),
        *(shard["features"].path for cache in caches for shard in cache.shards),
    ]


def search_run(
    run: Path,
    query: str | Path,
    request: SearchRequest = SearchRequest(),
    places: RunFiles = RunFiles(),
    device: str = "auto",
    last: LastSearcher | None = None,
) -> list[SearchHit]:
    """Return the best images for a text, or captions for a photo; write a report if requested.

    A query with the file extension of a photo is the path of a photo. With an ``index`` or ``last`` the searcher is cached for
    the next query in this process, as long as its files do not change. For ``places`` and ``device`` see
    :func:`vse.train.use.model.load_run`.
    """
    photo = Path(query) if isinstance(query, Path) or query.lower().endswith(PHOTOS) else None
    with memory_guard(MEMORY_ADVICE):
        hits = _search(run, str(query) if photo is None else photo, request, places, device, last)
    if request.html is not None:
        from vse.eval.report.pages import write_search_page

        searched = f"{run}, {request.corpus or request.split or 'test'}"
        log.info("%s: the results as a report", write_search_page(request.html, photo or str(query), hits, searched))
    return hits


def _search(
    run: Path, query: str | Path, request: SearchRequest, places: RunFiles, device: str, last: LastSearcher | None
) -> list[SearchHit]:
    split, corpus, index, page = request.split or "test", request.corpus, request.index, request.html
    if index is None and (request.index_type is not None or request.index_parameters):
        raise UserError("--index-type and --index-parameters describe the index file; name it with --index")
    options = SearchOptions(corpus, index, request.index_type, request.index_parameters, request.rerank)
    cache_key, started = (Path.cwd(), run, split, places, device, options), time.time_ns()
    if last is None and index is not None:
        last = LAST
    cached = None if last is None else last.searcher(cache_key)
    trained = load_for_search(run, split, places, device) if cached is None else cached.trained
    if isinstance(query, Path) and corpus is None and not len(trained.split.pairs):
        raise UserError(f"{trained.dataset.path}: no image of the split {split!r} has a caption for a photo to find")
    inputs = [*trained.inputs, *([query] if isinstance(query, Path) else []), *([corpus] if corpus else [])]
    if index is not None:
        check_output(index, INDEX, inputs)
        check_output(metadata_file(index), INDEX_METADATA, inputs)
        inputs += [index, metadata_file(index)]
    if page is not None:
        from vse.eval.report.pages import SEARCH_PAGE  # a search without a report does not need it

        check_output(page, SEARCH_PAGE, inputs)
    if cached is None:
        searcher = Searcher(trained, split, places.weights_dir, options)
    else:
        searcher = cached
        _use_device(trained)
    given: Query = decode_image(query) if isinstance(query, Path) else query
    encoded = searcher.read(given)
    if encoded.remark:
        log.warning("%s", encoded.remark)
    answer = searcher.answer(given, encoded, request.k)
    if last is not None and cached is None:
        index_files = [] if index is None else [index, metadata_file(index)]
        last.keep(cache_key, searcher, [*index_files, *([corpus] if corpus else [])], started)
    if request.rerank is not None and answer.scored is not None:
        side = "captions" if isinstance(query, Path) else "images"
        log.info("scored: the %d of %d %s that pooled vectors find", answer.scored, searcher.size(side == "captions"), side)
    if page is None or corpus is not None:
        return answer.hits
    return with_attention(trained, given, encoded.encoded, answer.hits, answer.rows.tolist())


def load_for_search(run: Path, split: str, places: RunFiles, device: str) -> TrainedRun:
    """Load a run for a search, on its device; log a warning if its training did not finish."""
    trained = load_run(run, split, places, device, unfinished=True)
    _use_device(trained)
    return trained


def _use_device(trained: TrainedRun) -> None:
    if state := unfinished_state(trained.record):
        run = trained.folder.path
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    use_device(str(trained.device) if trained.device.type == "cuda" else "cpu")


def find_phrase(
    run: Path,
    photo: Path,
    phrase: str,
    request: SearchRequest = SearchRequest(),
    places: RunFiles = RunFiles(),
    device: str = "auto",
) -> PhraseHit:
    """Return the candidate boxes of a photo for a phrase, best first. Raises UserError for options that apply to a split."""
    others = ("split", "corpus", "index", "index_type", "rerank")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(request, name) is not None]:
        raise UserError(f"--image searches one photo, and {given[0]} is of a split; leave it out")
    if request.html is not None:
        from vse.eval.report.pages import PHRASE_PAGE

        check_output(request.html, PHRASE_PAGE, [photo])
    with memory_guard(MEMORY_ADVICE):
        located = localise_phrase(run, photo, phrase, places, device)
    hit = PhraseHit(phrase, located.boxes, located.scores)
    if request.html is not None:
        from vse.eval.report.pages import write_phrase_page

        log.info("%s: the best box in the photo", write_phrase_page(request.html, photo, [hit], str(run)))
    return hit
