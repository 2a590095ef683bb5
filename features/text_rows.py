"""Whether a cache of texts has the rows that are read: captions, or phrases."""

from __future__ import annotations

from vse.features.cache import FeatureCache
from vse.features.rows import TextRows
from vse.pipeline.errors import UserError


def check_text_rows(cache: FeatureCache, wanted: TextRows) -> None:
    """:class:`UserError` unless a cache holds features of texts, and of ``wanted`` ones: ids of the other mean other texts."""
    if cache.kind != "text" or cache.text_rows != wanted:
        raise UserError(
            f"{cache.path} holds {cache.described()}; features of {wanted} are needed, those of a preset with of: {wanted}"
            if cache.kind == "text"
            else f"{cache.path} holds {cache.described()}; features of {wanted} are needed"
        )
