"""Settings of ``vse-extract tfidf``; the code is in :mod:`vse.features.tfidf_encoder`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from vse.features.extractors.settings import CaptionSettings

if TYPE_CHECKING:
    from vse.features.caption_encoders import CaptionCorpus, CaptionEncoder


class TfidfConfig(CaptionSettings):
    """TF-IDF vectors of captions: words weighted by their rarity, unit length (scikit-learn)."""

    extractor: Literal["tfidf"] = "tfidf"
    min_count: PositiveInt = Field(4, description="a word needs this many training captions")
    max_words: PositiveInt | None = Field(None, description="the most frequent so many words; none: all")
    sublinear: bool = Field(False, description="1 + log of a word's count in its caption instead of the count")

    @classmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        """Its code."""
        from vse.features.tfidf_encoder import TfidfEncoder

        return TfidfEncoder

    def fit(self, corpus: CaptionCorpus, words: Path | None, device: str) -> CaptionEncoder:
        """Count the words of the training captions."""
        from vse.features.tfidf_encoder import TfidfEncoder

        return TfidfEncoder.fit(corpus.training, self)
