"""Embeddings of a split from a model, in blocks, and how its images and captions rank each other."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vse.eval.ranking.ranks import Ranks, ranks_from_embeddings, ranks_from_scores
from vse.features.backbones import autocast
from vse.train.data.pairs import Split
from vse.train.models.build import TwoBranchModel

_BLOCK = 512
_PICTURES = 64  # at once, where a CNN reads them


def encode(
    model: TwoBranchModel, split: Split, device: torch.device
) -> tuple[Float[Tensor, "n_images dim"], Float[Tensor, "n_captions dim"]]:
    """Embeddings of all images and all captions of a split, in their order, on the CPU."""
    model.eval()
    n_images, n_captions = len(split.pairs.images), len(split.pairs)
    block = _BLOCK if model.cnn is None else _PICTURES
    with torch.inference_mode():
        images = [
            model.embed_images(split.images.of_images(np.arange(k, min(k + block, n_images))).to(device)).cpu()
            for k in range(0, n_images, block)
        ]
        captions = [
            model.embed_captions(*split.captions.of(np.arange(k, min(k + _BLOCK, n_captions)))).cpu()
            for k in range(0, n_captions, _BLOCK)
        ]
    return torch.cat(images), torch.cat(captions)


def score_matrix(
    model: TwoBranchModel,
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    precision: str = "fp32",
) -> Float[Tensor, "n_images n_captions"]:
    """Scores of all images with all captions, on the CPU."""
    model.eval()
    device = next(model.parameters()).device
    sentences = captions.to(device)
    with torch.inference_mode(), autocast(precision, device):
        return torch.cat([model.similarity(image[None].to(device), sentences).float().cpu() for image in images])


def ranks(
    model: TwoBranchModel,
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    precision: str = "fp32",
) -> Ranks:
    """Exact ranks of embeddings as the model compares them; ``precision`` is that of a network that scores every pair."""
    if model.pairwise:
        return ranks_from_scores(score_matrix(model, images, captions, precision), image_of_caption)
    return ranks_from_embeddings(images, captions, image_of_caption, model.config.ranked_by)
