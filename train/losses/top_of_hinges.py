"""The K highest hinges of each pair and direction, the loss of the two-branch embedding network."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses.hinges import highest, hinge_costs


def top_of_hinges(scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], settings: LossConfig) -> Float[Tensor, ""]:
    """Of each pair the ``k`` wrong captions and the ``k`` wrong images that cost most (two-branch paper, Eq. 3, section 5.1).

    Its hinges [m + d(x, y) - d(x, y')]+ are those of scores s = -d. With masked negatives an image that the batch has
    several times is one wrong image, at the first of its rows.
    """
    wrong_caption, wrong_image = hinge_costs(scores, negatives, settings.margin)
    seen_before = (~negatives).tril(-1).any(1, keepdim=True)
    of_images, of_captions = highest(wrong_caption, settings), highest((wrong_image * ~seen_before).T, settings)
    return settings.lambda1 * of_images + settings.lambda2 * of_captions
