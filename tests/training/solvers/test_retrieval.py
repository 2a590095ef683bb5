from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import forked
from tests.training.conftest import COMMAND, Fails, Log, Patch, assert_same, experiment, losses, options, state, weights
from vse.training.cli import train_main
from vse.training.kinds import select_batch_rows
from vse.training.losses.base import Batch, Cost, Objective
from vse.training.losses.hinges import SumOfHinges
from vse.training.losses.ranking import RankingLoss
from vse.training.run.folder import RunFolder
from vse.training.solvers import retrieval
from vse.training.solvers.encode import encode_split
from vse.training.training import train
from vse.training.use.model import load_run

COLLAPSED = ["train.learning_rate=1e-9", "loss.margin=500", "train.batch_size=2"]


def test_a_collapse_stops_with_the_cure_or_is_a_warning(
    cache: Path, tmp_path: Path, fails: Fails, caplog: Log, monkeypatch: Patch
) -> None:
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, *options(*COLLAPSED))
    assert "epoch 1: the loss stayed at its collapsed value" in line
    assert "2 x batch x margin for the max" in line
    assert "--set warmup.epochs=1" in line
    monkeypatch.setattr("vse.training.solvers.epochs._MIN_STEPS_TO_COLLAPSE", 10)
    sets = [*COLLAPSED, "train.batch_size=20", "train.on_collapse=warn", "train.epochs=1"]
    with caplog.at_level(logging.WARNING):
        run = train(cache, experiment(*sets), out=tmp_path / "told")
    assert "the loss stayed at its collapsed value" in caplog.text
    assert RunFolder(run).read_record()["state"] == "finished"


def test_a_diverging_run_keeps_its_last_good_checkpoint(cache: Path, tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    good = state(train(cache, experiment("train.epochs=1"), out=tmp_path / "good"))
    real, done = retrieval.RetrievalTrainer.step, iter(range(1000))

    def step(self: retrieval.RetrievalTrainer, *arguments: Any) -> Any:
        if next(done) == 11:
            with torch.no_grad():
                self.model.image_encoder.linear.weight.fill_(torch.inf)
        return real(self, *arguments)

    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", step)
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND)
    assert "epoch 2, step 8: the loss is nan; the last good checkpoint is kept. Try a lower learning rate" in line
    assert_same(good["model"], state(tmp_path / "run")["model"])
    assert_same(good["rows"], state(tmp_path / "run")["rows"])


STILL = ["train.batch_size=240", "train.learning_rate=1e-12", "train.clip=null"]  # an epoch is one step, which moves nothing


@pytest.mark.parametrize(
    "sets",
    [
        ["loss.name=top", "loss.same_image=mask", "loss.lambda2=1.5"],
        ["loss.name=sum", "loss.lambda1=0", "loss.lambda2=0", "loss.lambda3=1"],
        ["loss.name=max", "loss.lambda3=0.2", "loss.lambda4=0.3"],
        ["loss.name=top", "model.similarity=euclidean", "loss.reduction=mean_topk", "loss.lambda4=0.05"],
        ["loss.name=max", "warmup.loss=sum", "warmup.epochs=1"],
    ],
)
def test_an_epoch_has_the_loss_of_its_pairs(
    sets: list[str], own_cache: Path, edit: Callable[..., Path], tmp_path: Path
) -> None:
    def say_the_same(content: Any) -> None:
        for image in content["images"]:
            image["sentences"][0].pop("phrases", None)
            image["sentences"][0]["tokens"] = ["a", "disc", *["here"] * (image["imgid"] % 6)]

    edit(own_cache.parent.parent / "data" / "dataset.json", say_the_same)
    run = train(own_cache, experiment(*STILL, *sets, "train.epochs=1"), out=tmp_path / "run")
    found = load_run(run, "train", device="cpu")
    images, captions = (side.unpack_all() for side in encode_split(found.model, found.split, found.device))
    pairs, settings = found.split.pairs, found.experiment
    assert len(set(pairs.text_indices)) < len(pairs), "some images share a text"
    loss = settings.loss if not settings.warmup.epochs else SumOfHinges(margin=settings.loss.margin)
    batch = Batch(
        select_batch_rows(images, torch.from_numpy(pairs.image_indices)), captions, pairs.image_indices, pairs.text_indices
    )
    cost = loss.build_objective(found.model.similarity)(batch, 0).value.item() / len(pairs)
    assert cost > 0
    assert state(run)["rows"][0]["loss"] == pytest.approx(cost, rel=1e-4)


DEEP = ["model.image_encoder={name: branch, widths: [40, 6]}", "loss.name=sum"]
DEEP += ["model.caption_encoder={name: gru, head: {widths: [40, 6]}}"]


@pytest.mark.parametrize(("dropout", "alike"), [(0, True), (0.5, False)])
def test_dropout_changes_what_a_training_sees(dropout: float, alike: bool, cache: Path, tmp_path: Path) -> None:
    drop = [f"model.{key}.dropout={dropout}" for key in ("image_encoder", "caption_encoder.head")]
    run = train(cache, experiment(*STILL, *DEEP, *drop), out=tmp_path / "run")
    first, *others = losses(run)
    for other in others:
        assert (abs(other / first - 1) < 1e-4) == alike


def test_dropout_and_wrong_pairs_have_seeds_of_their_own_in_each_step(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def seeds(out: str, seed: int) -> list[int]:
        found = []
        real = RankingLoss.build_objective

        def build_objective(self: RankingLoss, *arguments: Any) -> Objective:
            cost = real(self, *arguments)

            def note(batch: Batch, score_pairs: int) -> Cost:
                found.extend([torch.initial_seed(), score_pairs])
                return cost(batch, score_pairs)

            return note

        with monkeypatch.context() as patch:
            patch.setattr(RankingLoss, "build_objective", build_objective)
            train(cache, experiment(*DEEP, "train.epochs=2", "train.batch_size=80"), seed=seed, out=tmp_path / out)
        return found

    one, again, other = seeds("one", 3), seeds("again", 3), seeds("other", 4)
    assert one == again
    assert len(set(one + other)) == 2 * len(one) == 2 * 2 * 2 * 3, "twice in each step of each epoch of each run"


LEARNT = ["train.epochs=5", "train.decay_after=5", "train.learning_rate=0.006", "train.min_count=1"]


def test_two_branches_learn(cache: Path, tmp_path: Path) -> None:
    sets = [*DEEP, "loss.name=top", "loss.same_image=mask", "model.similarity=euclidean", "train.sampling=neighbourhood"]
    run = train(cache, experiment(*LEARNT, *sets, "model.caption_encoder=lstm", "loss.lambda4=0.05"), out=tmp_path / "run")
    assert losses(run)[-1] < 0.8 * losses(run)[0]


@pytest.mark.nightly
def test_a_compiled_loss_and_cnn_give_the_same(cache: Path, tmp_path: Path) -> None:
    """In a process of its own, where no annotations are checked, which cannot be compiled."""
    sets = ["model.similarity=order", "images.source=pictures", "images.finetune=true", "train.epochs=1", "train.compile=true"]
    arguments = ["--features", str(cache), "--out", str(tmp_path / "compiled"), *COMMAND, *options(*sets)]
    log = tmp_path / "log.txt"
    assert forked.run(forked.train_compiled, arguments, log) == 0, log.read_text()
    assert "compiled: collapsed_cost forward total_cost\n" in log.read_text()
    plain = state(train(cache, experiment(*sets[:-1]), out=tmp_path / "plain"))
    compiled = state(tmp_path / "compiled")
    assert plain["rows"][0]["loss"] == pytest.approx(compiled["rows"][0]["loss"], rel=1e-4)
    assert plain["model"].keys() == compiled["model"].keys()


def test_deterministic_algorithms_change_nothing_on_a_processor(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    step, seen = retrieval.RetrievalTrainer.step, []

    def watched(self: retrieval.RetrievalTrainer, *arguments: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return step(self, *arguments)

    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", watched)
    plain = train(cache, experiment("train.epochs=1"), out=tmp_path / "plain")
    assert not any(seen)
    seen.clear()
    same = train(cache, experiment("train.epochs=1", "train.deterministic=true"), out=tmp_path / "same")
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(weights(plain)[name], weight) for name, weight in weights(same).items())


def test_a_missing_deterministic_algorithm_is_named(cache: Path, tmp_path: Path, fails: Fails, monkeypatch: Patch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("put_ does not have a deterministic implementation, but you set x. You can turn off determinism")

    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", refused)
    line = fails(train_main, "--features", cache, *COMMAND, "--set", "train.deterministic=true", "--out", tmp_path / "run")
    assert "train.deterministic: put_ does not have a deterministic implementation" in line


@pytest.mark.parametrize(
    "place", ["vse.training.solvers.retrieval.RetrievalTrainer.step", "vse.training.training.prepare_task"]
)
def test_a_gpu_without_memory_is_one_line(place: str, cache: Path, tmp_path: Path, fails: Fails, monkeypatch: Patch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 3 GiB")

    monkeypatch.setattr(place, full)
    line = fails(train_main, "--features", cache, *COMMAND, "--out", tmp_path / "run")
    assert "out of memory (CUDA out of memory); lower train.batch_size, or --set train.features_in_memory=false" in line
    assert ("--device cpu" in line) == place.endswith("prepare_task")
