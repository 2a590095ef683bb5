"""Settings of ``vse-extract mean_vector``; the code is in :mod:`vse.features.mean_vector_encoder`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vse.features.extractors.settings import WordSettings

if TYPE_CHECKING:
    from vse.features.caption_encoders import CaptionCorpus, CaptionEncoder


class MeanVectorConfig(WordSettings):
    """Means of the captions' word vectors, unit length."""

    extractor: Literal["mean_vector"] = "mean_vector"

    @classmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        """Its code."""
        from vse.features.mean_vector_encoder import MeanVectorEncoder

        return MeanVectorEncoder

    def fit(self, corpus: CaptionCorpus, words: Path | None, device: str) -> CaptionEncoder:
        """Nothing but the words is kept."""
        from vse.features.mean_vector_encoder import MeanVectorEncoder
        from vse.features.words import vectors_of

        kept, _ = vectors_of(corpus, self, words, n_sampled=0)
        return MeanVectorEncoder(kept)
