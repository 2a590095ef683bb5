"""The languages of captions, as tags of BCP 47 such as ``en``, ``de`` or ``pt-BR``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError

_TAG_PATTERN = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*")


def is_language_tag(text: object) -> bool:
    """Return whether ``text`` has the form of a language tag."""
    return isinstance(text, str) and _TAG_PATTERN.fullmatch(text) is not None


def check_language_tag(text: str, option: str) -> str:
    """Return a language tag unchanged. Raises UserError, whose message begins with ``option``, if ``text`` is not a tag."""
    if not is_language_tag(text):
        raise UserError(f"{option} {text}: not a language; give a tag of BCP 47, such as en, de or pt-BR")
    return text


def parse_languages(text: str, option: str = "--languages") -> list[str]:
    """Return the languages in a text such as ``en,de``. Raises UserError if one is not a language tag or occurs twice."""
    languages = [check_language_tag(part.strip(), option) for part in text.split(",")]
    if len(set(languages)) < len(languages):
        raise UserError(f"{option} {text}: names a language twice")
    return languages


def build_language_fields(languages: Sequence[str]) -> dict[str, Any]:
    """Return the fields ``languages`` and ``caption_languages`` of a file of embeddings.

    The parameter ``languages`` has the language of each caption. The field ``languages`` is a text with the distinct
    languages, such as ``en,de``. The field ``caption_languages`` has the index of each caption's language in this text.
    Returns an empty dictionary if a caption has no language.
    """
    if not languages or not all(languages):
        return {}
    names = list(dict.fromkeys(languages))
    return {"caption_languages": np.asarray([names.index(one) for one in languages], np.int64), "languages": ",".join(names)}


def check_language_fields(path: Path, indices: NDArray[np.int64], names: str, n_captions: int) -> None:
    """Raise UserError if the languages in a file of embeddings are invalid. The message begins with ``path``, the file.

    ``indices`` must hold ``n_captions`` positions in ``names``, a text with the distinct languages such as ``en,de``.
    """
    listed = names.split(",")
    if wrong := next((name for name in listed if not is_language_tag(name)), None):
        raise UserError(f"{path}: the attribute languages is {names!r}, and {wrong!r} is not a tag such as en or de")
    if indices.shape != (n_captions,) or indices.min() < 0 or indices.max() >= len(listed):
        raise UserError(f"{path}: caption_languages are not {n_captions} numbers from 0 to {len(listed) - 1}")
