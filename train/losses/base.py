"""What all losses share: their settings, the batch that they see, and the cost that they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from vse.pipeline.config import Settings
from vse.train.kinds import Encoded
from vse.train.models.similarities.base import Similarity

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The pairs of a batch.

    images, captions : embeddings of the n pairs, see :mod:`vse.train.kinds`
    image_of, text_of : (n,) a number for the image and for the text of each pair
    more_images, more_captions : embeddings of further candidates, which are negatives of every query, such as an adversary's
    pair_of : (n,) the number of each pair among those that are trained on, if an adversary asks
    """

    images: Encoded
    captions: Encoded
    image_of: Numbers
    text_of: Numbers
    more_images: Encoded | None = None
    more_captions: Encoded | None = None
    pair_of: Numbers | None = None


class Ranking(NamedTuple):
    """What the queries of one direction were compared with: scores (n, m), positives (n,) and negatives (n, m)."""

    scores: Float[Tensor, "n m"]
    positives: Tensor
    negatives: Bool[Tensor, "n m"]


class Cost(NamedTuple):
    """The loss of a batch, what it would be if all embeddings were equal, and what images and captions were compared with."""

    loss: Float[Tensor, ""]
    collapsed: Float[Tensor, ""]
    rankings: tuple[Ranking, Ranking] | None = None


# From a batch, and a seed for what is drawn at random, to its cost.
Objective = Callable[[Batch, int], Cost]


class Loss(Settings, ABC):
    """Settings of a loss, chosen by its ``name`` (VSE++ paper, Eqs. 5 and 6; two-branch paper, Eqs. 3 to 7).

    ``ranks`` says whether it compares the candidates of a query, so that a hardest negative exists.
    """

    ranks: ClassVar[bool]
    name: str
    margin: float = Field(0.2, ge=0, description="alpha of the hinges; m of the two-branch paper")
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

    @property
    def averages(self) -> bool:
        """Whether the cost of a batch is a mean over its queries, not a sum."""
        return False

    @abstractmethod
    def objective(self, similarity: Similarity, compiled: bool = False) -> Objective:
        """What training minimises, with a similarity that compares embeddings; ``compiled`` by torch.compile, if it can be."""
