"""Which combinations of a ladder are trained: the rule, and that it is what training itself refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import SETS
from vse.features.settings import load_feature
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import known_presets, load_ladder
from vse.pipeline.presets.schema import parse_composed_name
from vse.train.experiment import load_experiment
from vse.train.named_experiment import fitting, misfit
from vse.train.options import TrainInputs
from vse.train.training import train


@pytest.mark.parametrize("name", known_presets("ladders"))
def test_every_ladder_that_ships_loads_on_its_data_set(name: str) -> None:
    ladder, dataset = load_ladder(name), name if name in known_presets("datasets") else None
    fits, misfits = fitting(name, dataset)
    assert {*fits, *misfits} == {made.name for made in ladder.combinations()}
    for composed in fits:
        made, experiment = parse_composed_name(composed), load_experiment(composed, dataset)
        assert (experiment.feature, experiment.caption_feature) == (made.feature, made.caption_feature)
        assert experiment.title == ladder.changes(made.experiment).title
        assert load_feature(made.feature, dataset).kind == "image"
    assert {parse_composed_name(composed).experiment for composed in fits} == set(ladder.experiments)  # type: ignore[union-attr]


def test_the_ladder_of_flickr8k_leaves_out_words_where_vectors_are_read() -> None:
    _, misfits = fitting("f8k", "f8k")
    assert {name.partition("@")[0] for name in misfits} == {"twobranch_effnet", "cca_effnet"}
    assert all("+words+" in name for name in misfits)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vsepp+words+fc7", None),
        ("vsepp+tfidf+fc7", None),
        ("vsepp+minilm_tokens+fc7", "the similarity 'cosine' compares vectors of captions"),
        ("vsepp+words+effnet_grid", "the similarity 'cosine' compares vectors of images"),
        ("vsepp+words+fc7_rc", None),
        ("scan_t2i_avg+words+effnet_grid", None),
        ("scan_t2i_avg+words+fc7", "the similarity 'scan' compares sets of images"),
        ("cca+words+fc7", "the solver 'cca' reads captions as vectors, not as words"),
        ("cca+hglmm+fc7", None),
        ("twobranch+words+fc7", "the caption encoder 'branch' reads vectors, not the words of the captions"),
    ],
)
def test_what_models_take_decides(name: str, why: str | None) -> None:
    made = parse_composed_name(name)
    assert made is not None
    said = misfit(made, load_experiment(name))
    assert said == why if why is None or said is None else why in said


@pytest.mark.parametrize("base", ["vsepp", "cca", "twobranch"])
@pytest.mark.parametrize("captions", ["words", "tfidf"])
def test_training_refuses_what_the_rule_leaves_out_and_nothing_else(
    base: str, captions: str, cache: Path, tfidf: Path, tmp_path: Path
) -> None:
    """The caches are of other presets than the name says, of the same kinds."""
    name = f"{base}+{captions}+fc7"
    made = parse_composed_name(name)
    assert made is not None
    small = [item for item in SETS if not item.startswith("model")] if base != "vsepp" else SETS
    experiment = load_experiment(name, sets=[*small, "train.on_collapse=warn"])
    inputs = TrainInputs(caption_features=tfidf if captions == "tfidf" else None)
    if misfit(made, experiment) is None:
        assert train(cache, experiment, out=tmp_path / "run", inputs=inputs).is_dir()
    else:
        with pytest.raises(UserError):
            train(cache, experiment, out=tmp_path / "run", inputs=inputs)


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ("features: [tfidf]\nexperiments: { vsepp: }", "the feature 'tfidf' for images, .* of captions"),
        (
            "features: [fc7]\ncaption_features: [resnet]\nexperiments: { vsepp: }",
            "'resnet' for captions, .* of images",
        ),
        (
            "features: [fc7]\ncaption_features: [tfidf_phrases]\nexperiments: { vsepp: }",
            "'tfidf_phrases' for captions, .* of phrases",
        ),
        ("features: [fc8]\nexperiments: { vsepp: }", "unknown feature 'fc8' .did you mean 'fc7'"),
        (
            "features: [fc7]\nexperiments: { cca: }",
            "ladder 'own': no combination can be trained; .* first .cca@own.words.fc7.:",
        ),
        ("features: [fc7]\nexperiments: { vsepp: { settings: { los: max } } }", "unknown setting 'los'"),
        ("features: [fc7]\nexperiments: { vsepp_ft: }", "vsepp_ft has start_from"),
    ],
)
def test_a_mistake_in_a_ladder_is_one_line(ladder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ladders").mkdir()
    (tmp_path / "ladders" / "own.yaml").write_text(ladder)
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    with pytest.raises(UserError, match=message):
        fitting("own")
