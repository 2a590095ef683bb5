"""Searching a split, or a file of embeddings, with a run: a text finds images, an image file finds captions.

The searcher that answered last, kept for the next query in the same process.
"""

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
from vse.train.use.localise import locate
from vse.train.use.model import TrainedRun, load_run
from vse.train.use.queries import Query
from vse.train.use.searcher import Searcher, SearchOptions
from vse.train.use.trained_run import unfinished_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """A searcher, what was asked for when it was made, and the states that its files had."""

    asked_for: Hashable
    searcher: Searcher
    states: Mapping[Path, FileState | None]


class LastSearcher:
    """Keeps one searcher and returns it for the same request, as long as its files do not change."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def searcher(self, asked_for: Hashable) -> Searcher | None:
        """Return the cached searcher if it fits the request; otherwise drop it and return None."""
        kept = self._kept
        as_it_was = kept is not None and all(read_file_state(file) == state for file, state in kept.states.items())
        if kept is not None and as_it_was and kept.asked_for == asked_for:
            return kept.searcher
        self._kept = None
        return None

    def keep(self, asked_for: Hashable, searcher: Searcher, files: Iterable[Path], started: int) -> None:
        """Keep a searcher that was made from the time ``started`` on, of its run and of ``files``.

        Not if one of them was written shortly before, or since: what was read may not be what is there.
        """
        states = {file: read_file_state(file) for file in (*_files_of(searcher.trained), *files)}
        if all(state is None or state.is_settled(started) for state in states.values()):
            self._kept = _Kept(asked_for, searcher, states)


LAST = LastSearcher()


def _files_of(trained: TrainedRun) -> list[Path]:
    """Return the files that a run is loaded from, without the weights of pretrained networks."""
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


log = logging.getLogger(__name__)


def search_split(
    run: Path,
    query: str | Path,
    k: int = 10,
    split: str = "test",
    *,
    places: RunFiles = RunFiles(),
    device: str = "auto",
    corpus: Path | None = None,
    index: Path | None = None,
    index_type: str | None = None,
    index_parameters: str = "",
    rerank: int | None = None,
    page: Path | None = None,
    last: LastSearcher | None = None,
) -> list[SearchHit]:
    """Return the ``k`` best images for a text, or captions for an image file, of a split or an embeddings file.

    The model is the run's, with its best weights; how it reads a query and searches says
    :class:`vse.train.use.searcher.Searcher`. With an ``index`` or ``last`` all that was opened is kept for the next query, as
    long as its files stay as they are.

    Parameters
    ----------
    run, split, places, device : see :func:`vse.train.use.model.load_run`; the weights in ``places`` are those of a CNN, for
        an image file, and of a pretrained text encoder, for a text
    corpus, index, index_type, index_parameters, rerank : see :class:`vse.train.use.searcher.SearchOptions`
    page : where the results will be written; :class:`UserError` if that is one of the files that are searched with
    last : keeps the searcher for further queries; by default, only a searcher with an index is kept
    """
    if index is None and (index_type is not None or index_parameters):
        raise UserError("--index-type and --index-parameters say what --index is, which names the file; it is missing")
    options = SearchOptions(corpus, index, index_type, index_parameters, rerank)
    asked_for, started = (Path.cwd(), run, split, places, device, options), time.time_ns()
    if last is None and index is not None:
        last = LAST
    kept = None if last is None else last.searcher(asked_for)
    trained = load_searched(run, split, places, device) if kept is None else kept.trained
    by_photo = isinstance(query, Path)
    if by_photo and corpus is None and not len(trained.split.pairs):
        raise UserError(f"{trained.dataset.path}: no image of the split {split!r} has a caption for a photo to find")
    read = [*trained.inputs, *([query] if isinstance(query, Path) else []), *([corpus] if corpus else [])]
    if index is not None:
        check_output(index, INDEX, read)
        check_output(metadata_file(index), INDEX_METADATA, read)
        read += [index, metadata_file(index)]
    if page is not None:
        from vse.eval.report.pages import SEARCH_PAGE  # which a search without a page does not need

        check_output(page, SEARCH_PAGE, read)
    if kept is None:
        searcher = Searcher(trained, split, places.weights_dir, options)
    else:
        searcher = kept
        _use(trained)
    asking: Query = decode_image(query) if isinstance(query, Path) else query
    asked = searcher.read(asking)
    if asked.remark:
        log.warning("%s", asked.remark)
    answer = searcher.answer(asking, asked, k)
    if last is not None and kept is None:
        index_files = [] if index is None else [index, metadata_file(index)]
        last.keep(asked_for, searcher, [*index_files, *([corpus] if corpus else [])], started)
    if rerank is not None and answer.scored is not None:
        side = "captions" if by_photo else "images"
        log.info("scored: the %d of %d %s that pooled vectors find", answer.scored, searcher.size(by_photo), side)
    if page is None or corpus is not None:
        return answer.hits
    return with_attention(trained, asking, asked.encoded, answer.hits, answer.rows.tolist())


def load_searched(run: Path, split: str, places: RunFiles, device: str) -> TrainedRun:
    """Load a run for a search, on its device; log a warning if its training did not finish."""
    trained = load_run(run, split, places, device, unfinished=True)
    _use(trained)
    return trained


def _use(trained: TrainedRun) -> None:
    if state := unfinished_state(trained.record):
        run = trained.folder.path
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    use_device(str(trained.device) if trained.device.type == "cuda" else "cpu")


PHOTOS = (".jpg", ".jpeg", ".png", ".webp")


def search_run(
    run: Path,
    query: str | Path,
    asked: SearchRequest = SearchRequest(),
    places: RunFiles = RunFiles(),
    device: str = "auto",
    last: LastSearcher | None = None,
) -> list[SearchHit]:
    """Return the best hits for a query, and write a report if requested; see :func:`search_split`.

    A text that ends as the name of a photo does is one.
    """
    given = Path(query) if str(query).lower().endswith(PHOTOS) else query
    with memory_guard(MEMORY_ADVICE):
        hits = search_split(
            run,
            given,
            asked.k,
            asked.split or "test",
            places=places,
            device=device,
            corpus=asked.corpus,
            index=asked.index,
            index_type=asked.index_type,
            index_parameters=asked.index_parameters,
            rerank=asked.rerank,
            page=asked.html,
            last=last,
        )
    if asked.html is not None:
        from vse.eval.report.pages import write_search_page

        searched = f"{run}, {asked.corpus or asked.split or 'test'}"
        log.info("%s: the results as a report", write_search_page(asked.html, given, hits, searched))
    return hits


def find_phrase(
    run: Path,
    photo: Path,
    phrase: str,
    asked: SearchRequest = SearchRequest(),
    places: RunFiles = RunFiles(),
    device: str = "auto",
) -> PhraseHit:
    """Return the candidate boxes of a photo for a phrase, best first, and write a page with the best one if requested.

    :class:`UserError` for an option of a split, since one photo is searched.
    """
    others = ("split", "corpus", "index", "index_type", "rerank")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(asked, name) is not None]:
        raise UserError(f"--image searches one photo, and {given[0]} is of a split; leave it out")
    if asked.html is not None:
        from vse.eval.report.pages import PHRASE_PAGE

        check_output(asked.html, PHRASE_PAGE, [photo])
    with memory_guard(MEMORY_ADVICE):
        located = locate(run, photo, phrase, places, device)
    hit = PhraseHit(phrase, located.boxes, located.scores)
    if asked.html is not None:
        from vse.eval.report.pages import write_phrase_page

        log.info("%s: the best box in the photo", write_phrase_page(asked.html, photo, [hit], str(run)))
    return hit
