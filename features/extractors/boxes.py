"""Settings of ``vse-extract boxes``; the code is in :mod:`vse.features.box_extractor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.settings import WEIGHT_SUFFIXES, Job, LayerSettings

if TYPE_CHECKING:
    from vse.features.extractors.extractor import Extractor


class BoxesConfig(LayerSettings):
    """Vectors of given or proposed boxes of images, by ROI-align on a CNN.

    Two-branch paper, section 4.3: 200 EdgeBoxes per image, layer fc7 of a VGG that was fine-tuned as a Fast R-CNN on the
    trainval sets of PASCAL VOC 2007 and 2012.
    """

    memory_mb: ClassVar[int] = 12_000  # hundreds of boxes with thousands of numbers each are held at once

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
    def how(cls) -> set[str]:
        """Files are known by their hashes."""
        return super().how() | {"chunk", "proposer_weights", "edge_model"}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """The boxes of an image."""
        return "sets"

    @property
    def most_vectors(self) -> int | None:
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

    def build(self, job: Job) -> Extractor:
        """The CNN with its weights, and what proposes boxes."""
        from vse.features.box_extractor import BoxesExtractor

        return BoxesExtractor(self, job.weights_dir, job.device, job.dataset)
