from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.adversaries.conftest import SCAN, batch_of, grid, task_of
from tests.training.conftest import Patch, experiment, table
from vse.pipeline.errors import UserError
from vse.training.adversaries import compositional as module
from vse.training.adversaries.base import SampledCandidates, sample_candidates
from vse.training.adversaries.compositional import CompositionalAdversary
from vse.training.kinds import BatchVectors
from vse.training.losses.base import Batch
from vse.training.solvers.base import RetrievalTask
from vse.training.solvers.retrieval import RetrievalTrainer
from vse.training.training import train

ROWS = [0, 7, 12, 1]  # pairs of the demo, the first and the last of one image


def players(cache: Path, adversary: str, *sets: str) -> tuple[RetrievalTask, CompositionalAdversary]:
    task = task_of(cache, "loss.margin=0.5", *SCAN, f"adversary={{name: compositional, {adversary}}}", *sets)
    torch.manual_seed(1)
    made = task.adversary.build(RetrievalTrainer.build_opponent(task))
    assert isinstance(made, CompositionalAdversary)
    return task, made


def sets_of(side: BatchVectors) -> list[torch.Tensor]:
    """The vectors of each set, without padding."""
    return [vectors[mask] for vectors, mask in zip(*side, strict=True)]


def score(task: RetrievalTask, image: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
    """The score of one image and one caption alone."""
    sides = [(one[None], torch.ones(1, len(one), dtype=torch.bool)) for one in (image, caption)]
    scores = task.model.similarity(*sides)
    assert isinstance(scores, torch.Tensor)
    return scores[0, 0]


def allowed(task: RetrievalTask, batch: Batch) -> list[list[bool]]:
    """Of which pairs of the batch parts may come for a query: of other images, and of captions of other words."""
    words = [task.pairs.captions[pair].tokens for pair in batch.pair_indices.tolist()]  # type: ignore[union-attr]
    image_indices = batch.image_indices.tolist()
    return [
        [image_indices[a] != image_indices[b] and words[a] != words[b] for b in range(len(words))] for a in range(len(words))
    ]


def played(
    adversary: CompositionalAdversary, task: RetrievalTask, batch: Batch, monkeypatch: Patch
) -> tuple[module.AdversarialLosses, list[tuple[torch.Tensor, torch.Tensor, SampledCandidates]]]:
    seen = []

    def spied(logits: torch.Tensor, masked: torch.Tensor, samples: int) -> SampledCandidates:
        seen.append((logits.detach(), masked, sample_candidates(logits, masked, samples)))
        return seen[-1][2]

    with monkeypatch.context() as patch:
        patch.setattr(module, "sample_candidates", spied)
        return adversary.compute_losses(batch, task.model, task.loss.build_objective(task.model.similarity), 0), seen


@pytest.mark.parametrize("form", ["difference", "hinge"])
@pytest.mark.parametrize("sides", ["images", "captions", "both"])
def test_compositions_cost_what_each_scores_alone(positions: Path, monkeypatch: Patch, sides: str, form: str) -> None:
    settings = f"sides: {sides}, form: {form}, samples: 2, weight: 0.7, in_batch: 0.3, baseline: none"
    task, adversary = players(positions, settings)
    batch = batch_of(task, ROWS)
    found, seen = played(adversary, task, batch, monkeypatch)
    images, captions = sets_of(batch.image_embeddings), sets_of(batch.caption_embeddings)
    costs, own_loss = torch.zeros(()), torch.zeros(())
    for side, (_, masked, drawn) in zip(adversary.inferences, seen, strict=True):
        (parts, there), queries = (
            (batch.image_embeddings, captions) if side == "images" else (batch.caption_embeddings, images)
        )
        flat = parts.flatten(0, 1)
        logits = adversary.inferences[side](torch.cat(queries).detach(), flat.detach())
        log_p = logits.masked_fill(masked | ~there.flatten(), -torch.inf).log_softmax(1)
        starts = np.cumsum([0, *map(len, queries)])
        for k, query in enumerate(queries):
            for s in range(2):
                numbers = drawn.indices[starts[k] : starts[k + 1], s]
                assert len(numbers) == len(query), "a part for each vector of the query"
                composed = score(task, flat[numbers], query) if side == "images" else score(task, query, flat[numbers])
                cost = composed - score(task, images[k], captions[k])
                cost = cost if form == "difference" else (0.5 + cost).clamp(min=0)
                costs = costs + cost / 2
                reward = (composed if form == "difference" else cost).detach()
                likely = sum(log_p[starts[k] + row, number] for row, number in enumerate(numbers.tolist()))
                own_loss = own_loss - reward * likely / (2 * len(queries))
    slow = 0.3 * task.loss.build_objective(task.model.similarity)(batch, 0).value + 0.7 * costs
    torch.testing.assert_close(found.model_cost.value, slow, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.adversary_loss, own_loss, rtol=1e-4, atol=1e-5)
    for loss, expected, player in ((found.model_cost.value, slow, task.model), (found.adversary_loss, own_loss, adversary)):
        weights = list(player.parameters())
        for fast, exact in zip(grid(loss, weights), grid(expected, weights), strict=True):
            torch.testing.assert_close(fast, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("sides", ["images", "captions"])
def test_parts_come_from_other_images_alone(positions: Path, monkeypatch: Patch, sides: str) -> None:
    task, adversary = players(positions, f"sides: {sides}, samples: 50")
    batch = batch_of(task, ROWS)
    _, ((_, _, drawn),) = played(adversary, task, batch, monkeypatch)
    (parts, there), queries = (
        (batch.image_embeddings, batch.caption_embeddings)
        if sides == "images"
        else (batch.caption_embeddings, batch.image_embeddings)
    )
    rows, columns = drawn.indices // parts.shape[1], drawn.indices % parts.shape[1]
    may = allowed(task, batch)
    assert not may[0][3], "pairs 0 and 1 are of one image"
    query_of = queries[1].nonzero()[:, 0].tolist()
    came = {(query, row) for query, own in zip(query_of, rows.tolist(), strict=True) for row in own}
    assert came == {(a, b) for a in range(4) for b in range(4) if may[a][b]}
    assert there[rows, columns].all()


def test_a_run_logs_what_the_adversary_does(positions: Path, tmp_path: Path) -> None:
    sets = [*SCAN, "adversary={name: compositional, scale: 5, entropy_weight: 0.1, baseline: self_critical}", "train.epochs=2"]
    rows = table(train(positions, experiment(*sets), out=tmp_path / "run"))
    for row in rows:
        measures = {name: float(row[f"adversary_{name}"]) for name in ("entropy", "reward", "masked", "harder", "loss")}
        assert np.isfinite(list(measures.values())).all()
        assert 0 < measures["masked"] < 1
        assert 0 < measures["entropy"] <= np.log(32 * 4) + 1e-6
        assert -2 <= measures["harder"] <= 2


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([], "compositional samples regions, but 'cosine' compares single vectors; use the adversary ace"),
        ([*SCAN, "loss=logistic"], "compositional requires a ranking loss, and logistic"),
    ],
)
def test_what_it_does_not_go_with_is_refused(cache: Path, positions: Path, tmp_path: Path, sets: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(positions if sets else cache, experiment("adversary=compositional", *sets), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
