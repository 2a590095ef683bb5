"""The Flask application of vse-serve: a search page and photos by id. It writes no files."""

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

from vse.eval.report.drawings import BRACKETS, EXPLANATIONS, draw_attention
from vse.eval.report.pages import jpeg_source, render_page, small_jpeg
from vse.eval.search.top_k import Attention
from vse.pipeline.errors import UserError, printable
from vse.training.serve.answers import SIDE, ServedRuns, TooManyLargePhotos, UnknownId, as_json, columns, read_upload
from vse.training.serve.server import REFUSED
from vse.training.use.queries import Query

MOST = 100  # results of a query
LONGEST = 1000  # characters of a text
_SCRIPT = Path(__file__).with_name("page.js")
_HEADERS = {
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
    """The default number of results, limits on uploaded photos, and the host names of the server.

    ``hosts`` are in lower case and without a port. None accepts any host name.
    """

    k: int = 10
    upload_bytes: int = 20 * 2**20
    hosts: Sequence[str] | None = None
    max_pixels: int = 25_000_000


class _InMemory(flask.Request):
    """A request that keeps an uploaded photo in memory, so that nothing is written to disk."""

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
    app.request_class = _InMemory
    app.config.update(
        MAX_CONTENT_LENGTH=settings.upload_bytes + 4096,  # the form around the photo
        PROPAGATE_EXCEPTIONS=False,
    )
    script = _SCRIPT.read_bytes()

    @app.before_request
    def called_by_its_name() -> None:
        if settings.hosts is not None and _host() not in settings.hosts:
            raise SecurityError

    @app.before_request
    def refused_unread() -> None:
        code, line = flask.request.environ.get(REFUSED, (None, ""))
        if code is not None:
            raise RequestEntityTooLarge if code == RequestEntityTooLarge.code else ServiceUnavailable(line)

    @app.get("/", provide_automatic_options=False)
    def page() -> str:
        return _page(served, settings)

    @app.route("/search", methods=["GET", "POST"], provide_automatic_options=False)
    def search() -> flask.Response | str:
        return _search(served, settings)

    @app.get("/photo/<int:image_id>", provide_automatic_options=False)
    def photo(image_id: int) -> flask.Response:
        answer = flask.Response(served.small_photo(image_id), mimetype="image/jpeg")
        answer.headers["Cache-Control"] = "private, max-age=3600"
        return answer

    @app.get("/page.js", provide_automatic_options=False)
    def page_script() -> flask.Response:
        return flask.Response(script, mimetype="text/javascript")

    @app.after_request
    def secure(answer: flask.Response) -> flask.Response:
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.errorhandler(UserError)
    def wrong(error: UserError) -> tuple[flask.Response | str, int]:
        code = 404 if isinstance(error, UnknownId) else 503 if isinstance(error, TooManyLargePhotos) else 400
        return _error_response(served, settings, str(error), code)

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> tuple[flask.Response | str, int]:
        return _error_response(served, settings, _reason(error, settings), error.code or 500)

    return app


def _search(served: ServedRuns, settings: PageSettings) -> flask.Response | str:
    """Answer a text (GET, ``q``) or a photo (POST, ``photo``). With ``run`` and ``hit``, return the attention for that hit."""
    arguments = flask.request.args
    k = _number("k", settings.k, 1, MOST)
    query = _uploaded_photo(settings) if flask.request.method == "POST" else _query_text()
    if "run" in arguments or "hit" in arguments:
        number, identity = _number("run", None, 0, 2**31), _number("hit", None, -(2**63), 2**63 - 1)
        seen = served.attention(number, query, identity)
        if _answer_format() == "json":
            return flask.jsonify(attention_json(seen))
        drawing = _attention_fields(query, seen, number, identity)
        if _answer_format() == "part":
            return render_page("serve_look.html", **drawing)
        return _page(served, settings, query, look={**drawing, "name": served.runs[number].name})
    answers = served.answers(query, k)
    if _answer_format() == "json":
        return flask.jsonify(as_json(served, query, answers))
    values = {"query": _query_fields(query), "columns": columns(served, answers, not isinstance(query, str)), "k": k}
    return (
        render_page("serve_part.html", **values)
        if _answer_format() == "part"
        else _page(served, settings, query, results=values)
    )


def attention_json(seen: Attention) -> dict[str, Any]:
    """Return attention as JSON fields."""
    return {
        "side": seen.side,
        "score": seen.score,
        "size": list(seen.size),
        "words": list(seen.words),
        "boxes": seen.boxes.tolist(),
        "weights": seen.weights.tolist(),
    }


def _host() -> str:
    """Return the host name in the request, without its port, or an empty string. Werkzeug's own check lacks IPv6."""
    match = re.fullmatch(r"(\[[0-9a-f:]+\]|[^:]+)(?::\d{1,5})?", flask.request.environ.get("HTTP_HOST", "").lower())
    return match[1] if match else ""


def _answer_format() -> str:
    """Return the form of the answer: a page, the part of a page that the script inserts, or JSON."""
    form = flask.request.args.get("as", "page")
    return form if form in ("part", "json") else "page"


def _number(name: str, default: int | None, least: int, most: int) -> int:
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


def _query_text() -> str:
    text = flask.request.args.get("q", "").strip()
    if not text:
        raise BadRequest("Type a caption, or choose a photograph.")
    if len(text) > LONGEST:
        raise BadRequest(f"The caption has more than {LONGEST} characters.")
    return text


def _uploaded_photo(settings: PageSettings) -> Query:
    photo: FileStorage | None = flask.request.files.get("photo")
    content = photo.read() if photo else b""
    if not content:
        raise BadRequest("Choose a photograph first.")
    if len(content) > settings.upload_bytes:
        raise RequestEntityTooLarge
    return read_upload(content, settings.max_pixels)


def _attention_fields(query: Query, seen: Attention, number: int, identity: int) -> dict[str, Any]:
    """Return the data for the drawing of attention on a photo: the hit if it is an image, otherwise the query."""
    source = f"/photo/{identity}" if isinstance(query, str) else jpeg_source(small_jpeg(query, SIDE))
    drawing = draw_attention(f"look-{number}-{identity}".replace("--", "-m"), [seen])
    return {"drawing": drawing, "source": source, "explanation": EXPLANATIONS[seen.side], "brackets": BRACKETS}


def _query_fields(query: Query) -> dict[str, str]:
    if isinstance(query, str):
        return {"text": query, "photo": ""}
    return {"text": "", "photo": jpeg_source(small_jpeg(query, SIDE))}


def _page(served: ServedRuns, settings: PageSettings, query: Query | None = None, **values: Any) -> str:
    """Return the complete page.

    ``values`` fill it: the ``results`` of a query, the attention for one of them (``look``), or an ``error``.
    """
    every = {"results": None, "look": None, "error": "", **values}
    return render_page("serve.html", **_page_fields(served, settings), text=query if isinstance(query, str) else "", **every)


def _page_fields(served: ServedRuns, settings: PageSettings) -> dict[str, Any]:
    return {
        "dataset": served.dataset.name,
        "split": served.split,
        "n_images": served.n_images,
        "names": [run.name for run in served.runs],
        "photos": served.reads_photos,
        "k": _k(settings),
        "most": MOST,
        "longest": LONGEST,
        "upload_bytes": settings.upload_bytes,
        "upload_mb": f"{settings.upload_bytes / 2**20:g}",
    }


def _k(settings: PageSettings) -> int:
    try:
        return _number("k", settings.k, 1, MOST)
    except BadRequest:
        return settings.k


def _reason(error: HTTPException, settings: PageSettings) -> str:
    if isinstance(error, SecurityError):
        return "The server is not called by this name; call it as its terminal says."
    if isinstance(error, RequestEntityTooLarge):
        return f"The photograph has more than {settings.upload_bytes / 2**20:g} MB."
    if type(error) in (BadRequest, ServiceUnavailable) and error.description != type(error).description:
        return str(error.description)
    return {404: "There is no such page.", 405: "This page does not accept such a request."}.get(
        error.code or 500, "That did not work; the terminal of vse-serve may say why."
    )


def _error_response(served: ServedRuns, settings: PageSettings, message: str, code: int) -> tuple[flask.Response | str, int]:
    line = printable(message)
    if _answer_format() == "json":
        return flask.jsonify({"error": line}), code
    if _answer_format() == "part":
        return render_page("serve_error.html", error=line), code
    return _page(served, settings, flask.request.args.get("q", "")[:LONGEST] or None, error=line), code
