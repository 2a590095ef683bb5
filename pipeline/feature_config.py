"""The schema of feature presets: what determines each kind of feature, and how it is made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.pipeline.config import Settings

MixtureKind = Literal["hybrid", "gaussian", "laplacian"]


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
    """Fisher vectors of a hybrid Gaussian-Laplacian mixture (two-branch paper, section 4.3; Klein et al., CVPR 2015).

    Or of others, or of several, such as GMM+HGLMM in the tables of both papers. Neither paper says how the two are combined:
    here each is reduced by principal components of its own, and they stand side by side. The code of Klein et al. puts the
    whole Fisher vectors side by side (``pca: null``) and, for COCO, draws 20,000 of their 36,000 numbers at random.
    """

    extractor: Literal["hglmm"] = "hglmm"
    ica: bool = Field(True, description="independent components of the word vectors first")
    ica_words: PositiveInt = Field(300_000, description="words drawn for the fit of the components and of the mixture")
    ica_iterations: PositiveInt = 200
    scale: float = Field(10.0, gt=0, description="length of a word's vector before the mixture")
    mixtures: list[MixtureKind] = Field(
        default=["hybrid"],
        min_length=1,
        description="one is fitted per entry, and their vectors stand side by side in this order; hybrid: each dimension of a "
        "cluster is a Gaussian or a Laplacian, whichever is likelier; gaussian, laplacian: all are",
    )
    centres: PositiveInt = Field(30, description="of each mixture")
    iterations: PositiveInt = Field(10, description="steps of expectation maximisation")
    pca: PositiveInt | None = Field(6000, description="principal components of each mixture; none: the whole Fisher vector")
    pca_captions: PositiveInt | None = Field(None, description="training captions drawn for the components; none: all")
    normalize: bool = Field(False, description="L2-normalise each mixture's vectors once more after the projection")

    def content(self) -> dict[str, Any]:
        """A hybrid mixture alone is not named: features made before there were others stay what they are."""
        found = super().content()
        if self.mixtures == ["hybrid"]:
            del found["mixtures"]
        return found

    @model_validator(mode="after")
    def _once(self) -> HglmmConfig:
        if len(set(self.mixtures)) < len(self.mixtures):
            raise ValueError(f"mixtures {', '.join(self.mixtures)}: a kind can be there once")
        return self


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
