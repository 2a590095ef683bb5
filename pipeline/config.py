"""The schema of every preset but features: commands, YAML files and the workflow are checked against these models alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Settings):
    """The two branches (VSE++ paper, section 2 and Eq. 3; order embeddings: section 3.5)."""

    dim: PositiveInt = Field(1024, description="joint embedding and GRU state")
    word_dim: PositiveInt = 300
    normalize_image: bool = Field(True, description="unit-length image embeddings; false for VSE0")
    absolute: bool = Field(False, description="absolute values of both embeddings, after their normalisation; true for Order0")
    similarity: Literal["cosine", "order"] = "cosine"
    order_form: Literal["squared", "norm"] = Field(
        "squared", description="minus the squared norm of the violation (the papers), or minus the norm (the authors' code)"
    )


class LossConfig(Settings):
    """The loss, summed over the batch (VSE++ paper, Eqs. 5 and 6)."""

    name: str = Field("max", description="a loss of vse.train.losses: max, sum or spectrum (of hinges), or infonce")
    margin: float = Field(0.2, ge=0, description="alpha of the hinges")
    temperature: float = Field(
        0.1, ge=1e-6, description="spectrum: from the max of hinges (0) to their sum (infinity); infonce: divides the scores"
    )
    same_image: Literal["keep", "mask"] = Field(
        "keep", description="whether other captions of the same image count as negatives (keep, as in the paper)"
    )


class WarmupConfig(Settings):
    """Another loss for the first epochs (the curriculum of the VSE++ paper, section 3.6); the paper's runs have none."""

    loss: str = Field("sum", description="the loss of the first epochs")
    epochs: int = Field(0, ge=0)


class ImagesConfig(Settings):
    """What a training step sees of an image: its cached features, or a random crop through the CNN that made the cache."""

    source: Literal["cache", "pictures"] = Field(
        "cache", description="cache: the cached vector, or a random one of a crop bank; pictures: a new random crop each time"
    )
    finetune: bool = Field(False, description="train the CNN too (source: pictures)")
    random_crop: Literal["resized", "plain"] | None = Field(
        None, description="kind of random crops, as in a feature's settings; none: as the cache's own settings say"
    )
    batch_norm: Literal["frozen", "train"] = Field(
        "frozen", description="whether a fine-tuned CNN keeps its batch norms' statistics; its dropout is always off"
    )
    gradient_checkpointing: bool = Field(False, description="compute the CNN twice instead of keeping its activations")
    workers: int = Field(2, ge=0, description="threads that decode pictures ahead")

    @model_validator(mode="after")
    def _fits(self) -> ImagesConfig:
        if self.finetune and self.source != "pictures":
            raise ValueError("finetune needs source: pictures")
        if self.batch_norm == "train" and self.gradient_checkpointing:
            raise ValueError("batch_norm: train does not go with gradient_checkpointing, which would count each batch twice")
        return self


class TrainConfig(Settings):
    """Optimisation (VSE++ paper, section 3.2)."""

    epochs: PositiveInt = 30
    batch_size: int = Field(128, ge=2)
    learning_rate: float = Field(2e-4, gt=0)
    decay_after: PositiveInt = Field(15, description="epochs between decays of the learning rate")
    decay: float = Field(0.1, gt=0, le=1)
    clip: float = Field(2.0, gt=0, description="bound on the gradient's global norm")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of a training step: fp32, or autocast to bf16")
    compile: bool = Field(False, description="compile the loss, and a CNN that is trained (torch.compile)")
    restval: bool = Field(False, description="train on the split restval too (rV of the paper: COCO's 113,287 images)")
    min_count: PositiveInt = Field(4, description="a word needs this many training occurrences to be in the vocabulary")
    early_stop: PositiveInt | None = Field(None, description="stop after so many epochs without a better validation rsum")
    on_collapse: Literal["stop", "warn"] = Field(
        "stop", description="when all embeddings are alike for a whole epoch: stop, or say so and go on"
    )
    features_in_memory: bool = Field(True, description="keep the training features in memory (a GPU's, if there is one)")
    memory_gb: float = Field(2.0, ge=0, description="unless they are larger, on a CPU; then they are read from files")
    save_minutes: float = Field(10.0, gt=0, description="between checkpoints within an epoch")


_HOW = (("images", "workers"), ("train", "features_in_memory"), ("train", "memory_gb"), ("train", "save_minutes"))


class ExperimentConfig(Settings):
    """One experiment: the features it reads, the model, the loss, the optimisation."""

    name: str
    rows: list[str] = Field(default_factory=list, description="rows of published tables that this is: vsepp 1.6, say")
    seeds: list[int] = Field(default=[0], min_length=1, description="seeds that the workflow trains and averages over")
    feature: str = Field("fc7", description="the feature preset whose cache is read")
    eval_feature: str | None = Field(
        None, description="the one read for validation and test; none: the same, a crop bank as the mean of its crops"
    )
    start_from: str | None = Field(None, description="experiment whose best weights (same data set and seed) this starts from")
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    warmup: WarmupConfig = WarmupConfig()
    train: TrainConfig = TrainConfig()

    def content(self) -> dict[str, Any]:
        """The settings that determine the trained weights."""
        content = self.model_dump(mode="json", exclude={"rows", "seeds"})
        for group, name in _HOW:
            del content[group][name]
        return content


class SourceFile(Settings):
    """A published zip or tar archive, and the file or folder of it that a data set needs."""

    url: str = Field(pattern=r"^https?://.+/[\w.-]*\w$", description="ends with the archive's file name")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the archive")
    bytes: PositiveInt = Field(description="size of the archive")
    member: str = Field(description="the file or folder in the archive that is wanted")
    to: str = Field(description="where it goes in the source folder")
    max_bytes: PositiveInt = Field(description="what is wanted must not be larger than this once unpacked")


class DatasetConfig(Settings):
    """A data set: where its files come from and what it changes in other presets."""

    name: str
    annotations: str | None = Field(None, description="file of the Karpathy splits in the source folder; none for the demo")
    images: str = Field("images", description="folder of the images in the source folder")
    where: str = Field("", description="where a user gets the files")
    files: list[SourceFile] = Field(default_factory=list, description="what vse-data fetch may download")
    shards: PositiveInt = Field(4, description="shards of an image feature, each a job of the workflow")
    n_images: PositiveInt | None = Field(None, description="pictures to draw, for the demo")
    seed: int = Field(0, description="seed of the drawing, for the demo")
    features: dict[str, dict[str, Any]] = Field(default_factory=dict, description="feature -> settings it changes")
    experiment: dict[str, Any] = Field(default_factory=dict, description="settings it changes in every experiment")
    experiments: dict[str, dict[str, Any]] = Field(default_factory=dict, description="experiment -> settings it changes")


class WorkflowConfig(Settings):
    """Settings of the workflow (``config/config.yaml`` and ``--config``)."""

    weights_dir: str | None = None
    words: str | None = None
    device: str = "auto"
    threads: PositiveInt = 8
    skip_bad: bool = False
    seeds: list[int] | None = Field(None, min_length=1, description="instead of those of the experiments")
    experiments: list[str] = Field(default=["vse0", "vsepp"], min_length=1)
    sources: dict[str, str] = Field(default_factory=dict)
