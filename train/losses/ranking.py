"""Ranking losses: a query's positive is compared with its negatives, for images and for captions as queries.

:func:`block_costs` computes a cost block by block, for batches whose score matrix is too large for the memory.
:func:`loss_of_function` makes a loss of a user's plain function, whose further parameters become settings.
"""

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
from vse.train.kinds import Encoded, select
from vse.train.losses.base import Batch, Cost, Loss, Objective, Ranking
from vse.train.losses.neighbourhood import neighbourhood, related
from vse.train.models.similarities.base import Scores, Similarity

# The cost of a block; a number for each column, or none; and a number that is summed over blocks without gradients.
BlockCost = tuple[Float[Tensor, ""], Float[Tensor, " m"], Float[Tensor, ""]]
OfRows = Callable[[Tensor, Tensor, int], BlockCost]


class BlockCosts(NamedTuple):
    """The sum of the costs of all blocks, the numbers of each block for each column, and the sum without gradients."""

    cost: Float[Tensor, ""]
    columns: Float[Tensor, "n_blocks m"]
    total: Float[Tensor, ""]


def block_costs(
    of_rows: OfRows,
    size: int,
    images: Float[Tensor, "n dim"],
    captions: Float[Tensor, "m dim"],
    *parameters: nn.Parameter,
) -> BlockCosts:
    """Return costs computed for ``size`` images at a time; the backward pass computes each block again (Chen et al., 2016).

    Parameters
    ----------
    of_rows : function of some images, all captions and the index of the first of these images that returns their cost; of
        all tensors with gradients it uses only its arguments and ``parameters``
    size : number of images in a block
    images, captions : embeddings
    parameters : further tensors that need gradients
    """
    return BlockCosts(*_ByBlocks.apply(of_rows, size, images, captions, *parameters))


class _ByBlocks(torch.autograd.Function):
    """Costs block by block. Results of all blocks are stored in memory that is allocated once.

    Small tensors that outlive a block would fragment the memory, so that the next block could not use it.
    """

    @staticmethod
    def forward(ctx: Any, of_rows: OfRows, size: int, images: Tensor, captions: Tensor, *parameters: Tensor) -> Any:
        ctx.save_for_backward(images, captions, *parameters)
        ctx.of_rows, ctx.size = of_rows, size
        cost, total = images.new_zeros(()), images.new_zeros(())
        columns = images.new_empty(0, 0)
        for number, start in enumerate(range(0, len(images), size)):
            of_block, of_columns, more = of_rows(images[start : start + size], captions, start)
            if not number:
                columns = of_columns.new_empty(-(-len(images) // size), len(of_columns))
            columns[number] = of_columns
            cost += of_block
            total += more
        ctx.mark_non_differentiable(total)
        return cost, columns, total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        images, captions, *parameters = ctx.saved_tensors
        of_cost, of_columns = upstream[:2]
        gradients = [torch.zeros_like(part) for part in (images, captions, *parameters)]
        whole = captions.detach().requires_grad_()
        for number, start in enumerate(range(0, len(images), ctx.size)):
            rows = slice(start, start + ctx.size)
            with torch.enable_grad():
                some = images[rows].detach().requires_grad_()
                cost, columns, _ = ctx.of_rows(some, whole, start)
                weighed = of_cost * cost + (of_columns[number] * columns).sum()
            own, *others = torch.autograd.grad(weighed, [some, whole, *parameters], materialize_grads=True)
            gradients[0][rows] = own
            for total, gradient in zip(gradients[1:], others, strict=True):
                total += gradient
        return None, None, *gradients


class RankingLoss(Loss):
    """A loss of the scores (n, m) of queries with candidates.

    With ``distinct_candidates``, an image that occurs several times in a batch is a candidate only in its first row.
    """

    ranks: ClassVar = True
    distinct_candidates: ClassVar[bool] = False

    @abstractmethod
    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        """Return the cost of one direction, summed over its queries.

        Parameters
        ----------
        scores : score of each query (row) with each candidate (column)
        positives : column of the positive of each query
        negatives : True where a candidate is a negative of the query
        """

    def of_direction(self, ranking: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """Return the cost of one direction, with the parameters of the loss if it has any."""
        return self.cost(*ranking)

    def of_rankings(self, images: Ranking, captions: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """Return the weighted sum of the costs of both directions."""
        return self.lambda1 * self.of_direction(images, weights) + self.lambda2 * self.of_direction(captions, weights)

    def if_equal(self, images: Ranking, captions: Ranking) -> tuple[Ranking, Ranking]:
        """Return both rankings with the scores of equal embeddings."""
        equal = self.equal_scores
        return images._replace(scores=equal(images.scores)), captions._replace(scores=equal(captions.scores))

    def equal_scores(self, scores: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Return the scores of equal embeddings: 0, unless the loss depends on their common value."""
        return torch.zeros_like(scores)

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """Return the function that adds the costs of both directions and of the neighbourhood constraints of a batch."""
        of_rankings = torch.compile(self.of_rankings) if compiled else self.of_rankings

        def cost(batch: Batch, seed: int) -> Cost:
            rankings = rankings_of(batch, similarity, self.same_image != "keep", self.distinct_candidates)
            loss = of_rankings(*rankings, weights)
            with torch.no_grad():
                collapsed = of_rankings(*self.if_equal(*rankings), weights)
            for weight, side, own, others in _sides(self, batch):
                first, neighbours, outside = related(own, others)
                chosen = select(side, first)
                within = similarity(chosen, chosen)
                loss = loss + weight * neighbourhood(within, neighbours, outside, self)
                with torch.no_grad():
                    collapsed = collapsed + weight * neighbourhood(torch.zeros_like(within), neighbours, outside, self)
            return Cost(loss, collapsed, rankings)

        return cost


def rankings_of(
    batch: Batch, similarity: Similarity, mask_same_image: bool, distinct: bool = False
) -> tuple[Ranking, Ranking]:
    """Return the rankings of the images and of the captions of a batch, with the batch's further candidates."""
    image_of = torch.from_numpy(batch.image_of).to(batch.images[0].device)
    negatives = negative_pairs(image_of, mask_same_image)
    positives = torch.arange(len(image_of), device=image_of.device)
    i2t, t2i = _both(similarity(batch.images, batch.captions))
    among_images = negatives.T
    if distinct:
        among_images = among_images & ~(~negatives).tril(-1).any(1)
    return (
        _ranking(
            i2t,
            positives,
            negatives,
            None if batch.more_captions is None else _both(similarity(batch.images, batch.more_captions))[0],
        ),
        _ranking(
            t2i.T,
            positives,
            among_images,
            None if batch.more_images is None else _both(similarity(batch.more_images, batch.captions))[1].T,
        ),
    )


def negative_pairs(image_ids: Int[Tensor, " n"], mask_same_image: bool) -> Bool[Tensor, "n n"]:
    """Return a mask of the negative pairs of a batch: all but i = j, or, if masked, all pairs with different images.

    A batch of shuffled captions can hold two captions of one image. The VSE++ paper and its code count each caption as a
    negative of the image, as the other caption has its own row. Masking leaves such pairs out.
    """
    if mask_same_image:
        return image_ids[:, None] != image_ids[None, :]
    return ~torch.eye(len(image_ids), dtype=torch.bool, device=image_ids.device)


def _ranking(scores: Tensor, positives: Tensor, negatives: Tensor, more: Tensor | None) -> Ranking:
    if more is None:
        return Ranking(scores, positives, negatives)
    return Ranking(torch.cat([scores, more], 1), positives, torch.cat([negatives, torch.ones_like(more, dtype=torch.bool)], 1))


def _both(scores: Scores) -> tuple[Tensor, Tensor]:
    return scores if isinstance(scores, tuple) else (scores, scores)


def _sides(loss: Loss, batch: Batch) -> list[tuple[float, Encoded, Tensor, Tensor]]:
    """Return weight, embeddings, own indices and partners' indices of each side with neighbourhood constraints."""
    if not loss.lambda3 and not loss.lambda4:
        return []
    device = batch.images[0].device
    image_of, text_of = (torch.from_numpy(numbers).to(device) for numbers in (batch.image_of, batch.text_of))
    sides = [
        (loss.lambda3, batch.images, image_of, text_of),
        (loss.lambda4, batch.captions, torch.arange(len(image_of), device=device), image_of),
    ]
    return [side for side in sides if side[0]]


_GIVEN = ("scores", "positives", "negatives")


class OwnFunction(RankingLoss):
    """A loss whose cost of one direction is a user's function."""

    function: ClassVar[Callable[..., Tensor]]
    passed: ClassVar[tuple[str, ...]]

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
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
    further = parameters[len(_GIVEN) :]
    if len(parameters) < len(_GIVEN) or any(one.kind not in plain for one in further):
        raise UserError(f"{place}: a loss function takes {', '.join(_GIVEN)}, then settings by name")
    fields: dict[str, Any] = {}
    for one in further:
        if one.default is not inspect.Parameter.empty:
            fields[one.name] = (_type_of(function, one), one.default)
        elif one.name not in Loss.model_fields:
            raise UserError(f"{place}: the setting {one.name!r} of this loss needs a default")
    made = create_model(function.__name__, __base__=OwnFunction, __module__=function.__module__, **fields)
    made.__doc__ = function.__doc__ or OwnFunction.__doc__
    made.function, made.passed = function, tuple(one.name for one in further)
    return made


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a setting: the annotation of the parameter, or the type of its default."""
    kind = get_type_hints(function).get(parameter.name, type(parameter.default))
    return float if kind is int and isinstance(parameter.default, float) else kind
