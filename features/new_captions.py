"""Captions that no cache has, encoded as those of a cache were: a text that is searched for, another data set's captions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from vse.features.cache import FeatureCache
from vse.features.caption_extractor import encoder_of
from vse.features.rows import Item


class CaptionReader(Protocol):
    """What turns captions, given as words and as they were written, into what a model reads of them.

    ``reads_raw`` tells which of the two it reads.
    """

    reads_raw: ClassVar[bool]

    def encoded(self, captions: Sequence[Item]) -> tuple[Tensor, ...]:
        """(vectors (n, dim),), or (sets (n, longest, dim), mask (n, longest)), float32."""


def caption_reader(cache: FeatureCache, weights_dir: Path | None = None, device: str = "auto") -> CaptionReader:
    """What made a cache of captions: the encoder beside it, or the pretrained one that its provenance names.

    :class:`vse.pipeline.errors.UserError` if that is not at hand, or another one is there.
    """
    if cache.provenance.get("config", {}).get("extractor") == "text":
        from vse.features.text_extractor import rebuild_text_extractor

        return rebuild_text_extractor(cache, weights_dir, device)
    return encoder_of(cache, device)
