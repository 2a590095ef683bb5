"""Test composed names of experiments, such as ``vsepp+tfidf+effnet``, and their settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import is_experiment, load_experiment_outline
from vse.pipeline.presets.schema import ComposedName, parse_composed_name

WORD = st.text("abcXYZ019_-", min_size=1, max_size=12)


@given(WORD, st.none() | WORD.filter(lambda text: text != "words"), WORD, st.none() | WORD)
def test_a_name_is_built_of_parts_and_read_back(
    experiment: str, captions: str | None, feature: str, ladder: str | None
) -> None:
    made = ComposedName(experiment, captions, feature, ladder)
    assert parse_composed_name(made.name) == made


@pytest.mark.parametrize(
    "name",
    ["vsepp", "", "+", "++", "vsepp+words", "vsepp+words+fc7+x", "vsepp@+words+fc7", "@a+b+c", "a/b+words+c", "a+b+c.yaml"],
)
def test_what_has_no_three_parts_is_composed_of_nothing(name: str) -> None:
    assert parse_composed_name(name) is None
    assert is_experiment(name) == (name == "vsepp")


def test_it_is_the_experiment_that_reads_other_features_without_its_row_and_title() -> None:
    base, made = load_experiment_outline("vsepp_effnet"), load_experiment_outline("vsepp_effnet+tfidf+resnet")
    assert (made.name, made.feature, made.caption_feature) == ("vsepp_effnet+tfidf+resnet", "resnet", "tfidf")
    others = base.settings_affecting_weights() | {"name": made.name, "feature": "resnet", "caption_feature": "tfidf"}
    assert made.settings_affecting_weights() == others
    assert (made.seeds, made.rows, made.title, made.about) == (base.seeds, [], "", "")


def test_features_for_validation_are_those_for_training_and_words_are_no_feature() -> None:
    assert load_experiment_outline("vsepp_rc").eval_feature == "fc7"
    assert load_experiment_outline("vsepp_rc+words+resnet").eval_feature is None
    assert load_experiment_outline("vsepp_minilm_effnet").caption_feature == "minilm"
    assert load_experiment_outline("vsepp_minilm_effnet+words+effnet").caption_feature is None


def test_a_data_set_may_change_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets").mkdir()
    preset = "experiments: { vsepp: { train: { epochs: 3, batch_size: 8 } }, vsepp+words+resnet: { train: { epochs: 4 } } }\n"
    (tmp_path / "datasets" / "mine.yaml").write_text(preset)
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    assert load_experiment_outline("vsepp+words+resnet", "mine").settings_affecting_weights()["train"] == {
        "epochs": 4,
        "batch_size": 8,
    }
    assert load_experiment_outline("vsepp+words+fc7", "mine").settings_affecting_weights()["train"] == {
        "epochs": 3,
        "batch_size": 8,
    }


def test_a_ladder_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ladders").mkdir()
    vsepp = "{ title: Mine, settings: { train: { epochs: 2 }, loss: { margin: 0.1 } }, seeds: [4] }"
    ladder = f"features: [fc7, resnet]\nexperiments: {{ vsepp: {vsepp}, vse0: }}\nseeds: [1, 2]\n"
    (tmp_path / "ladders" / "own.yaml").write_text(ladder)
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    made = load_experiment_outline("vsepp@own+words+resnet")
    assert (made.title, made.seeds, made.feature) == ("Mine", [4], "resnet")
    assert made.settings_affecting_weights()["train"] == {"epochs": 2}
    assert made.settings_affecting_weights()["loss"] == {"name": "max", "margin": 0.1}
    assert (load_experiment_outline("vse0@own+words+fc7").title, load_experiment_outline("vse0@own+words+fc7").seeds) == (
        "",
        [1, 2],
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vspp+words+fc7", "unknown experiment 'vspp' .did you mean 'vsepp'"),
        ("vsepp@dmo+words+fc7", "unknown ladder 'dmo' .did you mean 'demo'"),
        ("vse0@demo+words+fc7", "the ladder 'demo' has no vse0"),
        ("vsepp_ft+words+resnet", "vsepp_ft has start_from, so it takes no other features"),
        ("phrase_cca+tfidf+resnet", "phrase_cca has truth_feature, so it takes no other features"),
        ("twobranch_phrases+tfidf+resnet", "twobranch_phrases has ensemble_of, so it takes no other features"),
    ],
)
def test_what_cannot_read_other_features_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment_outline(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *(("vsepp+words+anything", True), ("vsepp@demo+words+fc7", True), ("clip+of+others", False)),
        *(("vspp+words+fc7", False), ("vsepp@nowhere+words+fc7", False), ("vse0@demo+words+fc7", False)),
    ],
)
def test_a_result_of_any_name_can_be_looked_up(name: str, known: bool) -> None:
    assert is_experiment(name) == known
