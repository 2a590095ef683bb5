"""The schema of every preset: the commands, the YAML files and the workflow are checked against these models alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FeatureSettings(Settings):
    """What every feature preset has; its ``extractor`` says which of the classes below describes it."""

    name: str = Field(description="name of the preset, part of the cache's file name")
    dtype: Literal["float16", "float32"] = Field("float16", description="how the cache stores the vectors")

    @classmethod
    def how(cls) -> set[str]:
        """Settings of how a feature is made that do not determine it."""
        return {"name"}

    def content(self) -> dict[str, Any]:
        """The settings that determine the vectors, beside weights, which are known by their own hash."""
        return self.model_dump(mode="json", exclude=self.how())


class NetworkSettings(FeatureSettings):
    """A network that reads pictures, and its weights."""

    model: str = Field(description="a torchvision model, timm/<model> or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained, random, a name that the model's library knows, or a .pth or .safetensors file",
    )
    weights_sha256: str | None = Field(None, description="expected SHA-256 of a weights file")
    seed: int = Field(0, ge=0, description="seed of random weights")
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="fp32, or autocast to bf16 or fp16")
    workers: int = Field(2, ge=0, description="threads that decode images ahead of the network")

    @classmethod
    def how(cls) -> set[str]:
        """The weights are known by their hash."""
        return super().how() | {"workers", "weights", "seed", "weights_sha256"}


class LayerSettings(NetworkSettings):
    """A classification network of which one layer is read."""

    layer: str = Field(
        "penultimate",
        description="a module of the model whose output is taken; penultimate: what the last Linear reads; "
        "output: what the model returns",
    )
    grid: PositiveInt = Field(1, description="a layer with height and width is averaged to grid x grid positions")
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


class CnnConfig(LayerSettings):
    """How a CNN turns an image into one vector or one per crop (VSE++ paper, section 3: 256 x 256, 224 crops, FC7)."""

    extractor: Literal["cnn"] = "cnn"
    positions: bool = Field(
        False, description="false: the grid is flattened into one vector; true: (grid x grid, dim), a vector per position"
    )
    resize: PositiveInt = 256
    resize_mode: Literal["square", "shorter"] = Field(
        "square", description="square: to resize x resize, as the paper; shorter: the shorter side to resize"
    )
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    crop: PositiveInt = 224
    crops: Literal["1c", "10c", "10c_bank", "rc_bank"] = Field(
        "1c",
        description="1c: centre crop; 10c: mean of corners, centre and their mirrors; 10c_bank: those ten, each kept; "
        "rc_bank: random crops, each kept",
    )
    n_random: PositiveInt = Field(10, description="random crops per image in an rc_bank")
    random_crop: Literal["resized", "plain"] = Field(
        "resized",
        description="resized: of 8 to 100% of the area and aspect 3/4 to 4/3, scaled to the crop (the authors' code); "
        "plain: of the crop's size from the resized image (the paper). Each is mirrored with probability 1/2",
    )
    crop_seed: int = Field(0, ge=0, description="with the image's id, the seed of its random crops")
    batch_size: PositiveInt = 32
    compile: bool = Field(False, description="compile the network first (torch.compile); pays on a GPU")

    @classmethod
    def how(cls) -> set[str]:
        """Neither the batches nor compilation change what is computed."""
        return super().how() | {"batch_size", "compile"}

    @property
    def n_crops(self) -> int:
        """How many crops of an image the network reads."""
        return {"1c": 1, "10c": 10, "10c_bank": 10, "rc_bank": self.n_random}[self.crops]

    @property
    def bank(self) -> bool:
        """Whether every crop keeps its own vector."""
        return self.crops.endswith("_bank")

    @model_validator(mode="after")
    def _fits(self) -> CnnConfig:
        if self.crop > self.resize:
            raise ValueError(f"crop {self.crop} is larger than resize {self.resize}")
        if self.positions and self.bank:
            raise ValueError(f"crops {self.crops} keep one vector per crop; positions: true goes with 1c and 10c")
        return self


class RegionsConfig(NetworkSettings):
    """Which boxes of a Faster R-CNN are kept, and the vector of its box head for each (bottom-up attention, in short)."""

    extractor: Literal["regions"] = "regions"
    model: str = Field("fasterrcnn_resnet50_fpn_v2", description="a Faster R-CNN of torchvision")
    normalize: bool = Field(False, description="L2-normalise each region's vector")
    shorter: PositiveInt = Field(800, description="the shorter side is scaled to this")
    longer: PositiveInt = Field(1333, description="unless the longer side would then be more than this")
    proposals: PositiveInt = Field(1000, description="boxes that the region-proposal network hands on")
    selection: Literal["detections", "bottom_up"] = Field(
        "detections",
        description="detections: boxes regressed and suppressed class by class, as the detector reports them; "
        "bottom_up: the proposals themselves, each with its highest score over the classes that keep it",
    )
    nms: float = Field(0.5, gt=0, le=1, description="overlap (IoU) above which the lower of two boxes of a class is dropped")
    score: float = Field(0.2, ge=0, le=1, description="boxes that score more are kept, within the two bounds")
    min_boxes: PositiveInt = Field(36, description="at least so many of the best, if there are")
    max_boxes: PositiveInt = Field(36, description="at most so many")

    @model_validator(mode="after")
    def _bounds(self) -> RegionsConfig:
        if self.min_boxes > self.max_boxes:
            raise ValueError(f"min_boxes {self.min_boxes} is more than max_boxes {self.max_boxes}")
        return self


class BoxesConfig(LayerSettings):
    """Vectors of given or proposed boxes by ROI-align on a CNN (two-branch paper, section 5.3: 200 EdgeBoxes, VGG fc7)."""

    extractor: Literal["boxes"] = "boxes"
    boxes: str = Field(
        "edge_boxes", description="edge_boxes, selective_search, rpn, or a .json or .h5 file with boxes of the images"
    )
    n_boxes: PositiveInt = Field(200, description="the best so many proposals of an image; a file's boxes are all taken")
    edge_model: str | None = Field(None, description="structured-edge model (model.yml.gz) for edge_boxes; none: plain edges")
    proposer: str = Field("fasterrcnn_resnet50_fpn", description="the Faster R-CNN whose proposals rpn takes")
    proposer_weights: str = Field("pretrained", description="its weights, as weights")
    shorter: PositiveInt = Field(600, description="the shorter side is scaled to this")
    longer: PositiveInt = Field(1000, description="unless the longer side would then be more than this")
    map: str = Field(description="the layer on whose output boxes are pooled; the layers behind it run on each box")
    pool: PositiveInt = Field(14, description="side of a pooled box; what the map has for the network's own input size")
    chunk: PositiveInt = Field(256, description="boxes that run through the layers behind the map at once")

    @classmethod
    def how(cls) -> set[str]:
        """Files are known by their hashes."""
        return super().how() | {"chunk", "proposer_weights", "edge_model"}

    @property
    def from_file(self) -> bool:
        """Whether ``boxes`` names a file."""
        return self.boxes.endswith((".json", ".h5"))

    def content(self) -> dict[str, Any]:
        """A file of boxes is known by its hash, not by its place."""
        return {**super().content(), **({"boxes": "file"} if self.from_file else {})}

    @model_validator(mode="after")
    def _known(self) -> BoxesConfig:
        if not self.from_file and self.boxes not in ("edge_boxes", "selective_search", "rpn"):
            raise ValueError(f"boxes: {self.boxes!r} is not edge_boxes, selective_search, rpn, or a .json or .h5 file")
        return self


class CaptionSettings(FeatureSettings):
    """A caption feature: an encoder fitted on the training captions, then a vector per caption."""

    chunk: PositiveInt = Field(2048, description="captions encoded at once")

    @classmethod
    def how(cls) -> set[str]:
        """The chunk only bounds the memory."""
        return super().how() | {"chunk"}


class TfidfConfig(CaptionSettings):
    """Words weighted by their rarity (scikit-learn's TF-IDF), unit length."""

    extractor: Literal["tfidf"] = "tfidf"
    min_count: PositiveInt = Field(4, description="a word needs this many training captions")
    max_words: PositiveInt | None = Field(None, description="the most frequent so many words; none: all")
    sublinear: bool = Field(False, description="1 + log of a word's count in its caption instead of the count")


class WordSettings(CaptionSettings):
    """A feature built on word vectors."""

    words: str | None = Field(
        None, description="word2vec (.bin or text) or GloVe file, unless --words or $VSE_WORDS names one; none: trained here"
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


class MeanVectorConfig(WordSettings):
    """The mean of a caption's word vectors, unit length."""

    extractor: Literal["mean_vector"] = "mean_vector"


class HglmmConfig(WordSettings):
    """Fisher vectors of a hybrid Gaussian-Laplacian mixture (two-branch paper, section 4.3; Klein et al., CVPR 2015)."""

    extractor: Literal["hglmm"] = "hglmm"
    ica: bool = Field(True, description="independent components of the word vectors first")
    ica_words: PositiveInt = Field(300_000, description="words drawn for the fit of the components and of the mixture")
    ica_iterations: PositiveInt = 200
    scale: float = Field(10.0, gt=0, description="length of a word's vector before the mixture")
    centres: PositiveInt = 30
    iterations: PositiveInt = Field(10, description="steps of expectation maximisation")
    pca: PositiveInt | None = Field(6000, description="principal components; none: the whole Fisher vector")
    pca_captions: PositiveInt | None = Field(None, description="training captions drawn for the components; none: all")
    normalize: bool = Field(False, description="L2-normalise once more after the projection")


FeatureConfig = CnnConfig | RegionsConfig | BoxesConfig | TfidfConfig | MeanVectorConfig | HglmmConfig
EXTRACTORS: dict[str, type[FeatureConfig]] = {
    "cnn": CnnConfig,
    "regions": RegionsConfig,
    "boxes": BoxesConfig,
    "tfidf": TfidfConfig,
    "mean_vector": MeanVectorConfig,
    "hglmm": HglmmConfig,
}
CAPTION_EXTRACTORS = ("tfidf", "mean_vector", "hglmm")


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
