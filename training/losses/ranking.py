"""Ranking losses, which compare a query's positive with the query's negatives, for images and for captions as queries."""

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
from vse.training.kinds import BatchVectors, select_batch_rows
from vse.training.losses.base import (
    Batch,
    Cost,
    Loss,
    Mask,
    Objective,
    PositiveColumns,
    QueryScores,
    Scalar,
    ScoreMatrix,
    reduce_highest_costs,
)
from vse.training.models.similarities.base import Scores, Similarity

# The result for a block of images: its cost, an intermediate result for each caption (m may be 0), and the sum of its scores.
BlockResult = tuple[Scalar, Float[Tensor, " m"], Scalar]
# A function of the image embeddings of a block, all caption embeddings, and the index of the block's first image.
BlockFunction = Callable[[Tensor, Tensor, int], BlockResult]
_COST_ARGUMENTS = ("scores", "positives", "negatives")  # the first arguments of a user's loss function


class BlockwiseCost(NamedTuple):
    """The cost of a batch that was computed in blocks of images, and further results.

    ``cost`` : sum of the costs of all blocks.
    ``caption_results`` : partial result of each block (row) for each caption (column), such as a sum over the block.
    ``score_sum`` : sum of the scores of all blocks, without gradients.
    """

    cost: Scalar
    caption_results: Float[Tensor, "n_blocks m"]
    score_sum: Scalar


def compute_cost_in_blocks(
    compute_block: BlockFunction,
    size: int,
    images: Float[Tensor, "n dim"],
    captions: Float[Tensor, "m dim"],
    *parameters: nn.Parameter,
) -> BlockwiseCost:
    """Compute costs in blocks of ``size`` images. The backward pass computes each block again (Chen et al., 2016).

    ``compute_block(block_images, captions, index_of_first_image)`` returns the results for a block. Only the embeddings and
    ``parameters`` get gradients, so ``compute_block`` must not use other learned tensors.
    """
    return BlockwiseCost(*_RecomputedBlockCosts.apply(compute_block, size, images, captions, *parameters))


class _RecomputedBlockCosts(torch.autograd.Function):
    """The autograd function of :func:`compute_cost_in_blocks`: costs in blocks that the backward pass computes again.

    Memory for the results of all blocks is allocated once, to avoid fragmentation.
    """

    @staticmethod
    def forward(
        ctx: Any, compute_block: BlockFunction, size: int, images: Tensor, captions: Tensor, *parameters: Tensor
    ) -> Any:
        ctx.save_for_backward(images, captions, *parameters)
        ctx.compute_block, ctx.size = compute_block, size
        cost, score_sum = images.new_zeros(()), images.new_zeros(())
        columns = images.new_empty(0, 0)
        starts = range(0, max(1, len(images)), size)  # without images, there is one empty block
        for block, start in enumerate(starts):
            block_cost, block_columns, block_sum = compute_block(images[start : start + size], captions, start)
            if not block:
                columns = block_columns.new_empty(len(starts), len(block_columns))
            columns[block] = block_columns
            cost += block_cost
            score_sum += block_sum
        ctx.mark_non_differentiable(score_sum)
        return cost, columns, score_sum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        images, captions, *parameters = ctx.saved_tensors
        cost_gradient, column_gradients = upstream[:2]
        gradients = [torch.zeros_like(part) for part in (images, captions, *parameters)]
        all_captions = captions.detach().requires_grad_()
        for block, start in enumerate(range(0, max(1, len(images)), ctx.size)):
            rows = slice(start, start + ctx.size)
            with torch.enable_grad():
                block_images = images[rows].detach().requires_grad_()
                cost, columns, _ = ctx.compute_block(block_images, all_captions, start)
                weighted = cost_gradient * cost + (column_gradients[block] * columns).sum()
            own, *others = torch.autograd.grad(weighted, [block_images, all_captions, *parameters], materialize_grads=True)
            gradients[0][rows] = own
            for total, gradient in zip(gradients[1:], others, strict=True):
                total += gradient
        return None, None, *gradients


class RankingLoss(Loss):
    """A loss of the scores of queries with candidates.

    With ``has_distinct_candidates``, an image that occurs several times in a batch counts only once among the candidates.
    """

    is_ranking: ClassVar = True
    has_distinct_candidates: ClassVar[bool] = False

    @abstractmethod
    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        """Return the cost of the queries of one direction: a sum, or a mean if ``is_mean_over_queries`` is true.

        ``positives`` has the column of each query's positive, and ``negatives`` marks the columns of its negatives.
        """

    def direction_cost(self, query_scores: QueryScores, scale: nn.Module | None = None) -> Scalar:
        """Return the cost of the queries of one direction. ``scale`` has the learned temperature and bias, if any."""
        return self.cost(*query_scores)

    def total_cost(self, images: QueryScores, captions: QueryScores, scale: nn.Module | None = None) -> Scalar:
        """Return the sum of the costs of both directions, weighted by ``lambda1`` and ``lambda2``."""
        return self.lambda1 * self.direction_cost(images, scale) + self.lambda2 * self.direction_cost(captions, scale)

    def collapsed_cost(self, images: QueryScores, captions: QueryScores, scale: nn.Module | None = None) -> Scalar:
        """Return the cost of both directions for a model whose embeddings are all equal."""
        images, captions = (side._replace(scores=self.scores_if_collapsed(side.scores)) for side in (images, captions))
        return self.total_cost(images, captions, scale)

    def scores_if_collapsed(self, scores: ScoreMatrix) -> ScoreMatrix:
        """Return the scores of a batch whose embeddings are all equal: zeros, because only differences of scores count.

        A loss that changes if a constant is added to all scores overrides this method.
        """
        return torch.zeros_like(scores)

    def build_objective(self, similarity: Similarity, compiled: bool = False, scale: nn.Module | None = None) -> Objective:
        """Return the function that adds the costs of both directions and of the neighbourhood constraints of a batch."""
        total_cost, collapsed_cost = self.total_cost, self.collapsed_cost
        if compiled:
            total_cost, collapsed_cost = torch.compile(total_cost), torch.compile(collapsed_cost)

        def cost(batch: Batch, seed: int) -> Cost:
            query_scores = score_queries(batch, similarity, self.same_image != "keep", self.has_distinct_candidates)
            value = total_cost(*query_scores, scale)
            with torch.no_grad():
                collapsed = collapsed_cost(*query_scores, scale)
            total = Cost(value, collapsed, query_scores)
            for weight, side, items, partners in _list_neighbourhood_constraints(self, batch):
                found = find_neighbours(items, partners, side[0].device)
                total = add_neighbourhood_cost(
                    total, weight, select_batch_rows(side, found.first_pair), found, similarity, self
                )
            return total

        return cost


def score_queries(
    batch: Batch, similarity: Similarity, mask_same_image: bool, distinct: bool = False
) -> tuple[QueryScores, QueryScores]:
    """Return the scores of a batch with images as queries, and with captions as queries.

    ``mask_same_image`` : whether only pairs of different images are negatives, see :func:`build_negative_mask`.
    ``distinct`` : whether an image that occurs several times is a candidate only once.
    """
    image_indices = torch.from_numpy(batch.image_indices).to(batch.image_embeddings[0].device)
    negatives = build_negative_mask(image_indices, mask_same_image)
    positives = torch.arange(len(image_indices), device=image_indices.device)
    i2t, t2i = _split_directions(similarity(batch.image_embeddings, batch.caption_embeddings))
    negative_images = negatives.T
    if distinct:
        negative_images = negative_images & ~(~negatives).tril(-1).any(1)
    extra_caption_scores = extra_image_scores = None
    if batch.extra_negative_captions is not None:
        extra_caption_scores = _split_directions(similarity(batch.image_embeddings, batch.extra_negative_captions))[0]
    if batch.extra_negative_images is not None:
        extra_image_scores = _split_directions(similarity(batch.extra_negative_images, batch.caption_embeddings))[1].T
    return (
        _append_negatives(QueryScores(i2t, positives, negatives), extra_caption_scores),
        _append_negatives(QueryScores(t2i.T, positives, negative_images), extra_image_scores),
    )


def build_negative_mask(image_indices: Int[Tensor, " n"], mask_same_image: bool) -> Bool[Tensor, "n n"]:
    """Return a mask that is True at (i, j) for i != j or, with ``mask_same_image``, if the pairs i and j differ in the image.

    A batch can hold two captions of one image. Without masking, as in the VSE++ paper and its code, each of these captions
    counts as a negative of the other pair's image.
    """
    if mask_same_image:
        return image_indices[:, None] != image_indices[None, :]
    return ~torch.eye(len(image_indices), dtype=torch.bool, device=image_indices.device)


def _append_negatives(query_scores: QueryScores, more_scores: Tensor | None) -> QueryScores:
    if more_scores is None:
        return query_scores
    scores, positives, negatives = query_scores
    more_negatives = torch.ones_like(more_scores, dtype=torch.bool)
    return QueryScores(torch.cat([scores, more_scores], 1), positives, torch.cat([negatives, more_negatives], 1))


def _split_directions(scores: Scores) -> tuple[Tensor, Tensor]:
    return scores if isinstance(scores, tuple) else (scores, scores)


def _list_neighbourhood_constraints(loss: Loss, batch: Batch) -> list[tuple[float, BatchVectors, Tensor, Tensor]]:
    """Return the neighbourhood constraints whose weight is not 0: among images, among captions, both, or none.

    Images with the same text are neighbours, and so are captions of the same image. A constraint has four values: its weight,
    the embeddings of the images (or captions), and two arrays on the CPU with a number for each pair of the batch. Among
    images, these numbers are the index of the pair's image and the index of its text. Among captions, they are the position of
    the pair in the batch and the index of its image.
    """
    image_indices, text_indices = torch.from_numpy(batch.image_indices), torch.from_numpy(batch.text_indices)
    sides = [
        (loss.lambda3, batch.image_embeddings, image_indices, text_indices),
        (loss.lambda4, batch.caption_embeddings, torch.arange(len(image_indices)), image_indices),
    ]
    return [side for side in sides if side[0]]


class Neighbours(NamedTuple):
    """The m different items (either images or captions) of a batch, and the pairs of neighbours among them.

    ``first_pair`` : (m,) for each item, the position in the batch of the first pair with this item.
    ``is_neighbour`` : True for two neighbours: different images that share a text, or different captions that share an image.
    ``neighbour_rows``, ``neighbour_columns`` : row and column of each True value in ``is_neighbour``.
    ``is_outside`` : True for two items that share no text (or image), so that one can be a negative of the other.
    """

    first_pair: Int[Tensor, " m"]
    is_neighbour: Bool[Tensor, "m m"]
    neighbour_rows: Int[Tensor, " k"]
    neighbour_columns: Int[Tensor, " k"]
    is_outside: Bool[Tensor, "m m"]


def neighbourhood_cost(scores: Float[Tensor, "m m"], neighbours: Neighbours, loss: Loss) -> Scalar:
    """Return the cost of hinges [margin + d(y, y+) - d(y, y-)]+ among images or captions (two-branch paper, Eqs. 4 to 6).

    y is a query, y+ a neighbour of y, and y- an item outside the neighbourhood of y. The distances d are minus the ``scores``.
    The cost is the sum of the ``loss.k`` highest hinges of each query and neighbour. With the reduction ``mean_topk`` (the
    authors' code), the cost is the mean of the ``loss.k`` highest hinges of each query. y+ is then the farthest neighbour, or
    y itself if y has no neighbour.
    """
    if loss.reduction == "mean_topk":
        itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        farthest = scores.masked_fill(~(neighbours.is_neighbour | itself), torch.inf).amin(1, keepdim=True)
        return reduce_highest_costs((loss.margin - farthest + scores).clamp(min=0) * neighbours.is_outside, loss)
    k = len(scores) if loss.k is None else min(loss.k, len(scores))
    nearest = scores.masked_fill(~neighbours.is_outside, -torch.inf).topk(k, sorted=False).values
    query, neighbour = neighbours.neighbour_rows, neighbours.neighbour_columns
    return (loss.margin - scores[query, neighbour, None] + nearest[query]).clamp(min=0).sum()


def add_neighbourhood_cost(
    cost: Cost,
    weight: float,
    items: BatchVectors,
    neighbours: Neighbours,
    similarity: Similarity,
    loss: Loss,
) -> Cost:
    """Return ``cost`` plus ``weight`` times the cost of hinges between neighbours (:func:`neighbourhood_cost`).

    ``items`` are the embeddings of the images of a batch, or those of its captions.
    """
    scores = similarity(items, items)
    added = weight * neighbourhood_cost(scores, neighbours, loss)
    with torch.no_grad():
        collapsed = weight * neighbourhood_cost(torch.zeros_like(scores), neighbours, loss)
    return cost._replace(value=cost.value + added, collapsed_value=cost.collapsed_value + collapsed)


def find_neighbours(items: Int[Tensor, " n"], partners: Int[Tensor, " n"], device: torch.device) -> Neighbours:
    """Find the neighbours among the images of a batch (two images with the same text), or among its captions.

    ``items`` : index of each pair's image (or caption), on the CPU.
    ``partners`` : index of each pair's text (or image), on the CPU. Two items with the same partner are neighbours.
    ``device`` : device of the result.
    """
    different_items, item_of_pair = torch.unique(items, return_inverse=True)
    different_partners, partner_of_pair = torch.unique(partners, return_inverse=True)
    m, n = len(different_items), len(items)
    first_pair = item_of_pair.new_full((m,), n).scatter_reduce(0, item_of_pair, torch.arange(n), "amin")
    is_pair = torch.zeros(m, len(different_partners))
    is_pair[item_of_pair, partner_of_pair] = 1
    have_common_partner = (is_pair @ is_pair.T) > 0
    is_neighbour = have_common_partner & ~torch.eye(m, dtype=torch.bool)
    rows, columns = is_neighbour.nonzero(as_tuple=True)
    return Neighbours(*(part.to(device) for part in (first_pair, is_neighbour, rows, columns, ~have_common_partner)))


class FunctionLoss(RankingLoss):
    """A loss whose method ``cost`` calls the ``function`` of a user.

    ``setting_names`` : names of the settings that ``function`` takes as arguments.
    """

    function: ClassVar[Callable[..., Tensor]]
    setting_names: ClassVar[tuple[str, ...]]

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Any:
        settings = {name: getattr(self, name) for name in self.setting_names}
        return type(self).function(scores, positives, negatives, **settings)


def build_function_loss(function: Callable[..., Any]) -> type[Loss]:
    """Return the class of a loss whose :meth:`RankingLoss.cost` is ``function(scores, positives, negatives, ...)``.

    Each further parameter receives the setting of the same name. A parameter with a default defines this setting. A parameter
    without a default must have the name of a setting of every loss, such as ``margin``.

    Raises UserError for another parameter without a default, for parameters such as ``*args``, or if there are fewer than
    three parameters.
    """
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}" if inspect.isfunction(function) else "code"
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    further = parameters[len(_COST_ARGUMENTS) :]
    if len(parameters) < len(_COST_ARGUMENTS) or any(one.kind not in plain for one in further):
        raise UserError(f"{place}: a loss function takes {', '.join(_COST_ARGUMENTS)}, then settings by name")
    fields: dict[str, Any] = {}
    for one in further:
        if one.default is not inspect.Parameter.empty:
            fields[one.name] = (_setting_type(function, one), one.default)
        elif one.name not in Loss.model_fields:
            raise UserError(f"{place}: the setting {one.name!r} of this loss needs a default")
    loss = create_model(function.__name__, __base__=FunctionLoss, __module__=function.__module__, **fields)
    loss.__doc__ = function.__doc__ or FunctionLoss.__doc__
    loss.function, loss.setting_names = function, tuple(one.name for one in further)
    return loss


def _setting_type(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotated type of a parameter, or the type of its default. int with a float default becomes float."""
    kind = get_type_hints(function).get(parameter.name, type(parameter.default))
    return float if kind is int and isinstance(parameter.default, float) else kind
