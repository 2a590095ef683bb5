"""The encoders ``tfidf``, TF-IDF vectors of captions, and ``mean_vector``, means of the captions' word vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor
from torch.nn.functional import normalize

from vse.features.extractors.words import WordVectors, select_vectors
from vse.features.settings.captions import CaptionCorpus, CaptionEncoder, TokenLists, tensor_to_words, words_to_tensor
from vse.features.settings.texts import MeanVectorConfig, TfidfConfig
from vse.pipeline.errors import UserError


class TfidfEncoder(CaptionEncoder):
    """Word counts times the words' inverse document frequencies ``idf``, of unit length (scikit-learn's TfidfVectorizer)."""

    def __init__(self, words: Sequence[str], idf: NDArray[np.float64], sublinear: bool) -> None:
        self.words, self.idf, self.sublinear, self.dim = words, idf, sublinear, len(words)
        self._vectorizer = _vectorizer(sublinear, vocabulary={word: k for k, word in enumerate(words)})
        self._vectorizer.idf_ = idf

    @classmethod
    def fit_to_corpus(cls, config: TfidfConfig, corpus: CaptionCorpus, words: Path | None, device: str) -> TfidfEncoder:
        """Fit the encoder to the training captions; ``words`` and ``device`` are not used."""
        return cls.fit(corpus.training, config)

    @classmethod
    def fit(cls, captions: TokenLists, config: TfidfConfig) -> TfidfEncoder:
        """Fit the encoder to captions.

        It knows the words that occur in at least ``config.min_count`` captions, and of these the ``config.max_words`` most
        frequent ones. Raises UserError if there are none.
        """
        vectorizer = _vectorizer(config.sublinear, min_df=config.min_count, max_features=config.max_words)
        try:
            vectorizer.fit(captions)
        except ValueError as error:
            raise UserError(f"no word occurs in {config.min_count} training captions ({error})") from None
        return cls(list(vectorizer.get_feature_names_out()), vectorizer.idf_, config.sublinear)

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        """Return the vectors of captions."""
        return torch.from_numpy(self._vectorizer.transform(captions).astype(np.float32).toarray())

    def tensors(self) -> dict[str, Tensor]:
        """Return the words, their inverse document frequencies (as ``rarity``) and ``sublinear``."""
        idf = torch.from_numpy(np.asarray(self.idf))
        return {"words": words_to_tensor(self.words), "rarity": idf, "sublinear": torch.tensor(self.sublinear)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> TfidfEncoder:
        """Build the encoder from its :meth:`tensors`."""
        return cls(tensor_to_words(tensors["words"]), tensors["rarity"].numpy(), bool(tensors["sublinear"]))


def _vectorizer(sublinear: bool, **options: object) -> TfidfVectorizer:
    return TfidfVectorizer(analyzer=_keep_words, sublinear_tf=sublinear, **options)


def _keep_words(caption: Sequence[str]) -> Sequence[str]:
    """Return the words of a caption unchanged: captions are already tokenised."""
    return caption


class MeanVectorEncoder(CaptionEncoder):
    """The mean of a caption's word vectors, of unit length."""

    @classmethod
    def fit_to_corpus(
        cls, config: MeanVectorConfig, corpus: CaptionCorpus, words: Path | None, device: str
    ) -> MeanVectorEncoder:
        """Return the encoder that keeps the word vectors of the corpus; ``device`` is not used."""
        kept, _ = select_vectors(corpus, config, words, n_sampled=0)
        return cls(kept)

    def __init__(self, words: WordVectors) -> None:
        self.words, self.dim = words, words.vectors.shape[1]

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        """Return the vectors of captions."""
        rows, lengths = self.words.flatten(captions)
        starts = lengths.cumsum(0) - lengths
        return normalize(torch.nn.functional.embedding_bag(rows, torch.from_numpy(self.words.vectors), starts, mode="mean"))

    def tensors(self) -> dict[str, Tensor]:
        """Return the words and their vectors."""
        return self.words.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> MeanVectorEncoder:
        """Build the encoder from its :meth:`tensors`."""
        return cls(WordVectors.from_tensors(tensors))
