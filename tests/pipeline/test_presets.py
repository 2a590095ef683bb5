from __future__ import annotations

from pathlib import Path

import pytest

from vse.pipeline import presets
from vse.pipeline.errors import UserError

EXPERIMENTS, FEATURES, DATASETS = (presets.known_presets(kind) for kind in ("experiments", "features", "datasets"))


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_preset_is_valid_for_every_data_set(dataset: str) -> None:
    assert presets.load_dataset(dataset).name == dataset
    for experiment in EXPERIMENTS:
        assert presets.load_experiment(experiment, dataset).feature in FEATURES


def test_vsepp_is_the_paper_s() -> None:
    config = presets.load_experiment("vsepp")
    assert (config.loss.name, config.loss.margin, config.loss.same_image, config.warmup.epochs) == ("max", 0.2, "keep", 0)
    assert (config.model.dim, config.model.word_dim, config.model.normalize_image) == (1024, 300, True)
    train = config.train
    assert (train.epochs, train.batch_size, train.learning_rate, train.decay_after, train.decay) == (30, 128, 2e-4, 15, 0.1)
    assert (train.clip, train.min_count, train.precision) == (2.0, 4, "fp32")


def test_vse0_differs_from_vsepp_in_two_settings() -> None:
    changes = presets.changed_fields(presets.load_experiment("vsepp").content(), presets.load_experiment("vse0").content())
    assert changes == ["loss.name: max -> sum", "model.normalize_image: True -> False", "name: vsepp -> vse0"]


@pytest.mark.parametrize("load", [presets.load_experiment, presets.load_dataset])
def test_an_unknown_name_is_answered_with_the_nearest(load: type) -> None:
    known = {"load_experiment": "vsepp", "load_dataset": "f30k"}[load.__name__]
    with pytest.raises(UserError, match=f"did you mean '{known}'"):
        load(known[:-1] + "x" if known == "f30k" else known + "x")


def test_a_setting_is_read_as_yaml() -> None:
    config = presets.load_experiment("vsepp", sets=["loss.margin=0.1", "train.learning_rate=2e-3", "loss.same_image=mask"])
    assert (config.loss.margin, config.train.learning_rate, config.loss.same_image) == (0.1, 2e-3, "mask")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.margn=1", "unknown setting 'loss.margn' .did you mean 'loss.margin'"),
        ("loss", "takes key=value"),
        ("loss.name=[", "is not a YAML value"),
        ("loss.margin=-1", "loss.margin: Input should be greater than or equal to 0"),
        ("loss.same_image=drop", "loss.same_image: Input should be 'keep' or 'mask'"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        presets.load_experiment("vsepp", sets=[setting])


def test_a_preset_by_path_may_extend_one_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: vse0\nloss: {margin: 0.3}\n")
    config = presets.load_experiment(str(path))
    assert (config.name, config.loss.name, config.loss.margin) == ("mine", "sum", 0.3)


def test_a_user_s_folder_comes_before_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "wide.yaml").write_text("extends: vsepp\nmodel: {dim: 2048}\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    assert presets.load_experiment("wide").model.dim == 2048


@pytest.mark.parametrize("text", ["loss: {margn: 1}", "[1, 2]", "a: [", "learning_rate: 1", "extends: 3"])
def test_a_wrong_preset_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match="bad"):
        presets.load_experiment(str(tmp_path / "bad.yaml"))


def test_the_workflow_takes_a_data_set_s_folder_in_short_form() -> None:
    settings = presets.load_workflow({"f8k_dir": "/pictures", "threads": 2})
    assert (settings.sources, settings.threads) == ({"f8k": "/pictures"}, 2)
    with pytest.raises(UserError, match="did you mean 'threads'"):
        presets.load_workflow({"thread": 2})


def test_a_preset_that_extends_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "a.yaml").write_text("extends: b\n")
    (tmp_path / "experiments" / "b.yaml").write_text("extends: a\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match="extends itself .a -> b -> a"):
        presets.load_experiment("a")
