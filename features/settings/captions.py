"""Base classes of caption features: their settings, and the encoders that are fitted to captions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from vse.features.settings.base import ExtractorOption, FeatureSettings
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file, sha256_json, sha256_json_list
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
    stop words; :data:`STOP_WORDS` lists closed word classes.
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
        """Return a tuple with one tensor, the vectors (n, dim) of the captions."""
        return (self.encode([self.select_words(caption.tokens) for caption in captions]),)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return all fitted parameters by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """Build the encoder from its :meth:`tensors`."""


def words_to_tensor(words: Sequence[str]) -> Tensor:
    """Return words as a uint8 tensor of their UTF-8 bytes, separated by line feeds."""
    import torch

    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def tensor_to_words(tensor: Tensor) -> list[str]:
    """Return the words from which :func:`words_to_tensor` built the tensor."""
    return bytes(tensor.numpy()).decode().split("\n")


class TextSettings(FeatureSettings):
    """Settings of a feature of captions, or of the annotated phrases in captions."""

    kind: ClassVar[Literal["image", "text"]] = "text"

    of: Literal["captions", "phrases"] = Field(
        "captions",
        description="captions: a row for each caption; phrases: a row for each distinct phrase in captions, in lower case",
    )
    stop_words: Literal["keep", "drop"] = Field(
        "keep", description="drop: the encoder ignores articles, pronouns, prepositions and other stop words of phrases"
    )

    def key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        The settings ``of`` and ``stop_words`` are omitted if they have their defaults, so that older caches keep their keys.
        """
        content = super().key_settings()
        for name in ("of", "stop_words"):
            if content[name] == type(self).model_fields[name].default:
                del content[name]
        return content

    @property
    def text_unit(self) -> Literal["captions", "phrases"]:
        """The kind of the texts, the setting ``of``."""
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
    def excluded_fields(cls) -> set[str]:
        return super().excluded_fields() | {"chunk"}

    def hash_fit_inputs(self, corpus: CaptionCorpus, word_file: Path | None) -> Mapping[str, str | None]:
        """Return the SHA-256, by name, of each input of the fit except ``corpus.fit_texts``."""
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


def dictionary_path(table: Path) -> Path | None:
    """Return the path of the file with the words of a ``.npy`` table of word vectors; None for a table in another format."""
    return table.with_name("dictionary.txt") if table.suffix == ".npy" else None


def hash_word_file(path: Path) -> str:
    """Return the SHA-256 of a file of word vectors; for a ``.npy`` table, a hash of the table and its words.

    Raises UserError if a file is missing.
    """
    dictionary = dictionary_path(path)
    for file in (path, dictionary):
        if file is not None and not file.is_file():
            advice = f"; the words of {path.name} belong there, one per line" if file is dictionary else ""
            raise UserError(f"{file}: no such file of word vectors{advice}")
    return sha256_file(path) if dictionary is None else sha256_json([sha256_file(path), sha256_file(dictionary)])


class WordSettings(FittedCaptionSettings):
    """Settings of a caption feature that is computed from word vectors."""

    option_names: ClassVar[tuple[ExtractorOption, ...]] = ("words",)

    words: str | None = Field(
        None,
        description="word2vec (.bin or text) or GloVe file, or Skip-Thought's table (.npy, next to its dictionary.txt); "
        "--words and $VSE_WORDS override it; none: the vectors are trained on the captions",
    )
    keep: PositiveInt = Field(
        100_000,
        description="number of words at the start of the file that the encoder keeps; it also keeps the data set's words",
    )
    trained_dim: PositiveInt = Field(300, description="length of word vectors that are trained on the captions")
    trained_epochs: PositiveInt = Field(
        20, description="epochs of training, for word vectors that are trained on the captions"
    )
    min_count: PositiveInt = Field(
        4, description="number of occurrences that a word needs to get a vector trained on the captions"
    )
    seed: int = Field(
        0, ge=0, description="seed of the training of word vectors, and of the samples that the encoder is fitted to"
    )

    @classmethod
    def excluded_fields(cls) -> set[str]:
        return super().excluded_fields() | {"words"}

    def find_word_file(self, given: str | Path | None = None) -> Path | None:
        """Return the file of word vectors: ``given``, else the preset's file; None if the vectors are trained on captions."""
        file = given or self.words
        return Path(file) if file else None

    def hash_fit_inputs(self, corpus: CaptionCorpus, word_file: Path | None) -> Mapping[str, str | None]:
        """Return hashes of the file of word vectors and of the data set's words.

        An encoder of phrases without a file trains word vectors on captions, so the hash of the training captions is added.
        """
        trained = word_file is None and self.of == "phrases"
        return {
            **({"training_captions_sha256": sha256_json_list(corpus.sentences)} if trained else {}),
            "words_sha256": hash_word_file(word_file) if word_file is not None else None,
            "words_used_sha256": sha256_json(sorted(corpus.vocabulary)),
        }
