"""TF-IDF vectors of captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from vse.features.caption_encoders import CaptionEncoder, TokenLists, tensor_text, text_tensor
from vse.features.extractors.tfidf import TfidfConfig
from vse.pipeline.errors import UserError


class TfidfEncoder(CaptionEncoder):
    """Word counts times the logarithm of the words' rarity, unit length (scikit-learn's TfidfVectorizer)."""

    def __init__(self, words: Sequence[str], rarity: NDArray[np.float64], sublinear: bool) -> None:
        self.words, self.rarity, self.sublinear, self.dim = words, rarity, sublinear, len(words)
        self._vectorizer = _vectorizer(sublinear, vocabulary={word: k for k, word in enumerate(words)})
        self._vectorizer.idf_ = rarity

    @classmethod
    def fit(cls, captions: TokenLists, config: TfidfConfig) -> TfidfEncoder:
        """Words that are in ``config.min_count`` captions, the most frequent ``config.max_words`` of them."""
        vectorizer = _vectorizer(config.sublinear, min_df=config.min_count, max_features=config.max_words)
        try:
            vectorizer.fit(captions)
        except ValueError as error:
            raise UserError(f"no word is in {config.min_count} training captions ({error})") from None
        return cls(list(vectorizer.get_feature_names_out()), vectorizer.idf_, config.sublinear)

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        """Vectors of captions."""
        return torch.from_numpy(self._vectorizer.transform(captions).astype(np.float32).toarray())

    def tensors(self) -> dict[str, Tensor]:
        """The words and their rarity."""
        rarity = torch.from_numpy(np.asarray(self.rarity))
        return {"words": text_tensor(self.words), "rarity": rarity, "sublinear": torch.tensor(self.sublinear)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> TfidfEncoder:
        """The encoder whose :meth:`tensors` these are."""
        return cls(tensor_text(tensors["words"]), tensors["rarity"].numpy(), bool(tensors["sublinear"]))


def _vectorizer(sublinear: bool, **options: object) -> TfidfVectorizer:
    return TfidfVectorizer(analyzer=_words_of, sublinear_tf=sublinear, **options)


def _words_of(caption: Sequence[str]) -> Sequence[str]:
    return caption
