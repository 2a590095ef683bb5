"""Searches in the address of a web page: read the parameters, and build the addresses of further pages of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlencode

from werkzeug.exceptions import BadRequest

MAX_RESULTS = 100  # on a page
MAX_TEXT_LENGTH = 1000  # characters
_MAX_PAGE = 100_000
_ID_LIMIT = 2**63

QueryKind = Literal["q", "photo", "like"]
"""The parameter that holds the query: ``q`` a text, ``photo`` the key of an upload, ``like`` the id of an image."""

ItemKind = Literal["images", "captions"]


@dataclass(frozen=True)
class PageRequest:
    """The search that the address of a page requests.

    ``kind``, ``value`` : the query, see :data:`QueryKind`.
    ``finds`` : kind of items to find; a text and an image of the split always find images.
    ``k`` : number of results on a page.
    ``page`` : number of the page, from 1.
    ``default_k`` : number of results if an address does not contain it.
    """

    kind: QueryKind
    value: str
    finds: ItemKind
    k: int
    page: int = 1
    default_k: int = 10

    @property
    def start(self) -> int:
        """The number of results on the pages before this one."""
        return (self.page - 1) * self.k

    def build_address(self, **parameters: object) -> str:
        """Return the address of this page, with further parameters."""
        fields: dict[str, object] = {self.kind: self.value}
        if self.kind == "photo":
            fields["find"] = self.finds
        if self.k != self.default_k:
            fields["k"] = self.k
        if self.page > 1:
            fields["page"] = self.page
        return f"/?{urlencode({**fields, **parameters})}"

    def turn_to(self, page: int) -> str:
        """Return the address of another page of the results."""
        return replace(self, page=page).build_address()

    def find(self, finds: ItemKind) -> str:
        """Return the address of the first page of results for the same query, with another kind of items to find."""
        return replace(self, finds=finds, page=1).build_address()


def read_page_request(
    arguments: Mapping[str, str], default_k: int, default_finds: ItemKind, photo_key: str | None = None
) -> PageRequest:
    """Return the search that the parameters of an address request. Raises BadRequest if a parameter is invalid.

    ``default_finds`` : kind of items that a photo finds if the parameters do not contain it.
    ``photo_key`` : key of the photo that was uploaded with the request, which replaces the query; None without an upload.
    """
    k = read_number(arguments, "k", 1, MAX_RESULTS, default_k)
    page = read_number(arguments, "page", 1, _MAX_PAGE, 1)
    key = arguments.get("photo", "") if photo_key is None else photo_key
    if photo_key is not None or key:
        finds = arguments.get("find", default_finds)
        if finds not in ("images", "captions"):
            raise BadRequest("find must be images or captions")
        return PageRequest("photo", key, "images" if finds == "images" else "captions", k, page, default_k)
    if "like" in arguments:
        return PageRequest("like", str(read_id(arguments, "like")), "images", k, page, default_k)
    text = arguments.get("q", "").strip()
    if not text:
        raise BadRequest("Type a caption, or choose a photograph.")
    if len(text) > MAX_TEXT_LENGTH:
        raise BadRequest(f"The caption has more than {MAX_TEXT_LENGTH} characters.")
    return PageRequest("q", text, "images", k, page, default_k)


def read_id(arguments: Mapping[str, str], name: str) -> int:
    """Return the id of an image or a caption. Raises BadRequest if the parameter is not an id."""
    return read_number(arguments, name, -_ID_LIMIT, _ID_LIMIT - 1)


def read_number(arguments: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    """Return the whole number in a parameter, or ``default`` if the parameter is missing.

    Raises BadRequest if the number is not from ``least`` to ``most``, or if a parameter without default is missing.
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
