"""Loaded runs that answer the same query, and their answers as JSON and as columns of the page."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from PIL import Image

from vse.eval.report.pages import small_jpeg
from vse.eval.search.top_k import Attention, SearchHit
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import MAX_PIXELS, BadImage, count_pixels, decode_image, read_image_bytes
from vse.training.options import RunFileOptions
from vse.training.use.model import TrainedRun
from vse.training.use.queries import Query
from vse.training.use.search import Searcher, SearchOptions, load_run_for_search

LARGE_PHOTO_PIXELS = 10_000_000  # photos with more pixels are decoded one at a time
LARGE_PHOTO_LOCK = Lock()
_large_photo_slots = BoundedSemaphore(2)  # one large upload is decoded and one waits, so that some threads stay free
_CAPTIONS_PER_IMAGE = 2
log = logging.getLogger(__name__)
SMALL_PHOTO_SIDE = 360  # longer side of a photo on the page, in pixels
_MAX_CACHED_PHOTOS = 1024  # small photos in memory, about 20 KB each


class TooManyLargePhotos(UserError):
    """One large photo is being decoded, and another one already waits."""


def read_photo(path: Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return a decoded photo. Large photos are decoded one at a time. Raises BadImage if ``path`` is invalid or too large."""
    content = read_image_bytes(path) if content is None else content
    with LARGE_PHOTO_LOCK if LARGE_PHOTO_PIXELS < count_pixels(path, content) <= max_pixels else nullcontext():
        return decode_image(path, content, max_pixels)


def read_upload(content: bytes, max_pixels: int) -> Image.Image:
    """Return a decoded photo that a client sent. Raises TooManyLargePhotos if too many large photos wait."""
    path = Path("the photograph")
    if not LARGE_PHOTO_PIXELS < count_pixels(path, content) <= max_pixels:
        return decode_image(path, content, max_pixels)
    if not _large_photo_slots.acquire(blocking=False):
        raise TooManyLargePhotos("The server reads other large photographs; try again in a moment.")
    try:
        return read_photo(path, content, max_pixels)
    finally:
        _large_photo_slots.release()


def build_answer_json(served: ServedRuns, query: Query, answers: Sequence[RunAnswer]) -> dict[str, Any]:
    """Return the answer of ``/search?as=json``, see ``docs/serve.md``."""
    asked = {"query": query} if isinstance(query, str) else {"photo": {"width": query.width, "height": query.height}}
    return {**asked, "dataset": served.dataset.name, "split": served.split, "runs": [_build_run_json(one) for one in answers]}


def build_page_columns(served: ServedRuns, answers: Sequence[RunAnswer], by_photo: bool) -> list[dict[str, Any]]:
    """Return a column of the page for each run, with the hits of the run and their ranks in the other columns."""
    ranks = [{_hit_id(hit): rank for rank, hit in enumerate(one.hits, 1)} for one in answers]
    built = []
    for number, (run, answer) in enumerate(zip(served.runs, answers, strict=True)):
        cards = []
        for rank, hit in enumerate(answer.hits, 1):
            elsewhere = [
                (served.runs[other].name, of_other[_hit_id(hit)])
                for other, of_other in enumerate(ranks)
                if other != number and _hit_id(hit) in of_other
            ]
            cards.append(
                {
                    "rank": rank,
                    "score": f"{hit.score:.4f}".replace("-", "−"),
                    "hit": _hit_id(hit),
                    "image": hit.image_id,
                    "photo": served.dataset.has_image_files,
                    "name": hit.photo.name if hit.photo else f"image {hit.image_id}",
                    "captions": hit.captions[:_CAPTIONS_PER_IMAGE],
                    "elsewhere": elsewhere,
                }
            )
        built.append({"answer": answer, "cards": cards, "number": number, "attends": run.attends, "by_photo": by_photo})
    return built


def _build_run_json(answer: RunAnswer) -> dict[str, Any]:
    hits = [
        {
            "rank": rank,
            "score": hit.score,
            "image": hit.image_id,
            **({} if hit.caption_id is None else {"caption": hit.caption_id}),
            "captions": list(hit.captions),
        }
        for rank, hit in enumerate(answer.hits, 1)
    ]
    return {
        "name": answer.name,
        "seconds": round(answer.seconds, 6),
        "searched": answer.n_searched,
        "scored": answer.n_scored,
        "remark": answer.remark,
        "error": answer.error,
        "hits": hits,
    }


def _hit_id(hit: Any) -> int:
    return int(hit.image_id if hit.caption_id is None else hit.caption_id)


class UnknownId(UserError):
    """The run, image or caption that a request names does not exist."""


@dataclass(frozen=True)
class RunAnswer:
    """The hits of one run for a query, best first, or an ``error`` message.

    ``n_searched`` : number of images or captions to search.
    ``remark`` : message about words that are unknown to the run.
    ``n_scored`` : number of items that the model scored pair by pair; None for a model that compares vectors.
    """

    name: str
    seconds: float
    n_searched: int
    hits: Sequence[SearchHit] = ()
    remark: str = ""
    error: str = ""
    n_scored: int | None = None


@dataclass(frozen=True)
class ServedRun:
    """A loaded run, and the kinds of queries that the run reads. ``attends`` is True if attention can be displayed."""

    name: str
    searcher: Searcher
    reads_texts: bool
    reads_photos: bool
    attends: bool
    lock: Lock = field(default_factory=Lock)  # a model answers one query at a time

    def reads(self, query: Query) -> bool:
        return self.reads_texts if isinstance(query, str) else self.reads_photos


class ServedRuns:
    """Loaded runs that search one split of one data set. Raises UserError if the data sets of the runs differ.

    A warning is logged for a run that reads only texts or only photos.

    ``runs`` : run folders.
    ``split`` : split to search.
    ``files`` : input files of each run.
    ``options`` : options of the search.
    ``device`` : device of the models.
    """

    def __init__(
        self, runs: Sequence[Path], split: str, files: Sequence[RunFileOptions], options: SearchOptions, device: str = "auto"
    ) -> None:
        self.split, self.runs = split, _load_runs(runs, split, files, options, device)
        searchers = [run.searcher for run in self.runs]
        self.dataset: Dataset = searchers[0].trained.dataset
        images = [image for searcher in searchers for image in searcher.trained.split.pairs.images]
        self._photo_files_by_image_id = {
            image.imgid: self.dataset.image_path(image) for image in images if self.dataset.has_image_files
        }
        self.n_images = len({image.imgid for image in images})
        self.read_small_photo = lru_cache(_MAX_CACHED_PHOTOS)(self._decode_small_photo)

    @property
    def reads_photos(self) -> bool:
        return any(run.reads_photos for run in self.runs)

    def answer_query(self, query: Query, k: int) -> list[RunAnswer]:
        """Return the answer of each run: the ``k`` best images for a text, or the ``k`` best captions for a photo."""
        return [_answer_query(run, query, k) for run in self.runs]

    def attention(self, index: int, query: Query, hit_id: int) -> Attention:
        """Return the attention of a run between a query and one of the hits.

        ``index`` is the position of the run, and ``hit_id`` the id of the image or caption. Raises UserError if the run, the
        hit or the attention does not exist.
        """
        if not 0 <= index < len(self.runs):
            raise UnknownId(f"there is no run {index}")
        run, by_photo = self.runs[index], not isinstance(query, str)
        pairs = run.searcher.trained.split.pairs
        rows = (pairs.caption_ids if by_photo else pairs.image_ids) == hit_id
        if not rows.any():
            raise UnknownId(f"the split {self.split!r} has no {'caption' if by_photo else 'image'} {hit_id}")
        if not (run.attends and run.reads(query)):
            raise UserError(f"{run.name} cannot show where it looked")
        with run.lock:
            (attention,) = run.searcher.attention(query, run.searcher.encode(query), [int(rows.argmax())])
        if attention is None:
            raise UserError("its photo cannot be read, or it is not known where on it the regions are")
        return attention

    def _decode_small_photo(self, image_id: int) -> bytes:
        file = self._photo_files_by_image_id.get(image_id)
        if file is None:
            raise UnknownId(f"the split {self.split!r} has no photo {image_id}")
        try:
            return small_jpeg(read_photo(file), SMALL_PHOTO_SIDE)
        except BadImage as error:
            log.warning("%s", error)
            raise UnknownId(f"photo {image_id} cannot be read") from None


def _load_runs(
    runs: Sequence[Path], split: str, files: Sequence[RunFileOptions], options: SearchOptions, device: str
) -> list[ServedRun]:
    served: list[ServedRun] = []
    opened = [load_run_for_search(run, split, run_files, device) for run, run_files in zip(runs, files, strict=True)]
    names = [_build_run_name(trained) for trained in opened]
    for run, run_files, trained in zip(runs, files, opened, strict=True):
        if served and trained.dataset.sha256 != served[0].searcher.trained.dataset.sha256:
            first = served[0].searcher.trained.dataset.path
            raise UserError(f"{run} searches {trained.dataset.path}, and {runs[0]} {first}; all runs must search one file")
        searcher = Searcher(trained, split, run_files.weights_dir, options)
        texts, photos = (_try_load_networks(searcher, by_photo) for by_photo in (False, True))
        if texts and photos:
            raise UserError(texts)
        name = (
            _build_run_name(trained) if names.count(_build_run_name(trained)) == 1 else f"{_build_run_name(trained)} ({run})"
        )
        for what, error in (("texts", texts), ("photos", photos)):
            if error:
                log.warning("%s reads no %s: %s", name, what, error)
        served.append(ServedRun(name, searcher, not texts, not photos, _can_attend(searcher)))
        log.info("%s: %d images, %d captions", name, len(trained.split.pairs.images), len(trained.split.pairs))
    return served


def _build_run_name(trained: TrainedRun) -> str:
    return f"{trained.experiment.name}, seed {trained.record['seed']}"


def _try_load_networks(searcher: Searcher, by_photo: bool) -> str:
    """Load the networks for photos or texts. Return the error message, or an empty string."""
    try:
        searcher.load(by_photo)
    except UserError as error:
        return str(error)
    return ""


def _can_attend(searcher: Searcher) -> bool:
    if searcher.trained.experiment.model.similarity.attention_direction is None:
        return False
    try:
        searcher.attention("", searcher.encode(searcher.choose_sample_text()), [])
    except UserError as error:
        log.info("%s; so the page does not show where it looked", error)
        return False
    return True


def _answer_query(run: ServedRun, query: Query, k: int) -> RunAnswer:
    by_photo = not isinstance(query, str)
    searched = run.searcher.count_items(by_photo)
    if not run.reads(query):
        what = "photos" if by_photo else "texts"
        return RunAnswer(run.name, 0.0, searched, error=f"It reads no {what} here; the terminal of vse-serve says why.")
    started = time.perf_counter()
    try:
        with run.lock:
            encoded = run.searcher.encode(query)
            answer = run.searcher.answer(by_photo, encoded, k)
    except UserError as error:
        return RunAnswer(run.name, time.perf_counter() - started, searched, error=str(error))
    taken = time.perf_counter() - started
    return RunAnswer(run.name, taken, searched, answer.hits, encoded.remark, n_scored=answer.n_scored)
