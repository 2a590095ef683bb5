"""What the commands ask of a trained run: embeddings of a split or as features, answers to a query, boxes of a phrase.

What draws pages is imported when one is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.eval.search.top_k import PhraseHit, SearchHit
from vse.features.backbones.device import NO_MEMORY, memory_guard
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_out
from vse.train.use.backbone import files_as_features, run_as_features
from vse.train.use.embed import embed_split
from vse.train.use.localise import locate
from vse.train.use.search import LastSearcher, search_split
from vse.train.use.trained_run import RunPlaces

PHOTOS = (".jpg", ".jpeg", ".png", ".webp")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AskedSearch:
    """How a run is searched; None is what :func:`vse.train.use.search.search_split` does by itself.

    Attributes
    ----------
    k : how many results
    split : of the data set; ``test`` if None
    corpus, index, index_type, index_parameters, rerank : see :func:`vse.train.use.search.search_split`
    html : where a report with photos is written
    """

    k: int = 10
    split: str | None = None
    corpus: Path | None = None
    index: Path | None = None
    index_type: str | None = None
    index_parameters: str = ""
    rerank: int | None = None
    html: Path | None = None


def embed_runs(
    runs: Sequence[Path],
    split: str | None = None,
    out: Path | None = None,
    as_features: Path | None = None,
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    unfinished: bool = False,
    allow_leak: bool = False,
    sentences: bool = False,
) -> list[Path]:
    """Write the embeddings of a split by a run, or with ``as_features`` those of all splits as two caches; returns the files.

    With ``as_features`` the ``runs`` may be embeddings files of any program instead, one for each split. See
    :func:`vse.train.use.embed.embed_split` and :func:`vse.train.use.backbone.run_as_features`. :class:`UserError` for
    arguments that do not go together.
    """
    if as_features is None and len(runs) > 1:
        raise UserError(f"{runs[1]}: a second run; vse-embed takes one, and several files only with --as-features")
    if as_features is not None and (out is not None or split is not None):
        raise UserError("--as-features names its own files, of all splits; leave --out and --split out")
    if as_features is not None and sentences:
        raise UserError("--sentences writes scores, which are no features; leave it out, or --as-features")
    with memory_guard(NO_MEMORY):
        if as_features is None:
            return [embed_split(runs[0], out, split or "test", places, device, unfinished, allow_leak, sentences)]
        if not runs[0].is_dir():
            return files_as_features(runs, as_features, places.captions)
        if len(runs) > 1:
            raise UserError(f"{runs[1]}: a second run; --as-features takes one run, or files of embeddings")
        return run_as_features(runs[0], as_features, places, device, unfinished)


def search_run(
    run: Path,
    query: str | Path,
    asked: AskedSearch = AskedSearch(),
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    last: LastSearcher | None = None,
) -> list[SearchHit]:
    """The best for a query, and a report if it is asked for; see :func:`vse.train.use.search.search_split`.

    A text that ends as the name of a photo does is one.
    """
    given = Path(query) if str(query).lower().endswith(PHOTOS) else query
    with memory_guard(NO_MEMORY):
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
    asked: AskedSearch = AskedSearch(),
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
) -> PhraseHit:
    """The candidate boxes of a photo for a phrase, best first, and a page with the best one if it is asked for.

    :class:`UserError` for an option of a split, since one photo is searched.
    """
    others = ("split", "corpus", "index", "index_type", "rerank")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(asked, name) is not None]:
        raise UserError(f"--image searches one photo, and {given[0]} is of a split; leave it out")
    if asked.html is not None:
        from vse.eval.report.pages import PHRASE_PAGE

        check_out(asked.html, PHRASE_PAGE, [photo])
    with memory_guard(NO_MEMORY):
        located = locate(run, photo, phrase, places, device)
    hit = PhraseHit(phrase, located.boxes, located.scores)
    if asked.html is not None:
        from vse.eval.report.pages import write_phrase_page

        log.info("%s: the best box in the photo", write_phrase_page(asked.html, photo, [hit], str(run)))
    return hit
