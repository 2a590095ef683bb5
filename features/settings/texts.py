"""Settings of the caption extractors ``text``, ``tfidf``, ``mean_vector`` and ``hglmm``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.libraries import OPTIONAL_LIBRARIES, OptionalLibrary
from vse.features.settings.base import WEIGHT_FILE_SUFFIXES, ExtractorOption
from vse.features.settings.captions import FittedCaptionSettings, TextSettings, WordSettings

_OPEN_CLIP_PREFIX = "open_clip/"


class TextConfig(TextSettings):
    """Vectors of captions, or of their tokens, from a pretrained text encoder.

    The encoder is any model of sentence-transformers or transformers by its name on the Hugging Face hub (BERT, MiniLM, E5,
    GTE, ...), or the text tower of an OpenCLIP model. The encoder reads the original text of captions, not lower-case words.
    """

    option_names: ClassVar[tuple[ExtractorOption, ...]] = ("weights_dir",)
    default_preset: ClassVar[str | None] = "minilm"
    reads_raw_text: ClassVar[bool] = True

    extractor_class_path: ClassVar[str] = "vse.features.extractors.text:TextExtractor"

    extractor: Literal["text"] = "text"
    model: str = Field(description="a model of the Hugging Face hub, such as intfloat/e5-base-v2, or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained, random, or a folder with the model; for OpenCLIP pretrained, random, the name of weights in "
        "the library, or a .pth or .safetensors file",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a download from the hub; none: the newest")
    seed: int = Field(0, ge=0, description="seed of random weights")
    pooling: Literal["own", "mean", "first", "tokens"] = Field(
        "own",
        description="own: the model's own pooling, or the mean for a model without pooling; mean: the mean of the last "
        "layer's states; first: the state of the first token; tokens: the states of all tokens, a vector per token",
    )
    prompt: str | None = Field(
        None, description="text that some models expect before each caption; none: the model's default prompt, if it has one"
    )
    max_length: int | None = Field(
        None, ge=3, description="maximum number of tokens of a caption, with special tokens; none: the model's own maximum"
    )
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="fp32, or autocast to bf16; auto: bf16 if the device has instructions for it, else fp32"
    )
    batch_tokens: PositiveInt = Field(2048, description="number of tokens in a batch, with padding")

    @classmethod
    def excluded_fields(cls) -> set[str]:
        return super().excluded_fields() | {"weights", "revision", "seed", "batch_tokens"}

    def list_rerun_settings(self) -> dict[str, Any]:
        return {**super().list_rerun_settings(), "revision": self.revision}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        return "sets" if self.pooling == "tokens" else "vectors"

    @property
    def max_vectors_per_row(self) -> int | None:
        return None if self.pooling == "tokens" else 1

    @property
    def n_network_passes(self) -> int:
        return 1

    @property
    def open_clip_name(self) -> str | None:
        """The name of the OpenCLIP model; None for a model of the hub."""
        return self.model.removeprefix(_OPEN_CLIP_PREFIX) if self.model.startswith(_OPEN_CLIP_PREFIX) else None

    @property
    def library(self) -> OptionalLibrary:
        """The library that the model comes from."""
        return OPTIONAL_LIBRARIES["sentence_transformers" if self.open_clip_name is None else "open_clip"]

    @property
    def extra(self) -> str | None:
        return self.library.extra

    @property
    def has_local_weights(self) -> bool:
        """True if the setting ``weights`` is the path of a folder or, for OpenCLIP, of a file."""
        if self.open_clip_name is not None:
            return self.weights.endswith(WEIGHT_FILE_SUFFIXES)
        return self.weights not in ("pretrained", "random")

    def list_input_files(self) -> list[str]:
        return [self.weights] if self.has_local_weights else []

    @model_validator(mode="after")
    def _check_model(self) -> TextConfig:
        if self.open_clip_name is not None and self.pooling == "first":
            raise ValueError(
                f"pooling: first cannot be used with {self.model}: its first token does not depend on the caption's words"
            )
        if self.revision is not None and (self.open_clip_name is not None or self.has_local_weights):
            raise ValueError("revision can be used only with a model that is downloaded from the Hugging Face hub")
        return self


class TfidfConfig(FittedCaptionSettings):
    """TF-IDF vectors of captions, of unit length (scikit-learn)."""

    encoder_class_path: ClassVar[str] = "vse.features.extractors.words:TfidfEncoder"

    extractor: Literal["tfidf"] = "tfidf"
    min_count: PositiveInt = Field(4, description="number of training captions in which a word must occur")
    max_words: PositiveInt | None = Field(
        None, description="only this number of the most frequent words are kept; none: all words"
    )
    sublinear: bool = Field(False, description="use 1 + log(count) of a word in its caption instead of the count")


class MeanVectorConfig(WordSettings):
    """Means of the captions' word vectors, of unit length."""

    encoder_class_path: ClassVar[str] = "vse.features.extractors.words:MeanVectorEncoder"

    extractor: Literal["mean_vector"] = "mean_vector"


MixtureKind = Literal["hybrid", "gaussian", "laplacian"]


class HglmmConfig(WordSettings):
    """Fisher vectors of captions on a hybrid Gaussian-Laplacian mixture model (HGLMM), or on several mixture models.

    Two-branch paper (Wang et al., TPAMI 2018), section 4.3; Klein et al., CVPR 2015. The tables of both papers also have two
    mixtures, GMM+HGLMM, but neither paper states how their Fisher vectors are combined. Here the Fisher vectors of each
    mixture are projected on principal components of their own and then concatenated. The code of Klein et al. concatenates
    the unprojected Fisher vectors (pca: null) and, for COCO, keeps a random sample of 20,000 of their 36,000 coordinates.
    """

    encoder_class_path: ClassVar[str] = "vse.features.extractors.hglmm:HglmmEncoder"

    extractor: Literal["hglmm"] = "hglmm"
    ica: bool = Field(True, description="replace the word vectors by their independent components first")
    ica_words: PositiveInt = Field(
        300_000, description="size of the sample of words to which the independent components and the mixtures are fitted"
    )
    ica_iterations: PositiveInt = Field(200, description="maximum number of iterations for the independent components")
    scale: float = Field(10.0, gt=0, description="Euclidean norm to which word vectors are scaled")
    mixtures: list[MixtureKind] = Field(
        default=["hybrid"],
        min_length=1,
        description="kinds of the mixtures; their vectors are concatenated in this order; hybrid: each dimension of a cluster "
        "is a Gaussian or a Laplacian, whichever is likelier; gaussian, laplacian: all dimensions are of this kind",
    )
    centres: PositiveInt = Field(30, description="number of clusters of each mixture")
    iterations: PositiveInt = Field(10, description="steps of expectation maximisation")
    pca: PositiveInt | None = Field(
        6000,
        description="number of principal components of each mixture's Fisher vectors; none: Fisher vectors are not reduced",
    )
    pca_captions: PositiveInt | None = Field(
        None, description="size of the sample of training captions to which the components are fitted; none: all captions"
    )
    normalize: bool = Field(False, description="L2-normalise each mixture's vectors once more after the projection")

    def key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        The setting ``mixtures`` is omitted if it is its default, so that caches older than this setting keep their keys.
        """
        content = super().key_settings()
        if self.mixtures == ["hybrid"]:
            del content["mixtures"]
        return content

    @model_validator(mode="after")
    def _check_mixtures(self) -> HglmmConfig:
        if len(set(self.mixtures)) < len(self.mixtures):
            raise ValueError(f"mixtures {', '.join(self.mixtures)}: each kind may occur only once")
        return self
