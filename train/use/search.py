"""Searching a split, or a file of embeddings, with a run: a text finds images, an image file finds captions."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from vse.eval.search.gpu import use_device
from vse.eval.search.hits import SearchHit
from vse.eval.search.index_file import INDEX, INDEX_NOTE, note_file
from vse.pipeline.errors import UserError
from vse.pipeline.image_files import decode
from vse.pipeline.outputs import check_out
from vse.train.use.attention import with_attention
from vse.train.use.embed import TrainedRun, load_run
from vse.train.use.kept_searcher import LAST
from vse.train.use.opened_run import RunPlaces, unfinished_state
from vse.train.use.queries import Query
from vse.train.use.searcher import Searcher, SearchOptions

log = logging.getLogger(__name__)


def search_split(
    run: Path,
    query: str | Path,
    k: int = 10,
    split: str = "test",
    *,
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    corpus: Path | None = None,
    index: Path | None = None,
    index_type: str | None = None,
    index_parameters: str = "",
    rerank: int | None = None,
    page: Path | None = None,
) -> list[SearchHit]:
    """The ``k`` best for a text (images) or for an image file (captions), best first, of a split or of an embeddings file.

    The model is the run's, with its best weights; how it reads a query and searches says
    :class:`vse.train.use.searcher.Searcher`. With an ``index`` all that was opened is kept for the next query, as long as its
    files stay as they are.

    Parameters
    ----------
    run, split, places, device : see :func:`vse.train.use.embed.load_run`; the weights in ``places`` are those of a CNN, for
        an image file, and of a pretrained text encoder, for a text
    corpus, index, index_type, index_parameters, rerank : see :class:`vse.train.use.searcher.SearchOptions`
    page : where the results will be written; :class:`UserError` if that is one of the files that are searched with
    """
    if index is None and (index_type is not None or index_parameters):
        raise UserError("--index-type and --index-parameters say what --index is, which names the file; it is missing")
    options = SearchOptions(corpus, index, index_type, index_parameters, rerank)
    asked_for, started = (Path.cwd(), run, split, places, device, options), time.time_ns()
    kept = None if index is None else LAST.searcher(asked_for)
    trained = load_searched(run, split, places, device) if kept is None else kept.trained
    by_photo = isinstance(query, Path)
    if by_photo and corpus is None and not len(trained.split.pairs):
        raise UserError(f"{trained.dataset.path}: no image of the split {split!r} has a caption for a photo to find")
    read = [*trained.inputs, *([query] if isinstance(query, Path) else []), *([corpus] if corpus else [])]
    if index is not None:
        check_out(index, INDEX, read)
        check_out(note_file(index), INDEX_NOTE, read)
        read += [index, note_file(index)]
    if page is not None:
        from vse.eval.report.search_page import SEARCH_PAGE  # which a search without a page does not need

        check_out(page, SEARCH_PAGE, read)
    if kept is None:
        searcher = Searcher(trained, split, places.weights_dir, options)
    else:
        searcher = kept
        _use(trained)
    asking: Query = decode(query) if isinstance(query, Path) else query
    asked = searcher.read(asking)
    if asked.remark:
        log.warning("%s", asked.remark)
    answer = searcher.answer(asking, asked, k)
    if index is not None and kept is None:
        LAST.keep(asked_for, searcher, [index, note_file(index), *([corpus] if corpus else [])], started)
    if rerank is not None and answer.scored is not None:
        side = "captions" if by_photo else "images"
        log.info("scored: the %d of %d %s that pooled vectors find", answer.scored, searcher.size(by_photo), side)
    if page is None or corpus is not None:
        return answer.hits
    return with_attention(trained, asking, asked.encoded, answer.hits, answer.rows.tolist())


def load_searched(run: Path, split: str, places: RunPlaces, device: str) -> TrainedRun:
    """A run to search with, on its device; a warning says if its training did not finish."""
    trained = load_run(run, split, places, device, unfinished=True)
    _use(trained)
    return trained


def _use(trained: TrainedRun) -> None:
    if state := unfinished_state(trained.record):
        run = trained.folder.path
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    use_device(str(trained.device) if trained.device.type == "cuda" else "cpu")
