"""Try a user's own loss on four pairs with known scores."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import explain_own_errors
from vse.training.losses.base import Loss
from vse.training.losses.pair_loss import PairLoss
from vse.training.losses.ranking import RankingLoss, mask_negative_pairs

log = logging.getLogger(__name__)

RANKING_FORM = (
    "a loss is `def my_loss(scores, positives, negatives, margin)`. Here scores (n, m) compare n queries with m candidates, "
    "positives (n,) are the columns of the positives, and negatives (n, m) is the mask of the negatives. It returns the sum "
    "of the costs as one number, such as `((margin - scores.gather(1, positives[:, None]) + scores).clamp(min=0) * "
    "negatives).sum()` (vse new loss FILE.py writes an example)"
)
PAIR_FORM = (
    "the method `cost(self, scores, labels)` takes the scores (n,) of pairs and labels (n,) of +1 or -1, and returns the sum "
    "of the costs as one number, such as `torch.nn.functional.softplus(-labels * scores).sum()`"
)
_N_QUERIES = 4
_MEAN_TOLERANCE = 1e-4


def check_loss(loss: Loss, n_more_negatives: int = 0) -> None:
    """Compute the cost and the gradient of a loss for the scores of four queries.

    ``n_more_negatives`` : number of candidates that are no pair of the batch, as an adversary adds them.

    Raises UserError if the result is not one finite number with a finite gradient, or if the loss changes its arguments. Also
    raises UserError if the loss counts a score of a pair that ``same_image`` excludes, or if a higher score of the positives
    costs more. A loss that is a mean over queries causes a warning, because the learning rates of the presets are for sums.
    """
    if isinstance(loss, RankingLoss):
        _check_ranking_loss(loss, n_more_negatives)
    elif isinstance(loss, PairLoss):
        _check_pair_loss(loss)


def _check_ranking_loss(loss: RankingLoss, n_more_negatives: int) -> None:
    images = torch.tensor([0, 1, 2, 2])  # the last two captions belong to one image
    negatives = mask_negative_pairs(images, loss.same_image != "keep")
    negatives = torch.cat([negatives, torch.ones(_N_QUERIES, n_more_negatives, dtype=torch.bool)], 1)
    positives = torch.arange(_N_QUERIES)
    scores = torch.rand(negatives.shape, generator=torch.Generator().manual_seed(0)) * 0.5
    scores[positives, positives] -= 0.5  # each positive is below all negatives, so that every loss has a gradient
    arguments = {"scores": scores, "positives": positives, "negatives": negatives}
    gradient, value = _differentiate(loss, arguments, RANKING_FORM)
    unrelated = ~negatives
    unrelated[positives, positives] = False
    if loss.same_image != "positive" and gradient[unrelated].any():
        raise _refuse(
            loss,
            "it counts the score of a caption of the same image, which same_image excludes; multiply the costs by `negatives`",
            RANKING_FORM,
        )
    if gradient[positives, positives].sum() > 0:
        raise _refuse(loss, "a higher score of the positives costs more; the sign is the wrong way round", RANKING_FORM)
    twice = {name: torch.cat([part, part]) for name, part in arguments.items()}
    doubled = float(loss.cost(**twice))
    if not loss.is_mean_over_queries and abs(doubled - value) <= _MEAN_TOLERANCE * abs(value):
        log.warning(
            "%s is a mean over the queries, because twice the same queries have the same cost; the learning rates of the "
            "presets are those for sums, so raise train.learning_rate or return the sum",
            loss.name,
        )


def _check_pair_loss(loss: PairLoss) -> None:
    labels = torch.tensor([1.0, 1, -1, -1])
    gradient, _ = _differentiate(loss, {"scores": torch.tensor([-0.4, 0.2, 0.3, -0.1]), "labels": labels}, PAIR_FORM)
    if gradient[labels > 0].sum() > 0:
        raise _refuse(loss, "a higher score of the positives costs more; the sign is the wrong way round", PAIR_FORM)


def _differentiate(loss: RankingLoss | PairLoss, arguments: dict[str, Tensor], form: str) -> tuple[Tensor, float]:
    """Return the gradient of the cost with respect to the scores, and the cost."""
    leaf = arguments["scores"].clone().requires_grad_()
    given = {name: part.clone() for name, part in arguments.items()} | {"scores": leaf * 1}
    with explain_own_errors(loss.name, form):
        cost = loss.cost(**given)
    changed = [name for name, part in arguments.items() if not torch.equal(given[name].detach(), part)]
    if changed:
        raise _refuse(loss, f"it changes its argument {changed[0]} in place; work on a copy, {changed[0]}.clone()", form)
    if not isinstance(cost, Tensor):
        raise _refuse(loss, f"it returns {type(cost).__name__}, not a tensor (.item() and float() lose the gradient)", form)
    if cost.shape:
        raise _refuse(loss, f"it returns a tensor of shape {tuple(cost.shape)}, not one number; end with .sum()", form)
    if not cost.isfinite():
        raise _refuse(loss, f"its cost of four pairs is {cost.item()}", form)
    if not cost.requires_grad:
        raise _refuse(loss, "its cost has no gradient; detach, numpy, argmax and comparisons cut it off", form)
    with explain_own_errors(loss.name, form):
        gradient = torch.autograd.grad(cost, leaf, allow_unused=True)[0]
    if gradient is None or not gradient.any():
        raise _refuse(loss, "its cost does not change with the scores, even where negatives are above the positives", form)
    if not gradient.isfinite().all():
        raise _refuse(loss, "its gradient is not finite, though its cost is; add a small number in roots and logarithms", form)
    return gradient, cost.item()


def _refuse(loss: Loss, fault: str, form: str) -> UserError:
    return UserError(f"{loss.name}, tried on four pairs: {fault}; {form}")
