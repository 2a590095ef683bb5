"""The schema of every preset: the commands, the YAML files and the workflow are checked against these models alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FeatureConfig(Settings):
    """How a CNN turns an image into one vector (VSE++ paper, section 3: 256 x 256, 224 crops, FC7)."""

    name: str = Field(description="name of the preset, part of the cache's file name")
    extractor: Literal["cnn"] = "cnn"
    model: str = Field(description="a torchvision classification model, or timm/<model>")
    layer: str = Field(
        "penultimate", description="a module of the model whose output is taken; penultimate = what the last Linear reads"
    )
    grid: PositiveInt = Field(1, description="a layer with height and width is averaged to grid x grid, then flattened")
    weights: str = Field(
        "pretrained", description="pretrained, random, a torchvision weights name, or a .pth or .safetensors file"
    )
    weights_sha256: str | None = Field(None, description="expected SHA-256 of a weights file")
    seed: int = Field(0, description="seed of random weights")
    resize: PositiveInt = 256
    resize_mode: Literal["square", "shorter"] = Field(
        "square", description="square: to resize x resize, as the paper; shorter: the shorter side to resize"
    )
    crop: PositiveInt = 224
    crops: Literal["1c", "10c"] = Field("1c", description="1c: centre crop; 10c: mean of corners, centre and their mirrors")
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    normalize: bool = Field(True, description="L2-normalise each image's vector")
    dtype: Literal["float16", "float32"] = Field("float16", description="how the cache stores the vectors")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="fp32, or autocast to bf16 or fp16")
    batch_size: PositiveInt = 32
    workers: int = Field(2, ge=0, description="threads that decode images ahead of the network")

    def content(self) -> dict[str, Any]:
        """The settings that determine the vectors, beside the weights, which are known by their own hash."""
        return self.model_dump(mode="json", exclude={"name", "batch_size", "workers", "weights", "seed", "weights_sha256"})


class ModelConfig(Settings):
    """The two branches (VSE++ paper, section 2 and Eq. 3)."""

    dim: PositiveInt = Field(1024, description="joint embedding and GRU state")
    word_dim: PositiveInt = 300
    normalize_image: bool = Field(True, description="unit-length image embeddings; false for VSE0")
    similarity: Literal["cosine"] = "cosine"


class LossConfig(Settings):
    """The ranking loss, summed over the batch (VSE++ paper, Eqs. 5 and 6)."""

    name: str = Field("max", description="a loss of vse.train.losses: max or sum (of hinges)")
    margin: float = Field(0.2, ge=0)
    same_image: Literal["keep", "mask"] = Field(
        "keep", description="whether other captions of the same image count as negatives (keep, as in the paper)"
    )


class WarmupConfig(Settings):
    """Another loss for the first epochs (the curriculum of the VSE++ paper, section 3.6); the paper's runs have none."""

    loss: str = Field("sum", description="the loss of the first epochs")
    epochs: int = Field(0, ge=0)


class TrainConfig(Settings):
    """Optimisation (VSE++ paper, section 3.2)."""

    epochs: PositiveInt = 30
    batch_size: int = Field(128, ge=2)
    learning_rate: float = Field(2e-4, gt=0)
    decay_after: PositiveInt = Field(15, description="epochs between decays of the learning rate")
    decay: float = Field(0.1, gt=0, le=1)
    clip: float = Field(2.0, gt=0, description="bound on the gradient's global norm")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of a training step: fp32, or autocast to bf16")
    min_count: PositiveInt = Field(4, description="a word needs this many training occurrences to be in the vocabulary")
    memory_gb: float = Field(2.0, ge=0, description="features kept in memory; the rest is mapped from the cache")


class ExperimentConfig(Settings):
    """One experiment: the feature it reads, the model, the loss, the optimisation."""

    name: str
    feature: str = Field("fc7", description="the feature preset whose cache is read")
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    warmup: WarmupConfig = WarmupConfig()
    train: TrainConfig = TrainConfig()


class DatasetConfig(Settings):
    """A data set: where its files come from and what it changes in other presets."""

    name: str
    annotations: str | None = Field(None, description="file of the Karpathy splits in the source folder; none for the demo")
    images: str = Field("images", description="folder of the images in the source folder")
    where: str = Field("", description="where a user gets the files")
    shards: PositiveInt = Field(4, description="shards of an image feature, each a job of the workflow")
    n_images: PositiveInt | None = Field(None, description="pictures to draw, for the demo")
    seed: int = Field(0, description="seed of the drawing, for the demo")
    features: dict[str, dict[str, Any]] = Field(default_factory=dict, description="feature -> settings it changes")
    experiment: dict[str, Any] = Field(default_factory=dict, description="settings it changes in every experiment")


class WorkflowConfig(Settings):
    """Settings of the workflow (``config/config.yaml`` and ``--config``)."""

    weights_dir: str | None = None
    device: str = "auto"
    threads: PositiveInt = 8
    skip_bad: bool = False
    seeds: list[int] = Field(default=[0], min_length=1)
    experiments: list[str] = Field(default=["vse0", "vsepp"], min_length=1)
    sources: dict[str, str] = Field(default_factory=dict)
