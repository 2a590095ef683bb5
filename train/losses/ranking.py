"""Losses of rankings: of each query, how its positive scores among its negatives, for images and for captions as queries.

Costs of the scores of all images with all captions of a batch, a block of images at a time, in memory for one block.

A loss from a plain function of a user's own, whose further parameters are its settings.
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

# What a block costs; a number for each column, or none; and a number that is summed up without gradients.
BlockCost = tuple[Float[Tensor, ""], Float[Tensor, " m"], Float[Tensor, ""]]
OfRows = Callable[[Tensor, Tensor, int], BlockCost]


class BlockCosts(NamedTuple):
    """The summed cost of all blocks, what each has for each column, and the sum of the numbers without gradients."""

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
    """Costs of ``size`` images at a time with all captions; the backward pass computes each block again (Chen et al., 2016).

    Parameters
    ----------
    of_rows : from some images, all captions and the number of the first of these images to what they cost; it depends on
        nothing else that has gradients but ``parameters``
    size : images of a block
    images, captions : embeddings
    parameters : what else there are gradients of
    """
    return BlockCosts(*_ByBlocks.apply(of_rows, size, images, captions, *parameters))


class _ByBlocks(torch.autograd.Function):
    """No block leaves anything behind but its numbers, in memory that is taken once: what lives on between large blocks that
    come and go would keep an allocator from using their memory for the next ones.
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
    """A loss of scores (n, m) of queries with candidates.

    With ``distinct_candidates`` an image that a batch has several times is a candidate once, at the first of its rows.
    """

    ranks: ClassVar = True
    distinct_candidates: ClassVar[bool] = False

    @abstractmethod
    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        """The cost of one direction, summed over its queries.

        Parameters
        ----------
        scores : of each query (row) with each candidate (column)
        positives : the column of each query's positive
        negatives : which candidates count as negatives of a query
        """

    def of_direction(self, ranking: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """The cost of one direction, by what the loss has learned, if it learns anything."""
        return self.cost(*ranking)

    def of_rankings(self, images: Ranking, captions: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """The weighted costs of images as queries and of captions as queries."""
        return self.lambda1 * self.of_direction(images, weights) + self.lambda2 * self.of_direction(captions, weights)

    def if_equal(self, images: Ranking, captions: Ranking) -> tuple[Ranking, Ranking]:
        """Both rankings as they would be if all embeddings were equal."""
        equal = self.equal_scores
        return images._replace(scores=equal(images.scores)), captions._replace(scores=equal(captions.scores))

    def equal_scores(self, scores: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """What the scores would be if all embeddings were equal; 0, unless the loss is not the same for any number."""
        return torch.zeros_like(scores)

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """The cost of both directions and the neighbourhood constraints of a batch."""
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
    """What each image and each caption of a batch is compared with: the other side, and the batch's further candidates."""
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
    """Which pairs of a batch are negatives: all but i = j, or, if masked, all whose images differ.

    A batch of shuffled captions can hold two captions of one image. The VSE++ paper and its code count
    each as a negative of the other's image; masking does not.
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
    """The sides that have neighbourhood constraints: their weight, embeddings, own numbers and those of the other side."""
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
    """The function of a user's own as the cost of one direction."""

    function: ClassVar[Callable[..., Tensor]]
    passed: ClassVar[tuple[str, ...]]

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        settings = {name: getattr(self, name) for name in self.passed}
        return type(self).function(scores, positives, negatives, **settings)


def loss_of_function(function: Callable[..., Any]) -> type[Loss]:
    """The loss whose :meth:`RankingLoss.cost` is ``function(scores, positives, negatives, ...)``.

    Each further parameter is a setting: one of every loss, such as ``margin``, or a new one with the default that it has.
    :class:`UserError` if the function cannot be called so.
    """
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}" if inspect.isfunction(function) else "code"
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    further = parameters[len(_GIVEN) :]
    if len(parameters) < len(_GIVEN) or any(one.kind not in plain for one in further):
        raise UserError(f"{place}: a loss is a function of {', '.join(_GIVEN)} and of settings by name")
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
    """The type of a setting: what the function says, else that of its default."""
    kind = get_type_hints(function).get(parameter.name, type(parameter.default))
    return float if kind is int and isinstance(parameter.default, float) else kind
