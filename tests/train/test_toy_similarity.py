"""A pairwise, directional similarity on sets goes all the way, from training to search, by its file and its line alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.train.conftest import SETS, assert_same, state, table
from tests.train.toy_similarity import ToySettings
from vse.eval.cli import eval_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import Interrupted
from vse.train.cli import embed_main, report_main, search_main, train_main
from vse.train.experiment import ExperimentConfig, load_experiment
from vse.train.models.similarities import SIMILARITIES
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing
from vse.train.solvers import adam
from vse.train.solvers.encode import encode
from vse.train.training import train
from vse.train.use.model import load_run

TOY = ["model.similarity=toy", "model.caption_encoder={name: gru, states: all}", "train.epochs=2"]


def toy(*sets: str) -> ExperimentConfig:
    return load_experiment("vsepp", sets=[*SETS, *TOY, *sets])


@pytest.fixture(scope="module", autouse=True)
def line() -> Iterator[None]:
    """The line in the registry."""
    SIMILARITIES.add(ToySettings)
    yield
    SIMILARITIES.remove("toy")


@pytest.fixture(scope="module")
def toy_run(positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on the positions of a CNN, with the scores of the test split. Read only."""
    run = train(positions, toy(), out=tmp_path_factory.mktemp("runs") / "run")
    call(embed_main, run)
    return run


def call(main: Callable[[list[str]], None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def slow_scores(run: Path, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    """Both directions, pair by pair, each with no more than its own regions and words."""
    trained = load_run(run, split, device="cpu")
    (regions, inside), (words, spoken) = (side.all() for side in encode(trained.model, trained.split, trained.device))
    i2t, t2i = np.empty((2, len(regions), len(words)))
    for i in range(len(regions)):
        for c in range(len(words)):
            cosines = regions[i][inside[i]] @ words[c][spoken[c]].T
            i2t[i, c], t2i[i, c] = cosines.amax(1).mean(), cosines.amax(0).mean()
    return i2t, t2i


def written(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both directions as a file has them, and the row of each caption's image."""
    with h5py.File(file) as content:
        rows = [content["image_ids"][:].tolist().index(k) for k in content["caption_image_ids"][:]]
        return content["scores_i2t"][:], content["scores_t2i"][:], np.asarray(rows)


def slow_rsum(i2t: np.ndarray, t2i: np.ndarray, image_of_caption: np.ndarray) -> float:
    """The sum of six recalls, query by query."""
    right = image_of_caption[None] == np.arange(len(i2t))[:, None]
    ranks_i2t = [min((row[~own] >= best).sum() for best in row[own]) for row, own in zip(i2t, right, strict=True)]
    ranks_t2i = [(column[~own] >= column[own]).sum() for column, own in zip(t2i.T, right.T, strict=True)]
    return sum(100 * np.mean(np.asarray(ranks) < k) for ranks in (ranks_i2t, ranks_t2i) for k in (1, 5, 10))


def test_its_validation_is_that_of_its_scores(toy_run: Path, tmp_path: Path) -> None:
    call(embed_main, toy_run, "--split", "val", "--out", tmp_path / "val.h5")
    assert RunFolder(toy_run).record()["best_rsum"] == pytest.approx(slow_rsum(*written(tmp_path / "val.h5")))
    assert len({row["loss"] for row in table(toy_run)}) == 2


def test_it_learns_on_regions_of_different_numbers(regions: Path, tmp_path: Path) -> None:
    sets = ("train.learning_rate=0.01", "train.epochs=6", "train.decay_after=6", "loss=sum")
    losses = [float(row["loss"]) for row in table(train(regions, toy(*sets), out=tmp_path / "run"))]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("memory", ["true", "false"])
def test_it_is_resumed_bit_for_bit_in_mid_epoch(memory: str, regions: Path, tmp_path: Path) -> None:
    config = toy(f"train.features_in_memory={memory}")
    train(regions, config, out=tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        real, steps = adam.Trainer.step, iter(range(99))

        def step(self: adam.Trainer, *arguments: object) -> object:
            if next(steps) == 11:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(adam.Trainer, "step", step)
        with pytest.raises(Interrupted, match="stopped in epoch 2, step 4"):
            train(regions, config, out=tmp_path / "cut")
    train(regions, config, out=tmp_path / "cut", existing=Existing(resume=True))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))


def test_its_file_has_the_scores_of_each_direction(toy_run: Path) -> None:
    i2t, t2i = slow_scores(toy_run)
    with h5py.File(toy_run / "test.h5") as file:
        matrices = {"scores_i2t", "scores_t2i", "pooled_images", "pooled_captions"}
        assert matrices == {name for name in file if not name.endswith(("ids", "hashes"))}
        np.testing.assert_allclose(file["scores_i2t"][:], i2t, atol=1e-5)
        np.testing.assert_allclose(file["scores_t2i"][:], t2i, atol=1e-5)
    assert abs(i2t - t2i).max() > 0.01


def test_it_is_evaluated_compared_averaged_and_reported(toy_run: Path, tmp_path: Path, positions: Path) -> None:
    result = tmp_path / "result.json"
    call(eval_main, toy_run / "test.h5", "--out", result, "--bootstrap", 100)
    found = json.loads(result.read_text())["protocols"]["full"]["rsum"]
    assert found == pytest.approx(slow_rsum(*written(toy_run / "test.h5")))
    other = train(positions, toy(), seed=1, out=tmp_path / "other")
    call(embed_main, other)
    files = [toy_run / "test.h5", other / "test.h5"]
    call(eval_main, *files, "--compare", "--bootstrap", 100, "--out", tmp_path / "compared.json")
    call(eval_main, *files, "--ensemble", "--bootstrap", 0, "--out", tmp_path / "both.json")
    *first, image_of_caption = written(files[0])
    mean = [np.mean(both, 0) for both in zip(first, written(files[1])[:2], strict=True)]
    found = json.loads((tmp_path / "both.json").read_text())["protocols"]["full"]["rsum"]
    assert found == pytest.approx(slow_rsum(*mean, image_of_caption))
    call(report_main, tmp_path / "both.json", "--out", tmp_path / "report.html")
    assert f"{found:.1f}" in (tmp_path / "report.html").read_text()


def test_a_text_finds_images_by_its_direction(toy_run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = load_dataset_file(demo).split("test")
    _, t2i = slow_scores(toy_run)
    capsys.readouterr()
    call(search_main, toy_run, " ".join(images[1].captions[2].tokens), "-k", 4)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(line[2]).name for line in lines] == [images[k].file for k in np.argsort(-t2i[:, 7])[:4]]
    assert [float(line[1]) for line in lines] == pytest.approx(sorted(t2i[:, 7])[::-1][:4], abs=1e-4)


def test_a_photo_finds_captions_by_the_other(toy_run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset_file(demo)
    i2t, _ = slow_scores(toy_run)
    capsys.readouterr()
    call(search_main, toy_run, dataset.image_path(dataset.split("test")[3]), "-k", 5)
    scores = [float(line.split("\t")[1]) for line in capsys.readouterr().out.splitlines()]
    assert scores == pytest.approx(sorted(i2t[3])[::-1][:5], abs=2e-3), "the cache holds float16"


def test_what_its_encoders_do_not_give_is_refused_in_one_line(
    cache: Path, positions: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    chosen = [part for setting in [*SETS, *TOY] for part in ("--set", setting)]
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *chosen)
    assert (
        "the similarity 'toy' compares sets of images, and the image encoder 'linear' makes vectors of the feature 'tiny'"
        in line
    )
    chosen += ["--set", "model.caption_encoder.states=last"]
    line = fails(train_main, "--features", positions, "--out", tmp_path / "run", *chosen)
    assert (
        "the similarity 'toy' compares sets of captions, and the caption encoder 'gru' makes vectors of the captions" in line
    )
    assert not (tmp_path / "run").exists()
