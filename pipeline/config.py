"""The schema of every preset but features: commands, YAML files and the workflow are checked against these models alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, model_validator


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BranchesConfig(Settings):
    """Fully connected layers of both branches (two-branch paper, sections 3.2.1, 4.2 and 5.3)."""

    layers: Literal["none", "linear", "nonlinear"] = Field(
        "none",
        description="none: the linear maps of VSE++; nonlinear: all layers, with ReLU and dropout between them and batch "
        "normalisation; linear: the first layer alone",
    )
    image_widths: list[PositiveInt] = Field(
        default=[2048, 512], min_length=1, description="outputs of the image branch's layers"
    )
    caption_widths: list[PositiveInt] = Field(default=[2048, 512], min_length=1, description="of the caption branch's")
    batch_norm: Literal["after_last", "after_first"] = Field(
        "after_last",
        description="after_last: behind the last layer (the paper's text); after_first: between the first and its ReLU (the "
        "authors' code)",
    )
    batch_norm_momentum: float = Field(
        0.1, gt=0, le=1, description="share of a batch in the running statistics; 0.9 in the authors' code"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="behind each ReLU")

    @property
    def widths(self) -> tuple[list[int], list[int]]:
        """Of the layers that there are, of images and of captions."""
        n = {"none": 0, "linear": 1, "nonlinear": None}[self.layers]
        return self.image_widths[:n], self.caption_widths[:n]

    @model_validator(mode="after")
    def _meet(self) -> BranchesConfig:
        image, caption = ((widths or [0])[-1] for widths in self.widths)
        if image != caption:
            raise ValueError(f"{self.layers} branches end in {image} numbers for images and {caption} for captions")
        return self


class ModelConfig(Settings):
    """The two branches (VSE++ paper, section 2 and Eq. 3; order embeddings: section 3.5; two-branch paper, section 3)."""

    dim: PositiveInt = Field(
        1024, description="joint embedding, unless there are branches, and state of the recurrent network"
    )
    word_dim: PositiveInt = 300
    recurrent: Literal["gru", "lstm"] = Field("gru", description="what reads the words, unless captions are cached vectors")
    branches: BranchesConfig = BranchesConfig()
    normalize_image: bool = Field(True, description="unit-length image embeddings; false for VSE0")
    absolute: bool = Field(False, description="absolute values of both embeddings, after their normalisation; true for Order0")
    similarity: Literal["cosine", "order", "euclidean", "network"] = Field(
        "cosine",
        description="cosine; order; euclidean: minus the distance of unit vectors, which ranks as the cosine does; network: a "
        "similarity network on the product of both embeddings (two-branch paper, section 3.3)",
    )
    order_form: Literal["squared", "norm"] = Field(
        "squared", description="minus the squared norm of the violation (the papers), or minus the norm (the authors' code)"
    )
    distance_floor: float = Field(
        0.0,
        ge=0,
        description="added to squared distances before their root; 1e-4 in the authors' code of the two-branch networks",
    )
    network_widths: list[PositiveInt] = Field(
        default=[512, 256], description="layers of the similarity network before its last, which gives the score"
    )

    @property
    def embedding_dim(self) -> int:
        """Length of an embedding."""
        return self.branches.widths[0][-1] if self.branches.layers != "none" else self.dim

    @property
    def ranked_by(self) -> Literal["cosine", "order"]:
        """How embeddings are compared in evaluation: unit vectors rank by their distance as they do by their cosine."""
        return "order" if self.similarity == "order" else "cosine"

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if self.similarity == "euclidean" and not self.normalize_image:
            raise ValueError("similarity: euclidean takes unit vectors, so normalize_image: true")
        return self


class LossConfig(Settings):
    """The loss of a batch (VSE++ paper, Eqs. 5 and 6; two-branch paper, Eqs. 3 to 7)."""

    name: str = Field(
        "max", description="a loss of vse.train.losses: max, sum, top or spectrum (of hinges), infonce, logistic"
    )
    margin: float = Field(0.2, ge=0, description="alpha of the hinges; m of the two-branch paper")
    temperature: float = Field(
        0.1, ge=1e-6, description="spectrum: from the max of hinges (0) to their sum (infinity); infonce: divides the scores"
    )
    same_image: Literal["keep", "mask"] = Field(
        "keep", description="whether other captions of the same image count as negatives (keep, as in the VSE++ paper)"
    )
    k: PositiveInt | None = Field(
        10, description="top and the neighbourhood terms: the highest so many hinges count; none: all"
    )
    reduction: Literal["sum", "mean_topk"] = Field(
        "sum",
        description="of top and of the neighbourhood terms: the sum over the triplets that violate the margin (the two-branch "
        "paper), or the mean over all k of each query, be they 0 or not (the authors' code)",
    )
    lambda1: float = Field(1.0, ge=0, description="weight of the terms in which an image is the query")
    lambda2: float = Field(1.0, ge=0, description="weight of those in which a caption is")
    lambda3: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among images")
    lambda4: float = Field(0.0, ge=0, description="weight of those among captions")


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
    weight_decay: float = Field(
        0.0, ge=0, description="of weights but word embeddings, added to gradients (1e-3 in the two-branch PyTorch port)"
    )
    clip: float | None = Field(2.0, gt=0, description="bound on the gradient's global norm; none: no bound")
    sampling: str = Field(
        "shuffled",
        description="a sampler of vse.train.data.samplers: shuffled, every pair once in an epoch; neighbourhood, that, with two "
        "captions or more of each image of a batch; neighbourhood_added, shuffled, then each image gets a second caption, if "
        "it has none, on top of the batch size (two-branch paper, section 3.2.3)",
    )
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


class CcaConfig(Settings):
    """Canonical correlation analysis, the linear baseline of the two-branch paper (Gong et al., IJCV 2014)."""

    regularization: list[NonNegativeFloat] = Field(
        default=[1e-4, 1e-3, 1e-2, 1e-1],
        min_length=1,
        description="added to the diagonals of both covariances, as a share of their mean; each is tried, validation decides",
    )
    power: float = Field(4.0, ge=0, description="directions are scaled by their correlations to this power, 4 in that paper")


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
    caption_feature: str | None = Field(
        None, description="the feature preset of captions whose cache is read instead of their words; none: the words"
    )
    start_from: str | None = Field(None, description="experiment whose best weights (same data set and seed) this starts from")
    solver: Literal["gradient", "cca"] = Field("gradient", description="how the weights are found")
    protocols: list[str] = Field(default=["auto"], min_length=1, description="protocols of the workflow's evaluation")
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    warmup: WarmupConfig = WarmupConfig()
    train: TrainConfig = TrainConfig()
    cca: CcaConfig = CcaConfig()

    @model_validator(mode="after")
    def _fits(self) -> ExperimentConfig:
        if self.loss.lambda3 or self.loss.lambda4:
            if "logistic" in (self.loss.name, self.warmup.loss if self.warmup.epochs else ""):
                raise ValueError("loss.lambda3 and lambda4 go with the ranking losses, not with logistic")
            if self.model.similarity not in ("cosine", "euclidean") or not self.model.normalize_image:
                raise ValueError("loss.lambda3 and lambda4 compare unit vectors, by the cosine or the euclidean similarity")
        if self.solver == "cca":
            if self.model.branches.layers != "linear" or self.model.similarity != "cosine":
                raise ValueError("solver: cca needs linear model.branches and the cosine similarity")
            if self.images.source != "cache" or self.start_from is not None:
                raise ValueError("solver: cca reads cached features and starts from nothing")
        return self

    def content(self) -> dict[str, Any]:
        """The settings that determine the trained weights."""
        content = self.model_dump(mode="json", exclude={"rows", "seeds", "protocols"})
        for group, name in _HOW:
            del content[group][name]
        return content


class SourceFile(Settings):
    """A published zip or tar archive, and the file or folder of it that a data set needs."""

    url: str = Field(pattern=r"^https?://.+/[\w.-]*\w$", description="ends with the archive's file name")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the archive")
    bytes: PositiveInt = Field(description="size of the archive")
    member: str = Field(description="the file or folder in the archive to unpack")
    to: str = Field(description="where it goes in the source folder")
    max_bytes: PositiveInt = Field(description="largest size of the member once unpacked")


class DatasetConfig(Settings):
    """A data set: where its files come from and what it changes in other presets."""

    name: str
    annotations: str | None = Field(None, description="file of the Karpathy splits in the source folder; none for the demo")
    images: str = Field("images", description="folder of the images in the source folder")
    where: str = Field("", description="how a user gets the files")
    files: list[SourceFile] = Field(default_factory=list, description="what vse-data fetch may download")
    shards: PositiveInt = Field(4, description="shards of an image feature, each a job of the workflow")
    n_images: PositiveInt | None = Field(None, description="images to draw, for the demo")
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
    seeds: list[int] | None = Field(None, min_length=1, description="seeds to run instead of those of the experiments")
    experiments: list[str] = Field(default=["vse0", "vsepp"], min_length=1)
    dataset: str | None = Field(
        None, description="published tables show our metrics on this data set, not on those of their rows"
    )
    sources: dict[str, str] = Field(default_factory=dict)
