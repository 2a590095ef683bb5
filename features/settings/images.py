"""Settings of ``vse-extract cnn``; the code is in :mod:`vse.features.extractors.cnn`.

Settings of ``vse-extract regions``; the code is in :mod:`vse.features.extractors.regions`.

Settings of ``vse-extract boxes``; the code is in :mod:`vse.features.extractors.boxes`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.settings.base import WEIGHT_SUFFIXES, LayerSettings, NetworkSettings


class CnnConfig(LayerSettings):
    """Vectors of images from a CNN: one crop, ten crops, random crops, or a grid of positions.

    VSE++ paper, section 3: images of 256 x 256, crops of 224 x 224, layer FC7 of VGG19.
    """

    default_preset: ClassVar[str | None] = "fc7"

    code: ClassVar[str] = "vse.features.extractors.cnn:CnnExtractor"

    extractor: Literal["cnn"] = "cnn"
    positions: bool = Field(
        False, description="false: the grid is flattened into one vector; true: a vector per position, row by row"
    )
    resize: PositiveInt = 256
    resize_mode: Literal["square", "shorter", "library"] = Field(
        "square",
        description="square: to resize x resize, as the paper; shorter: the shorter side to resize; library: likewise, the "
        "longer side cut off to whole pixels instead of rounded, as torchvision, timm and OpenCLIP do",
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
    fold_batch_norm: bool = Field(
        False, description="fold batch norms into convolutions: faster, and vectors differ by rounding, so that their key does"
    )

    @classmethod
    def excluded_fields(cls) -> set[str]:
        """Neither the batches nor compilation change what is computed."""
        return super().excluded_fields() | {"batch_size", "compile"}

    def content(self) -> dict[str, Any]:
        """Batch norms are named only if they are folded, so that features made before that was a setting keep their keys."""
        content = super().content()
        if not self.fold_batch_norm:
            del content["fold_batch_norm"]
        return content

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """A bank keeps the crops apart, ``positions`` the places of the grid."""
        return "crops" if self.bank else "sets" if self.positions else "vectors"

    @property
    def n_crops(self) -> int:
        """How many crops of an image the network reads."""
        return {"1c": 1, "10c": 10, "10c_bank": 10, "rc_bank": self.n_random}[self.crops]

    @property
    def max_vectors(self) -> int | None:
        """None if positions are those of a whole map, whose size the network decides."""
        if not self.positions:
            return self.n_crops if self.bank else 1
        return self.grid**2 if isinstance(self.grid, int) else None

    @property
    def network_passes(self) -> int:
        return self.n_crops

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
    """Boxes that a Faster R-CNN finds in images, and the vector of its box head for each (bottom-up attention, in short)."""

    code: ClassVar[str] = "vse.features.extractors.regions:RegionsExtractor"

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

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """The regions of an image."""
        return "sets"

    @property
    def max_vectors(self) -> int:
        return self.max_boxes

    @model_validator(mode="after")
    def _bounds(self) -> RegionsConfig:
        if self.min_boxes > self.max_boxes:
            raise ValueError(f"min_boxes {self.min_boxes} is more than max_boxes {self.max_boxes}")
        return self


class BoxesConfig(LayerSettings):
    """Vectors of given or proposed boxes of images, by ROI-align on a CNN.

    Two-branch paper, section 4.3: 200 EdgeBoxes per image, layer fc7 of a VGG that was fine-tuned as a Fast R-CNN on the
    trainval sets of PASCAL VOC 2007 and 2012.
    """

    memory_mb: ClassVar[int] = 12_000  # hundreds of boxes with thousands of numbers each are held at once

    code: ClassVar[str] = "vse.features.extractors.boxes:BoxesExtractor"

    extractor: Literal["boxes"] = "boxes"
    boxes: str = Field(
        "edge_boxes",
        description="edge_boxes, selective_search, rpn, phrases (the ground-truth boxes of the data set's phrases), or a "
        ".json or .h5 file with boxes of the images",
    )
    n_boxes: PositiveInt = Field(
        200, description="the best so many proposals of an image; those of a file or of phrases are all taken"
    )
    train_boxes: PositiveInt | None = Field(
        None, description="of a training image the first so many boxes, those of a file, too; none: as of any other image"
    )
    edge_model: str | None = Field(None, description="structured-edge model (model.yml.gz) for edge_boxes; none: plain edges")
    thin_edges: bool = Field(
        False, description="edge_boxes on the ridges of plain edges: many times faster; a model's edges are ridges anyhow"
    )
    proposer: str = Field("fasterrcnn_resnet50_fpn", description="the Faster R-CNN whose proposals rpn takes")
    proposer_weights: str = Field("pretrained", description="its weights, as weights")
    shorter: PositiveInt = Field(600, description="the shorter side is scaled to this")
    longer: PositiveInt = Field(1000, description="unless the longer side would then be more than this")
    map: str = Field(description="the layer on whose output boxes are pooled; the layers after it run on each box")
    pool: PositiveInt = Field(14, description="side of a pooled box; what the map has for the network's own input size")
    chunk: PositiveInt = Field(256, description="boxes that run through the layers after the map at once")

    @classmethod
    def excluded_fields(cls) -> set[str]:
        """Files are known by their hashes."""
        return super().excluded_fields() | {"chunk", "proposer_weights", "edge_model"}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """The boxes of an image."""
        return "sets"

    @property
    def max_vectors(self) -> int | None:
        """None if all boxes of a file or of phrases are taken."""
        return None if self.from_file or self.boxes == "phrases" else self.n_boxes

    @property
    def from_file(self) -> bool:
        """Whether ``boxes`` names a file."""
        return self.boxes.endswith((".json", ".h5"))

    def content(self) -> dict[str, Any]:
        """A file of boxes is known by its hash, not by its place; features made before some settings stay what they are."""
        content = {**super().content(), **({"boxes": "file"} if self.from_file else {})}
        return {name: value for name, value in content.items() if name not in ("train_boxes", "thin_edges") or value}

    def files(self) -> list[str]:
        """Weights of both networks, boxes and the edge model, where they are files."""
        proposer = [self.proposer_weights] if self.proposer_weights.endswith(WEIGHT_SUFFIXES) else []
        edge_model = [self.edge_model] if self.edge_model is not None else []
        return [*super().files(), *([self.boxes] if self.from_file else []), *proposer, *edge_model]

    @model_validator(mode="after")
    def _known(self) -> BoxesConfig:
        sources = ("edge_boxes", "selective_search", "rpn", "phrases")
        if not self.from_file and self.boxes not in sources:
            raise ValueError(f"boxes: {self.boxes!r} is not {', '.join(sources)}, or a .json or .h5 file")
        if self.boxes == "phrases" and self.train_boxes is not None:
            raise ValueError("train_boxes: every ground-truth box is needed, so it does not go with boxes: phrases")
        return self
