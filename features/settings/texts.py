"""Settings of ``vse-extract text``; the code is in :mod:`vse.features.extractors.text`.

Settings of ``vse-extract tfidf``; the code is in :mod:`vse.features.extractors.tfidf`.

Settings of ``vse-extract mean_vector``; the code is in :mod:`vse.features.extractors.tfidf`.

Settings of ``vse-extract hglmm``; the code is in :mod:`vse.features.extractors.hglmm`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.settings.base import LIBRARIES, WEIGHT_SUFFIXES, Library, Option
from vse.features.settings.captions import CaptionSettings, TextSettings, WordSettings

_OPEN_CLIP = "open_clip/"


class TextConfig(TextSettings):
    """Vectors of captions, or of their tokens, from a pretrained text encoder.

    Any model of sentence-transformers or transformers by its name on the Hugging Face hub (BERT, MiniLM, E5, GTE, ...), or
    the text tower of an OpenCLIP model. Captions are read as they were written, not as lower-case words.
    """

    options: ClassVar[tuple[Option, ...]] = ("weights_dir",)
    default_preset: ClassVar[str | None] = "minilm"
    reads_raw: ClassVar[bool] = True

    code: ClassVar[str] = "vse.features.extractors.text:TextExtractor"

    extractor: Literal["text"] = "text"
    model: str = Field(description="a model of the Hugging Face hub, such as intfloat/e5-base-v2, or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained, random, or a folder with the model; of OpenCLIP a name that it knows, or a .pth or "
        ".safetensors file",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a download from the hub; none: the newest")
    seed: int = Field(0, ge=0, description="seed of random weights")
    pooling: Literal["own", "mean", "first", "tokens"] = Field(
        "own",
        description="own: the model's own vector, the mean if its folder names none; mean, first: of the last layer's states; "
        "tokens: these states themselves, a vector per token",
    )
    prompt: str | None = Field(
        None, description="text before each caption, which some models want; none: the model's own default, mostly none"
    )
    max_length: int | None = Field(
        None, ge=3, description="tokens of a caption that are read, special ones counted; none: as many as the model reads"
    )
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="fp32, or autocast to bf16; auto: bf16 where the device has it, else fp32"
    )
    batch_tokens: PositiveInt = Field(2048, description="tokens that run through the network at once, padding counted")

    @classmethod
    def excluded_fields(cls) -> set[str]:
        """The weights are known by their hash; batches do not change what is computed."""
        return super().excluded_fields() | {"weights", "revision", "seed", "batch_tokens"}

    def triggers(self) -> dict[str, Any]:
        """And the revision that is asked for."""
        return {**super().triggers(), "revision": self.revision}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """A vector per caption, or the set of its tokens' states."""
        return "sets" if self.pooling == "tokens" else "vectors"

    @property
    def max_vectors(self) -> int | None:
        return None if self.pooling == "tokens" else 1

    @property
    def network_passes(self) -> int:
        return 1

    @property
    def open_clip(self) -> str | None:
        """The name of the OpenCLIP model; None for a model of the hub."""
        return self.model.removeprefix(_OPEN_CLIP) if self.model.startswith(_OPEN_CLIP) else None

    @property
    def library(self) -> Library:
        """The library that the model comes from."""
        return LIBRARIES["sentence_transformers" if self.open_clip is None else "open_clip"]

    @property
    def extra(self) -> str | None:
        """That of the model's library."""
        return self.library.extra

    @property
    def from_files(self) -> bool:
        """Whether ``weights`` names a folder of the user or, of OpenCLIP, a file."""
        if self.open_clip is not None:
            return self.weights.endswith(WEIGHT_SUFFIXES)
        return self.weights not in ("pretrained", "random")

    def files(self) -> list[str]:
        """A folder or file of weights."""
        return [self.weights] if self.from_files else []

    @model_validator(mode="after")
    def _fits(self) -> TextConfig:
        if self.open_clip is not None and self.pooling == "first":
            raise ValueError(f"pooling: first of {self.model} knows no word of the caption, since no token sees a later one")
        if self.revision is not None and (self.open_clip is not None or self.from_files):
            raise ValueError("revision goes with a model that is downloaded from the Hugging Face hub")
        return self


class TfidfConfig(CaptionSettings):
    """TF-IDF vectors of captions: words weighted by their rarity, unit length (scikit-learn)."""

    encoder: ClassVar[str] = "vse.features.extractors.tfidf:TfidfEncoder"

    extractor: Literal["tfidf"] = "tfidf"
    min_count: PositiveInt = Field(4, description="a word needs this many training captions")
    max_words: PositiveInt | None = Field(None, description="the most frequent so many words; none: all")
    sublinear: bool = Field(False, description="1 + log of a word's count in its caption instead of the count")


class MeanVectorConfig(WordSettings):
    """Means of the captions' word vectors, unit length."""

    encoder: ClassVar[str] = "vse.features.extractors.tfidf:MeanVectorEncoder"

    extractor: Literal["mean_vector"] = "mean_vector"


MixtureKind = Literal["hybrid", "gaussian", "laplacian"]


class HglmmConfig(WordSettings):
    """Fisher vectors of captions on a hybrid Gaussian-Laplacian mixture, or on several mixtures.

    Two-branch paper, section 4.3; Klein et al., CVPR 2015. Several mixtures are, e.g., the GMM+HGLMM in the tables of both
    papers. Neither paper says how the two are combined: here each is reduced by principal components of its own, and they
    stand side by side. The code of Klein et al. puts the whole Fisher vectors side by side (pca: null) and, for COCO, draws
    20,000 of their 36,000 numbers at random.
    """

    encoder: ClassVar[str] = "vse.features.extractors.hglmm:HglmmEncoder"

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
