"""Every experiment that ships: it names its row of the paper, and it trains on the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vse.features.cnn import CnnExtractor
from vse.features.extraction import extract_shards, merge
from vse.pipeline import presets
from vse.pipeline.feature_config import CnnConfig
from vse.train.run import RunFolder
from vse.train.training import train

EXPERIMENTS = presets.known_presets("experiments")

# Tables 1 to 4 of the VSE++ paper: the rows of VSE0, VSE++, Order0 and Order++, not those of other people's models.
ROWS = [
    *(f"vsepp 1.{row}" for row in (6, 7, 8, 9, 10, 11, 13, 14)),
    *(f"vsepp 2.{row}" for row in (1, 2, 3, 4, 5, 6)),
    *(f"vsepp 3.{row}" for row in range(8, 18)),
    *(f"vsepp 4.{row}" for row in (2, 3, 4, 5)),
]


def test_every_row_of_the_paper_is_one_experiment() -> None:
    found = [row for name in EXPERIMENTS for row in presets.load_experiment(name).rows]
    assert sorted(found) == sorted(ROWS)


def test_a_preset_that_extends_a_row_is_not_that_row() -> None:
    assert presets.load_experiment("vsepp").rows == ["vsepp 1.6", "vsepp 3.10"]
    assert presets.load_experiment("vsepp_effnet").rows == []


@pytest.mark.parametrize(
    ("name", "loss", "normalize", "absolute", "margin", "rate", "form"),
    [
        ("vse0", "sum", False, False, 0.2, 2e-4, "cosine"),
        ("vsepp", "max", True, False, 0.2, 2e-4, "cosine"),
        ("order0", "sum", True, True, 0.05, 1e-3, "order"),
        ("orderpp", "max", True, False, 0.2, 2e-4, "order"),
    ],
)
def test_the_four_models_are_those_of_the_paper(
    name: str, loss: str, normalize: bool, absolute: bool, margin: float, rate: float, form: str
) -> None:
    found = presets.load_experiment(name)
    assert (found.loss.name, found.loss.margin) == (loss, margin)
    assert (found.model.normalize_image, found.model.absolute, found.model.similarity) == (normalize, absolute, form)
    assert (found.train.epochs, found.train.decay_after, found.train.learning_rate) == (30, 15, rate)
    assert (found.train.batch_size, found.model.dim, found.model.word_dim, found.warmup.epochs) == (128, 1024, 300, 0)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "_ft" in name])
def test_fine_tuning_follows_the_paper(name: str) -> None:
    found = presets.load_experiment(name)
    assert (found.train.epochs, found.train.learning_rate, found.train.decay_after) == (15, 2e-5, 15)
    base = presets.load_experiment(str(found.start_from))
    assert (base.train.epochs, base.images.finetune, base.train.restval) == (30, False, found.train.restval)
    assert base.model == found.model
    assert base.loss == found.loss
    assert base.eval_feature == found.feature


@pytest.fixture(scope="module")
def feature(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The cache of a feature preset on the demo, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("features")

    def make(name: str) -> Path:
        out = folder / f"demo_{name}.h5"
        if not out.exists():
            config = presets.load_feature(name, "demo", ["resize=32", "crop=32"])
            assert isinstance(config, CnnConfig)
            extract_shards(demo, CnnExtractor(config), out, 1)
            merge(demo, out, 1)
        return out

    return make


@pytest.fixture(scope="module")
def trained(feature: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of an experiment preset, of two steps, and before it those that it starts from."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        out = folder / f"demo_{name}" / "seed-0"
        if not out.exists():
            config = presets.load_experiment(name, "demo", ["train.epochs=1", "train.batch_size=120"])
            if config.start_from:
                run(config.start_from)
            if config.eval_feature:
                feature(config.eval_feature)
            train(feature(config.feature), config, out=out)
        return out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps_on_the_demo(name: str, trained: Callable[[str], Path]) -> None:
    run = RunFolder(trained(name))
    assert run.record()["state"] == "finished"
    assert {float(entry["step"]) for entry in run.checkpoint()["optimizer"]["state"].values()} == {2.0}
    assert run.best_file.is_file()
