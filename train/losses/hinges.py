"""The hinge costs that the ranking losses sum up or take the maximum of."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def hinge_costs(
    scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], margin: float
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Costs [margin - s(i, c) + s(i, c')]+ and [margin - s(i, c) + s(i', c)]+ of every wrong pair, 0 elsewhere.

    In the first matrix row i is the query image and column j the wrong caption; in the second column j is
    the query caption and row i the wrong image.
    """
    right = scores.diagonal()
    wrong_caption = (margin + scores - right[:, None]).clamp(min=0) * negatives
    wrong_image = (margin + scores - right[None, :]).clamp(min=0) * negatives
    return wrong_caption, wrong_image
