"""Ranking losses compare a query's positive with its negatives, for images and for captions as queries."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from jaxtyping import Bool, Float, Int
from pydantic import create_model
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.training.kinds import Encoded, select
from vse.training.losses.base import Batch, Cost, Loss, Mask, Objective, Positives, Ranking, Scalar, ScoreMatrix, sum_highest
from vse.training.models.similarities.base import Scores, Similarity

# The cost of a block; a value for each column, or none; and a value that is summed over blocks without gradients.
BlockCost = tuple[Scalar, Float[Tensor, " m"], Scalar]
RowCost = Callable[[Tensor, Tensor, int], BlockCost]
_ARGUMENTS = ("scores", "positives", "negatives")


class BlockCosts(NamedTuple):
    """The results of :func:`block_costs`.

    ``cost`` : the sum of the costs of all blocks.
    ``columns`` : a value of each block for each column (caption).
    ``total`` : the sum of the third result of ``row_cost``, without gradients.
    """

    cost: Scalar
    columns: Float[Tensor, "n_blocks m"]
    total: Scalar


def block_costs(
    row_cost: RowCost, size: int, images: Float[Tensor, "n dim"], captions: Float[Tensor, "m dim"], *parameters: nn.Parameter
) -> BlockCosts:
    """Return costs computed for ``size`` images at a time; the backward pass computes each block again (Chen et al., 2016).

    ``row_cost`` takes the embeddings of some images, those of all captions, and the index of the first of these images. It may
    use no tensors with gradients except the embeddings and ``parameters``.
    """
    return BlockCosts(*_ByBlocks.apply(row_cost, size, images, captions, *parameters))


class _ByBlocks(torch.autograd.Function):
    """Costs block by block. The results of all blocks are written to memory that is allocated once, to avoid fragmentation."""

    @staticmethod
    def forward(ctx: Any, row_cost: RowCost, size: int, images: Tensor, captions: Tensor, *parameters: Tensor) -> Any:
        ctx.save_for_backward(images, captions, *parameters)
        ctx.row_cost, ctx.size = row_cost, size
        cost, total = images.new_zeros(()), images.new_zeros(())
        columns = images.new_empty(0, 0)
        for block, start in enumerate(range(0, len(images), size)):
            block_cost, block_columns, more = row_cost(images[start : start + size], captions, start)
            if not block:
                columns = block_columns.new_empty(-(-len(images) // size), len(block_columns))
            columns[block] = block_columns
            cost += block_cost
            total += more
        ctx.mark_non_differentiable(total)
        return cost, columns, total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        images, captions, *parameters = ctx.saved_tensors
        cost_gradient, column_gradients = upstream[:2]
        gradients = [torch.zeros_like(part) for part in (images, captions, *parameters)]
        every_caption = captions.detach().requires_grad_()
        for block, start in enumerate(range(0, len(images), ctx.size)):
            rows = slice(start, start + ctx.size)
            with torch.enable_grad():
                some = images[rows].detach().requires_grad_()
                cost, columns, _ = ctx.row_cost(some, every_caption, start)
                weighted = cost_gradient * cost + (column_gradients[block] * columns).sum()
            own, *others = torch.autograd.grad(weighted, [some, every_caption, *parameters], materialize_grads=True)
            gradients[0][rows] = own
            for total, gradient in zip(gradients[1:], others, strict=True):
                total += gradient
        return None, None, *gradients


class RankingLoss(Loss):
    """A loss of the scores of queries with candidates.

    With ``distinct_candidates``, an image that occurs several times in a batch is a candidate only once, in its first row.
    """

    ranks: ClassVar = True
    distinct_candidates: ClassVar[bool] = False

    @abstractmethod
    def cost(self, scores: ScoreMatrix, positives: Positives, negatives: Mask) -> Scalar:
        """Return the cost of one direction, summed over its queries. ``negatives`` marks the negatives of each query."""

    def direction_cost(self, ranking: Ranking, weights: nn.Module | None = None) -> Scalar:
        """Return the cost of one direction. ``weights`` are the parameters of the loss, if it has any."""
        return self.cost(*ranking)

    def total_cost(self, images: Ranking, captions: Ranking, weights: nn.Module | None = None) -> Scalar:
        """Return the sum of the costs of both directions, weighted by ``lambda1`` and ``lambda2``."""
        return self.lambda1 * self.direction_cost(images, weights) + self.lambda2 * self.direction_cost(captions, weights)

    def collapse(self, images: Ranking, captions: Ranking) -> tuple[Ranking, Ranking]:
        """Return both rankings with the scores that they would have if all embeddings were equal."""
        equal = self.equal_scores
        return images._replace(scores=equal(images.scores)), captions._replace(scores=equal(captions.scores))

    def equal_scores(self, scores: ScoreMatrix) -> ScoreMatrix:
        """Return the scores of a batch whose embeddings are all equal.

        They are zeros here, because only their differences count. A loss that depends on their value overrides this method.
        """
        return torch.zeros_like(scores)

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """Return the function that adds the costs of both directions and of the neighbourhood constraints of a batch."""
        total_cost = torch.compile(self.total_cost) if compiled else self.total_cost

        def cost(batch: Batch, seed: int) -> Cost:
            rankings = rankings_of(batch, similarity, self.same_image != "keep", self.distinct_candidates)
            loss = total_cost(*rankings, weights)
            with torch.no_grad():
                collapsed = total_cost(*self.collapse(*rankings), weights)
            total = Cost(loss, collapsed, rankings)
            for weight, side, own, others in _constrained_sides(self, batch):
                first, neighbours, outside = find_neighbours(own, others)
                total = add_neighbourhood(total, weight, select(side, first), neighbours, outside, similarity, self)
            return total

        return cost


def rankings_of(
    batch: Batch, similarity: Similarity, mask_same_image: bool, distinct: bool = False
) -> tuple[Ranking, Ranking]:
    """Return two rankings of a batch: captions for each image as a query, and images for each caption.

    ``mask_same_image`` : see :func:`negative_pairs`.
    ``distinct`` : whether an image that occurs several times is a candidate only once.
    """
    image_of = torch.from_numpy(batch.image_of).to(batch.images[0].device)
    negatives = negative_pairs(image_of, mask_same_image)
    positives = torch.arange(len(image_of), device=image_of.device)
    i2t, t2i = _both_directions(similarity(batch.images, batch.captions))
    negative_images = negatives.T
    if distinct:
        negative_images = negative_images & ~(~negatives).tril(-1).any(1)
    more_captions = more_images = None
    if batch.more_captions is not None:
        more_captions = _both_directions(similarity(batch.images, batch.more_captions))[0]
    if batch.more_images is not None:
        more_images = _both_directions(similarity(batch.more_images, batch.captions))[1].T
    return _ranking(i2t, positives, negatives, more_captions), _ranking(t2i.T, positives, negative_images, more_images)


def negative_pairs(image_ids: Int[Tensor, " n"], mask_same_image: bool) -> Bool[Tensor, "n n"]:
    """Return a mask of the negative pairs (i, j) of a batch: i != j or, if masked, only pairs of different images.

    A batch of shuffled captions can hold two captions of one image. The VSE++ paper and its code count each of them as a
    negative in the row of the other one. Masking leaves such pairs out.
    """
    if mask_same_image:
        return image_ids[:, None] != image_ids[None, :]
    return ~torch.eye(len(image_ids), dtype=torch.bool, device=image_ids.device)


def _ranking(scores: Tensor, positives: Tensor, negatives: Tensor, more: Tensor | None) -> Ranking:
    if more is None:
        return Ranking(scores, positives, negatives)
    return Ranking(torch.cat([scores, more], 1), positives, torch.cat([negatives, torch.ones_like(more, dtype=torch.bool)], 1))


def _both_directions(scores: Scores) -> tuple[Tensor, Tensor]:
    return scores if isinstance(scores, tuple) else (scores, scores)


def _constrained_sides(loss: Loss, batch: Batch) -> list[tuple[float, Encoded, Tensor, Tensor]]:
    """Return the sides (images, captions) that have neighbourhood constraints in the loss.

    A side is its weight, its embeddings, the indices of its items, and the indices of the items that they are paired with.
    """
    if not loss.lambda3 and not loss.lambda4:
        return []
    device = batch.images[0].device
    image_of, text_of = (torch.from_numpy(indices).to(device) for indices in (batch.image_of, batch.text_of))
    sides = [
        (loss.lambda3, batch.images, image_of, text_of),
        (loss.lambda4, batch.captions, torch.arange(len(image_of), device=device), image_of),
    ]
    return [side for side in sides if side[0]]


def neighbourhood_cost(
    scores: Float[Tensor, "n n"], neighbours: Bool[Tensor, "n n"], outside: Bool[Tensor, "n n"], settings: Loss
) -> Scalar:
    """Return the hinges [m + d(y, y+) - d(y, y-)]+ of queries y, neighbours y+ and other items y- (two-branch, Eqs. 4 to 6).

    m is the margin, d the distance, and ``scores`` = -d are the scores of all items of one side with each other. The ``k``
    highest hinges of each query and neighbour are summed. With the reduction ``mean_topk``, as in the authors' code, only the
    farthest neighbour counts, a query is its own neighbour, and the result is the mean of the ``k`` highest hinges over all
    queries.
    """
    if settings.reduction == "mean_topk":
        itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        farthest = scores.masked_fill(~(neighbours | itself), torch.inf).amin(1, keepdim=True)
        return sum_highest((settings.margin - farthest + scores).clamp(min=0) * outside, settings)
    k = len(scores) if settings.k is None else min(settings.k, len(scores))
    nearest = scores.masked_fill(~outside, -torch.inf).topk(k, sorted=False).values
    query, neighbour = neighbours.nonzero(as_tuple=True)
    return (settings.margin - scores[query, neighbour, None] + nearest[query]).clamp(min=0).sum()


def add_neighbourhood(
    cost: Cost,
    weight: float,
    items: Encoded,
    neighbours: Bool[Tensor, "n n"],
    outside: Bool[Tensor, "n n"],
    similarity: Similarity,
    loss: Loss,
) -> Cost:
    """Return a cost plus the weighted :func:`neighbourhood_cost` of ``items``, which are images only or captions only."""
    scores = similarity(items, items)
    added = weight * neighbourhood_cost(scores, neighbours, outside, loss)
    with torch.no_grad():
        collapsed = weight * neighbourhood_cost(torch.zeros_like(scores), neighbours, outside, loss)
    return cost._replace(loss=cost.loss + added, collapsed=cost.collapsed + collapsed)


def find_neighbours(
    own: Int[Tensor, " n"], others: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " m"], Bool[Tensor, "m m"], Bool[Tensor, "m m"]]:
    """Find the neighbours among images, or among captions: items that are paired with a common item of the other side.

    ``own`` and ``others`` are the indices of the two items of each pair. Returns the position in ``own`` of each of the m
    different items, a mask of neighbours (an item is not its own neighbour), and a mask of unrelated items.
    """
    items, item_of = torch.unique(own, return_inverse=True)
    partners, partner_of = torch.unique(others, return_inverse=True)
    rows = torch.arange(len(own), device=own.device)
    first = rows.new_full((len(items),), len(own)).scatter_reduce(0, item_of, rows, "amin")
    has = torch.zeros(len(items), len(partners), device=own.device)
    has[item_of, partner_of] = 1
    share = (has @ has.T) > 0
    itself = torch.eye(len(items), dtype=torch.bool, device=own.device)
    return first, share & ~itself, ~share


class FunctionLoss(RankingLoss):
    """A loss whose cost of one direction is a user's ``function``. ``passed`` lists the settings that are passed to it."""

    function: ClassVar[Callable[..., Tensor]]
    passed: ClassVar[tuple[str, ...]]

    def cost(self, scores: ScoreMatrix, positives: Positives, negatives: Mask) -> Scalar:
        settings = {name: getattr(self, name) for name in self.passed}
        return type(self).function(scores, positives, negatives, **settings)


def loss_of_function(function: Callable[..., Any]) -> type[Loss]:
    """Return the loss whose :meth:`RankingLoss.cost` is ``function(scores, positives, negatives, ...)``.

    Each further parameter becomes a setting: a setting of every loss, such as ``margin``, or a new one with its default.
    Raises UserError if the function does not have these parameters.
    """
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}" if inspect.isfunction(function) else "code"
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    further = parameters[len(_ARGUMENTS) :]
    if len(parameters) < len(_ARGUMENTS) or any(one.kind not in plain for one in further):
        raise UserError(f"{place}: a loss function takes {', '.join(_ARGUMENTS)}, then settings by name")
    fields: dict[str, Any] = {}
    for one in further:
        if one.default is not inspect.Parameter.empty:
            fields[one.name] = (_setting_type(function, one), one.default)
        elif one.name not in Loss.model_fields:
            raise UserError(f"{place}: the setting {one.name!r} of this loss needs a default")
    loss = create_model(function.__name__, __base__=FunctionLoss, __module__=function.__module__, **fields)
    loss.__doc__ = function.__doc__ or FunctionLoss.__doc__
    loss.function, loss.passed = function, tuple(one.name for one in further)
    return loss


def _setting_type(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation of the parameter, or the type of its default."""
    kind = get_type_hints(function).get(parameter.name, type(parameter.default))
    return float if kind is int and isinstance(parameter.default, float) else kind
