"""Write a commented template of a user's own loss, similarity or extractor, and a test of the template."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import write_text

PartKind = Literal["loss", "similarity", "extractor"]

_LOSS = '''"""A loss: the sum of the hinges of all negatives, smoothed by a softplus."""

import torch


def NAME(scores, positives, negatives, margin, sharpness: float = 10.0):
    """Return the sum of the costs of n queries with m candidates, as one number.

    scores : (n, m) similarity of each query (row) with each candidate (column); higher is better
    positives : (n,) column of each query's positive
    negatives : (n, m) mask of each query's negatives
    margin : the setting loss.margin, which every loss has
    sharpness : a setting of this loss, with its default: --set loss.sharpness=20

    The trainer calls this function twice for a batch: with images as queries, and with captions as queries.
    """
    right = scores.gather(1, positives[:, None])  # (n, 1)
    costs = torch.nn.functional.softplus(sharpness * (margin - right + scores)) / sharpness
    return (costs * negatives).sum()
'''
_LOSS_TEST = """import math

import pytest
import torch

from STEM import NAME


def test_the_cost_is_the_sum_over_all_negatives():
    scores, positives = torch.tensor([[0.9, 0.8], [0.1, 0.3]]), torch.tensor([0, 1])
    negatives = torch.tensor([[False, True], [True, False]])
    expected = sum(math.log1p(math.exp(10 * (0.2 - right + wrong))) / 10 for right, wrong in [(0.9, 0.8), (0.3, 0.1)])
    assert NAME(scores, positives, negatives, margin=0.2).item() == pytest.approx(expected)
"""
_SIMILARITY = '''"""A similarity: a cosine whose vectors are weighted by learned numbers, one for each dimension."""

import torch
from torch import nn

from vse.training.models.similarities.base import Similarity, SimilaritySettings


class NAME(SimilaritySettings):
    """Settings of the similarity. A field is a setting: --set model.similarity.start=2."""

    start: float = 1.0

    def build(self, dim):
        """Return the network for embeddings of length dim."""
        return WeightedCosine(dim, self.start)


class WeightedCosine(Similarity):
    def __init__(self, dim, start):
        super().__init__()
        self.weights = nn.Parameter(torch.full((dim,), start))

    def forward(self, images, captions):
        """Return the scores (n_images, n_captions); higher is better.

        A score must not depend on other images or captions of the batch.
        """
        (image_vectors,), (caption_vectors,) = images, captions  # (n_images, dim), (n_captions, dim)
        return (image_vectors * self.weights) @ caption_vectors.T
'''
_SIMILARITY_TEST = """import pytest
import torch

from STEM import NAME


def test_a_score_is_a_weighted_sum_of_products():
    images, captions = torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[0.0, 1.0]])
    scores = NAME(name="own", start=2.0).build(2)((images,), (captions,))
    assert scores.shape == (2, 1)
    assert scores.flatten().tolist() == pytest.approx([0.0, 1.6])
"""
_EXTRACTOR = '''"""An extractor: a histogram of the colours of an image."""

import numpy as np
from pydantic import PositiveInt

from vse.features.extractors.images import ImageExtractor, ImageVectors
from vse.features.settings.base import ImageSettings


class NAME(ImageSettings):
    """Settings of the extractor. A field is a setting: --set bins=8. The settings are part of the key of the cache."""

    bins: PositiveInt = 4

    def build_extractor(self, arguments):
        """Return the extractor."""
        return HistogramExtractor(self)


class HistogramExtractor(ImageExtractor):
    version = 1  # raise it when a change of the code changes the vectors
    batch_size = 8

    def __init__(self, config):
        self.config = config

    def prepare(self, image, image_id):
        """Return the input of compute_vectors for one RGB image of Pillow. Several threads call this method."""
        return np.asarray(image)

    def compute_vectors(self, batch):
        """Return the vectors of each image of a batch, in its order."""
        return [ImageVectors(count_colours(pixels, self.config.bins)) for pixels in batch]


def count_colours(pixels, bins):
    """Return the share of the pixels in each bin of red, green and blue: (3 * bins,), float32."""
    counts = [np.histogram(pixels[..., channel], bins, (0, 256))[0] for channel in range(3)]
    return (np.concatenate(counts) / pixels[..., 0].size).astype(np.float32)
'''
_EXTRACTOR_TEST = """import numpy as np

from STEM import count_colours


def test_the_shares_of_a_colour_are_those_of_its_pixels():
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0, 0] = 255  # one white pixel, three black ones
    assert count_colours(pixels, bins=2).tolist() == [0.75, 0.25] * 3
"""
_TEMPLATES: Mapping[PartKind, tuple[str, str]] = {
    "loss": (_LOSS, _LOSS_TEST),
    "similarity": (_SIMILARITY, _SIMILARITY_TEST),
    "extractor": (_EXTRACTOR, _EXTRACTOR_TEST),
}
_USES: Mapping[PartKind, str] = {
    "loss": "vse train --features features/demo_fc7.h5 --set loss={0}",
    "similarity": "vse train --features features/demo_fc7.h5 --set model.similarity={0}",
    "extractor": "vse extract {0} --dataset data/demo/dataset.json",
}


def write_template(kind: PartKind, file: Path) -> list[str]:
    """Write a template to ``file`` and its test to ``test_<file>``. Return the commands that use the template.

    A loss is a function with the name of the file. A similarity or an extractor is a class, so ``my_part.py`` defines
    ``MyPart``. Raises UserError if one of the two files exists, or if Python cannot import a file of this name.
    """
    stem = file.stem
    if file.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise UserError(f"{file}: the file needs a name that Python can import, such as my_{kind}.py")
    name = stem if kind == "loss" else "".join(word.capitalize() for word in stem.split("_")) or "Part"
    test = file.with_name(f"test_{stem}.py")
    for path in (file, test):
        if path.exists():
            raise UserError(f"{path}: exists already; give another name")
    for path, text in zip((file, test), _TEMPLATES[kind], strict=True):
        write_text(path, text.replace("NAME", name).replace("STEM", stem))
    place = f"{file}:{name}"
    return [f"vse check {place}", f"pytest {test}", _USES[kind].format(place)]
