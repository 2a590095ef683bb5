"""Settings of the image extractors ``cnn``, ``regions`` and ``boxes``; their code is in :mod:`vse.features.extractors`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.settings.base import WEIGHT_FILE_SUFFIXES, LayerSettings, NetworkSettings


class CnnConfig(LayerSettings):
    """Vectors that a CNN computes from one crop, ten crops or random crops of an image, or for a grid of positions.

    The default preset follows section 3 of the VSE++ paper: images of 256 x 256 pixels, crops of 224 x 224 pixels, layer FC7
    of VGG19.
    """

    default_preset: ClassVar[str | None] = "fc7"

    extractor_class_path: ClassVar[str] = "vse.features.extractors.cnn:CnnExtractor"

    extractor: Literal["cnn"] = "cnn"
    positions: bool = Field(
        False,
        description="true: each cell of the grid gives a vector of its own, row by row. false: the cells are concatenated "
        "to one vector",
    )
    resize: PositiveInt = Field(256, description="side length in pixels to which an image is scaled before the crop")
    resize_mode: Literal["square", "shorter", "library"] = Field(
        "square",
        description="square: both sides get this length, as in the VSE++ paper. shorter: the shorter side gets this "
        "length, and the longer side is rounded to the nearest pixel. library: the same, but the longer side "
        "is rounded down, as in torchvision, timm and OpenCLIP",
    )
    interpolation: Literal["bilinear", "bicubic"] = Field(
        "bilinear", description="interpolation when an image is scaled: bilinear or bicubic"
    )
    crop: PositiveInt = Field(224, description="side of a crop in pixels")
    crops: Literal["1c", "10c", "10c_bank", "rc_bank"] = Field(
        "1c",
        description="1c: the vector of the centre crop. 10c: the mean vector of ten crops (corners, centre, and their "
        "mirror images). 10c_bank: a vector for each of these ten crops. rc_bank: a vector for each random "
        "crop",
    )
    n_random: PositiveInt = Field(10, description="number of random crops of each image, if crops is rc_bank")
    random_crop: Literal["resized", "plain"] = Field(
        "resized",
        description="kind of the random crops. resized, as in the code of VSE++: 8 to 100% of the image's area, with an "
        "aspect ratio of 3/4 to 4/3, scaled to crop x crop pixels. plain, as in the VSE++ paper: crop x crop "
        "pixels of the scaled image. Half of the crops are mirrored in both cases",
    )
    crop_seed: int = Field(0, ge=0, description="seed of the random crops, which also depend on the id of the image")
    batch_size: PositiveInt = Field(32, description="number of images that the network reads at once")
    compile: bool = Field(False, description="compile the network with torch.compile before the extraction; faster on a GPU")
    fold_batch_norm: bool = Field(
        False,
        description="merge batch norms into convolutions. This is faster, and changes vectors by rounding errors. A cache "
        "with merged batch norms counts as another feature",
    )

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"batch_size", "compile"}

    def list_cache_key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        A false ``fold_batch_norm`` is omitted, so that the keys (hashes) of older caches stay the same.
        """
        content = super().list_cache_key_settings()
        if not self.fold_batch_norm:
            del content["fold_batch_norm"]
        return content

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        return "crops" if self.is_crop_bank else "sets" if self.positions else "vectors"

    @property
    def n_crops(self) -> int:
        """Number of crops that the network reads for an image."""
        return {"1c": 1, "10c": 10, "10c_bank": 10, "rc_bank": self.n_random}[self.crops]

    @property
    def max_vectors_per_row(self) -> int | None:
        if not self.positions:
            return self.n_crops if self.is_crop_bank else 1
        return self.grid**2 if isinstance(self.grid, int) else None

    @property
    def n_network_passes(self) -> int:
        return self.n_crops

    @property
    def is_crop_bank(self) -> bool:
        """True if the cache stores a vector for each crop of an image (a bank of crops) instead of their mean."""
        return self.crops.endswith("_bank")

    @model_validator(mode="after")
    def _check_crops(self) -> CnnConfig:
        if self.crop > self.resize:
            raise ValueError(f"crop {self.crop} is larger than resize {self.resize}")
        if self.positions and self.is_crop_bank:
            raise ValueError(f"crops {self.crops} keep one vector per crop; positions: true goes with 1c and 10c")
        return self


class RegionsConfig(NetworkSettings):
    """Vectors of the regions that a Faster R-CNN finds in images, from the detector's box head (bottom-up attention)."""

    extractor_class_path: ClassVar[str] = "vse.features.extractors.regions:RegionsExtractor"

    extractor: Literal["regions"] = "regions"
    model: str = Field("fasterrcnn_resnet50_fpn_v2", description="a Faster R-CNN of torchvision")
    normalize: bool = Field(False, description="L2-normalise each region's vector")
    shorter: PositiveInt = Field(800, description="length in pixels to which the shorter side of an image is scaled")
    longer: PositiveInt = Field(
        1333,
        description="maximum length in pixels of the longer side; an image that would exceed it is scaled to this length "
        "instead",
    )
    proposals: PositiveInt = Field(1000, description="number of boxes that the region-proposal network proposes")
    selection: Literal["detections", "bottom_up"] = Field(
        "detections",
        description="boxes from which the best are kept, after non-maximum suppression (NMS) in each class. detections: the "
        "final boxes of the detector. bottom_up: the proposals, before the detector adjusts their position. If NMS "
        "keeps a proposal in several classes, its score is the highest of its scores in these classes",
    )
    nms: float = Field(
        0.5,
        gt=0,
        le=1,
        description="NMS drops a box if its overlap (IoU) with a better box of the same class is above this value",
    )
    score: float = Field(
        0.2,
        ge=0,
        le=1,
        description="threshold: boxes with a higher score are kept; min_boxes and max_boxes limit their number",
    )
    min_boxes: PositiveInt = Field(
        36,
        description="minimum number of boxes of an image: if too few have a score above the threshold, the best of the "
        "other boxes are added",
    )
    max_boxes: PositiveInt = Field(36, description="maximum number of boxes of an image")

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        return "sets"

    @property
    def max_vectors_per_row(self) -> int:
        return self.max_boxes

    @model_validator(mode="after")
    def _check_bounds(self) -> RegionsConfig:
        if self.min_boxes > self.max_boxes:
            raise ValueError(f"min_boxes {self.min_boxes} is more than max_boxes {self.max_boxes}")
        return self


class BoxesConfig(LayerSettings):
    """Vectors that a CNN computes for given or proposed boxes of an image, by ROI-align.

    The two-branch paper (Wang et al., TPAMI 2018, section 4.3) has 200 EdgeBoxes per image. The vectors of the paper are layer
    fc7 of a VGG, fine-tuned as a Fast R-CNN on PASCAL VOC 2007 and 2012 (trainval). The default preset reads a VGG19 that was
    trained on ImageNet only.
    """

    memory_mb: ClassVar[int] = 12_000  # for hundreds of boxes with thousands of numbers each

    extractor_class_path: ClassVar[str] = "vse.features.extractors.boxes:BoxesExtractor"

    extractor: Literal["boxes"] = "boxes"
    boxes: str = Field(
        "edge_boxes",
        description="source of the boxes: edge_boxes or selective_search (algorithms), rpn (a region-proposal network), "
        "phrases (the ground-truth boxes of the data set's phrases), or a .json or .h5 file of boxes",
    )
    n_boxes: PositiveInt = Field(
        200,
        description="maximum number of boxes that are proposed for an image, those with the highest scores; boxes from a "
        "file and boxes of phrases are not limited",
    )
    train_boxes: PositiveInt | None = Field(
        None,
        description="maximum number of boxes of a training image: the proposals with the highest scores, or the first "
        "boxes in the file; null: training images have no limit of their own",
    )
    edge_model: str | None = Field(
        None,
        description="file of a structured-edge model (model.yml.gz) that finds the edges for edge_boxes; null: edges are "
        "image gradients",
    )
    thin_edges: bool = Field(
        False,
        description="thin the image gradients to ridges, which makes edge_boxes many times faster; ignored with an edge_model",
    )
    proposer: str = Field(
        "fasterrcnn_resnet50_fpn",
        description="Faster R-CNN of torchvision that proposes the boxes, if boxes is rpn",
    )
    proposer_weights: str = Field(
        "pretrained",
        description="weights of the proposer: pretrained, random, the name of weights in torchvision, or a .pth or "
        ".safetensors file",
    )
    shorter: PositiveInt = Field(600, description="length in pixels to which the shorter side of an image is scaled")
    longer: PositiveInt = Field(
        1000,
        description="maximum length in pixels of the longer side; an image that would exceed it is scaled to this length "
        "instead",
    )
    map: str | None = Field(
        None,
        description="ROI-align pools the boxes on the output of this layer. The network then continues with each pooled "
        "box, up to the layer that the setting 'layer' names",
    )
    layers: tuple[str, ...] = Field(
        (),
        description="use several layers instead of map and layer, in the order of the network. The output of each layer is "
        "averaged over a box, and the vector of the box concatenates these averages",
    )
    pool: PositiveInt = Field(
        14, description="a box is pooled to pool x pool cells; the layers after map must accept an input of this size"
    )
    chunk: PositiveInt = Field(256, description="maximum number of boxes that the layers after map read at once")

    @classmethod
    def list_fields_outside_key(cls) -> set[str]:
        return super().list_fields_outside_key() | {"chunk", "proposer_weights", "edge_model"}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        return "sets"

    @property
    def max_vectors_per_row(self) -> int | None:
        return None if self.has_box_file or self.boxes == "phrases" else self.n_boxes

    @property
    def has_box_file(self) -> bool:
        """True if the setting ``boxes`` is the path of a file."""
        return self.boxes.endswith((".json", ".h5"))

    def list_cache_key_settings(self) -> dict[str, Any]:
        """Return the settings that determine the vectors.

        If ``boxes`` is the path of a file, its value here is "file", because the key contains the hash of the file. Defaults
        of ``train_boxes``, ``thin_edges`` and ``layers`` are omitted, so that the keys (hashes) of older caches stay the same.
        """
        content = {**super().list_cache_key_settings(), **({"boxes": "file"} if self.has_box_file else {})}
        return {name: value for name, value in content.items() if name not in ("train_boxes", "thin_edges", "layers") or value}

    @model_validator(mode="after")
    def _check_layers(self) -> BoxesConfig:
        if bool(self.layers) == (self.map is not None):
            raise ValueError("give either map, the layer on which boxes are pooled, or layers, several of them")
        return self

    def list_input_files(self) -> list[str]:
        proposer = [self.proposer_weights] if self.proposer_weights.endswith(WEIGHT_FILE_SUFFIXES) else []
        edge_model = [self.edge_model] if self.edge_model is not None else []
        return [*super().list_input_files(), *([self.boxes] if self.has_box_file else []), *proposer, *edge_model]

    @model_validator(mode="after")
    def _check_boxes(self) -> BoxesConfig:
        sources = ("edge_boxes", "selective_search", "rpn", "phrases")
        if not self.has_box_file and self.boxes not in sources:
            raise ValueError(f"boxes: {self.boxes!r} is not {', '.join(sources)}, or a .json or .h5 file")
        if self.boxes == "phrases" and self.train_boxes is not None:
            raise ValueError("train_boxes: every ground-truth box is needed, so it does not go with boxes: phrases")
        return self
