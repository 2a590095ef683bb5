"""The Flask application of vse-serve. It answers searches and sends photos, and writes no files."""

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

from vse.eval.report.pages import render_page
from vse.pipeline.errors import UserError, to_printable_line
from vse.training.serve.answers import ServedRuns, UnknownId
from vse.training.serve.page import (
    MAX_RESULTS,
    MAX_TEXT_LENGTH,
    PHOTO_SLOTS,
    ItemKind,
    PageRequest,
    SplitImageQuery,
    TooManyLargePhotos,
    UploadedPhotos,
    build_answer_json,
    build_attention,
    build_attention_json,
    build_image,
    build_results,
    read_id,
    read_number,
    read_page_request,
    read_upload,
)
from vse.training.serve.server import REFUSAL_KEY
from vse.training.use.model import Query

_QUERY_PARAMETERS = {"q", "photo", "like"}
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

    ``n_results`` : default number of results on a page.
    ``max_upload_bytes``, ``max_pixels`` : largest size of an uploaded photo.
    ``allowed_hosts`` : host names that requests may address, in lower case and without a port; None accepts any host name.
    """

    n_results: int = 10
    max_upload_bytes: int = 20 * 2**20
    allowed_hosts: Sequence[str] | None = None
    max_pixels: int = 25_000_000


class _InMemoryRequest(flask.Request):
    """A request that keeps an uploaded photo in memory instead of writing the photo to disk."""

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
    """Build the application.

    ``GET /`` returns the search page, with results if the address contains a query. ``GET /search`` answers the same queries;
    with the parameter ``as=json``, the answer is JSON. ``POST /search`` answers an uploaded photo. ``GET /image/<id>`` returns
    the page of an image, and ``GET /photo/<id>`` returns a small JPEG.
    """
    app = flask.Flask("vse-serve", static_folder=None)
    app.request_class = _InMemoryRequest
    app.config.update(
        MAX_CONTENT_LENGTH=settings.max_upload_bytes + 4096,  # 4096 bytes for the other fields of the form
        PROPAGATE_EXCEPTIONS=False,
    )
    page = _SearchPage(served, settings)
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
    def start() -> flask.Response | str:
        return page.answer_search() if _QUERY_PARAMETERS & flask.request.args.keys() else page.render()

    @app.get("/search", provide_automatic_options=False)
    def search() -> flask.Response | str:
        return page.answer_search()

    @app.post("/search", provide_automatic_options=False)
    def upload() -> flask.Response | str:
        return page.answer_upload()

    @app.get("/image/<int:image_id>", provide_automatic_options=False)
    def image(image_id: int) -> str:
        fields = build_image(served.dataset, served.find_image(image_id))
        return render_page("serve_image.html", image=fields) if _read_answer_format() == "part" else page.render(image=fields)

    @app.get("/photo/<int:image_id>", provide_automatic_options=False)
    def photo(image_id: int) -> flask.Response:
        return _build_photo_response(served.read_small_photo(image_id))

    @app.get("/photo/<int:image_id>/large", provide_automatic_options=False)
    def large_photo(image_id: int) -> flask.Response:
        return _build_photo_response(served.read_large_photo(image_id))

    @app.get("/photo/<int:image_id>/file", provide_automatic_options=False)
    def original(image_id: int) -> flask.Response:
        name, content = served.read_original_photo(image_id)
        return flask.send_file(BytesIO(content), "application/octet-stream", as_attachment=True, download_name=name)

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
        return page.answer_error(str(error), code)

    @app.errorhandler(HTTPException)
    def answer_http_error(error: HTTPException) -> tuple[flask.Response | str, int]:
        return page.answer_error(_build_error_message(error, settings), error.code or 500)

    return app


class _SearchPage:
    """The search page, and the photos that clients have uploaded."""

    def __init__(self, served: ServedRuns, settings: PageSettings) -> None:
        self._served, self._settings, self._uploads = served, settings, UploadedPhotos()
        self._header = {
            "dataset": served.dataset.name,
            "split": served.split,
            "searched": served.searched_images_text,
            "names": [run.name for run in served.runs],
            "photos": served.reads_photos,
            "captions": served.has_captions,
            "examples": served.list_example_queries(),
            "most": MAX_RESULTS,
            "longest": MAX_TEXT_LENGTH,
            "upload_bytes": settings.max_upload_bytes,
            "upload_mb": f"{settings.max_upload_bytes / 2**20:g}",
        }
        self._facts = {
            "dataset": served.dataset.name,
            "split": served.split,
            "images": {"searched": served.n_images, "all": len(served.dataset.images)},
        }

    def answer_search(self) -> flask.Response | str:
        """Answer a text (parameter ``q``), a photo that was uploaded before (``photo``) or an image of the split (``like``).

        With the parameters ``run`` (index) and ``hit`` (id), return the attention between a text or photo and this hit.
        """
        request = self._read_request()
        if request.query_kind == "photo":
            return self._answer_photo(request, self._uploads.find(request.query_value))
        query = SplitImageQuery(int(request.query_value)) if request.query_kind == "like" else request.query_value
        return self._answer(request, query)

    def answer_upload(self) -> flask.Response | str:
        """Answer an uploaded photo with JSON, or store the photo in memory and redirect to the page of the results."""
        content = _read_uploaded_file(self._settings)
        if _read_answer_format() == "json":
            return self._answer_photo(self._read_request(""), content)
        address = self._read_request(self._uploads.keep(content)).build_address()
        return flask.Response(status=303, headers={"Location": address})

    def render(self, **values: Any) -> str:
        """Return the complete search page as HTML.

        ``values`` : contents of the page: the ``results`` of a query, the ``attention`` of a hit, an ``image`` or an
            ``error``, and the ``text`` in the search field.
        """
        contents = {"results": None, "attention": None, "image": None, "error": "", "text": "", **values}
        try:
            k = read_number(flask.request.args, "k", 1, MAX_RESULTS, self._settings.n_results)
        except BadRequest:
            k = self._settings.n_results
        return render_page("serve.html", **self._header, **contents, k=k)

    def answer_error(self, message: str, code: int) -> tuple[flask.Response | str, int]:
        line = to_printable_line(message)
        if _read_answer_format() == "json":
            return flask.jsonify({"error": line}), code
        if _read_answer_format() == "part":
            return render_page("serve_error.html", error=line), code
        return self.render(error=line, text=flask.request.args.get("q", "")[:MAX_TEXT_LENGTH]), code

    def _read_request(self, photo_key: str | None = None) -> PageRequest:
        arguments = {**flask.request.args.to_dict(), **flask.request.form.to_dict()}
        default_hit_kind: ItemKind = "captions" if self._served.has_captions else "images"
        return read_page_request(arguments, self._settings.n_results, default_hit_kind, photo_key)

    def _answer_photo(self, request: PageRequest, content: bytes) -> flask.Response | str:
        with PHOTO_SLOTS:
            return self._answer(request, read_upload(content, self._settings.max_pixels))

    def _answer(self, request: PageRequest, query: Query | SplitImageQuery) -> flask.Response | str:
        arguments, served, form = flask.request.args, self._served, _read_answer_format()
        text = query if isinstance(query, str) else ""
        if ("run" in arguments or "hit" in arguments) and not isinstance(query, SplitImageQuery):
            index, hit_id = read_number(arguments, "run", 0, 2**31), read_id(arguments, "hit")
            attention = served.compute_attention(index, query, hit_id)
            if form == "json":
                return flask.jsonify(build_attention_json(attention))
            fields = build_attention(query, attention, served.runs[index].name, hit_id)
            return (
                render_page("serve_look.html", attention=fields)
                if form == "part"
                else self.render(attention=fields, text=text)
            )
        answers = served.answer_query(query, request.k, request.start, request.hit_kind)
        if form == "json":
            return flask.jsonify(build_answer_json(answers, **_describe_query(query), **self._facts))
        return self.render(results=build_results(served.dataset, request, query, answers, served.has_captions), text=text)


def _read_host_name() -> str:
    """Return the host name that the request addresses, without the port, or an empty string if the name is invalid.

    The function of Werkzeug for this purpose does not support IPv6 addresses.
    """
    match = re.fullmatch(r"(\[[0-9a-f:]+\]|[^:]+)(?::\d{1,5})?", flask.request.environ.get("HTTP_HOST", "").lower())
    return match[1] if match else ""


def _read_answer_format() -> str:
    """Return the requested format of the answer: ``page``, ``part`` (HTML for a dialog of the page) or ``json``."""
    form = flask.request.args.get("as", "page")
    return form if form in ("part", "json") else "page"


def _describe_query(query: Query | SplitImageQuery) -> dict[str, Any]:
    """Return the fields that describe the query in a JSON answer."""
    if isinstance(query, SplitImageQuery):
        return {"like": query.image_id}
    return {"query": query} if isinstance(query, str) else {"photo": {"width": query.width, "height": query.height}}


def _read_uploaded_file(settings: PageSettings) -> bytes:
    photo: FileStorage | None = flask.request.files.get("photo")
    content = photo.read() if photo else b""
    if not content:
        raise BadRequest("Choose a photograph first.")
    if len(content) > settings.max_upload_bytes:
        raise RequestEntityTooLarge
    return content


def _build_photo_response(content: bytes) -> flask.Response:
    answer = flask.Response(content, mimetype="image/jpeg")
    answer.headers["Cache-Control"] = "private, max-age=3600"
    return answer


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
