"""The Flask application of vse-serve, which answers searches and sends photos. The application writes no files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import flask
from werkzeug.datastructures import FileStorage
from werkzeug.exceptions import BadRequest, HTTPException, RequestEntityTooLarge, SecurityError, ServiceUnavailable

from vse.eval.report.drawings import ATTENTION_EXPLANATIONS, BRACKET_NOTE, draw_attention
from vse.eval.report.pages import jpeg_source, render_page, small_jpeg
from vse.eval.search.top_k import Attention
from vse.pipeline.errors import UserError, to_printable_line
from vse.training.serve.answers import (
    SMALL_PHOTO_SIDE,
    ServedRuns,
    TooManyLargePhotos,
    UnknownId,
    build_answer_json,
    build_page_columns,
    read_upload,
)
from vse.training.serve.server import REFUSAL_KEY
from vse.training.use.queries import Query

MAX_RESULTS = 100  # of a query
MAX_TEXT_LENGTH = 1000  # characters
_SCRIPT_FILE = Path(__file__).with_name("page.js")
_RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class PageSettings:
    """The settings of the application.

    ``n_results`` : default number of results.
    ``max_upload_bytes``, ``max_pixels`` : limits on an uploaded photo.
    ``allowed_hosts`` : host names of the server, in lower case and without a port; None accepts any host name.
    """

    n_results: int = 10
    max_upload_bytes: int = 20 * 2**20
    allowed_hosts: Sequence[str] | None = None
    max_pixels: int = 25_000_000


class _InMemoryRequest(flask.Request):
    """A request whose uploaded photo stays in memory and is not written to disk."""

    max_form_parts = 8

    def _get_file_stream(
        self,
        total_content_length: int | None,
        content_type: str | None,
        filename: str | None = None,
        content_length: Any = None,
    ) -> BytesIO:
        return BytesIO()


def create_app(served: ServedRuns, settings: PageSettings = PageSettings()) -> flask.Flask:
    """Build the application: ``GET /`` is the page, ``/search`` answers queries, ``GET /photo/<id>`` is a small JPEG."""
    app = flask.Flask("vse-serve", static_folder=None)
    app.request_class = _InMemoryRequest
    app.config.update(
        MAX_CONTENT_LENGTH=settings.max_upload_bytes + 4096,  # the form around the photo
        PROPAGATE_EXCEPTIONS=False,
    )
    script = _SCRIPT_FILE.read_bytes()

    @app.before_request
    def check_host() -> None:
        if settings.allowed_hosts is not None and _read_host_name() not in settings.allowed_hosts:
            raise SecurityError

    @app.before_request
    def refuse_unread_request() -> None:
        code, line = flask.request.environ.get(REFUSAL_KEY, (None, ""))
        if code is not None:
            raise RequestEntityTooLarge if code == RequestEntityTooLarge.code else ServiceUnavailable(line)

    @app.get("/", provide_automatic_options=False)
    def page() -> str:
        return _render_page(served, settings)

    @app.route("/search", methods=["GET", "POST"], provide_automatic_options=False)
    def search() -> flask.Response | str:
        return _search(served, settings)

    @app.get("/photo/<int:image_id>", provide_automatic_options=False)
    def photo(image_id: int) -> flask.Response:
        answer = flask.Response(served.read_small_photo(image_id), mimetype="image/jpeg")
        answer.headers["Cache-Control"] = "private, max-age=3600"
        return answer

    @app.get("/page.js", provide_automatic_options=False)
    def page_script() -> flask.Response:
        return flask.Response(script, mimetype="text/javascript")

    @app.after_request
    def add_headers(answer: flask.Response) -> flask.Response:
        for name, value in _RESPONSE_HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.errorhandler(UserError)
    def answer_user_error(error: UserError) -> tuple[flask.Response | str, int]:
        code = 404 if isinstance(error, UnknownId) else 503 if isinstance(error, TooManyLargePhotos) else 400
        return _error_response(served, settings, str(error), code)

    @app.errorhandler(HTTPException)
    def answer_http_error(error: HTTPException) -> tuple[flask.Response | str, int]:
        return _error_response(served, settings, _build_error_message(error, settings), error.code or 500)

    return app


def _search(served: ServedRuns, settings: PageSettings) -> flask.Response | str:
    """Answer a text (GET, ``q``) or a photo (POST, ``photo``). With ``run`` and ``hit``, return the attention of a hit."""
    arguments = flask.request.args
    k = _read_number_argument("k", settings.n_results, 1, MAX_RESULTS)
    query = _read_uploaded_photo(settings) if flask.request.method == "POST" else _read_query_text()
    if "run" in arguments or "hit" in arguments:
        index, hit_id = _read_number_argument("run", None, 0, 2**31), _read_number_argument("hit", None, -(2**63), 2**63 - 1)
        attention = served.attention(index, query, hit_id)
        if _answer_format() == "json":
            return flask.jsonify(build_attention_json(attention))
        drawing = _attention_fields(query, attention, index, hit_id)
        if _answer_format() == "part":
            return render_page("serve_look.html", **drawing)
        return _render_page(served, settings, query, attention={**drawing, "name": served.runs[index].name})
    answers = served.answer_query(query, k)
    if _answer_format() == "json":
        return flask.jsonify(build_answer_json(served, query, answers))
    values = {
        "query": _query_fields(query),
        "columns": build_page_columns(served, answers, not isinstance(query, str)),
        "k": k,
    }
    return (
        render_page("serve_part.html", **values)
        if _answer_format() == "part"
        else _render_page(served, settings, query, results=values)
    )


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


def _read_host_name() -> str:
    """Return the host name in the request without the port, or an empty string. Werkzeug's own check lacks IPv6."""
    match = re.fullmatch(r"(\[[0-9a-f:]+\]|[^:]+)(?::\d{1,5})?", flask.request.environ.get("HTTP_HOST", "").lower())
    return match[1] if match else ""


def _answer_format() -> str:
    """Return ``page``, ``part`` (the part of a page that the script inserts) or ``json``."""
    form = flask.request.args.get("as", "page")
    return form if form in ("part", "json") else "page"


def _read_number_argument(name: str, default: int | None, least: int, most: int) -> int:
    given = flask.request.args.get(name)
    if given is None and default is not None:
        return default
    try:
        number = int(given or "")
    except ValueError:
        raise BadRequest(f"{name} must be a number") from None
    if not least <= number <= most:
        raise BadRequest(f"{name} must be a number from {least} to {most}")
    return number


def _read_query_text() -> str:
    text = flask.request.args.get("q", "").strip()
    if not text:
        raise BadRequest("Type a caption, or choose a photograph.")
    if len(text) > MAX_TEXT_LENGTH:
        raise BadRequest(f"The caption has more than {MAX_TEXT_LENGTH} characters.")
    return text


def _read_uploaded_photo(settings: PageSettings) -> Query:
    photo: FileStorage | None = flask.request.files.get("photo")
    content = photo.read() if photo else b""
    if not content:
        raise BadRequest("Choose a photograph first.")
    if len(content) > settings.max_upload_bytes:
        raise RequestEntityTooLarge
    return read_upload(content, settings.max_pixels)


def _attention_fields(query: Query, attention: Attention, index: int, hit_id: int) -> dict[str, Any]:
    """Return the template fields for a photo and its drawn attention. The photo is the hit of a text, or the query itself."""
    source = f"/photo/{hit_id}" if isinstance(query, str) else jpeg_source(small_jpeg(query, SMALL_PHOTO_SIDE))
    drawing = draw_attention(f"look-{index}-{hit_id}".replace("--", "-m"), [attention])
    return {
        "drawing": drawing,
        "source": source,
        "explanation": ATTENTION_EXPLANATIONS[attention.direction],
        "brackets": BRACKET_NOTE,
    }


def _query_fields(query: Query) -> dict[str, str]:
    if isinstance(query, str):
        return {"text": query, "photo": ""}
    return {"text": "", "photo": jpeg_source(small_jpeg(query, SMALL_PHOTO_SIDE))}


def _render_page(served: ServedRuns, settings: PageSettings, query: Query | None = None, **values: Any) -> str:
    """Return the complete page.

    ``values`` are the contents of the page: the ``results`` of a query, the ``attention`` of a hit, or an ``error``.
    """
    every = {"results": None, "attention": None, "error": "", **values}
    return render_page("serve.html", **_page_fields(served, settings), text=query if isinstance(query, str) else "", **every)


def _page_fields(served: ServedRuns, settings: PageSettings) -> dict[str, Any]:
    return {
        "dataset": served.dataset.name,
        "split": served.split,
        "n_images": served.n_images,
        "names": [run.name for run in served.runs],
        "photos": served.reads_photos,
        "k": _read_n_results(settings),
        "most": MAX_RESULTS,
        "longest": MAX_TEXT_LENGTH,
        "upload_bytes": settings.max_upload_bytes,
        "upload_mb": f"{settings.max_upload_bytes / 2**20:g}",
    }


def _read_n_results(settings: PageSettings) -> int:
    try:
        return _read_number_argument("k", settings.n_results, 1, MAX_RESULTS)
    except BadRequest:
        return settings.n_results


def _build_error_message(error: HTTPException, settings: PageSettings) -> str:
    if isinstance(error, SecurityError):
        return "The server is not called by this name; call it as its terminal says."
    if isinstance(error, RequestEntityTooLarge):
        return f"The photograph has more than {settings.max_upload_bytes / 2**20:g} MB."
    if type(error) in (BadRequest, ServiceUnavailable) and error.description != type(error).description:
        return str(error.description)
    return {404: "There is no such page.", 405: "This page does not accept such a request."}.get(
        error.code or 500, "That did not work; the terminal of vse-serve may say why."
    )


def _error_response(served: ServedRuns, settings: PageSettings, message: str, code: int) -> tuple[flask.Response | str, int]:
    line = to_printable_line(message)
    if _answer_format() == "json":
        return flask.jsonify({"error": line}), code
    if _answer_format() == "part":
        return render_page("serve_error.html", error=line), code
    return _render_page(served, settings, flask.request.args.get("q", "")[:MAX_TEXT_LENGTH] or None, error=line), code
