"""Nested embeddings: costs on the first dimensions, and models that are trained on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.conftest import Fails, done, experiment, options
from tests.training.losses.slow_losses import RANKING, ranking_loss
from vse.eval.files.embeddings import read_embeddings
from vse.training.cli import embed_main, train_main
from vse.training.losses.base import Batch, build_nested_objective
from vse.training.models.similarities.vectors import CosineSimilarity
from vse.training.training import train


@pytest.mark.parametrize("name", RANKING)
def test_the_cost_is_the_mean_of_the_costs_of_cut_embeddings(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images, captions = (torch.randn(6, 8, generator=generator).requires_grad_() for _ in "ab")
    indices = np.arange(6)
    objective = ranking_loss(name).build_objective(CosineSimilarity())

    def batch(n_dims: int) -> Batch:
        cut = [part[:, :n_dims] / part[:, :n_dims].norm(dim=1, keepdim=True) for part in (images, captions)]
        return Batch((cut[0],), (cut[1],), indices, indices)

    nested = build_nested_objective(objective, [2, 5])(batch(8), 0)
    by_hand = [objective(batch(n_dims), 0) for n_dims in (2, 5, 8)]
    expected = sum(cost.value for cost in by_hand) / 3
    torch.testing.assert_close(nested.value, expected)
    torch.testing.assert_close(nested.collapsed_value, sum(cost.collapsed_value for cost in by_hand) / 3)
    gradients = [torch.autograd.grad(value, [images, captions]) for value in (nested.value, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.nightly
def test_a_nested_model_finds_more_with_few_dimensions(cache: Path, tmp_path: Path) -> None:
    """Cosines of the first four dimensions separate own captions from others better than without nesting."""
    gaps = []
    for name, sets in {"plain": [], "nested": ["loss.nested=[4]"]}.items():
        settings = [*sets, "train.epochs=6", "train.learning_rate=0.01", "loss.name=sum"]
        run = train(cache, experiment(*settings), out=tmp_path / name)
        done(embed_main, run, "--split", "train", "--last-epoch")
        embeddings = read_embeddings(run / "train_last.h5")
        assert embeddings.vectors is not None
        images, captions = (side[:, :4] / np.linalg.norm(side[:, :4], axis=1, keepdims=True) for side in embeddings.vectors)
        scores = images @ captions.T
        own = embeddings.image_of_caption()[None] == np.arange(len(images))[:, None]
        gaps.append((scores[own].mean() - scores[~own].mean()) / scores[~own].std())
    assert gaps[1] > gaps[0]


@pytest.mark.parametrize(
    ("sets", "fault"),
    [
        (["loss.nested=[16]"], "below model.dim, 16"),
        (["loss.nested=[4,4]"], "give different numbers"),
        (["loss.nested=[4]", "model.similarity=order"], "compares unit vectors by the cosine"),
        (["loss.nested=[0]"], "loss.nested"),
    ],
)
def test_wrong_nestings_are_refused(cache: Path, tmp_path: Path, fails: Fails, sets: list[str], fault: str) -> None:
    given = options("model.dim=16", *sets)
    assert fault in fails(train_main, "--features", cache, *given, "--out", tmp_path / "run")
