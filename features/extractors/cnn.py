"""Settings of ``vse-extract cnn``; the code is in :mod:`vse.features.cnn_extractor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.settings import Job, LayerSettings

if TYPE_CHECKING:
    from vse.features.extractors.extractor import Extractor


class CnnConfig(LayerSettings):
    """Vectors of images from a CNN: one crop, ten crops, random crops, or a grid of positions.

    VSE++ paper, section 3: images of 256 x 256, crops of 224 x 224, layer FC7 of VGG19.
    """

    default_preset: ClassVar[str | None] = "fc7"

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
    def how(cls) -> set[str]:
        """Neither the batches nor compilation change what is computed."""
        return super().how() | {"batch_size", "compile"}

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
    def most_vectors(self) -> int | None:
        """None if positions are those of a whole map, whose size the network decides."""
        if not self.positions:
            return self.n_crops if self.bank else 1
        return self.grid**2 if isinstance(self.grid, int) else None

    @property
    def network_reads(self) -> int:
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

    def build(self, job: Job) -> Extractor:
        """The CNN with its weights."""
        from vse.features.cnn_extractor import CnnExtractor

        return CnnExtractor(self, job.weights_dir, job.device)
