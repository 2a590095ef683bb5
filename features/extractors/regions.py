"""Settings of ``vse-extract regions``; the code is in :mod:`vse.features.detector`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.settings import Job, NetworkSettings

if TYPE_CHECKING:
    from vse.features.extractors.extractor import Extractor


class RegionsConfig(NetworkSettings):
    """Boxes that a Faster R-CNN finds in images, and the vector of its box head for each (bottom-up attention, in short)."""

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
    def most_vectors(self) -> int:
        return self.max_boxes

    @model_validator(mode="after")
    def _bounds(self) -> RegionsConfig:
        if self.min_boxes > self.max_boxes:
            raise ValueError(f"min_boxes {self.min_boxes} is more than max_boxes {self.max_boxes}")
        return self

    def build(self, job: Job) -> Extractor:
        """The detector with its weights."""
        from vse.features.detector import RegionsExtractor

        return RegionsExtractor(self, job.weights_dir, job.device)
