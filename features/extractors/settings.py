"""What the settings of extractors share: what determines a feature, how it is made, and what its command and its jobs need.

Nothing here imports torch, so that a workflow which only reads presets starts quickly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.libraries import LIBRARIES, Library
from vse.features.phrase_words import phrase_words
from vse.features.word_files import word_file_sha256
from vse.pipeline.config import Settings
from vse.pipeline.files import sha256_json

if TYPE_CHECKING:
    from vse.features.caption_encoders import CaptionCorpus, CaptionEncoder
    from vse.features.extractors.extractor import Extractor

Option = Literal["skip_bad", "weights_dir", "words"]
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class Job:
    """What a command hands to an extractor beside its settings; ``fit``: fit the encoder of a caption feature first."""

    dataset: Path
    out: Path
    device: str = "auto"
    weights_dir: Path | None = None
    words: Path | None = None
    fit: bool = True


class FeatureSettings(Settings):
    """What every feature preset has; its field ``extractor`` names a class of the registry that derives from this one.

    The docstring of that class is the help text of its command, ``vse-extract <extractor>``.
    """

    kind: ClassVar[Literal["image", "text"]] = "image"
    options: ClassVar[tuple[Option, ...]] = ()
    """Options of its command beside those that every extractor has."""
    memory_mb: ClassVar[int] = 6000
    """What the job of a shard needs at most."""
    fitted: ClassVar[bool] = False
    """Whether an encoder is fitted before rows can be made."""
    reads_raw: ClassVar[bool] = False
    """Whether captions are read as they were written, not as words."""
    default_preset: ClassVar[str | None] = None
    """The preset that its command makes if it is given none; none: the one that is called as the extractor."""

    name: str = Field(description="name of the preset, part of the cache's file name")
    dtype: Literal["float16", "float32"] = Field("float16", description="how the cache stores the vectors")

    @classmethod
    def extractor_name(cls) -> str:
        """What presets and the command line call the extractor."""
        name: str = cls.model_fields["extractor"].default
        return name

    @classmethod
    def how(cls) -> set[str]:
        """Settings of how a feature is made that do not determine it."""
        return {"name"}

    def content(self) -> dict[str, Any]:
        """The settings that determine the vectors, beside weights, which are known by their own hash."""
        return self.model_dump(mode="json", exclude=self.how())

    def triggers(self) -> dict[str, Any]:
        """The content, and where weights and boxes come from: a change makes the workflow's jobs run again.

        Every feature has these keys: a new one would make all jobs of the others run again, too.
        """
        sources = ("weights", "seed", "boxes", "proposer_weights")
        return {**self.content(), **{key: getattr(self, key, None) for key in sources}}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """What one row is, as :attr:`vse.features.cache.FeatureCache.row_kind` has it."""
        return "vectors"

    @property
    def most_vectors(self) -> int | None:
        """How many vectors a row has, or at most; None if that is not known before it is made."""
        return 1

    @property
    def network_reads(self) -> int | None:
        """How often its network reads something for a row, at the speed of the bare network; None if that says nothing."""
        return None

    @property
    def text_rows(self) -> Literal["captions", "phrases"]:
        """What a feature of texts has a row of: every caption, or every different text of the captions' phrases."""
        return "captions"

    @property
    def extra(self) -> str | None:
        """The extra of this package that has to be installed, ``timm`` for example; None if there is no such need."""
        return None

    def files(self) -> list[str]:
        """The user's files that a feature is made from, beside images, captions and word vectors."""
        return []

    def word_file(self, given: str | Path | None = None) -> Path | None:
        """The user's file of word vectors: the one ``given`` for all features, or that of the preset; None if none is read."""
        return None

    @abstractmethod
    def build(self, job: Job) -> Extractor:
        """The extractor, ready to make rows. The code that needs torch is imported here, not at the top of a file."""


class ImageSettings(FeatureSettings):
    """A feature of images."""

    options: ClassVar[tuple[Option, ...]] = ("skip_bad",)

    workers: int = Field(2, ge=0, description="threads that decode images ahead of what computes")

    @classmethod
    def how(cls) -> set[str]:
        """Nor do the threads."""
        return super().how() | {"workers"}


class NetworkSettings(ImageSettings):
    """A network that reads images, and its weights."""

    options: ClassVar[tuple[Option, ...]] = ("skip_bad", "weights_dir")

    model: str = Field(description="a torchvision model, timm/<model> or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained, random, a name that the model's library knows, or a .pth or .safetensors file",
    )
    weights_sha256: str | None = Field(None, description="expected SHA-256 of a weights file")
    seed: int = Field(0, ge=0, description="seed of random weights")
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "fp32", description="fp32, or autocast to bf16 or fp16; auto: bf16 where the device has it, else fp32"
    )

    @classmethod
    def how(cls) -> set[str]:
        """The weights are known by their hash."""
        return super().how() | {"weights", "seed", "weights_sha256"}

    @property
    def library(self) -> Library | None:
        """The library beside torchvision that the model comes from."""
        return LIBRARIES.get(self.model.rpartition("/")[0])

    @property
    def extra(self) -> str | None:
        """That of the model's library."""
        return self.library.extra if self.library is not None else None

    def files(self) -> list[str]:
        """A file of weights."""
        return [self.weights] if self.weights.endswith(WEIGHT_SUFFIXES) else []


class LayerSettings(NetworkSettings):
    """A classification network of which one layer is read."""

    layer: str = Field(
        "penultimate",
        description="a module of the model whose output is taken; penultimate: what the last Linear reads; "
        "output: what the model returns",
    )
    grid: PositiveInt | Literal["all"] = Field(
        1, description="a layer with height and width is averaged to grid x grid positions; all: those that it has"
    )
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


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

    fitted: ClassVar[bool] = True

    chunk: PositiveInt = Field(2048, description="captions encoded at once")

    @classmethod
    def how(cls) -> set[str]:
        """The chunk only bounds the memory."""
        return super().how() | {"chunk"}

    def build(self, job: Job) -> Extractor:
        """The extractor with the encoder beside the cache, which is fitted first if the job says so."""
        from vse.features.caption_extractor import CaptionExtractor, encoder_path, fit_encoder

        encoder = encoder_path(job.out)
        if job.fit:
            fit_encoder(job.dataset, self, encoder, job.device, job.words)
        return CaptionExtractor(self, encoder, job.device)

    def inputs(self, corpus: CaptionCorpus, words: Path | None) -> Mapping[str, str | None]:
        """What an encoder is fitted to beside the training captions, by its SHA-256."""
        return {}

    @classmethod
    @abstractmethod
    def encoder_class(cls) -> type[CaptionEncoder]:
        """The class of the encoder, which its tensors are read back with."""

    @abstractmethod
    def fit(self, corpus: CaptionCorpus, words: Path | None, device: str) -> CaptionEncoder:
        """The encoder of this feature, fitted to a data set's captions; ``words`` is the file of word vectors."""


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
