"""The spectrum of losses from the sum of hinges to their max, by one temperature."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses.hinges import hinge_costs


def spectrum_of_hinges(
    scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], settings: LossConfig
) -> Float[Tensor, ""]:
    """Hinges re-weighted by how far they are from the hardest of their query, summed over the batch.

    The VSE++ paper remarks behind Eq. 6 that a spectrum of losses lies between SH and MH, in which the gradients of all
    triplets are re-weighted. Here a hinge h weighs exp((h - max h) / temperature), the maximum being its query's; no
    gradient flows through the weights. So a temperature near 0 is MH (but counts all of several hardest hinges that tie), a
    high one SH.
    """
    wrong_caption, wrong_image = hinge_costs(scores, negatives, settings.margin)
    of_images, of_captions = (
        _reweighted(hinges, dim, settings.temperature) for dim, hinges in ((1, wrong_caption), (0, wrong_image))
    )
    return settings.lambda1 * of_images + settings.lambda2 * of_captions


def _reweighted(hinges: Float[Tensor, "n n"], dim: int, temperature: float) -> Float[Tensor, ""]:
    below = (hinges - hinges.amax(dim, keepdim=True)).detach()
    return ((below / temperature).exp() * hinges).sum()
