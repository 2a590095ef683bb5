"""A search page: read the request from its address, decode photos, and convert the answers of the runs to page contents."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from PIL import Image
from werkzeug.exceptions import BadRequest

from vse.eval.report.drawings import ATTENTION_EXPLANATIONS, BRACKET_NOTE, draw_attention
from vse.eval.report.pages import jpeg_data_uri, small_jpeg
from vse.eval.search.top_k import Attention, SearchHit
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.dataset import Image as DatasetImage
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import (
    MAX_PIXELS,
    QUERY_IMAGE_FORMATS,
    count_pixels,
    decode_image,
    read_image_bytes,
)
from vse.training.use.model import Query


class SplitImageQuery(NamedTuple):
    """A query for images that are similar to an image of the split."""

    image_id: int


@dataclass(frozen=True)
class RunAnswer:
    """The hits of one run for a query, best first, or an ``error`` message.

    ``n_searched`` : number of images or captions in the searched splits.
    ``name`` : name of the run.
    ``seconds`` : time from the query to the answer.
    ``start`` : number of better hits on earlier pages.
    ``remark`` : message about words that are unknown to the run, or empty.
    ``n_ranked`` : number of items on all pages of results: all searched items, or the candidates that a fast search chose.
    ``n_scored`` : number of items that the model scored pair by pair; None if only vectors were compared.
    ``has_attention`` : True if the page can display the attention between the query and a hit.
    """

    name: str
    seconds: float
    n_searched: int
    hits: Sequence[SearchHit] = ()
    start: int = 0
    remark: str = ""
    error: str = ""
    n_ranked: int = 0
    n_scored: int | None = None
    has_attention: bool = False


def build_answer_json(answers: Sequence[RunAnswer], **facts: Any) -> dict[str, Any]:
    """Return the JSON answer of ``/search?as=json``, see ``docs/serve.md``.

    ``facts`` : fields that describe the query and the split.
    """
    return {**facts, "runs": [_build_run_json(answer) for answer in answers]}


def build_attention_json(attention: Attention) -> dict[str, Any]:
    """Return attention as JSON fields, see ``docs/serve.md``."""
    return {
        "side": attention.direction,
        "score": attention.score,
        "size": list(attention.size),
        "words": list(attention.words),
        "boxes": attention.boxes.tolist(),
        "weights": attention.weights.tolist(),
    }


def _build_run_json(answer: RunAnswer) -> dict[str, Any]:
    hits = [
        {
            "rank": rank,
            "score": hit.score,
            "image": hit.image_id,
            **({} if hit.caption_id is None else {"caption": hit.caption_id}),
            "captions": list(hit.captions),
        }
        for rank, hit in enumerate(answer.hits, answer.start + 1)
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


MAX_RESULTS = 100  # on a page
MAX_TEXT_LENGTH = 1000  # characters
_MAX_PAGE = 100_000
_ID_LIMIT = 2**63

QueryKind = Literal["q", "photo", "like"]
"""The parameter with the query: ``q`` for a text, ``photo`` for the key of an upload, ``like`` for the id of an image."""

ItemKind = Literal["images", "captions"]


@dataclass(frozen=True)
class PageRequest:
    """The search that the address of a page requests.

    ``query_kind``, ``query_value`` : name and value of the parameter with the query: ``q`` for a text, ``photo`` for the key
        of a stored upload, ``like`` for the id of an image.
    ``hit_kind`` : kind of the hits, ``images`` or ``captions``. A text and an image of the split always find images.
    ``k`` : number of results on a page.
    ``page`` : number of the page, from 1.
    ``default_k`` : number of results on a page if the address does not contain ``k``.
    """

    query_kind: QueryKind
    query_value: str
    hit_kind: ItemKind
    k: int
    page: int = 1
    default_k: int = 10

    @property
    def start(self) -> int:
        """The number of results on the pages before this one."""
        return (self.page - 1) * self.k

    def build_address(self, **parameters: object) -> str:
        """Return the address of this page of results, with further parameters."""
        fields: dict[str, object] = {self.query_kind: self.query_value}
        if self.query_kind == "photo":
            fields["find"] = self.hit_kind
        if self.k != self.default_k:
            fields["k"] = self.k
        if self.page > 1:
            fields["page"] = self.page
        return f"/?{urlencode({**fields, **parameters})}"

    def build_page_address(self, page: int) -> str:
        """Return the address of another page of the results."""
        return replace(self, page=page).build_address()

    def build_first_page_address(self, hit_kind: ItemKind) -> str:
        """Return the address of the first page of results of the same query with another kind of hits."""
        return replace(self, hit_kind=hit_kind, page=1).build_address()


def read_page_request(
    arguments: Mapping[str, str], default_k: int, default_hit_kind: ItemKind, photo_key: str | None = None
) -> PageRequest:
    """Read the search from the parameters of an address. Raises BadRequest if a parameter is invalid.

    ``default_hit_kind`` : kind of the hits for a photo if the parameter ``find`` is missing.
    ``photo_key`` : key of the photo that was uploaded with the request and is the query; None without an upload.
    """
    k = read_number(arguments, "k", 1, MAX_RESULTS, default_k)
    page = read_number(arguments, "page", 1, _MAX_PAGE, 1)
    key = arguments.get("photo", "") if photo_key is None else photo_key
    if photo_key is not None or key:
        hit_kind = arguments.get("find", default_hit_kind)
        if hit_kind not in ("images", "captions"):
            raise BadRequest("find must be images or captions")
        return PageRequest("photo", key, "images" if hit_kind == "images" else "captions", k, page, default_k)
    if "like" in arguments:
        return PageRequest("like", str(read_id(arguments, "like")), "images", k, page, default_k)
    text = arguments.get("q", "").strip()
    if not text:
        raise BadRequest("Type a caption, or choose a photograph.")
    if len(text) > MAX_TEXT_LENGTH:
        raise BadRequest(f"The caption has more than {MAX_TEXT_LENGTH} characters.")
    return PageRequest("q", text, "images", k, page, default_k)


def read_id(arguments: Mapping[str, str], name: str) -> int:
    """Return the id of an image or a caption in the parameter ``name``. Raises BadRequest if it is not an id."""
    return read_number(arguments, name, -_ID_LIMIT, _ID_LIMIT - 1)


def read_number(arguments: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    """Return the whole number in the parameter ``name``, or ``default`` if the parameter is missing.

    Raises BadRequest if the number is not from ``least`` to ``most``, or if the parameter and the default are missing.
    """
    given = arguments.get(name)
    if given is None and default is not None:
        return default
    try:
        number = int(given or "")
    except ValueError:
        raise BadRequest(f"{name} must be a number") from None
    if not least <= number <= most:
        raise BadRequest(f"{name} must be a number from {least} to {most}")
    return number


SMALL_PHOTO_SIDE = 480  # pixels of the longer side of a photo among the results
LARGE_PHOTO_PIXELS = 10_000_000  # photos with more pixels are large, and are decoded one at a time
LARGE_PHOTO_LOCK = Lock()
PHOTO_SLOTS = BoundedSemaphore(4)  # photos in memory at once, because a decoded photo takes up to 75 MB by default
_large_photo_slots = BoundedSemaphore(2)  # one large upload is decoded, one waits, others are refused to keep threads free
_UPLOAD_NAME = Path("the photograph")  # the name of an upload in messages
_MAX_KEPT_BYTES = 64 * 2**20


class TooManyLargePhotos(UserError):
    """The error for a large upload that arrives while one large upload is decoded and another one waits."""


class UploadedPhotos:
    """The files of the last uploaded photos, in memory: as many as fit in 64 MiB, but at least one.

    The address of the results contains a key of the file. The key is a hash of the file and of a secret of the server, so
    only the client that sent the photo knows it.
    """

    def __init__(self) -> None:
        self._secret, self._lock = secrets.token_bytes(16), Lock()
        self._content_by_key: dict[str, bytes] = {}

    def keep(self, content: bytes) -> str:
        """Store a file in memory, and return its key."""
        key = hashlib.blake2b(content, key=self._secret, digest_size=16).hexdigest()
        with self._lock:
            self._content_by_key.pop(key, None)
            self._content_by_key[key] = content
            while len(self._content_by_key) > 1 and sum(map(len, self._content_by_key.values())) > _MAX_KEPT_BYTES:
                del self._content_by_key[next(iter(self._content_by_key))]
        return key

    def find(self, key: str) -> bytes:
        """Return the file with a key. Raises UserError if the file is no longer in memory."""
        content = self._content_by_key.get(key)
        if content is None:
            raise UserError("The photograph is no longer in the memory of the server; choose it again.")
        return content


def read_photo(path: Path) -> Image.Image:
    """Read and decode a photo. Large photos are decoded one at a time. Raises BadImage if the file is invalid."""
    with PHOTO_SLOTS:
        content = read_image_bytes(path)
        with LARGE_PHOTO_LOCK if LARGE_PHOTO_PIXELS < count_pixels(path, content) <= MAX_PIXELS else nullcontext():
            return decode_image(path, content)


def read_upload(content: bytes, max_pixels: int) -> Image.Image:
    """Decode an uploaded photo with at most ``max_pixels`` pixels. Raises BadImage if it is larger or invalid.

    Raises TooManyLargePhotos if the photo is large, one large upload is being decoded, and another one waits.
    """
    is_large = LARGE_PHOTO_PIXELS < count_pixels(_UPLOAD_NAME, content, QUERY_IMAGE_FORMATS) <= max_pixels
    if not is_large:
        return decode_image(_UPLOAD_NAME, content, max_pixels, QUERY_IMAGE_FORMATS)
    if not _large_photo_slots.acquire(blocking=False):
        raise TooManyLargePhotos("The server reads other large photographs; try again in a moment.")
    try:
        with LARGE_PHOTO_LOCK:
            return decode_image(_UPLOAD_NAME, content, max_pixels, QUERY_IMAGE_FORMATS)
    finally:
        _large_photo_slots.release()


_CAPTIONS_PER_IMAGE = 2


def build_results(
    dataset: Dataset, request: PageRequest, query: Query | SplitImageQuery, answers: Sequence[RunAnswer], has_captions: bool
) -> dict[str, Any]:
    """Return the fields of a page with results: the heading, a column for each run, and links to the next and previous page.

    ``has_captions`` : True if the split has captions, so that the page of a photo offers both captions and similar images.
    """
    has_more = request.start + request.k < max(answer.n_ranked for answer in answers)
    return {
        **_build_heading(dataset, request, query, has_captions),
        "hit_kind": request.hit_kind,
        "page": request.page,
        "columns": _build_columns(dataset, request, answers),
        "previous": request.build_page_address(request.page - 1) if request.page > 1 else "",
        "next": request.build_page_address(request.page + 1) if has_more else "",
    }


def build_attention(query: Query, attention: Attention, run_name: str, hit_id: int) -> dict[str, Any]:
    """Return the fields of a drawing of attention over a photo.

    If the query is a text, the photo is the found image, with the id ``hit_id``. Otherwise, the photo is the query.
    """
    source = f"/photo/{hit_id}/large" if isinstance(query, str) else jpeg_data_uri(small_jpeg(query, SMALL_PHOTO_SIDE))
    return {
        "drawing": draw_attention("look", [attention]),
        "source": source,
        "explanation": ATTENTION_EXPLANATIONS[attention.direction],
        "brackets": BRACKET_NOTE,
        "run": run_name,
    }


def build_image(dataset: Dataset, image: DatasetImage) -> dict[str, Any]:
    """Return the fields of the page of an image with all its captions."""
    return {
        "id": image.imgid,
        "photo": dataset.has_image_files,
        "name": image.file,
        "split": image.split,
        "captions": [caption.raw for caption in image.captions],
    }


def _build_heading(
    dataset: Dataset, request: PageRequest, query: Query | SplitImageQuery, has_captions: bool
) -> dict[str, Any]:
    """Return the fields of the heading: title, query as text or small photo, and for a photo links to captions and images."""
    if isinstance(query, str):
        return {"text": query, "title": query, "source": "", "choices": []}
    if isinstance(query, SplitImageQuery):
        image = dataset.find_image(query.image_id)
        name = image.file if image else f"image {query.image_id}"
        source = f"/photo/{query.image_id}" if dataset.has_image_files else ""
        return {"text": "", "title": f"Images like {name}", "source": source, "choices": []}
    names: dict[ItemKind, str] = {"captions": "Captions", "images": "Similar images"}
    choices = [(name, request.build_first_page_address(kind), kind == request.hit_kind) for kind, name in names.items()]
    return {
        "text": "",
        "title": "Captions for your photograph" if request.hit_kind == "captions" else "Images like your photograph",
        "source": jpeg_data_uri(small_jpeg(query, SMALL_PHOTO_SIDE)),
        "choices": choices if has_captions else [],
    }


def _build_columns(dataset: Dataset, request: PageRequest, answers: Sequence[RunAnswer]) -> list[dict[str, Any]]:
    """Return a column of the page for each run: the hits of the run, with the ranks that other runs give to the same items."""
    ranks = [{_hit_id(hit): rank for rank, hit in enumerate(answer.hits, answer.start + 1)} for answer in answers]
    columns = []
    for index, answer in enumerate(answers):
        cards = []
        for rank, hit in enumerate(answer.hits, answer.start + 1):
            hit_id = _hit_id(hit)
            elsewhere = [
                (answers[other].name, other_ranks[hit_id])
                for other, other_ranks in enumerate(ranks)
                if other != index and hit_id in other_ranks
            ]
            has_look = answer.has_attention and dataset.has_image_files
            cards.append(
                {
                    "rank": rank,
                    "score": f"{hit.score:.4f}".replace("-", "−"),
                    "image": hit.image_id,
                    "photo": dataset.has_image_files,
                    "name": hit.photo.name if hit.photo else f"image {hit.image_id}",
                    "captions": hit.captions[:_CAPTIONS_PER_IMAGE],
                    "elsewhere": elsewhere,
                    "look": request.build_address(run=index, hit=hit_id) if has_look else "",
                }
            )
        columns.append({"answer": answer, "cards": cards, "number": index})
    return columns


def _hit_id(hit: SearchHit) -> int:
    return int(hit.image_id if hit.caption_id is None else hit.caption_id)
