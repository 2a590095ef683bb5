"""Settings of the caption features ``text``, ``tfidf``, ``mean_vector`` and ``hglmm``, and encoders fitted to captions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from vse.features.libraries import OPTIONAL_LIBRARIES, OptionalLibrary
from vse.features.settings.base import WEIGHT_FILE_SUFFIXES, ExtractorOption, FeatureSettings, hash_word_file
from vse.pipeline.files.writing import sha256_json, sha256_json_list
from vse.pipeline.presets.parts import import_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vse.features.cache.rows import ExtractorInput


# Words of closed classes relate a phrase to its sentence, but do not describe its object. Numbers (two men), places (the
# front) and colours describe the object, so the list does not contain them.
_CLOSED_CLASS_WORDS = (
    "a an the this that these those",
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself",
    "it its itself they them their theirs themselves who whom whose which what",
    "of in on at to from with by for into onto upon as about and or but nor",
    "is are was were be been being am has have had having do does did doing",
    "some any each other another such own same so than too very",
)
STOP_WORDS = frozenset(word for words in _CLOSED_CLASS_WORDS for word in words.split(" "))


def select_phrase_words(tokens: Sequence[str], drop_stop_words: bool = False) -> tuple[str, ...]:
    """Return the words of a phrase in lower case, without stop words if ``drop_stop_words``.

    A phrase that consists of stop words only, such as *them*, keeps its words. Plummer et al. did not publish their list of
    stop words; :data:`STOP_WORDS` lists articles, pronouns, prepositions and the like.
    """
    words = tuple(token.lower() for token in tokens)
    return (tuple(word for word in words if word not in STOP_WORDS) or words) if drop_stop_words else words


TokenLists = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CaptionCorpus:
    """The texts that a caption encoder is fitted to.

    fit_texts : the training captions or their phrases, each as a list of words; the encoder is fitted to them
    vocabulary : all words of the data set's captions or phrases
    sentences : the training captions, each as a list of words; word vectors are trained on them
    """

    fit_texts: TokenLists
    vocabulary: frozenset[str]
    sentences: TokenLists


class CaptionEncoder(ABC):
    """Base class of encoders that map captions, given as words, to vectors.

    dim : length of a vector
    reads_raw_text : False, because the encoder reads words
    select_words : function from a caption's words to the words that the encoder reads, perhaps without stop words
    """

    dim: int
    reads_raw_text: ClassVar[bool] = False
    select_words: Callable[[Sequence[str]], Sequence[str]] = tuple

    @abstractmethod
    def encode(self, captions: TokenLists) -> Tensor:
        """Return the vectors of captions (n, dim), float32 on the CPU; zeros for a caption without a known word."""

    def encode_inputs(self, captions: Sequence[ExtractorInput]) -> tuple[Tensor, ...]:
        """Return a tuple with one tensor, the vectors (n, dim) of the captions.

        The result is a tuple, because encoders with a vector per token return a mask as a second tensor.
        """
        return (self.encode([self.select_words(caption.tokens) for caption in captions]),)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return all fitted parameters by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """Build the encoder from the result of :meth:`tensors`."""


class TextSettings(FeatureSettings):
    """Settings of a feature of captions, or of the annotated phrases in captions."""

    kind: ClassVar[Literal["image", "text"]] = "text"

    of: Literal["captions", "phrases"] = Field(
        "captions",
        description="captions: a row for each caption. phrases: a row for each distinct phrase that is marked in the "
        "captions, in lower case",
    )
    stop_words: Literal["keep", "drop"] = Field(
        "keep",
        description="keep: all words are read. drop, for phrases only: articles, pronouns, prepositions and other stop "
        "words are left out",
    )

    def list_cache_key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        The settings ``of`` (captions or phrases) and ``stop_words`` are omitted if they have their defaults, so that the keys
        (hashes) of older caches stay the same.
        """
        content = super().list_cache_key_settings()
        for name in ("of", "stop_words"):
            if content[name] == type(self).model_fields[name].default:
                del content[name]
        return content

    @property
    def text_unit(self) -> Literal["captions", "phrases"]:
        """The kind of text that a row belongs to, the setting ``of``."""
        return self.of

    def select_words(self, tokens: Sequence[str]) -> Sequence[str]:
        """Return the words that the encoder reads among the words ``tokens`` of a caption or phrase."""
        return select_phrase_words(tokens, self.stop_words == "drop") if self.of == "phrases" else tokens

    @model_validator(mode="after")
    def _check_stop_words(self) -> Self:
        if self.stop_words == "drop" and self.of != "phrases":
            raise ValueError("stop_words: drop goes with of: phrases")
        return self


class FittedCaptionSettings(TextSettings):
    """Settings of a feature whose encoder is fitted to the training captions, or to their phrases."""

    extractor_class_path: ClassVar[str] = "vse.features.extractors.captions:CaptionExtractor"
    encoder_class_path: ClassVar[str]
    """The class of the caption encoder, as ``module:Class``; imported lazily, because it needs torch."""
    fits_encoder: ClassVar[bool] = True
    extractor_version: ClassVar[int] = 1
    """The version of the code of the extractor, see :attr:`vse.features.settings.base.Extractor.version`."""

    chunk: PositiveInt = Field(2048, description="number of captions that are encoded at once")

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"chunk"}

    def hash_fit_inputs(self, corpus: CaptionCorpus, word_file: Path | None) -> Mapping[str, str | None]:
        """Return the SHA-256 of further inputs of the fit, by name; by default {}.

        The settings and ``corpus.fit_texts`` are not needed here, because the program records them for every encoder.
        """
        return {}

    @classmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        encoder: type[CaptionEncoder] = import_object(cls.encoder_class_path)
        return encoder

    def fit(self, corpus: CaptionCorpus, word_file: Path | None, device: str) -> CaptionEncoder:
        """Return the encoder, fitted to captions. The encoder's class is imported by the name :attr:`encoder_class_path`.

        A settings class in the module of its encoder may override this method, to call the encoder's class directly.
        """
        encoder: CaptionEncoder = import_object(self.encoder_class_path).fit_to_corpus(self, corpus, word_file, device)
        return encoder


class WordSettings(FittedCaptionSettings):
    """Settings of a caption feature that is computed from word vectors."""

    option_names: ClassVar[tuple[ExtractorOption, ...]] = ("words",)

    words: str | None = Field(
        None,
        description="file of word vectors: word2vec (.bin or text), GloVe, or a .npy table of Skip-Thought next to its "
        "dictionary.txt. null: word vectors are trained on the training captions. --words and $VSE_WORDS "
        "override this setting",
    )
    keep: PositiveInt = Field(
        100_000, description="number of words that are kept from the start of the file, besides the words of the data set"
    )
    trained_dim: PositiveInt = Field(300, description="length of the word vectors, if they are trained on the captions")
    trained_epochs: PositiveInt = Field(20, description="number of epochs, if word vectors are trained on the captions")
    min_count: PositiveInt = Field(
        4,
        description="if word vectors are trained on the captions: minimum number of occurrences of a word that gets a vector",
    )
    seed: int = Field(
        0, ge=0, description="seed of the training of word vectors and, for hglmm, of all random steps of its fit"
    )

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"words"}

    def find_word_file(self, override: str | Path | None = None) -> Path | None:
        """Return the file of word vectors: ``override``, else the preset's; None if the vectors are trained on captions."""
        file = override or self.words
        return Path(file) if file else None

    def hash_fit_inputs(self, corpus: CaptionCorpus, word_file: Path | None) -> Mapping[str, str | None]:
        """Return the SHA-256 of the word vectors' file (None: no file) and of the data set's words, by name.

        If the encoder is fitted to phrases and there is no file, word vectors are trained on captions. The hash of the
        training captions is then added.
        """
        trained = word_file is None and self.of == "phrases"
        return {
            **({"training_captions_sha256": sha256_json_list(corpus.sentences)} if trained else {}),
            "words_sha256": hash_word_file(word_file) if word_file is not None else None,
            "words_used_sha256": sha256_json(sorted(corpus.vocabulary)),
        }


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
        description="pretrained, random, or a folder with the model. For an OpenCLIP model: pretrained, random, the name "
        "of weights in the library, or a .pth or .safetensors file",
    )
    revision: str | None = Field(None, description="branch, tag or commit of the model on the hub; null: the newest version")
    seed: int = Field(0, ge=0, description="seed of random weights")
    pooling: Literal["own", "mean", "first", "tokens"] = Field(
        "own",
        description="how token states of the last layer become a caption's vector. mean: their mean. first: the state of "
        "the first token. own: the model's own pooling, or the mean if it has none. tokens: no pooling, a "
        "vector for each token",
    )
    prompt: str | None = Field(
        None, description="text to put before each caption; null: the model's default prompt, if it has one"
    )
    max_length: int | None = Field(
        None, ge=3, description="maximum number of tokens of a caption, with special tokens; null: the model's own maximum"
    )
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="fp32, or autocast to bf16; auto: bf16 if the device has instructions for it, else fp32"
    )
    batch_tokens: PositiveInt = Field(2048, description="number of tokens in a batch, including padding")

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"weights", "revision", "seed", "batch_tokens"}

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
    min_count: PositiveInt = Field(
        4, description="minimum number of training captions that must contain a word; rarer words are ignored"
    )
    max_words: PositiveInt | None = Field(None, description="number of words to keep, the most frequent ones; null: all words")
    sublinear: bool = Field(
        False, description="true: a word that occurs n times in a caption has the term frequency 1 + log(n) instead of n"
    )


class MeanVectorConfig(WordSettings):
    """The mean of the word vectors of a caption, scaled to unit length."""

    encoder_class_path: ClassVar[str] = "vse.features.extractors.words:MeanVectorEncoder"

    extractor: Literal["mean_vector"] = "mean_vector"


MixtureKind = Literal["hybrid", "gaussian", "laplacian"]


class HglmmConfig(WordSettings):
    """Fisher vectors of captions on a hybrid Gaussian-Laplacian mixture model (HGLMM), or on several mixture models.

    The feature follows the two-branch paper (Wang et al., TPAMI 2018, section 4.3) and Klein et al. (CVPR 2015). Both papers
    also use two mixtures, GMM+HGLMM, but do not state how to combine their Fisher vectors. Here PCA reduces the Fisher vectors
    of each mixture separately, and the results are concatenated. The code of Klein et al. has no PCA (pca=null). For COCO,
    that code keeps a random 20,000 of the 36,000 coordinates.
    """

    encoder_class_path: ClassVar[str] = "vse.features.extractors.hglmm:HglmmEncoder"

    extractor: Literal["hglmm"] = "hglmm"
    ica: bool = Field(True, description="first replace the word vectors by their independent components (ICA)")
    ica_words: PositiveInt = Field(300_000, description="number of random words for the fit of the ICA and the mixtures")
    ica_iterations: PositiveInt = Field(200, description="maximum number of iterations of the ICA")
    scale: float = Field(10.0, gt=0, description="length (Euclidean norm) to which each word vector is scaled")
    mixtures: list[MixtureKind] = Field(
        default=["hybrid"],
        min_length=1,
        description="list of mixture models: gaussian, laplacian or hybrid. In hybrid, each dimension of a cluster is a "
        "Gaussian or a Laplacian, whichever is likelier. The Fisher vectors of several mixtures are "
        "concatenated in the order of the list",
    )
    centres: PositiveInt = Field(30, description="number of clusters of each mixture")
    iterations: PositiveInt = Field(10, description="number of steps of expectation maximisation (EM) that fit a mixture")
    pca: PositiveInt | None = Field(
        6000, description="number of principal components of each mixture's Fisher vectors that PCA keeps; null: no PCA"
    )
    pca_captions: PositiveInt | None = Field(
        None, description="number of random training captions for the fit of the PCA; null: all captions"
    )
    normalize: bool = Field(False, description="L2-normalise the vectors of each mixture again after the PCA")

    def list_cache_key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        The setting ``mixtures`` is omitted if it has its default, so that the keys (hashes) of older caches stay the same.
        """
        content = super().list_cache_key_settings()
        if self.mixtures == ["hybrid"]:
            del content["mixtures"]
        return content

    @model_validator(mode="after")
    def _check_mixtures(self) -> HglmmConfig:
        if len(set(self.mixtures)) < len(self.mixtures):
            raise ValueError(f"mixtures {', '.join(self.mixtures)}: each kind may occur only once")
        return self
