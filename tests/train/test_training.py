"""What a user sees of a training beside its weights: losses, early stops, refusals, listings, events, caches, other runs."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.train.conftest import COMMAND, assert_same, experiment, state
from vse.features.cnn_extractor import CnnExtractor
from vse.features.extraction import extract_shards, merge
from vse.features.shards import shards_folder
from vse.train.cli import embed_main, train_main
from vse.train.losses.objective import Batch, Objective
from vse.train.run.folder import RunFolder
from vse.train.solvers import adam as trainer_module
from vse.train.solvers.encode import encode
from vse.train.solvers.negatives import COLUMNS
from vse.train.training import train
from vse.train.use.embed import load_run


def test_early_stop_waits_for_a_better_rsum(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([5.0, 9.0, 9.0, 8.0, 10.0])
    nothing = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
    monkeypatch.setattr(trainer_module.Trainer, "validate", lambda _: {**nothing, "rsum": next(values)})
    run = train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=tmp_path / "run")
    record = RunFolder(run).record()
    assert (record["state"], record["epochs"], record["best_epoch"]) == ("finished", 4, 2)
    (run / "run.json").unlink()
    train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=run, resume=True)
    assert RunFolder(run).record()["epochs"] == 4, "a resumed run does not go on behind its early stop"


def test_a_warm_up_without_end_is_told(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(cache, experiment("train.epochs=1", "warmup.epochs=1", "loss.name=max"), out=tmp_path / "run")
    assert "all 1 epochs are warm-up with the loss 'sum', and 'max' is never used" in caplog.text


def test_a_diverging_run_keeps_its_last_good_checkpoint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    good = state(train(cache, experiment("train.epochs=1"), out=tmp_path / "good"))
    real, done = trainer_module.Trainer.step, iter(range(1000))

    def step(self: trainer_module.Trainer, *arguments: Any) -> Any:
        if next(done) == 11:
            with torch.no_grad():
                self.model.image_encoder.linear.weight.fill_(torch.inf)
        return real(self, *arguments)

    monkeypatch.setattr(trainer_module.Trainer, "step", step)
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND)
    assert "epoch 2, step 8: the loss is nan; the last good checkpoint is kept. Try a lower learning rate" in line
    assert_same(good["model"], state(tmp_path / "run")["model"])
    assert_same(good["rows"], state(tmp_path / "run")["rows"])


def test_validation_has_a_cache_of_its_own(bank: Path, cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    arguments = ["--features", bank, "--out", tmp_path / "run", *COMMAND]
    assert "demo_fc7.h5: no such feature cache" in fails(train_main, *arguments, "--set", "eval_feature=fc7")
    run = train(bank, experiment("eval_feature=tiny"), out=tmp_path / "run")
    assert RunFolder(run).record()["eval_features"]["name"] == "tiny"
    other = train(bank, experiment(), out=tmp_path / "other")
    assert_same(state(run)["model"], state(other)["model"])
    assert [row["rsum"] for row in state(run)["rows"]] != [row["rsum"] for row in state(other)["rows"]]
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run)])
    assert stop.value.code == 0
    assert "is not the cache that" in fails(embed_main, run, "--features", bank)


def test_caches_of_different_networks_do_not_go_together(
    bank: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    other = tmp_path / "demo_other.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"seed": 1})), other, 1)
    merge(demo, other, 1)
    line = fails(train_main, "--features", bank, "--eval-features", other, "--out", tmp_path / "run", *COMMAND)
    assert "of networks with different weights" in line


def test_restval_is_trained_on_when_asked_for(cache: Path, own_cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "no images in split 'restval'" in fails(
        train_main, "--features", cache, "--out", tmp_path / "r", *COMMAND, "--set", "train.restval=true"
    )
    data = own_cache.parent.parent / "data" / "dataset.json"
    data.write_text(data.read_text().replace('"split": "test"', '"split": "restval"'))
    plain = train(own_cache, experiment("train.epochs=1"), out=tmp_path / "plain")
    more = train(own_cache, experiment("train.epochs=1", "train.restval=true"), out=tmp_path / "more")
    assert RunFolder(plain).record()["n_train_pairs"] == 240
    assert RunFolder(more).record()["n_train_pairs"] == 300


def test_hard_negatives_are_listed_per_epoch_and_direction(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run", log_negatives=2)
    rows = list(csv.DictReader((run / "negatives.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["epoch"], row["query"]) for row in rows] == [
        (epoch, query) for epoch in "123" for query in ("image", "image", "caption", "caption")
    ]
    assert all(row["sentid"] != row["negative_sentid"] for row in rows)
    plain = train(cache, experiment(), out=tmp_path / "plain")
    assert_same(state(run)["model"], state(plain)["model"])


def test_events_can_be_read_by_tensorboard(cache: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(cache, experiment(), out=tmp_path / "run", tensorboard=True)
    events = accumulator.EventAccumulator(str(run))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("rsum")]
    assert found == [(row["epoch"], pytest.approx(row["rsum"], abs=2e-3)) for row in state(run)["rows"]]


@pytest.mark.slow
@pytest.mark.parametrize("sets", [["model.similarity=order"], ["images.source=pictures", "images.finetune=true"]])
def test_a_compiled_loss_and_cnn_give_the_same(sets: list[str], cache: Path, tmp_path: Path) -> None:
    """In a process of its own, where no annotations are checked, which cannot be compiled."""
    sets = [*sets, "train.epochs=1", "train.compile=true"]
    command = [sys.executable, "-m", "vse.train", "--features", str(cache), "--out", str(tmp_path / "compiled"), *COMMAND]
    done = subprocess.run([*command, *(p for s in sets for p in ("--set", s))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain = state(train(cache, experiment(*sets[:-1]), out=tmp_path / "plain"))
    compiled = state(tmp_path / "compiled")
    assert plain["rows"][0]["loss"] == pytest.approx(compiled["rows"][0]["loss"], rel=1e-4)
    assert plain["model"].keys() == compiled["model"].keys()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_with_one_line(number: signal.Signals, code: int, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vse.train", "--features", str(cache), "--out", str(tmp_path / "run"), *COMMAND]
    command += ["--set", "train.epochs=500", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (tmp_path / "run" / "metrics.csv").exists():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        process.send_signal(number)
        _, log = process.communicate()
    assert process.returncode == code, log
    assert "Traceback" not in log
    assert log.splitlines()[-1].startswith("vse-train: stopped in epoch ")
    assert log.splitlines()[-1].endswith("--resume continues there")
    saved = RunFolder(tmp_path / "run").checkpoint()
    assert saved["epoch"] * 8 + saved["step"] > 0
    assert RunFolder(tmp_path / "run").record()["state"] == "running"


@pytest.fixture(scope="module")
def base(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained head of the demo, to start from."""
    out = tmp_path_factory.mktemp("runs") / "demo_base" / "seed-0"
    return train(cache, experiment("train.learning_rate=0.01", "train.epochs=6", "warmup.epochs=6"), out=out)


FINETUNE = ["images.source=pictures", "images.finetune=true", "train.epochs=2", "train.learning_rate=1e-3"]


def test_fine_tuning_starts_from_a_trained_head(base: Path, cache: Path, tmp_path: Path) -> None:
    still = train(cache, experiment(*FINETUNE[:3], "train.learning_rate=1e-12"), out=tmp_path / "still", start_from=base)
    best = max(row["rsum"] for row in state(base)["rows"])
    assert state(still)["rows"][0]["rsum"] == pytest.approx(best, abs=4), "nothing moved, and pictures give what was cached"
    run = train(cache, experiment(*FINETUNE), out=tmp_path / "run", start_from=base)
    assert RunFolder(run).record()["start_from"] == "../demo_base/seed-0" or RunFolder(run).record()["start_from"]
    weights = RunFolder(run).best_weights()
    moved = {name for name, value in weights.items() if name.startswith("cnn.")}
    first = RunFolder(still).best_weights()
    assert moved
    assert all(not torch.equal(weights[name], first[name]) for name in moved if "running" not in name)


def test_a_fine_tuned_run_embeds_the_pictures(base: Path, own_cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(own_cache, experiment(*FINETUNE), out=tmp_path / "run", start_from=base)
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run)])
    assert stop.value.code == 0
    picture = sorted((own_cache.parent.parent / "data" / "images").rglob("*.jpg"))[-1]
    picture.write_bytes(b"junk")
    assert f"{picture.name}: not a readable image" in fails(embed_main, run)


def test_a_run_starts_from_a_fitting_one_alone(base: Path, cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "runs" / "demo_x" / "seed-0", *COMMAND]
    assert "no trained run to start from" in fails(train_main, *arguments, "--set", "start_from=vsepp_rc")
    line = fails(train_main, *arguments, "--start-from", base, "--set", "model.dim=8")
    assert "weights of another model" in line
    assert "finetune needs source: pictures" in fails(train_main, *arguments, "--set", "images.finetune=true")


def test_pictures_need_a_cache_of_a_cnn(own_cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    arguments = ["--features", own_cache, "--out", tmp_path / "run", *COMMAND, "--set", "images.source=pictures"]
    for picture in (own_cache.parent.parent / "data" / "images").rglob("*.jpg"):
        picture.unlink()
    assert "no such image file" in fails(train_main, *arguments)


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
def test_the_loss_of_an_epoch_is_that_of_its_pairs(
    sets: list[str], own_cache: Path, edit: Callable[..., Path], tmp_path: Path
) -> None:
    def say_the_same(content: Any) -> None:
        for image in content["images"]:
            image["sentences"][0]["tokens"] = ["a", "disc", *["here"] * (image["imgid"] % 6)]

    edit(own_cache.parent.parent / "data" / "dataset.json", say_the_same)
    run = train(own_cache, experiment(*STILL, *sets, "train.epochs=1"), out=tmp_path / "run")
    found = load_run(run, "train", device="cpu")
    images, captions = encode(found.model, found.split, found.device)
    pairs, settings = found.split.pairs, found.experiment
    assert len(set(pairs.text_of)) < len(pairs), "some images share a text"
    name = settings.warmup.loss if settings.warmup.epochs else settings.loss.name
    batch = Batch(images[torch.from_numpy(pairs.image_of)], captions, pairs.image_of, pairs.text_of)
    loss = Objective(name, settings.loss, found.model)(batch, 0).loss.item() / len(pairs)
    assert loss > 0
    assert state(run)["rows"][0]["loss"] == pytest.approx(loss, rel=1e-4)


DEEP = [
    "model.branches.layers=nonlinear",
    "model.branches.image_widths=[40,6]",
    "model.branches.caption_widths=[40,6]",
    "loss.name=sum",
]


@pytest.mark.parametrize(("dropout", "alike"), [(0, True), (0.5, False)])
def test_dropout_changes_what_a_training_sees(dropout: float, alike: bool, cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(*STILL, *DEEP, f"model.branches.dropout={dropout}"), out=tmp_path / "run")
    losses = [row["loss"] for row in state(run)["rows"]]
    for other in losses[1:]:
        assert (abs(other / losses[0] - 1) < 1e-4) == alike


def test_dropout_and_wrong_pairs_have_seeds_of_their_own_in_each_step(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeds(out: str, seed: int) -> list[int]:
        found = []
        real = Objective.__call__

        def note(self: Objective, batch: Batch, of_pairs: int) -> Any:
            found.extend([torch.initial_seed(), of_pairs])
            return real(self, batch, of_pairs)

        with monkeypatch.context() as patch:
            patch.setattr(Objective, "__call__", note)
            train(cache, experiment(*DEEP), seed, out=tmp_path / out)
        return found

    one, again, other = seeds("one", 3), seeds("again", 3), seeds("other", 4)
    assert one == again
    assert len(set(one + other)) == 2 * len(one) == 2 * 2 * 3 * 8, "twice in each step of each epoch of each run"


LEARNT = ["train.epochs=12", "train.decay_after=12", "train.learning_rate=0.003", "train.min_count=1"]


@pytest.mark.usefixtures("tfidf")
@pytest.mark.parametrize("captions", ["caption_feature=tfidf", "model.recurrent=lstm"])
def test_two_branches_learn_from_vectors_and_from_words(captions: str, cache: Path, tmp_path: Path) -> None:
    sets = [*DEEP, "loss.name=top", "loss.same_image=mask", "model.similarity=euclidean", "train.sampling=neighbourhood"]
    run = train(cache, experiment(*LEARNT, *sets, captions, "loss.lambda4=0.05"), out=tmp_path / "run")
    losses = [row["loss"] for row in state(run)["rows"]]
    assert losses[-1] < 0.8 * losses[0]


def test_captions_are_read_from_the_cache_that_is_named(
    cache: Path, tfidf: Path, bank: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, "--set", "train.epochs=1"]
    line = fails(train_main, *arguments, "--set", "caption_feature=hglmm")
    assert "demo_hglmm.h5: no such feature cache; vsepp reads captions as 'hglmm': extract it, or name its cache with" in line
    line = fails(train_main, *arguments, "--caption-features", bank)
    assert "image rows of 3 x 256 float16; one vector per caption is needed" in line
    assert not (tmp_path / "run").exists()
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", caption_features=tfidf)
    assert RunFolder(run).experiment().caption_feature == "tfidf"
    assert RunFolder(run).record()["caption_features"]["name"] == "tfidf"


def test_a_run_on_cached_captions_is_embedded_with_them_alone(
    own_cache: Path, tfidf: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert (own_cache.parent / tfidf.name).exists()
    run = train(own_cache, experiment("caption_feature=tfidf", "train.epochs=1"), out=tmp_path / "run")
    for path in (own_cache.parent / tfidf.name, shards_folder(own_cache.parent / tfidf.name)):
        path.rename(path.with_name(f"moved_{path.name}"))
    moved = own_cache.parent / f"moved_{tfidf.name}"
    assert "demo_tfidf.h5" in fails(embed_main, run)
    assert "is not the cache that" in fails(embed_main, run, "--caption-features", own_cache)
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run), "--caption-features", str(moved)])
    assert stop.value.code == 0
