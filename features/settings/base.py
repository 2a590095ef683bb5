"""Settings that extractors share, and the base class of extractors.

Nothing here imports torch or h5py, so that a workflow which only reads presets starts quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from vse.features.settings.libraries import LIBRARIES, Library
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.parts import import_object
from vse.pipeline.presets.schema import Settings

if TYPE_CHECKING:
    from vse.features.cache.rows import Identity, Item, Rows
    from vse.pipeline.dataset.dataset import Dataset

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

    code: ClassVar[str]
    """The class that computes the feature, ``module:Class``. It is imported when it runs, because it needs torch."""
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
        """What one row is, as :attr:`vse.features.cache.feature_cache.FeatureCache.row_kind` has it."""
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

    def build(self, job: Job) -> Extractor:
        """Return the extractor, ready to compute rows.

        The class that :attr:`code` names is imported here. An extractor with its settings and its code in one file overrides
        this method instead.
        """
        extractor: type[Extractor] = import_object(self.code)
        return extractor.from_job(self, job)


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


class Extractor(ABC):
    """One feature, ready to be computed.

    ``weights_sha256`` stands for all that was learnt (a network's weights, a fitted encoder), ``version`` is raised
    when the code makes other vectors than before, ``extra`` names other files that were read, by their hashes,
    and ``notes`` tell where things came from. ``part`` says which part of the feature is being made, for a person.
    ``asked_precision`` is the precision of the preset, which may be ``auto``. The vectors are computed in that of ``config``.
    """

    version: ClassVar[int] = 1
    config: FeatureSettings
    weights_sha256: str
    extra: Mapping[str, str] = MappingProxyType({})
    notes: Mapping[str, Any] = MappingProxyType({})
    part: str = ""
    asked_precision: str | None = None

    @property
    def kind(self) -> Literal["image", "text"]:
        """Whether rows are made of images or of captions."""
        return self.config.kind

    def identity(self, dataset: Dataset) -> Identity:
        """All that determines the vectors of ``dataset``, beside the images or captions themselves."""
        from vse.features.cache.rows import Identity, row_ids  # imports h5py

        content = {
            "config": self.config.content(),
            "weights_sha256": self.weights_sha256,
            "requested_ids_sha256": sha256_json(row_ids(dataset, self.kind, self.config.text_rows).tolist()),
            "extractor_version": self.version,
            **self.extra,
        }
        return Identity(dataset.name, self.config.name, self.kind, content)

    @property
    def described(self) -> str:
        """What is being made, for a person: ``extract fc7, shard 2 of 4``."""
        return f"extract {self.config.name}" + (f", {self.part}" if self.part else "")

    @classmethod
    def from_job(cls, config: Any, job: Job) -> Self:
        """Return the extractor with the settings ``config`` for a command's ``job``."""
        build: Any = cls
        extractor: Self = build(config, job.weights_dir, job.device)
        return extractor

    @abstractmethod
    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of ``items``, in order.

        With ``skip_bad`` unreadable images are left out and listed; else the first raises :class:`BadImage`.
        """
