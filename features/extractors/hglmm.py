"""Settings of ``vse-extract hglmm``; the code is in :mod:`vse.features.hglmm_encoder`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.settings import WordSettings
from vse.pipeline.errors import UserError

if TYPE_CHECKING:
    from vse.features.caption_encoders import CaptionCorpus, CaptionEncoder, TokenLists

MixtureKind = Literal["hybrid", "gaussian", "laplacian"]


class HglmmConfig(WordSettings):
    """Fisher vectors of captions on a hybrid Gaussian-Laplacian mixture, or on several mixtures.

    Two-branch paper, section 4.3; Klein et al., CVPR 2015. Several mixtures are, e.g., the GMM+HGLMM in the tables of both
    papers. Neither paper says how the two are combined: here each is reduced by principal components of its own, and they
    stand side by side. The code of Klein et al. puts the whole Fisher vectors side by side (pca: null) and, for COCO, draws
    20,000 of their 36,000 numbers at random.
    """

    extractor: Literal["hglmm"] = "hglmm"
    ica: bool = Field(True, description="independent components of the word vectors first")
    ica_words: PositiveInt = Field(300_000, description="words drawn for the fit of the components and of the mixture")
    ica_iterations: PositiveInt = 200
    scale: float = Field(10.0, gt=0, description="length of a word's vector before the mixture")
    mixtures: list[MixtureKind] = Field(
        default=["hybrid"],
        min_length=1,
        description="one is fitted per entry, and their vectors stand side by side in this order; hybrid: each dimension of a "
        "cluster is a Gaussian or a Laplacian, whichever is likelier; gaussian, laplacian: all are",
    )
    centres: PositiveInt = Field(30, description="of each mixture")
    iterations: PositiveInt = Field(10, description="steps of expectation maximisation")
    pca: PositiveInt | None = Field(6000, description="principal components of each mixture; none: the whole Fisher vector")
    pca_captions: PositiveInt | None = Field(None, description="training captions drawn for the components; none: all")
    normalize: bool = Field(False, description="L2-normalise each mixture's vectors once more after the projection")

    def content(self) -> dict[str, Any]:
        """A hybrid mixture alone is not named: features made before there were others stay what they are."""
        content = super().content()
        if self.mixtures == ["hybrid"]:
            del content["mixtures"]
        return content

    @model_validator(mode="after")
    def _once(self) -> HglmmConfig:
        if len(set(self.mixtures)) < len(self.mixtures):
            raise ValueError(f"mixtures {', '.join(self.mixtures)}: a kind can be there once")
        return self

    @classmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        """Its code."""
        from vse.features.hglmm_encoder import HglmmEncoder

        return HglmmEncoder

    def fit(self, corpus: CaptionCorpus, words: Path | None, device: str) -> CaptionEncoder:
        """Components and mixtures of a sample of the words, then principal components of the training captions."""
        from vse.features.hardware import pick_device
        from vse.features.hglmm_encoder import HglmmEncoder
        from vse.features.words import vectors_of

        kept, sample = vectors_of(corpus, self, words, self.ica_words)
        n_sampled, dim = sample.vectors.shape
        if n_sampled <= dim:
            raise UserError(
                f"{n_sampled} words with vectors of {dim} numbers are too few for a mixture: "
                "take shorter vectors (trained_dim) or a file of more words (--words)"
            )
        return HglmmEncoder.fit(kept, self._texts(corpus), self, pick_device(device), sample)

    def _texts(self, corpus: CaptionCorpus) -> TokenLists:
        """What principal components are of: the training captions; of phrases each text once, however often it is there.

        Otherwise the components would be those of the few phrases that every other caption has, such as *a man*.
        """
        return list(dict.fromkeys(map(tuple, corpus.training))) if self.of == "phrases" else corpus.training
