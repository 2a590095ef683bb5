"""The schemas of YAML files: presets of data sets and of ladders, settings of the workflow, and main settings of experiments.

An experiment can be composed by its name: ``vsepp+tfidf+effnet`` is the experiment ``vsepp`` with the caption feature
``tfidf`` and the image feature ``effnet``. ``vsepp+words+effnet`` reads the words of captions and no caption feature.
``vsepp@f8k+tfidf+effnet`` has the settings of ``vsepp`` in the ladder ``f8k``. A ladder compares experiments, image features
and caption features; each of its combinations is a composed experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from vse.pipeline.files.inputs import is_valid_name
from vse.pipeline.option_types import Device, SkipBad, WeightsDir, WordVectorsFile

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Settings(BaseModel):
    """Base class of immutable settings. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    renamed_keys: ClassVar[Mapping[str, str]] = {}  # old key -> new key, e.g. model.order_form -> model.similarity.form


# Keys of settings that do not change the trained weights, such as the path of a file whose SHA-256 is known.
_KEYS_NOT_AFFECTING_WEIGHTS = (
    ("images", "workers"),
    ("train", "features_in_memory"),
    ("train", "memory_gb"),
    ("train", "save_minutes"),
    ("train", "timeout_minutes"),
    ("model", "caption_encoder", "words"),
)
ENSEMBLE_KEYS = ("name", "about", "title", "rows", "seeds", "protocols", "ensemble_of")  # the only settings of an ensemble


class ExperimentOutline(Settings):
    """The settings of an experiment that the workflow needs. Other settings are not checked."""

    model_config = ConfigDict(extra="allow")

    name: str
    about: str = Field("", description="a sentence about the experiment")
    title: str = Field("", description="name of the method in LaTeX tables, e.g. VSE++ (1C); default: the preset's name")
    label: str | None = Field(
        None, description="name of the run in tables (vse-train --name); default: its preset and changes"
    )
    rows: list[str] = Field(
        default_factory=list,
        description="rows of published tables that this experiment reproduces, e.g. vsepp 1.6 (table 1, row 6)",
    )
    seeds: list[Seed] = Field(default=[0], min_length=1, description="seeds that the workflow trains and averages over")
    feature: str = Field("fc7", description="feature preset whose cache is read")
    eval_feature: str | None = Field(
        None,
        description="feature preset for validation and test; default: the preset feature or, if it has several crops, the "
        "mean of its crops",
    )
    caption_feature: str | None = Field(
        None, description="feature preset of captions, to read its cache instead of words; default: words"
    )
    truth_feature: str | None = Field(
        None, description="feature preset of regions at the phrases' ground-truth boxes, for a training on phrases"
    )
    backbone: str | None = Field(
        None,
        description="experiment whose image and caption embeddings (same data set and seed) are read instead of features",
    )
    start_from: str | None = Field(
        None, description="experiment whose best weights (same data set and seed) the training starts from"
    )
    protocols: list[str] = Field(default=["auto"], min_length=1, description="protocols of the workflow's evaluation")
    ensemble_of: list[str] = Field(
        default_factory=list,
        exclude=True,
        description="makes this an ensemble: experiments whose scores are averaged seed by seed, or one experiment whose "
        "seeds are averaged",
    )

    @model_validator(mode="after")
    def _check_ensemble(self) -> Self:
        if "ensemble_of" not in self.model_fields_set:
            return self
        other = self.model_fields_set.difference(ENSEMBLE_KEYS)
        if other:
            raise ValueError(f"an ensemble trains nothing, so it has no {min(other)}; only {', '.join(ENSEMBLE_KEYS[1:])}")
        if not self.ensemble_of or (len(self.ensemble_of) == 1 and len(self.seeds) < 2):
            raise ValueError("an ensemble has two members at least: ensemble_of: [a, b], or [a] with seeds: [0, 1]")
        if len(set(self.ensemble_of)) < len(self.ensemble_of):
            raise ValueError("an ensemble counts every member once, and ensemble_of names one twice")
        return self

    def settings_affecting_weights(self) -> dict[str, Any]:
        """Return the settings that determine the trained weights."""
        content = self.model_dump(mode="json", exclude={"about", "title", "label", "rows", "seeds", "protocols"})
        for *groups, name in _KEYS_NOT_AFFECTING_WEIGHTS:
            holder: Any = content
            for group in groups:
                holder = holder.get(group) if isinstance(holder, dict) else None
            if isinstance(holder, dict):
                holder.pop(name, None)
        return content


class SourceFile(Settings):
    """A published file that a data set needs, or a file or folder to unpack from a published zip or tar archive."""

    url: str = Field(pattern=r"^https?://.+/[\w.-]*\w$", description="address, which ends with the file's name")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the published file")
    bytes: PositiveInt = Field(description="size of the published file")
    member: str | None = Field(
        None, description="file or folder to unpack from the archive; default: the file is not unpacked"
    )
    to: str = Field(description="path in the source folder")
    max_bytes: PositiveInt = Field(description="largest size after unpacking")


class DatasetConfig(Settings):
    """The preset of a data set: the source of the files, and changes to other presets."""

    name: str
    annotations: str | None = Field(
        None,
        description="path in the source folder: the file of the Karpathy splits or, for another layout, its file or folder; "
        "not for the demo",
    )
    layout: Literal["karpathy", "xm3600", "multi30k", "xtd"] = Field(
        "karpathy", description="layout of annotations: the Karpathy splits, or the files of a data set in several languages"
    )
    entities: str | None = Field(
        None,
        description="path in the source folder: the folder of Flickr30K Entities, with the phrases of the captions; without "
        "annotations, captions and splits also come from this folder",
    )
    images: str = Field("images", description="folder of the images in the source folder")
    where: str = Field("", description="how to get the files")
    files: list[SourceFile] = Field(default_factory=list, description="files that vse-data fetch downloads")
    tokeniser: str | None = Field(
        None,
        description="letters_and_digits, unicode_words or nltk, to split captions into words; default: the published tokens",
    )
    splits: dict[str, tuple[PositiveInt, PositiveInt]] = Field(
        default_factory=dict, description="published numbers of images and captions of each split, for vse-data plan"
    )
    folds_of: str | None = Field(None, description="data set whose images and captions are split into folds (vse-data folds)")
    folds: int = Field(5, ge=3, description="number of folds of folds_of; the seed k is trained on the fold k")
    shards: PositiveInt = Field(4, description="number of shards of an image feature; each is a job of the workflow")
    n_images: PositiveInt | None = Field(None, description="number of images to draw, for the demo")
    seed: Seed = Field(0, description="seed of the random scenes of the demo, or of the folds")
    features: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="feature -> settings that the data set changes"
    )
    experiment: dict[str, Any] = Field(default_factory=dict, description="changes to the settings of every experiment")
    experiments: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="experiment -> settings that the data set changes"
    )

    @property
    def is_published(self) -> bool:
        """True if the data set is built from published files. False for the demo data set."""
        return self.annotations is not None or self.entities is not None


GpuRule = Literal["fit", "extract", "train", "embed", "embed_sentences", "embed_as_features"]  # rules that may use a GPU


class WorkflowConfig(Settings):
    """Settings of the workflow (``config/config.yaml`` and ``--config``)."""

    weights_dir: WeightsDir = None
    words: WordVectorsFile = None
    device: Device = "auto"
    threads: PositiveInt = 8
    skip_bad: SkipBad = False
    gpus: dict[GpuRule, NonNegativeInt] = Field(
        default_factory=dict, description="rule -> number of GPUs of one job; default: 1"
    )
    gpu_models: dict[GpuRule, str] = Field(default_factory=dict, description="rule -> type of GPU, as SLURM names it")
    seeds: list[Seed] | None = Field(None, min_length=1, description="seeds that replace the experiments' seeds")
    experiments: list[str] = Field(default=["vse0", "vsepp"], min_length=1, description="experiments of the summary tables")
    ladder: str | None = Field(
        None, description="ladder of results/tables/ladder_<dataset>; default: the ladder with the data set's name"
    )
    dataset: str | None = Field(
        None,
        description="data set whose results are compared with all rows of published tables; default: for each row, the data "
        "set of this row",
    )
    sources: dict[str, str] = Field(default_factory=dict, description="data set -> folder of the published files")


WORDS_NAME = "words"


class ComposedName(NamedTuple):
    """The experiment, the ladder and the features in a composed name, such as ``vsepp@f8k+tfidf+effnet``.

    ``caption_feature`` is None if the experiment reads words. ``ladder`` is None if the name has no ladder.
    """

    experiment: str
    caption_feature: str | None
    feature: str
    ladder: str | None = None

    @property
    def name(self) -> str:
        ladder = "" if self.ladder is None else f"@{self.ladder}"
        return f"{self.experiment}{ladder}+{self.caption_feature or WORDS_NAME}+{self.feature}"

    def feature_settings(self) -> dict[str, str | None]:
        return {"feature": self.feature, "eval_feature": None, "caption_feature": self.caption_feature}


def parse_composed_name(name: str) -> ComposedName | None:
    """Return the experiment, ladder and features in a name such as ``vsepp@f8k+tfidf+effnet``; None for any other name.

    A ladder (``f8k``) is a comparison of experiments. A name without a ladder is accepted, too.
    """
    parts = name.split("+")
    if len(parts) != 3 or name.endswith((".yaml", ".yml")):
        return None
    base, captions, feature = parts
    experiment, at, ladder = base.partition("@")
    if not all(map(is_valid_name, (experiment, captions, feature, ladder or "none"))) or (at and not ladder):
        return None
    return ComposedName(experiment, None if captions == WORDS_NAME else captions, feature, ladder if at else None)


_Names = Annotated[list[str], Field(min_length=1)]


Correction = Literal["mean", "csls", "nnn", "inverted-softmax", "qb-norm"]  # methods of vse-eval --correct
CORRECTIONS: tuple[str, ...] = get_args(Correction)


class LadderExperiment(Settings):
    """An experiment in a ladder (a comparison of experiments): its title, changed settings, and the features to combine."""

    title: str = Field("", description="name in the ladder, e.g. VSE++; default: the experiment's name")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings that differ in this ladder")
    seeds: list[Seed] | None = Field(
        None, min_length=1, description="seeds of this experiment, e.g. [0] if the result does not depend on the seed"
    )
    features: _Names | None = Field(None, description="features of the ladder that the experiment reads; default: all")
    caption_features: _Names | None = Field(
        None, description="caption features of the ladder that the experiment reads, or words; default: all"
    )


class LadderConfig(Settings):
    """A ladder: a comparison of all combinations of experiments, image features, caption features and seeds."""

    name: str
    about: str = Field("", description="a sentence about the comparison")
    features: _Names = Field(description="image features")
    caption_features: _Names = Field(default=[WORDS_NAME], description="caption features, or words")
    experiments: dict[str, LadderExperiment | None] = Field(min_length=1, description="experiments by name")
    corrections: list[Correction] = Field(
        default=[], description="methods against hubs (vse-eval --correct); each adds a row to the table for every combination"
    )
    seeds: list[Seed] = Field(default=[0], min_length=1, description="seeds to train and average over")

    @field_validator("features", "caption_features", "corrections", "seeds")
    @classmethod
    def _check_unique(cls, values: list[Any]) -> list[Any]:
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is given twice")
        return values

    @field_validator("experiments")
    @classmethod
    def _check_own_features(cls, experiments: dict[str, Any], info: Any) -> dict[str, Any]:
        for name, experiment in experiments.items():
            for key in ("features", "caption_features"):
                own = getattr(experiment, key, None) or []
                other = next((one for one in own if one not in info.data.get(key, own)), None)
                if other is not None:
                    raise ValueError(f"{name}.{key}: {other!r} is not one of the ladder's {key}")
        return experiments

    def find_experiment(self, experiment: str) -> LadderExperiment:
        """Return the entry of this ladder for an experiment: title, settings, seeds and features."""
        return self.experiments[experiment] or LadderExperiment()

    def experiment_overrides(self, experiment: str) -> dict[str, Any]:
        """Return the settings that this ladder (a comparison) changes in an experiment, including the title and the seeds."""
        entry = self.find_experiment(experiment)
        return {**entry.settings, "title": entry.title, "seeds": entry.seeds or self.seeds}

    def list_composed_names(self) -> list[ComposedName]:
        """Return a name for each combination of an experiment, an image feature and a caption feature.

        Some combinations may not be possible.
        """
        return [
            ComposedName(name, None if captions == WORDS_NAME else captions, feature, self.name)
            for name in self.experiments
            for feature in self.find_experiment(name).features or self.features
            for captions in self.find_experiment(name).caption_features or self.caption_features
        ]
