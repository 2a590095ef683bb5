from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.training.conftest import COMMAND, SETS, Capture, Fails, Patch, done
from vse.eval.cli import eval_main, table_main
from vse.features.cache.shards import shards_folder
from vse.features.settings import load_feature_preset
from vse.pipeline.errors import UserError
from vse.pipeline.presets.preset_files import list_preset_names_and_descriptions
from vse.pipeline.presets.presets import list_preset_names, load_ladder
from vse.pipeline.presets.schema import parse_composed_name
from vse.training.cli import embed_main, train_main
from vse.training.experiment import find_misfit_reason, find_trainable_combinations, load_experiment
from vse.training.options import TrainInputs
from vse.training.training import train

CCA = ["solver=cca", "model.image_encoder=branch", "model.image_encoder.widths=[4]", "caption_feature=tfidf"]
ALONE = "solver: cca reads cached features only and cannot start from a run"
ONE_SIDE = "loss.lambda3 and lambda4 compare unit vectors of one side"
PAIRS = "loss.lambda3 and lambda4 require a ranking loss, not logistic"

ANY_LENGTH = ["model.normalize_image=false"]
REFUSED = {
    "layers of a linear map": (["model.image_encoder.widths=[4]"], "unknown setting 'model.image_encoder.widths'"),
    "settings of an encoder without its name": (["model.caption_encoder.head=null"], "is a name .gru, .* settings with its"),
    "a temperature without a use": (["loss.temperature=1"], "unknown setting 'loss.temperature'"),
    "a distance of vectors of any length": ([*ANY_LENGTH, "model.similarity=euclidean"], "euclidean takes unit vectors, so"),
    "constraints among images by order": (["loss.lambda3=0.1", "model.similarity=order"], ONE_SIDE),
    "constraints among captions by a network": (["loss.lambda4=0.1", "model.similarity=network"], ONE_SIDE),
    "constraints among sets": (["loss.lambda3=0.1", "model.similarity=scan"], ONE_SIDE),
    "attention to vectors of any length": ([*ANY_LENGTH, "model.similarity=scan"], "scan takes unit vectors"),
    "constraints among images of any length": (["loss.lambda3=0.1", *ANY_LENGTH], ONE_SIDE),
    "constraints and a warm-up of single pairs": (["loss.lambda4=0.1", "warmup.loss=logistic", "warmup.epochs=1"], PAIRS),
    "constraints beside single pairs": (["loss.lambda4=0.1", "loss.name=logistic"], PAIRS),
    "cca of photos": ([*CCA, "images.source=pictures"], ALONE),
    "cca from a run": ([*CCA, "start_from=vsepp"], ALONE),
    "an adversary, an update for several batches": (["adversary=ace", "train.accumulate=2"], "requires train.accumulate: 1"),
    "a misspelt setting": (["loss.margn=1"], "^unknown setting 'loss.margn' .did you mean 'loss.margin'"),
    "a wrong value": (["loss.same_image=drop"], "loss.same_image: Input should be 'keep', 'mask' or 'positive'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(name: str) -> None:
    sets, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as refusal:
        load_experiment("vsepp", sets=sets)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.recurrent", "model.caption_encoder.name"),
        ("model.branches.dropout", "model.image_encoder.dropout and model.caption_encoder.dropout"),
        ("cca.power", "solver.power"),
    ],
)
def test_an_old_name_of_a_setting_is_answered_with_the_new_one(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{old} is now {new}$"):
        load_experiment("vsepp", sets=[f"{old}=1"])
    group, _, key = old.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{group}: {{ {key.replace('.', ': { ')}: 1 {'}' * key.count('.')} }}")
    with pytest.raises(UserError, match="^experiment '.*mine.yaml': .* is now "):
        load_experiment(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("dataset", [None, *list_preset_names("datasets")])
def test_every_experiment_is_valid_on_every_data_set(dataset: str | None) -> None:
    trained = [name for name, _ in list_preset_names_and_descriptions("experiments", "ensemble_of")]
    assert [load_experiment(name, dataset).name for name in trained] == trained


def test_an_ensemble_is_not_trained(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("ensemble_of: [vsepp, vse0]")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match=r"^duo is an ensemble: train vsepp and vse0, then average .* --experiment duo$"):
        load_experiment("duo", "demo", ["train.epochs=1"])
    with pytest.raises(UserError, match=r"^unknown setting 'ensemble_of'"):
        load_experiment("vsepp", sets=["ensemble_of=[vse0, vsepp]"])


def test_settings_are_yaml_and_other_parts_keep_what_they_share() -> None:
    config = load_experiment("vsepp", sets=["loss.margin=0.1", "train.learning_rate=2e-3", "loss.same_image=mask"])
    assert (config.loss.margin, config.train.learning_rate, config.loss.same_image) == (0.1, 2e-3, "mask")
    loss = load_experiment("infonce", sets=["loss.margin=0.1", "loss.lambda2=0.5", "loss=sum"]).loss
    assert (loss.name, loss.margin, loss.lambda2) == ("sum", 0.1, 0.5)
    assert load_experiment("orderpp_effnet_10c").model.similarity.model_dump() == {"name": "order", "form": "norm"}


def test_a_preset_by_path_may_extend_one_by_name_and_an_empty_dictionary_replaces_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: vse0\nloss: {margin: 0.3}\n")
    config = load_experiment(str(path))
    assert (config.name, config.loss.name, config.loss.margin) == ("mine", "sum", 0.3)
    assert load_experiment("dsve_effnet").train.frozen
    assert load_experiment("dsve_effnet", None, ["train.frozen={}"]).train.frozen == {}
    only = load_experiment("dsve_effnet", None, ["train.frozen={image_encoder: 1}"])
    assert only.train.frozen == {"image_encoder": 1}


@pytest.mark.parametrize("name", list_preset_names("ladders"))
def test_every_ladder_that_ships_loads_on_its_data_set(name: str) -> None:
    ladder, dataset = load_ladder(name), name if name in list_preset_names("datasets") else None
    fits, misfits = find_trainable_combinations(name, dataset)
    assert {*fits, *misfits} == {made.name for made in ladder.list_composed_names()}
    for composed in fits:
        made, experiment = parse_composed_name(composed), load_experiment(composed, dataset)
        assert (experiment.feature, experiment.caption_feature) == (made.feature, made.caption_feature)
        assert experiment.title == ladder.find_experiment(made.experiment).title
        assert load_feature_preset(made.feature, dataset).kind == "image"
    assert {parse_composed_name(composed).experiment for composed in fits} == set(ladder.experiments)  # type: ignore[union-attr]


def test_the_ladder_of_flickr8k_leaves_out_words_where_vectors_are_read() -> None:
    _, misfits = find_trainable_combinations("f8k", "f8k")
    assert {name.partition("@")[0] for name in misfits} == {"twobranch_effnet", "cca_effnet"}
    assert all("+words+" in name for name in misfits)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vsepp+words+fc7", None),
        ("vsepp+minilm_tokens+fc7", "the similarity 'cosine' requires one vector per caption"),
        ("vsepp+words+effnet_grid", "the similarity 'cosine' requires one vector per image"),
        ("scan_t2i_avg+words+effnet_grid", None),
        ("scan_t2i_avg+words+fc7", "the similarity 'scan' requires several vectors per image"),
        ("cca+words+fc7", "the solver 'cca' reads captions as vectors, not as words"),
        ("cca+hglmm+fc7", None),
        ("twobranch+words+fc7", "the caption encoder 'branch' reads vectors, not the words of the captions"),
    ],
)
def test_what_models_take_decides(name: str, why: str | None) -> None:
    made = parse_composed_name(name)
    assert made is not None
    said = find_misfit_reason(made, load_experiment(name))
    assert said == why if why is None or said is None else why in said


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("base", "captions"), [("twobranch", "tfidf"), ("cca", "words"), ("twobranch", "words")])
def test_training_refuses_what_the_rule_leaves_out(base: str, captions: str, cache: Path, tfidf: Path, tmp_path: Path) -> None:
    name = f"{base}+{captions}+fc7"
    made = parse_composed_name(name)
    assert made is not None
    small = [item for item in SETS if not item.startswith("model")]
    experiment = load_experiment(name, sets=[*small, "train.on_collapse=warn"])
    inputs = TrainInputs(caption_features=tfidf if captions == "tfidf" else None)
    if find_misfit_reason(made, experiment) is None:
        assert train(cache, experiment, out=tmp_path / "run", inputs=inputs).is_dir()
    else:
        with pytest.raises(UserError):
            train(cache, experiment, out=tmp_path / "run", inputs=inputs)


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ("features: [tfidf]\nexperiments: { vsepp: }", "the feature 'tfidf' for images, .* of captions"),
        ("features: [fc7]\ncaption_features: [tfidf_phrases]\nexperiments: { vsepp: }", "'tfidf_phrases' for .* of phrases"),
        ("features: [fc8]\nexperiments: { vsepp: }", "unknown feature 'fc8' .did you mean 'fc7'"),
        ("features: [fc7]\nexperiments: { cca: }", "'own': no combination can be trained; .* first .cca@own.words.fc7.:"),
        ("features: [fc7]\nexperiments: { vsepp: { settings: { los: max } } }", "unknown setting 'los'"),
    ],
)
def test_a_mistake_in_a_ladder_is_one_line(ladder: str, message: str, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "ladders").mkdir()
    (tmp_path / "ladders" / "own.yaml").write_text(ladder)
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match=message):
        find_trainable_combinations("own")


def test_bad_usage_is_one_line(cache: Path, tmp_path: Path, own_cache: Path, fails: Fails) -> None:
    out = ["--out", tmp_path / "run"]
    assert "no such feature cache" in fails(train_main, "--features", tmp_path / "x.h5")
    assert "did you mean 'vsepp'" in fails(train_main, "--features", cache, *out, "--experiment", "vspp")
    assert "did you mean 'loss.margin'" in fails(train_main, "--features", cache, *out, "--set", "loss.marign=1")
    assert "did you mean 'max'" in fails(train_main, "--features", cache, *out, "--set", "loss.name=maks")
    assert "Missing option '--features'" in fails(train_main)
    sorted(shards_folder(own_cache).glob("*.h5"))[1].unlink()
    assert "this shard is missing" in fails(train_main, "--features", own_cache, *out)
    assert "--device foo: not usable here" in fails(train_main, "--features", cache, *out, "--device", "foo")
    for name in ("", " ", "two\nlines", "\x1b[31mred"):
        assert "must be one line of printable text" in fails(train_main, "--features", cache, *out, "--name", name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "shown"), [([], "vsepp[margin=0.1, "), (["--name", "half the margin"], "half the margin")])
def test_changed_settings_are_named_in_tables(
    name: list[str], shown: str, cache: Path, tmp_path: Path, capsys: Capture
) -> None:
    run, result = tmp_path / "run", tmp_path / "r.json"
    for main, arguments in (
        (train_main, ["--features", cache, "--out", run, *COMMAND, "--set", "loss.margin=0.1", *name]),
        (embed_main, [run]),
        (eval_main, [run / "test.h5", "--out", result, "--bootstrap", "0"]),
        (table_main, ["summary", result, "--out", tmp_path / "t.csv"]),
    ):
        done(main, *arguments)
    (row,) = csv.DictReader((tmp_path / "t.csv").read_text().splitlines())
    assert row["experiment"].startswith(shown)
    assert (row["feature"], row["run"]) == ("tiny", str(run))
    assert "loss.margin: 0.2 -> 0.1" in row["settings"]
    assert f"demo {row['experiment']} full: " in capsys.readouterr().err
    assert json.loads(result.read_text())["experiment"] == "vsepp", "the preset whose row it may be"
