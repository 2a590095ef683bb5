"""Pairs of images and captions in a batch, and what they cost by the equations of the two-branch paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vse.training.losses.base import Batch, Cost, Loss
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import Similarity

DIM = 4
Distance = Callable[[Tensor, Tensor], Tensor]


class Pairs:
    """Pairs of images with some captions each, in any order; unit vectors whose gradients can be taken.

    ``texts`` numbers what the captions say; without it each says something else.
    """

    def __init__(self, counts: Sequence[int], seed: int = 0, n_texts: int | None = None) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.image_indices = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        n = len(self.image_indices)
        self.text_indices = np.arange(n) if n_texts is None else rng.integers(n_texts, size=n)
        self.images, self.captions = (
            torch.nn.functional.normalize(torch.randn(m, DIM, generator=generator, dtype=torch.float64)).requires_grad_()
            for m in (len(counts), n)
        )

    def batch(self) -> Batch:
        return Batch(
            (self.images[torch.from_numpy(self.image_indices)],), (self.captions,), self.image_indices, self.text_indices
        )

    def with_gradients(self, loss: Tensor) -> list[Tensor]:
        return [loss, *torch.autograd.grad(loss, [self.images, self.captions], materialize_grads=True)]


def similarity(name: str = "euclidean", **settings: object) -> Similarity:
    torch.manual_seed(0)
    return SIMILARITIES[name](**settings).build(DIM)


def cost(pairs: Pairs, loss: Loss, compared_by: str = "euclidean", seed: int = 0, **settings: object) -> Cost:
    return loss.build_objective(similarity(compared_by, **settings))(pairs.batch(), seed)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum().sqrt()


def floored(a: Tensor, b: Tensor) -> Tensor:
    """What the authors' code calls the distance."""
    return (a.square().sum() - 2 * (a * b).sum() + b.square().sum() + 1e-4).sqrt()


def one_minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a * b).sum()


def top(hinges: list[Tensor], k: int | None) -> list[Tensor]:
    """The highest ``k`` of some numbers."""
    return sorted(hinges, key=Tensor.item, reverse=True)[:k]


def triplets(query: Tensor, positive: Tensor, negatives: list[Tensor], d: Distance, loss: Loss) -> Tensor:
    """Sum of the k highest [m + d(query, positive) - d(query, negative)]+."""
    hinges = [torch.relu(loss.margin + d(query, positive) - d(query, negative)) for negative in negatives]
    return sum(top(hinges, loss.k), start=0 * query.sum())


def slow_ranking(pairs: Pairs, d: Distance, loss: Loss) -> Tensor:
    """Eq. 3: for each positive pair, negative captions of its image, and negative images, each once, of its caption."""
    total = 0 * pairs.captions.sum()
    for i, own in enumerate(pairs.image_indices):
        negative_captions = [pairs.captions[j] for j, other in enumerate(pairs.image_indices) if other != own]
        negative_images = [pairs.images[j] for j in range(len(pairs.images)) if j != own]
        image, caption = pairs.images[own], pairs.captions[i]
        total = total + loss.lambda1 * triplets(image, caption, negative_captions, d, loss)
        total = total + loss.lambda2 * triplets(caption, image, negative_images, d, loss)
    return total


def slow_image_constraints(pairs: Pairs, d: Distance, loss: Loss) -> Tensor:
    """Eq. 4: N(x) is the images that some text of the batch describes too."""
    texts = [set(pairs.text_indices[pairs.image_indices == image].tolist()) for image in range(len(pairs.images))]
    total = 0 * pairs.images.sum()
    for i in range(len(pairs.images)):
        outside = [pairs.images[j] for j in range(len(pairs.images)) if not texts[i] & texts[j]]
        for j in range(len(pairs.images)):
            if j != i and texts[i] & texts[j]:
                total = total + triplets(pairs.images[i], pairs.images[j], outside, d, loss)
    return total


def slow_caption_constraints(pairs: Pairs, d: Distance, loss: Loss) -> Tensor:
    """Eq. 5: N(y) is the other captions of the same image."""
    total = 0 * pairs.captions.sum()
    for i, own in enumerate(pairs.image_indices):
        outside = [pairs.captions[j] for j, other in enumerate(pairs.image_indices) if other != own]
        for j, other in enumerate(pairs.image_indices):
            if j != i and other == own:
                total = total + triplets(pairs.captions[i], pairs.captions[j], outside, d, loss)
    return total


def slow_paper(pairs: Pairs, d: Distance, loss: Loss) -> Tensor:
    """Eq. 6."""
    of_images, of_captions = slow_image_constraints(pairs, d, loss), slow_caption_constraints(pairs, d, loss)
    return slow_ranking(pairs, d, loss) + loss.lambda3 * of_images + loss.lambda4 * of_captions
