from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.adversaries.conftest import SCAN, batch_of, grid, task_of
from tests.training.conftest import Log, Patch, experiment, table
from vse.pipeline.dataset.dataset import Caption, Image
from vse.pipeline.errors import UserError
from vse.training.adversaries import ace as ace_module
from vse.training.adversaries.ace import AceAdversary, FalseNegativeMasks
from vse.training.adversaries.base import AdversarialLosses, SampledCandidates, sample_candidates
from vse.training.data.images import CachedImageFeatures
from vse.training.data.pairs import Pairs
from vse.training.losses.base import Batch
from vse.training.solvers.base import RetrievalTask
from vse.training.solvers.retrieval import RetrievalTrainer
from vse.training.training import train

ROWS = [0, 7, 12, 1]  # pairs of the demo, the first and the last of one image


def players(cache: Path, *sets: str) -> tuple[RetrievalTask, AceAdversary]:
    task = task_of(cache, "loss.margin=0.5", *sets)
    torch.manual_seed(1)
    adversary = task.adversary.build(RetrievalTrainer.build_opponent(task))
    assert isinstance(adversary, AceAdversary)
    adversary.start_epoch(task.model)
    return task, adversary


@dataclass
class DirectionLosses:
    """One direction as it was played: the numbers of the candidates, their logits, what was masked and what was drawn."""

    indices: np.ndarray
    logits: torch.Tensor
    masked: torch.Tensor
    drawn: SampledCandidates


def played(
    adversary: AceAdversary, task: RetrievalTask, pairs: list[int], monkeypatch: Patch
) -> tuple[Batch, AdversarialLosses, tuple[DirectionLosses, DirectionLosses]]:
    """A batch, its round, and both directions: captions for images, images for captions."""
    batch, numbers, draws = batch_of(task, pairs), [], []
    real = ace_module._NegativeGenerator.choose_candidates

    def candidates(self: Any, *arguments: Any) -> Any:
        numbers.append(real(self, *arguments))
        return numbers[-1]

    def spied(logits: torch.Tensor, masked: torch.Tensor, samples: int) -> SampledCandidates:
        draws.append((logits.detach(), masked, sample_candidates(logits, masked, samples)))
        return draws[-1][2]

    with monkeypatch.context() as patch:
        patch.setattr(ace_module._NegativeGenerator, "choose_candidates", candidates)
        patch.setattr(ace_module, "sample_candidates", spied)
        found = adversary.compute_losses(batch, task.model, task.loss.build_objective(task.model.similarity), 0)
    turns = [DirectionLosses(chosen[0], *one) for chosen, one in zip(numbers, draws, strict=True)]
    return batch, found, (turns[0], turns[1])


def slow_hinge(task: RetrievalTask, batch: Batch, k: int, number: int, of_captions: bool, low: float = 0) -> torch.Tensor:
    """What one negative costs the k-th query; without the hinge if ``low`` is minus infinity."""
    image, caption = batch.image_embeddings[0][k], batch.caption_embeddings[0][k]
    if of_captions:
        score = image @ task.model.embed_captions(*task.caption_inputs.read(np.asarray([number])))[0][0]
    else:
        assert isinstance(task.image_inputs, CachedImageFeatures)
        score = caption @ task.model.embed_images(*task.image_inputs.read_images(np.asarray([number])))[0][0]
    return (0.5 - image @ caption + score).clamp(min=low)


@pytest.mark.parametrize("candidates", ["all", "batch", 40])
def test_each_query_costs_the_hinges_with_what_is_drawn_for_it(cache: Path, monkeypatch: Patch, candidates: str | int) -> None:
    sets = ["adversary={name: ace, samples: 3, in_batch: 0.25}", f"adversary.candidates={candidates}"]
    task, adversary = players(cache, *sets)
    batch, found, turns = played(adversary, task, ROWS, monkeypatch)
    sizes = {"all": (240, 48), "batch": (4, 4), 40: (40, 40)}[candidates]
    assert tuple(len(turn.indices) for turn in turns) == sizes
    hinges = torch.stack(
        [
            slow_hinge(task, batch, k, int(turn.indices[chosen]), turn is turns[0])
            for turn in turns
            for k in range(len(ROWS))
            for chosen in turn.drawn.indices[k].tolist()
        ]
    )
    slow = 0.25 * task.loss.build_objective(task.model.similarity)(batch, 0).value + 0.75 * hinges.sum() / 3
    torch.testing.assert_close(found.model_cost.value, slow)
    assert found.metrics["reward"].item() == pytest.approx(hinges.mean().item(), rel=1e-5)
    weights = [weight for weight in task.model.parameters() if weight.requires_grad]
    fast, exact = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in (found.model_cost.value, slow))
    torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reward", ["hinge", "score"])
@pytest.mark.parametrize("baseline", ["none", "moving_average", "self_critical"])
def test_generators_learn_by_reinforce(cache: Path, monkeypatch: Patch, baseline: str, reward: str) -> None:
    # With the margin 0.5 of this loss, some negatives are too easy to cost anything.
    low = 0 if reward == "hinge" else -torch.inf
    task, adversary = players(cache, f"adversary={{name: ace, samples: 2, baseline: {baseline}, reward: {reward}}}")
    batch, found, turns = played(adversary, task, ROWS, monkeypatch)
    slow = torch.zeros(())
    for turn, side in zip(turns, (adversary.captions, adversary.images), strict=True):
        queries = (batch.image_embeddings if turn is turns[0] else batch.caption_embeddings)[0].detach()
        log_p = side.inference(queries, side.embedded[turn.indices]).masked_fill(turn.masked, -torch.inf).log_softmax(1)
        for k in range(len(ROWS)):
            of_likeliest = slow_hinge(task, batch, k, int(turn.indices[log_p[k].argmax()]), turn is turns[0], low).detach()
            for chosen in turn.drawn.indices[k].tolist():
                gain = slow_hinge(task, batch, k, int(turn.indices[chosen]), turn is turns[0], low).detach()
                advantage = gain - of_likeliest if baseline == "self_critical" else gain
                slow = slow - advantage * log_p[k, chosen] / (2 * len(ROWS))
    torch.testing.assert_close(found.adversary_loss, slow)
    weights = list(adversary.parameters())
    for fast, expected in zip(grid(found.adversary_loss, weights), grid(slow, weights), strict=True):
        torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["linear", "mlp", "bilinear", "none"])
@pytest.mark.parametrize("known", ["model", "learnt"])
def test_what_is_drawn_is_likely_by_the_generator(cache: Path, monkeypatch: Patch, architecture: str, known: str) -> None:
    sets = f"adversary={{name: ace, architecture: {architecture}, table: {known}, scale: 5}}"
    task, adversary = players(cache, sets)
    batch, found, (to_captions, _) = played(adversary, task, ROWS, monkeypatch)
    side = adversary.captions
    encoded = task.model.embed_captions(*task.caption_inputs.read(np.arange(240)))[0]
    vectors = side.learnt if known == "learnt" else encoded
    images = batch.image_embeddings[0]
    mapped = 0 if architecture == "none" else side.inference.layers(images) @ vectors.T
    logits = mapped + 5 * images @ vectors.T
    torch.testing.assert_close(to_captions.logits, logits, rtol=1e-4, atol=1e-5)
    log_p = logits.masked_fill(to_captions.masked, -torch.inf).log_softmax(1)
    likely = to_captions.drawn.log_probabilities
    torch.testing.assert_close(likely, log_p.gather(1, to_captions.drawn.indices), rtol=1e-4, atol=1e-5)
    assert {"entropy", "reward", "masked", "harder"} == found.metrics.keys()


def test_embeddings_are_renewed_when_a_batch_has_them(cache: Path, monkeypatch: Patch) -> None:
    for refresh in ("visited", "epoch"):
        task, adversary = players(cache, f"adversary={{name: ace, refresh: {refresh}}}")
        before = adversary.captions.embedded
        torch.testing.assert_close(before, task.model.embed_captions(*task.caption_inputs.read(np.arange(240)))[0])
        first = before.clone()
        with torch.no_grad():
            for weight in task.model.parameters():
                weight.mul_(0.5)
        played(adversary, task, ROWS, monkeypatch)
        changed = (before != first).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted(ROWS)
        adversary.start_epoch(task.model)
        assert (before != first).any(1).all() == (refresh == "epoch")


def pairs_of(texts: list[list[int]]) -> Pairs:
    """Images whose captions have these texts."""
    images, sentid = [], 0
    for k, own in enumerate(texts):
        captions = tuple(Caption(sentid + j, k, str(text), (str(text),)) for j, text in enumerate(own))
        images.append(Image(k, f"{k}.jpg", "train", captions))
        sentid += len(own)
    return Pairs(images)


@pytest.mark.parametrize("mask", ["pair", "image", "text"])
@given(texts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_false_negatives_are_those_of_the_image_and_of_its_texts(mask: str, texts: list[list[int]], seed: int) -> None:
    pairs = pairs_of(texts)
    rng = np.random.default_rng(seed)
    batch = rng.integers(len(pairs), size=3)
    image_indices, text = pairs.image_indices, [t for own in texts for t in own]
    for captions in (np.arange(len(pairs)), rng.permutation(len(pairs))[: rng.integers(1, len(pairs) + 1)]):
        found = FalseNegativeMasks(pairs, mask).mask_captions(image_indices[batch], batch, captions)
        for row, pair in zip(found.tolist(), batch, strict=True):
            false = {
                "pair": [c == pair for c in captions],
                "image": [image_indices[c] == image_indices[pair] for c in captions],
                "text": [text[c] in texts[image_indices[pair]] for c in captions],
            }[mask]
            assert row == false
    for images in (np.arange(len(texts)), rng.permutation(len(texts))[:2]):
        found = FalseNegativeMasks(pairs, mask).mask_images(image_indices[batch], batch, images)
        for row, pair in zip(found.tolist(), batch, strict=True):
            alike = [mask == "text" and text[pair] in texts[k] for k in images]
            assert row == [one or k == image_indices[pair] for one, k in zip(alike, images, strict=True)]


def test_a_run_logs_what_the_adversary_does_and_ends_in_one_line_where_it_diverges(cache: Path, tmp_path: Path) -> None:
    rows = table(train(cache, experiment("adversary=ace", "train.epochs=2"), out=tmp_path / "run"))
    columns = ["entropy", "reward", "masked", "harder", "loss"]
    assert all(np.isfinite([float(row[f"adversary_{name}"]) for name in columns]).all() for row in rows)
    assert 0 < float(rows[0]["adversary_masked"]) < 0.2
    assert float(rows[0]["adversary_entropy"]) < np.log(240)
    sets = ["adversary={name: ace, learning_rate: 1e30, samples: 2}", "train.epochs=2"]
    with pytest.raises(UserError, match=r"the adversary's loss is nan; .* Try a lower adversary.learning_rate"):
        train(cache, experiment(*sets), out=tmp_path / "diverged")


def test_the_generator_alone_learns_in_the_first_epochs(cache: Path, monkeypatch: Patch) -> None:
    task, adversary = players(cache, "adversary={name: ace, pretraining_epochs: 1}")  # in the first epoch
    costs = []
    for _ in range(2):
        batch, found, _ = played(adversary, task, ROWS, monkeypatch)
        own = task.loss.build_objective(task.model.similarity)(batch, 0).value
        costs.append((found.model_cost.value.item(), own.item()))
        adversary.start_epoch(task.model)
    assert costs[0][0] == pytest.approx(costs[0][1])
    assert costs[1][0] != pytest.approx(costs[1][1])


def test_negatives_are_sampled_from_the_models_own_scores(cache: Path, tmp_path: Path) -> None:
    sets = ["adversary={name: ace, architecture: none, scale: 20}", "train.epochs=2"]
    rows = table(train(cache, experiment(*sets), out=tmp_path / "run"))
    assert all(0 < float(row["adversary_entropy"]) < np.log(240) for row in rows)


def test_an_adversary_that_always_draws_the_same_is_told(cache: Path, tmp_path: Path, caplog: Log) -> None:
    sets = ["adversary={name: ace, table: learnt, scale: 0, learning_rate: 1.0}", "train.epochs=2"]
    train(cache, experiment(*sets), out=tmp_path / "run")
    line = [record.getMessage() for record in caplog.records if "entropy" in record.getMessage()][-1]
    assert "epoch 2: the adversary's entropy is" in line
    assert "adversary.entropy_weight=1" in line


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["loss=logistic", "model.similarity=network"], "ace requires a ranking loss, and logistic"),
        (SCAN, "ace samples single vectors, .* 'scan' compares sets; the adversary compositional"),
        (["images.source=pictures"], "ace requires cached features"),
    ],
)
def test_misfits_are_refused(cache: Path, positions: Path, tmp_path: Path, sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(positions if sets is SCAN else cache, experiment("adversary=ace", *sets), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_candidates_than_memory_are_refused(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 16 if name == "SC_PHYS_PAGES" else real(name))
    with pytest.raises(UserError, match=r"ace needs 0.0 GB for 240 candidates, .* --set adversary.candidates=10000"):
        train(cache, experiment("adversary=ace"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(cache, experiment("adversary={name: ace, candidates: batch}", "train.epochs=1"), out=tmp_path / "run")
