"""The similarity network: a score of an image and a caption learnt as a classification, not as a distance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vse.train.models.encoders import linear

_BLOCK = 2**15  # pairs scored at once


class SimilarityNetwork(nn.Module):
    """Fully connected layers with ReLU on the product of two embeddings, down to a score (two-branch paper, section 3.3).

    Parameters
    ----------
    dim : length of an embedding
    widths : outputs of the layers before the last, whose output is the score
    """

    def __init__(self, dim: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = [dim, *widths]
        self.linears = nn.ModuleList(linear(n_in, n_out) for n_in, n_out in zip(inputs, [*widths, 1], strict=True))

    def of_pairs(self, images: Float[Tensor, "n dim"], captions: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        """Scores of each image with the caption of the same row."""
        *hidden, last = self.linears
        product = images * captions
        for layer in hidden:
            product = layer(product).relu()
        score: Tensor = last(product)
        return score[:, 0].float()

    def forward(
        self, images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
    ) -> Float[Tensor, "n_images n_captions"]:
        """Scores of all images with all captions, a block of pairs at a time."""
        n = len(captions)
        blocks = [
            self.of_pairs(images[pairs // n], captions[pairs % n])
            for pairs in torch.split(torch.arange(len(images) * n, device=images.device), _BLOCK)
        ]
        return torch.cat([*blocks, images.new_empty(0)]).view(len(images), n)
