"""Late interaction: scores and gradients as a dense einsum has them, and models that are trained on cached sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.eval.slow_ranks import slow_ranks
from tests.training.conftest import Fails, Patch, done, experiment, losses
from tests.training.models.similarities.test_scan import CAPTIONS, IMAGES, with_gradients
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.training.cli import embed_main
from vse.training.kinds import BatchVectors, PackedEmbeddings
from vse.training.models.similarities import scan
from vse.training.models.similarities.scan import MaxSimSettings
from vse.training.solvers.encode import pool_sets
from vse.training.training import train

QUERIES = ["words", "regions", "both"]


def dense(images: BatchVectors, captions: BatchVectors, queries: str) -> Tensor:
    """The score of each pair from all cosines at once."""
    cosines = torch.einsum("nrd,mwd->nmrw", images[0], captions[0])
    there = images[1][:, None, :, None] & captions[1][None, :, None, :]
    cosines = cosines.masked_fill(~there, -100.0)
    by_word = (cosines.amax(2) * captions[1]).sum(2) / captions[1].sum(1)
    by_region = (cosines.amax(3) * images[1][:, None]).sum(2) / images[1].sum(1)[:, None]
    return {"words": by_word, "regions": by_region, "both": (by_word + by_region) / 2}[queries]


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("block", [1, 40, 10**6])
def test_scores_and_gradients_are_those_of_a_dense_einsum(queries: Any, block: int, monkeypatch: Patch) -> None:
    monkeypatch.setitem(scan._COSINES_PER_BLOCK, "cpu", block)
    monkeypatch.setattr(scan, "_MAX_STORED_COSINES", 10 * block)
    similarity = MaxSimSettings(queries=queries).build(5)
    ours = with_gradients(similarity, IMAGES, CAPTIONS)
    theirs = with_gradients(lambda images, captions: dense(images, captions, queries), IMAGES, CAPTIONS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("queries", QUERIES)
def test_single_pairs_have_the_scores_of_the_matrix(queries: Any) -> None:
    similarity = MaxSimSettings(queries=queries).build(5)
    rows, columns = torch.tensor([0, 2, 3, 3]), torch.tensor([5, 0, 2, 1])
    scores = similarity(IMAGES, CAPTIONS)
    assert isinstance(scores, Tensor)
    torch.testing.assert_close(similarity.score_pairs(IMAGES, CAPTIONS, rows, columns), scores[rows, columns])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", ["max", "infonce", "sigmoid", "gce"])
def test_it_is_trained_with_any_loss_and_ranked_exactly(regions: Path, tmp_path: Path, loss: str) -> None:
    words = "model.caption_encoder={name: gru, states: all}"
    run = train(regions, experiment("model.similarity=maxsim", words, f"loss.name={loss}"), out=tmp_path / "run")
    assert losses(run)[-1] < losses(run)[0]
    done(embed_main, run)
    embeddings = read_embeddings(run / "test.h5")
    assert embeddings.scores is not None
    assert embeddings.pooled_images is not None
    done(eval_main, run / "test.h5", "--rerank", 60, "--out", tmp_path / "result.json", "--bootstrap", 0)
    result = json.loads((tmp_path / "result.json").read_text())
    ranks = slow_ranks(np.asarray(embeddings.scores[:]), embeddings.image_of_caption())
    assert result["protocols"]["full"]["t2i"]["r1"] == pytest.approx(100 * np.mean(np.asarray(ranks[1]) < 1))
    assert result["rerank"][0]["lost"]["rsum"] == pytest.approx(0)  # all candidates


def test_regions_are_pooled_into_means_of_similar_ones() -> None:
    """Two pairs of nearly equal vectors become two vectors; a single vector stays."""
    a, b, c = torch.eye(5)[:3]
    vectors = torch.stack([a, b, a + 0.01 * c, b - 0.01 * c, 2 * c])
    pooled = pool_sets(PackedEmbeddings(vectors, torch.tensor([4, 1])), 2)
    assert pooled.lengths is not None
    assert pooled.lengths.tolist() == [2, 1]
    first = sorted(pooled.vectors[:2].tolist(), reverse=True)
    torch.testing.assert_close(torch.tensor(first), torch.stack([a, b]), atol=0.01, rtol=0)
    torch.testing.assert_close(pooled.vectors[2], c)


def test_a_run_is_embedded_with_pooled_regions(regions: Path, tmp_path: Path, fails: Fails, run: Path) -> None:
    words = "model.caption_encoder={name: gru, states: all}"
    trained = train(regions, experiment("model.similarity=maxsim", words), out=tmp_path / "run")
    bytes_per_image = []
    for factor in (None, 2, 3):
        done(embed_main, trained, *([] if factor is None else ["--pool-regions", factor]))
        file = trained / ("test.h5" if factor is None else f"test_pooled_{factor}.h5")
        bytes_per_image.append(json.loads(read_embeddings(file).provenance)["regions"]["bytes_per_image"])
    assert bytes_per_image == sorted(bytes_per_image, reverse=True)
    assert bytes_per_image[2] < bytes_per_image[0] / 2
    assert "no regions to pool" in fails(embed_main, run, "--pool-regions", 2)
