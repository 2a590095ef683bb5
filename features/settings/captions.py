"""Settings of caption features, and the base class of the encoders that are fitted to captions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from vse.features.settings.base import FeatureSettings, Option
from vse.features.word_files import word_file_sha256
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.parts import import_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vse.features.cache.rows import Item

# They say how a phrase stands in its sentence, not what it names. Numbers (two men), places (the front) and colours are none.
_CLASSES = (
    "a an the this that these those",
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself",
    "it its itself they them their theirs themselves who whom whose which what",
    "of in on at to from with by for into onto upon as about and or but nor",
    "is are was were be been being am has have had having do does did doing",
    "some any each other another such own same so than too very",
)
STOP_WORDS = frozenset(word for words in _CLASSES for word in words.split(" "))


def phrase_words(tokens: Sequence[str], drop_stop_words: bool = False) -> tuple[str, ...]:
    """The words of a phrase as its encoder reads them; a phrase of stop words alone, such as *them*, keeps them.

    Plummer et al. remove stop words from phrases; their list is not published, so this is one of closed word classes.
    """
    words = tuple(token.lower() for token in tokens)
    return (tuple(word for word in words if word not in STOP_WORDS) or words) if drop_stop_words else words


TokenLists = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CaptionCorpus:
    """What an encoder is fitted on.

    training : the training captions, or every phrase of these
    words : all words of the data set's captions, or phrases
    sentences : the training captions, on which word vectors are trained, because phrases have few words around a word
    """

    training: TokenLists
    words: frozenset[str]
    sentences: TokenLists


class CaptionEncoder(ABC):
    """Turns captions, given as words, into vectors of ``dim`` numbers.

    ``words_read`` gives those words of a new caption that are read: all, unless the encoder is one of phrases.
    """

    dim: int
    reads_raw: ClassVar[bool] = False
    words_read: Callable[[Sequence[str]], Sequence[str]] = tuple

    @abstractmethod
    def encode(self, captions: TokenLists) -> Tensor:
        """Vectors of captions (n, dim), float32 on the CPU; zeros for a caption without a known word."""

    def encoded(self, captions: Sequence[Item]) -> tuple[Tensor, ...]:
        """Vectors of captions as a model reads them."""
        return (self.encode([self.words_read(caption.tokens) for caption in captions]),)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that was fitted."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """The encoder whose :meth:`tensors` these are."""


def text_tensor(words: Sequence[str]) -> Tensor:
    """Words as the bytes of their UTF-8, with a line feed between them."""
    import torch

    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def tensor_text(tensor: Tensor) -> list[str]:
    """The words whose :func:`text_tensor` this is."""
    return bytes(tensor.numpy()).decode().split("\n")


class TextSettings(FeatureSettings):
    """A feature of texts: of captions, or of the phrases that captions mark."""

    kind: ClassVar[Literal["image", "text"]] = "text"

    of: Literal["captions", "phrases"] = Field(
        "captions", description="a row per caption, or one per different text of the captions' phrases, in lower case"
    )
    stop_words: Literal["keep", "drop"] = Field(
        "keep", description="drop: of phrases the articles, pronouns, prepositions and the like are not read"
    )

    def content(self) -> dict[str, Any]:
        """What captions have had all along is not named: their features stay what they are."""
        content = super().content()
        for name in ("of", "stop_words"):
            if content[name] == type(self).model_fields[name].default:
                del content[name]
        return content

    @property
    def text_rows(self) -> Literal["captions", "phrases"]:
        """As ``of`` says."""
        return self.of

    def words_read(self, tokens: Sequence[str]) -> Sequence[str]:
        """The words of a caption, or of a phrase, that are read."""
        return phrase_words(tokens, self.stop_words == "drop") if self.of == "phrases" else tokens

    @model_validator(mode="after")
    def _of_phrases(self) -> Self:
        if self.stop_words == "drop" and self.of != "phrases":
            raise ValueError("stop_words: drop goes with of: phrases")
        return self


class CaptionSettings(TextSettings):
    """A feature of captions: an encoder fitted on the training captions, then a vector per caption.

    Of phrases it is fitted on the phrases of the training captions.
    """

    code: ClassVar[str] = "vse.features.extractors.captions:CaptionExtractor"
    encoder: ClassVar[str]
    """The class of the caption encoder, ``module:Class``. It is imported when it runs, because it needs torch."""
    fitted: ClassVar[bool] = True

    chunk: PositiveInt = Field(2048, description="captions encoded at once")

    @classmethod
    def how(cls) -> set[str]:
        """The chunk only bounds the memory."""
        return super().how() | {"chunk"}

    def inputs(self, corpus: CaptionCorpus, words: Path | None) -> Mapping[str, str | None]:
        """What an encoder is fitted to beside the training captions, by its SHA-256."""
        return {}

    @classmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        """Return the class of the encoder, which also reads its tensors."""
        encoder: type[CaptionEncoder] = import_object(cls.encoder)
        return encoder

    def fit(self, corpus: CaptionCorpus, words: Path | None, device: str) -> CaptionEncoder:
        """Fit the encoder to the captions of a data set; ``words`` is the file of word vectors.

        An encoder with its settings and its code in one file overrides this method and :meth:`encoder_class`.
        """
        encoder: CaptionEncoder = import_object(self.encoder).fit_to_corpus(self, corpus, words, device)
        return encoder


class WordSettings(CaptionSettings):
    """A feature built on word vectors."""

    options: ClassVar[tuple[Option, ...]] = ("words",)

    words: str | None = Field(
        None,
        description="word2vec (.bin or text) or GloVe file, or Skip-Thought's table (.npy, dictionary.txt beside it), unless "
        "--words or $VSE_WORDS names one; none: trained here",
    )
    keep: PositiveInt = Field(
        100_000, description="words kept for other captions, in the file's order, beside all words of the data set"
    )
    trained_dim: PositiveInt = Field(300, description="length of vectors trained here")
    trained_epochs: PositiveInt = Field(20, description="passes over the captions, for vectors trained here")
    min_count: PositiveInt = Field(4, description="occurrences a word needs, for vectors trained here")
    seed: int = Field(0, ge=0, description="seed of word vectors trained here, and of the samples of a fit")

    @classmethod
    def how(cls) -> set[str]:
        """The word vectors are known by their hash, as part of the encoder."""
        return super().how() | {"words"}

    def word_file(self, given: str | Path | None = None) -> Path | None:
        """The file of word vectors; None if they are trained."""
        file = given or self.words
        return Path(file) if file else None

    def inputs(self, corpus: CaptionCorpus, words: Path | None) -> Mapping[str, str | None]:
        """The word vectors, and the words of the whole data set, which are the ones kept.

        For phrases, vectors that are trained here are trained on the captions.
        """
        trained = {"training_captions_sha256": sha256_json(corpus.sentences)} if words is None and self.of == "phrases" else {}
        return {
            **trained,
            "words_sha256": word_file_sha256(words) if words is not None else None,
            "words_used_sha256": sha256_json(sorted(corpus.words)),
        }
