"""Base classes of extractors and of their settings.

This module imports neither torch nor h5py. A workflow, which reads only the presets of features, therefore starts quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from vse.features.libraries import OPTIONAL_LIBRARIES, OptionalLibrary
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file, sha256_json
from vse.pipeline.presets.parts import import_object
from vse.pipeline.presets.schema import Settings

if TYPE_CHECKING:
    from vse.features.cache.rows import CacheIdentity, ExtractorInput, FeatureRows
    from vse.pipeline.dataset.dataset import Dataset


ExtractorOption = Literal["skip_bad", "weights_dir", "words"]
WEIGHT_FILE_SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class ExtractionArguments:
    """The arguments of one extraction, besides the settings of the feature.

    dataset : path of the ``dataset.json``
    out : path of the cache to write
    device : ``auto``, or a device of torch
    weights_dir : folder whose files replace downloads of weights
    word_file : file of word vectors
    must_fit_encoder : whether the encoder of a caption feature is fitted first
    """

    dataset: Path
    out: Path
    device: str = "auto"
    weights_dir: Path | None = None
    word_file: Path | None = None
    must_fit_encoder: bool = True


class FeatureSettings(Settings):
    """Base class of the settings of an extractor; its fields are settings of every feature preset.

    A subclass has a field ``extractor`` whose default is the extractor's name. The docstring of the subclass is the help text
    of the command ``vse-extract <extractor>``.
    """

    extractor_class_path: ClassVar[str]
    """The class that computes the feature, as ``module:Class``; imported lazily, because it needs torch."""
    kind: ClassVar[Literal["image", "text"]] = "image"
    option_names: ClassVar[tuple[ExtractorOption, ...]] = ()
    """The options of this extractor's command among those that only some extractors have."""
    memory_mb: ClassVar[int] = 6000
    """Memory in MB that a job of the workflow reserves for one shard."""
    fits_encoder: ClassVar[bool] = False
    """True if an encoder is fitted before the extraction."""
    reads_raw_text: ClassVar[bool] = False
    """True if the extractor reads the raw text of captions instead of their tokens."""
    default_preset: ClassVar[str | None] = None
    """The default preset of the command; None: the preset with the extractor's name."""

    name: str = Field(description="name of the preset, part of the cache's file name")
    dtype: Literal["float16", "float32"] = Field(
        "float16", description="number type of the vectors in the cache: float16 or float32"
    )
    trained_on: list[str] = Field(
        default_factory=list,
        description="data sets whose test images were used to train the weights; tables mark results on these data sets",
    )

    @classmethod
    def extractor_name(cls) -> str:
        """Return the extractor's name in presets and on the command line."""
        name: str = cls.model_fields["extractor"].default
        return name

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        """Return the names of the settings that are not part of a cache's key, the hash that identifies the cache.

        These settings do not change the vectors, or the key contains a hash in their place, such as the hash of the weights.
        """
        return {"name", "trained_on"}

    def list_cache_key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        The key that identifies a cache is a hash of these settings and of hashes of weights and files.
        """
        return self.model_dump(mode="json", exclude=self.list_fields_outside_key())

    def restrict_dataset(self, dataset: Dataset) -> Dataset:
        """Return the part of a data set that this feature has rows for; by default, the complete data set."""
        return dataset

    def list_rerun_settings(self) -> dict[str, Any]:
        """Return the settings whose change makes the workflow run a job again.

        These settings determine the vectors, or name a source of weights or boxes. A source that the feature lacks is None.
        Adding a source to this method would change the result for all features, and so run all their jobs again.
        """
        sources = ("weights", "seed", "boxes", "proposer_weights")
        return {**self.list_cache_key_settings(), **{key: getattr(self, key, None) for key in sources}}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """The kind of a row: one vector, the vectors of several crops, or a set of vectors (of regions, positions, tokens)."""
        return "vectors"

    @property
    def max_vectors_per_row(self) -> int | None:
        """The largest number of vectors in a row; None if this number is unknown before the extraction."""
        return 1

    @property
    def n_network_passes(self) -> int | None:
        """Number of forward passes of the network for one row; None if the time of a row depends on other work."""
        return None

    @property
    def text_unit(self) -> Literal["captions", "phrases"]:
        """The texts that the rows of a text feature belong to: captions, or the distinct phrases in captions."""
        return "captions"

    @property
    def extra(self) -> str | None:
        """The extra (optional group of dependencies) of this package that the feature needs, such as ``timm``."""
        return None

    def list_input_files(self) -> list[str]:
        """Return the paths of the files that the settings name, such as weights, except the file of word vectors."""
        return []

    def find_word_file(self, override: str | Path | None = None) -> Path | None:
        """Return the file of word vectors: ``override``, else the preset's file; None if the feature needs none."""
        return None

    def build_extractor(self, arguments: ExtractionArguments) -> Extractor:
        """Return the extractor for ``arguments``. The extractor's class is imported by the name :attr:`extractor_class_path`.

        A settings class in the module of its extractor may override this method, to call the extractor's class directly.
        """
        extractor: type[Extractor] = import_object(self.extractor_class_path)
        return extractor.from_arguments(self, arguments)


class ImportedSettings(FeatureSettings):
    """Settings of a feature that another program computed: nothing is extracted, the user imports a file with ``vse-data``."""

    extractor: Literal["imported"] = "imported"
    where: str = Field(description="one sentence: where the files are published")
    command: Literal["import-npy", "import-tsv"] = Field(
        "import-npy", description="the command of vse-data that imports the files"
    )

    def describe_import(self, dataset: Path, out: Path) -> str:
        """Return a message: how to import the cache ``out`` for the data set in the file ``dataset``."""
        return (
            f"{out} is imported, not extracted. {self.where} Import the files with: "
            f"vse-data {self.command} FILES --dataset {dataset} --out-features {out}"
        )

    def build_extractor(self, arguments: ExtractionArguments) -> Extractor:
        raise UserError(self.describe_import(arguments.dataset, arguments.out))


class ImageSettings(FeatureSettings):
    """Settings of a feature of images."""

    option_names: ClassVar[tuple[ExtractorOption, ...]] = ("skip_bad",)

    workers: int = Field(2, ge=0, description="number of threads that decode images while the network computes")
    splits: list[Literal["train", "restval", "val", "test"]] | None = Field(
        None, min_length=1, description="splits whose images are extracted; null: all splits"
    )

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"workers"}

    def list_cache_key_settings(self) -> dict[str, Any]:
        settings = super().list_cache_key_settings()
        # if splits is not set, the keys (hashes) of caches are the same as before this setting existed
        return settings if self.splits else {name: value for name, value in settings.items() if name != "splits"}

    def restrict_dataset(self, dataset: Dataset) -> Dataset:
        return dataset if self.splits is None else dataset.keep_splits(self.splits)


class NetworkSettings(ImageSettings):
    """Settings of a feature that a network computes from images."""

    option_names: ClassVar[tuple[ExtractorOption, ...]] = ("skip_bad", "weights_dir")

    model: str = Field(description="a torchvision model, timm/<model> or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained (the default weights of the model's library), random, the name of other weights in the "
        "library, or a .pth or .safetensors file",
    )
    weights_sha256: str | None = Field(
        None,
        description="SHA-256 that the file of weights must have; null: not checked",
    )
    seed: int = Field(0, ge=0, description="seed of random weights")
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "fp32", description="fp32, or autocast to bf16 or fp16; auto: bf16 if the device has instructions for it, else fp32"
    )

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"weights", "seed", "weights_sha256"}

    @property
    def library(self) -> OptionalLibrary | None:
        """The optional library that the model comes from; None for torchvision."""
        return OPTIONAL_LIBRARIES.get(self.model.rpartition("/")[0])

    @property
    def extra(self) -> str | None:
        return self.library.extra if self.library is not None else None

    def list_input_files(self) -> list[str]:
        return [self.weights] if self.weights.endswith(WEIGHT_FILE_SUFFIXES) else []


class LayerSettings(NetworkSettings):
    """Settings of a feature that is the output of one layer of a classification network."""

    layer: str = Field(
        "penultimate",
        description="layer whose output is the feature: the name of a module, penultimate (the input of the last Linear "
        "layer) or output (the output of the model)",
    )
    grid: PositiveInt | Literal["all"] = Field(
        1,
        description="for a layer whose output is a feature map: 1 averages the map to one vector, g averages each cell of "
        "a g x g grid, and all keeps every position",
    )
    mean: tuple[float, float, float] = Field(
        (0.485, 0.456, 0.406), description="mean of red, green and blue (from 0 to 1), to subtract from the pixels"
    )
    std: tuple[float, float, float] = Field(
        (0.229, 0.224, 0.225),
        description="standard deviation of red, green and blue; pixels are divided by this after the subtraction of mean",
    )


class Extractor(ABC):
    """Base class of the code that computes a feature.

    version : version of the code; increase it with each change of the code that changes the vectors
    config : settings of the feature; instead of ``precision: auto``, they contain the precision in use
    weights_sha256 : SHA-256 of all learned parameters (a network's weights, a fitted encoder)
    extra_hashes : further hashes that enter the cache's key, by name, such as the hash of a tokenizer
    provenance : further notes that the cache records, such as versions of libraries; not part of the cache's key
    shard_label : the shard in progress, such as ``shard 2 of 4``, for the label of the progress bar
    requested_precision : precision in the preset, which may be ``auto``
    """

    version: ClassVar[int] = 1
    config: FeatureSettings
    weights_sha256: str
    extra_hashes: Mapping[str, str] = MappingProxyType({})
    provenance: Mapping[str, Any] = MappingProxyType({})
    shard_label: str = ""
    requested_precision: str | None = None

    @property
    def kind(self) -> Literal["image", "text"]:
        """The kind of the rows: images or captions."""
        return self.config.kind

    def build_cache_identity(self, dataset: Dataset) -> CacheIdentity:
        """Return the identity (names, settings and hashes) of the feature's cache for ``dataset``."""
        from vse.features.cache.rows import CacheIdentity, list_row_ids  # imports h5py

        content = {
            "config": self.config.list_cache_key_settings(),
            "weights_sha256": self.weights_sha256,
            "requested_ids_sha256": sha256_json(
                list_row_ids(self.config.restrict_dataset(dataset), self.kind, self.config.text_unit).tolist()
            ),
            "extractor_version": self.version,
            **self.extra_hashes,
        }
        return CacheIdentity(dataset.name, self.config.name, self.kind, content)

    @property
    def progress_label(self) -> str:
        """The label of the progress bar, such as ``extract fc7, shard 2 of 4``."""
        return f"extract {self.config.name}" + (f", {self.shard_label}" if self.shard_label else "")

    @classmethod
    def from_arguments(cls, config: Any, arguments: ExtractionArguments) -> Self:
        """Return the extractor with the settings ``config`` for one extraction."""
        build: Any = cls
        extractor: Self = build(config, arguments.weights_dir, arguments.device)
        return extractor

    @abstractmethod
    def extract(self, items: Sequence[ExtractorInput], skip_bad: bool = False) -> FeatureRows:
        """Compute the rows of ``items``, in order.

        Raises :class:`BadImage` if an image is unreadable. With ``skip_bad``, unreadable images are left out of the rows and
        listed in :attr:`FeatureRows.skipped`.
        """


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


def dictionary_path(table: Path) -> Path | None:
    """Return the path of the file with the words of a ``.npy`` table of word vectors; None for a table in another format."""
    return table.with_name("dictionary.txt") if table.suffix == ".npy" else None
