"""The runs that vse-serve has loaded, their answers to batches of queries, and the photo files of the searched images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from vse.eval.report.pages import small_jpeg
from vse.eval.search.top_k import Attention
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import Dataset, Image, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, count_pixels, read_image_bytes
from vse.training.options import RunInputOptions
from vse.training.run.inputs import find_training_dataset_file
from vse.training.serve.page import SMALL_PHOTO_SIDE, ItemKind, RunAnswer, SplitImageQuery, read_photo
from vse.training.use.corpus import describe_searched_images, find_default_split
from vse.training.use.model import EncodedQuery, Query, TrainedRun
from vse.training.use.searcher import SearchAnswer, Searcher, SearcherOptions, SearchQuery, load_run_for_search

log = logging.getLogger(__name__)

BatchedQuery = TypeVar("BatchedQuery")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class QueryBatcher(Generic[BatchedQuery, Answer]):
    """A thread that answers the queries of other threads in batches.

    Queries that arrive during a computation form the next batch. Many clients send their next query as soon as they have an
    answer. So if a query arrives soon after a batch, the thread waits a short time for as many queries as it expects: the
    size of the last batch, plus the queries that waited at its end. A client that was alone in the last batch does not wait.

    ``answer_all`` : function that returns the answers to a batch of queries. An exception in place of an answer is raised in
        the thread that waits for the answer.
    ``max_wait_share`` : longest time to wait after a batch, as a share of the time that the batch took.
    """

    def __init__(
        self,
        answer_all: Callable[[Sequence[BatchedQuery]], Sequence[Answer | Exception]],
        max_wait_share: float = 0.3,
    ) -> None:
        self._answer_all, self._max_wait_share = answer_all, max_wait_share
        self._waiting: SimpleQueue[tuple[BatchedQuery, Future[Answer]]] = SimpleQueue()
        self._n_expected = 1  # queries in the next batch
        self._wait_end = 0.0  # until when to wait for them, by time.monotonic
        self._executor = ThreadPoolExecutor(1)

    @property
    def n_waiting(self) -> int:
        """The number of queries that wait for the next batch."""
        return self._waiting.qsize()

    def ask(self, query: BatchedQuery) -> Answer:
        """Return the answer to a query, or raise the exception that ``answer_all`` returned for the query."""
        future: Future[Answer] = Future()
        self._waiting.put((query, future))
        self._executor.submit(self._answer_waiting)  # does nothing if an earlier call has already answered the query
        return future.result()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a function in the answering thread, and return its result."""
        return self._executor.submit(work).result()

    def _answer_waiting(self) -> None:
        if not (batch := self._collect_batch()):
            return
        started = time.monotonic()
        try:
            answers = self._answer_all([query for query, _ in batch])
        except Exception as error:  # is raised in each waiting thread
            answers = [error] * len(batch)
        # These are set before the answers: a client could send its next query at once, and would be counted twice.
        ended = time.monotonic()
        self._n_expected, self._wait_end = len(batch) + self.n_waiting, ended + self._max_wait_share * (ended - started)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _collect_batch(self) -> list[tuple[BatchedQuery, Future[Answer]]]:
        """Return all waiting queries. If some are waiting, but fewer than expected, wait for more until ``_wait_end``."""
        batch: list[tuple[BatchedQuery, Future[Answer]]] = []
        with suppress(Empty):
            while True:
                wait_s = self._wait_end - time.monotonic() if 0 < len(batch) < self._n_expected else 0
                batch.append(self._waiting.get(timeout=max(wait_s, 0)))
        return batch


_LARGE_PHOTO_SIDE = 1600  # longer side of a photo that is displayed alone
_MAX_CACHED_PHOTOS = 1024  # small photos in memory, about 30 KB each
_MAX_EXAMPLE_LENGTH = 60  # characters of an example query
_N_EXAMPLES, _N_EXAMPLE_IMAGES = 4, 20


class UnknownId(UserError):
    """An error for a request that names a run, an image or a caption that does not exist."""


class _RunQuery(NamedTuple):
    """A query to one run.

    ``k`` : number of items to find.
    ``start`` : number of better items to skip, because they are on earlier pages.
    ``hit_kind`` : whether to find images or captions.
    """

    query: Query | SplitImageQuery
    k: int
    start: int
    hit_kind: ItemKind


_AnswerWithRemark = tuple[SearchAnswer, str]  # an answer, and a message about words that are unknown to the run


@dataclass(frozen=True)
class ServedRun:
    """A loaded run, and the kinds of queries that the run can read.

    ``has_attention`` : True if the page can display the attention between a query and a hit.
    ``batcher`` : thread that uses the model and answers waiting queries in batches.
    """

    name: str
    searcher: Searcher
    reads_texts: bool
    reads_photos: bool
    has_attention: bool
    batcher: QueryBatcher[_RunQuery, _AnswerWithRemark]

    def reads(self, query: Query | SplitImageQuery) -> bool:
        """Return whether the run can read a query. Every run can read an image of the split: its features are cached."""
        return isinstance(query, SplitImageQuery) or (self.reads_texts if isinstance(query, str) else self.reads_photos)


class ServedRuns:
    """Loaded runs that search the same splits of one data set. Raises UserError if the data sets of the runs differ.

    A warning is logged for a run that reads only texts or only photos.

    ``runs`` : run folders.
    ``split`` : a split to search, several splits such as ``train,val``, or ``all``. None stands for ``test``,
        or for ``all`` in a data set without a split ``test``.
    ``files`` : for each run, the options that name its input files.
    ``options`` : options of the search.
    ``device`` : device of the models.
    """

    def __init__(
        self,
        runs: Sequence[Path],
        split: str | None,
        files: Sequence[RunInputOptions],
        options: SearcherOptions,
        device: str = "auto",
    ) -> None:
        self.runs = _load_runs(runs, split, files, options, device)
        searchers = [run.searcher for run in self.runs]
        self.dataset: Dataset = searchers[0].trained.dataset
        self.split = split or find_default_split(self.dataset)
        self._image_ids = {int(image_id) for searcher in searchers for image_id in searcher.trained.split.pairs.image_ids}
        self.n_images = len(self._image_ids)
        self.searched_images_text = describe_searched_images(searchers[0].trained, self.split)
        self.read_small_photo = lru_cache(_MAX_CACHED_PHOTOS)(self._encode_small_photo)

    @property
    def reads_photos(self) -> bool:
        return any(run.reads_photos for run in self.runs)

    @property
    def has_captions(self) -> bool:
        return any(len(run.searcher.trained.split.pairs) for run in self.runs)

    def list_example_queries(self) -> list[str]:
        """Return captions of the searched images as example queries.

        If these images have no captions, return captions of the first run's training data.
        """
        trained = self.runs[0].searcher.trained
        images: Sequence[Image] = trained.split.pairs.images
        if not self.has_captions:
            with suppress(UserError):  # a packed model has no data set
                own_cache = open_cache(trained.folder.image_cache_file())
                images = load_dataset_file(
                    find_training_dataset_file(trained.folder, trained.folder.read_record(), own_cache)
                ).images
        spaced = (images[row] for row in range(0, len(images), max(1, len(images) // _N_EXAMPLE_IMAGES)))
        captions = (image.captions[0].raw for image in spaced if image.captions)
        return list(dict.fromkeys(text for text in captions if len(text) <= _MAX_EXAMPLE_LENGTH))[:_N_EXAMPLES]

    def answer_query(
        self, query: Query | SplitImageQuery, k: int, start: int = 0, photo_hit_kind: ItemKind = "captions"
    ) -> list[RunAnswer]:
        """Return the answer of each run: ``k`` hits, best first. The first ``start`` hits, on earlier pages, are skipped.

        A text finds images. An image of the split finds similar images. A photo finds ``photo_hit_kind``, images or captions.
        Raises UnknownId if the image of the split does not exist. If a run fails, its answer contains the error.
        """
        if isinstance(query, SplitImageQuery):
            self.find_image(query.image_id)
        hit_kind = "images" if isinstance(query, str | SplitImageQuery) else photo_hit_kind
        return [_answer_query(run, query, k, start, hit_kind) for run in self.runs]

    def find_image(self, image_id: int) -> Image:
        """Return the image with this id. Raises UnknownId if the split has no such image."""
        image = self.dataset.find_image(image_id) if image_id in self._image_ids else None
        if image is None:
            raise UnknownId(f"the split {self.split!r} has no image {image_id}")
        return image

    def read_large_photo(self, image_id: int) -> bytes:
        """Return a large JPEG of an image of the split. Raises UnknownId if the image file is missing or cannot be read."""
        return self._encode_photo(image_id, _LARGE_PHOTO_SIDE)

    def read_original_photo(self, image_id: int) -> tuple[str, bytes]:
        """Return the name and the unchanged bytes of the file of an image of the split.

        Raises UnknownId if the file is missing or is not an image.
        """
        file = self._find_photo_file(image_id)
        try:
            content = read_image_bytes(file)
            count_pixels(file, content)
        except BadImage as error:
            raise self._build_unreadable_error(image_id, error) from None
        return file.name, content

    def compute_attention(self, index: int, query: Query, hit_id: int) -> Attention:
        """Return the attention that one run computes between a query and a hit.

        ``index`` : position of the run in ``runs``.
        ``hit_id`` : id of the image that a text found, or of the caption that a photo found.

        Raises UserError if the run or the hit does not exist, or if the run cannot compute the attention.
        """
        if not 0 <= index < len(self.runs):
            raise UnknownId(f"there is no run {index}")
        run, by_photo = self.runs[index], not isinstance(query, str)
        pairs = run.searcher.trained.split.pairs
        rows = (pairs.caption_ids if by_photo else pairs.image_ids) == hit_id
        if not rows.any():
            raise UnknownId(f"the split {self.split!r} has no {'caption' if by_photo else 'image'} {hit_id}")
        if not (run.has_attention and run.reads(query)):
            raise UserError(f"{run.name} cannot show where it looked")
        row, searcher = int(rows.argmax()), run.searcher
        (attention,) = run.batcher.run(lambda: searcher.compute_attention(query, searcher.encode(query), [row]))
        if attention is None:
            raise UserError("its photo cannot be read, or it is not known where on it the regions are")
        return attention

    def _encode_small_photo(self, image_id: int) -> bytes:
        return self._encode_photo(image_id, SMALL_PHOTO_SIDE)

    def _encode_photo(self, image_id: int, side: int) -> bytes:
        file = self._find_photo_file(image_id)
        try:
            return small_jpeg(read_photo(file), side)
        except BadImage as error:
            raise self._build_unreadable_error(image_id, error) from None

    def _find_photo_file(self, image_id: int) -> Path:
        image = self.find_image(image_id)
        if not self.dataset.has_image_files:
            raise UnknownId(f"the data set has no photo {image_id}")
        return self.dataset.image_path(image)

    def _build_unreadable_error(self, image_id: int, error: BadImage) -> UnknownId:
        log.warning("%s", error)
        return UnknownId(f"photo {image_id} cannot be read")


def _load_runs(
    runs: Sequence[Path], split: str | None, files: Sequence[RunInputOptions], options: SearcherOptions, device: str
) -> list[ServedRun]:
    served: list[ServedRun] = []
    opened = [load_run_for_search(run, split, run_files, device) for run, run_files in zip(runs, files, strict=True)]
    names = [_build_run_name(trained) for trained in opened]
    for run, run_files, trained in zip(runs, files, opened, strict=True):
        if served and trained.dataset.sha256 != served[0].searcher.trained.dataset.sha256:
            first = served[0].searcher.trained.dataset.path
            raise UserError(f"{run} searches {trained.dataset.path}, and {runs[0]} {first}; all runs must search one file")
        searched_split = split or find_default_split(trained.dataset)
        searcher = Searcher(trained, searched_split, run_files.weights_dir, options)
        text_error, photo_error = (_try_load_networks(searcher, by_photo) for by_photo in (False, True))
        if text_error and photo_error:
            raise UserError(text_error)
        name = _build_run_name(trained)
        name = name if names.count(name) == 1 else f"{name} ({run})"
        for query_kind, error in (("texts", text_error), ("photos", photo_error)):
            if error:
                log.warning("%s reads no %s: %s", name, query_kind, error)
        batcher = QueryBatcher(partial(_search_all, searcher))
        served.append(ServedRun(name, searcher, not text_error, not photo_error, _can_attend(searcher), batcher))
        log.info(
            "%s: searches %s, %d captions", name, describe_searched_images(trained, searched_split), len(trained.split.pairs)
        )
    return served


def _build_run_name(trained: TrainedRun) -> str:
    return f"{trained.experiment.name}, seed {trained.record['seed']}"


def _try_load_networks(searcher: Searcher, by_photo: bool) -> str:
    """Load the networks for photos (``by_photo``) or for texts. Return the error message, or an empty string on success."""
    try:
        searcher.load(by_photo)
    except UserError as error:
        return str(error)
    return ""


def _can_attend(searcher: Searcher) -> bool:
    if searcher.trained.experiment.model.similarity.attention_direction is None:
        return False
    try:
        searcher.compute_attention("", searcher.encode(searcher.choose_sample_text()), [])
    except UserError as error:
        log.info("%s; so the page does not show where it looked", error)
        return False
    return True


def _answer_query(run: ServedRun, query: Query | SplitImageQuery, k: int, start: int, hit_kind: ItemKind) -> RunAnswer:
    n_searched = run.searcher.count_items(hit_kind == "captions")
    if not run.reads(query):
        what = "texts" if isinstance(query, str) else "photos"
        return RunAnswer(run.name, 0.0, n_searched, error=f"It reads no {what} here; the terminal of vse-serve says why.")
    started = time.perf_counter()
    try:
        answer, remark = run.batcher.ask(_RunQuery(query, k, start, hit_kind))
    except UserError as error:
        return RunAnswer(run.name, time.perf_counter() - started, n_searched, error=str(error))
    return RunAnswer(
        run.name,
        time.perf_counter() - started,
        n_searched,
        answer.hits,
        start,
        remark,
        n_ranked=answer.n_ranked,
        n_scored=answer.n_scored,
        has_attention=run.has_attention and (isinstance(query, str) or hit_kind == "captions"),
    )


def _search_all(searcher: Searcher, queries: Sequence[_RunQuery]) -> list[_AnswerWithRemark | Exception]:
    """Return the answer of a run to each query, or the UserError that the query raised. Texts are answered as one batch."""
    answers: dict[int, _AnswerWithRemark | Exception] = {}  # by position of the query
    texts = {k: query.query for k, query in enumerate(queries) if isinstance(query.query, str)}
    encoded_texts: dict[int, EncodedQuery] = {}
    for k, encoded in zip(texts, searcher.encode_all(list(texts.values())), strict=True):
        if isinstance(encoded, UserError):
            answers[k] = encoded
        else:
            encoded_texts[k] = encoded
    if encoded_texts:
        requests = [SearchQuery(encoded, queries[k].k, queries[k].start) for k, encoded in encoded_texts.items()]
        for (k, encoded), answer in zip(encoded_texts.items(), searcher.answer_all(False, requests), strict=True):
            answers[k] = answer, encoded.remark
    for k, query in enumerate(queries):
        if k not in texts:
            try:
                answers[k] = _search_by_photo(searcher, query), ""
            except UserError as error:
                answers[k] = error
    return [answers[k] for k in range(len(queries))]


def _search_by_photo(searcher: Searcher, query: _RunQuery) -> SearchAnswer:
    """Return the answer of a run to a query that is a photo or an image of the split."""
    if isinstance(query.query, SplitImageQuery):
        rows = np.flatnonzero(searcher.trained.split.pairs.image_ids == query.query.image_id)
        if not len(rows):
            raise UserError(f"It has no features of image {query.query.image_id}.")
        row = int(rows[0])
        return searcher.find_similar_images(searcher.encode_image_of_split(row), query.k, query.start, row)
    encoded = searcher.encode(query.query)
    if query.hit_kind == "images":
        return searcher.find_similar_images(encoded, query.k, query.start)
    return searcher.answer(True, encoded, query.k, query.start)
