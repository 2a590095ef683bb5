"""The schema of every preset but features: commands, YAML files and the workflow are checked against these models alone.

Experiments that are put together by their name: ``vsepp+tfidf+effnet`` is ``vsepp`` on other features.

The parts of a name are an experiment, a caption feature or ``words``, and a feature of images. ``vsepp@f8k+tfidf+effnet`` is
the experiment as the ladder ``f8k`` sets it.

Ladders: which backbones, text encoders and experiments are trained and set side by side.

A ladder is a preset of ``config/ladders/``. Each combination that fits together is a composed experiment
(:mod:`vse.pipeline.presets.schema`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from vse.pipeline.files.inputs import is_name

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}  # settings that have another name now: model.order_form, for example


# How a run is made, not what: where a file lies whose SHA-256 is known, for instance.
_HOW = (
    ("images", "workers"),
    ("train", "features_in_memory"),
    ("train", "memory_gb"),
    ("train", "save_minutes"),
    ("model", "caption_encoder", "words"),
)
ENSEMBLE_KEYS = ("name", "about", "title", "rows", "seeds", "protocols", "ensemble_of")  # all that an ensemble may set


class ExperimentPlan(Settings):
    """What the workflow needs to know of an experiment; any other settings are kept as they are."""

    model_config = ConfigDict(extra="allow")

    name: str
    about: str = Field("", description="what the experiment is, in a sentence")
    title: str = Field("", description="what LaTeX tables call the method, e.g. VSE++ (1C); none: the preset's name")
    label: str | None = Field(None, description="what tables call the run (vse-train --name); none: its preset and changes")
    rows: list[str] = Field(default_factory=list, description="rows of published tables that this is, e.g. vsepp 1.6")
    seeds: list[Seed] = Field(default=[0], min_length=1, description="seeds that the workflow trains and averages over")
    feature: str = Field("fc7", description="the feature preset whose cache is read")
    eval_feature: str | None = Field(
        None, description="the one read for validation and test; none: the same, a crop bank as the mean of its crops"
    )
    caption_feature: str | None = Field(
        None, description="the feature preset of captions whose cache is read instead of their words; none: the words"
    )
    truth_feature: str | None = Field(
        None, description="of a training on phrases, the feature preset of regions at the phrases' ground-truth boxes"
    )
    backbone: str | None = Field(
        None,
        description="experiment whose embeddings (same data set and seed) are read instead of features, images and captions",
    )
    start_from: str | None = Field(None, description="experiment whose best weights (same data set and seed) this starts from")
    protocols: list[str] = Field(default=["auto"], min_length=1, description="protocols of the workflow's evaluation")
    ensemble_of: list[str] = Field(
        default_factory=list,
        exclude=True,
        description="experiments whose scores are averaged, seed by seed, or one whose seeds are: an ensemble, of which "
        "nothing else is trained",
    )

    @model_validator(mode="after")
    def _ensemble_is_made_of_others(self) -> Self:
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

    def content(self) -> dict[str, Any]:
        """The settings that determine the trained weights."""
        content = self.model_dump(mode="json", exclude={"about", "title", "label", "rows", "seeds", "protocols"})
        for *groups, name in _HOW:
            holder: Any = content
            for group in groups:
                holder = holder.get(group) if isinstance(holder, dict) else None
            if isinstance(holder, dict):
                holder.pop(name, None)
        return content


class SourceFile(Settings):
    """A published file, or zip or tar archive and the file or folder of it, that a data set needs."""

    url: str = Field(pattern=r"^https?://.+/[\w.-]*\w$", description="ends with the file's name")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the published file")
    bytes: PositiveInt = Field(description="size of the published file")
    member: str | None = Field(None, description="the file or folder in the archive to unpack; none: the file is no archive")
    to: str = Field(description="where it goes in the source folder")
    max_bytes: PositiveInt = Field(description="largest size of what is needed, once unpacked")


class DatasetConfig(Settings):
    """A data set: where its files come from and what it changes in other presets."""

    name: str
    annotations: str | None = Field(None, description="file of the Karpathy splits in the source folder; none for the demo")
    entities: str | None = Field(
        None,
        description="folder of Flickr30K Entities in the source folder, whose phrases the captions get; without annotations "
        "captions and splits are those of Entities, too",
    )
    images: str = Field("images", description="folder of the images in the source folder")
    where: str = Field("", description="how a user gets the files")
    files: list[SourceFile] = Field(default_factory=list, description="what vse-data fetch may download")
    tokeniser: str | None = Field(
        None, description="letters_and_digits, unicode_words or nltk, which cuts the captions into words; none: tokens stay"
    )
    splits: dict[str, tuple[PositiveInt, PositiveInt]] = Field(
        default_factory=dict, description="images and captions of each split as published, for vse-data plan"
    )
    shards: PositiveInt = Field(4, description="shards of an image feature, each a job of the workflow")
    n_images: PositiveInt | None = Field(None, description="images to draw, for the demo")
    seed: Seed = Field(0, description="seed of the drawing, for the demo")
    features: dict[str, dict[str, Any]] = Field(default_factory=dict, description="feature -> settings it changes")
    experiment: dict[str, Any] = Field(default_factory=dict, description="settings it changes in every experiment")
    experiments: dict[str, dict[str, Any]] = Field(default_factory=dict, description="experiment -> settings it changes")

    @property
    def published(self) -> bool:
        """Whether it is made from files that others published; else it is drawn."""
        return self.annotations is not None or self.entities is not None


GpuRule = Literal["fit", "extract", "train", "embed", "embed_sentences", "embed_as_features"]  # those that compute


class WorkflowConfig(Settings):
    """Settings of the workflow (``config/config.yaml`` and ``--config``)."""

    weights_dir: str | None = None
    words: str | None = None
    device: str = "auto"
    threads: PositiveInt = 8
    skip_bad: bool = False
    gpus: dict[GpuRule, NonNegativeInt] = Field(default_factory=dict, description="rule -> GPUs of one of its jobs; else 1")
    gpu_models: dict[GpuRule, str] = Field(default_factory=dict, description="rule -> kind of GPU, as SLURM calls it")
    seeds: list[Seed] | None = Field(None, min_length=1, description="seeds to run instead of those of the experiments")
    experiments: list[str] = Field(default=["vse0", "vsepp"], min_length=1)
    ladder: str | None = Field(None, description="the ladder of results/tables/ladder_<dataset>; none: the data set's own")
    dataset: str | None = Field(
        None, description="published tables show our metrics on this data set, not on those of their rows"
    )
    sources: dict[str, str] = Field(default_factory=dict)


WORDS = "words"


class ComposedName(NamedTuple):
    """The parts of a name. ``caption_feature`` is None if words are read, ``ladder`` if none changes a setting."""

    experiment: str
    caption_feature: str | None
    feature: str
    ladder: str | None = None

    @property
    def name(self) -> str:
        """The name whose parts these are."""
        of_ladder = "" if self.ladder is None else f"@{self.ladder}"
        return f"{self.experiment}{of_ladder}+{self.caption_feature or WORDS}+{self.feature}"

    def reads(self) -> dict[str, str | None]:
        """The settings of an experiment that say what is read."""
        return {"feature": self.feature, "eval_feature": None, "caption_feature": self.caption_feature}


def parse_composed_name(name: str) -> ComposedName | None:
    """The parts of ``name``; None if it is not composed of three."""
    parts = name.split("+")
    if len(parts) != 3 or name.endswith((".yaml", ".yml")):
        return None
    base, captions, feature = parts
    experiment, at, ladder = base.partition("@")
    if not all(map(is_name, (experiment, captions, feature, ladder or "none"))) or (at and not ladder):
        return None
    return ComposedName(experiment, None if captions == WORDS else captions, feature, ladder if at else None)


_Names = Annotated[list[str], Field(min_length=1)]


class LadderExperiment(Settings):
    """An experiment of a ladder: what it is called there, and what it changes."""

    title: str = Field("", description="what the ladder calls it, e.g. VSE++; none: the experiment's name")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings that it has in this ladder")
    seeds: list[Seed] | None = Field(None, min_length=1, description="its own seeds, e.g. [0] where none changes anything")
    features: _Names | None = Field(None, description="those of the ladder's features that it reads; none: all")
    caption_features: _Names | None = Field(None, description="the same of caption features and words")


class LadderConfig(Settings):
    """A ladder: features of images x captions x experiments x seeds."""

    name: str
    about: str = Field("", description="what is compared, in a sentence")
    features: _Names = Field(description="features of images")
    caption_features: _Names = Field(default=[WORDS], description="features of captions, or words")
    experiments: dict[str, LadderExperiment | None] = Field(min_length=1, description="experiments by their names")
    seeds: list[Seed] = Field(default=[0], min_length=1, description="seeds that are trained and averaged over")

    @field_validator("features", "caption_features", "seeds")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is given twice")
        return values

    @field_validator("experiments")
    @classmethod
    def _of_the_ladder(cls, experiments: dict[str, Any], info: Any) -> dict[str, Any]:
        for name, experiment in experiments.items():
            for key in ("features", "caption_features"):
                own = getattr(experiment, key, None) or []
                other = next((one for one in own if one not in info.data.get(key, own)), None)
                if other is not None:
                    raise ValueError(f"{name}.{key}: {other!r} is none of the ladder's {key}")
        return experiments

    def changes(self, experiment: str) -> LadderExperiment:
        """What the ladder says of one of its experiments."""
        return self.experiments[experiment] or LadderExperiment()

    def settings(self, experiment: str) -> dict[str, Any]:
        """The settings that an experiment has in this ladder, its title and its seeds among them."""
        changes = self.changes(experiment)
        return {**changes.settings, "title": changes.title, "seeds": changes.seeds or self.seeds}

    def combinations(self) -> list[ComposedName]:
        """Every experiment on every feature with every feature of captions, whether that fits together or not."""
        return [
            ComposedName(name, None if captions == WORDS else captions, feature, self.name)
            for name in self.experiments
            for feature in self.changes(name).features or self.features
            for captions in self.changes(name).caption_features or self.caption_features
        ]
