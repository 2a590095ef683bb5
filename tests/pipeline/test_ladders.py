"""Test presets of ladders: their combinations, and the errors of invalid ladders."""

from __future__ import annotations

from pathlib import Path

import pytest

from vse.eval.protocols.correction import PARAMETER_CHOICES
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import list_preset_names, load_ladder
from vse.pipeline.presets.schema import CORRECTIONS
from vse.training.experiment import select_correctable_experiments


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the ladder ``own`` in the user's folder of presets."""
    (tmp_path / "ladders").mkdir()
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    return tmp_path / "ladders" / "own.yaml"


@pytest.mark.parametrize("name", list_preset_names("ladders"))
def test_every_ladder_that_ships_names_what_there_is(name: str) -> None:
    ladder = load_ladder(name)
    assert ladder.about
    assert set(ladder.features) <= set(list_preset_names("features"))
    assert {*ladder.caption_features} - {"words"} <= set(list_preset_names("features"))
    assert all(ladder.find_experiment(experiment).title for experiment in ladder.experiments)


def test_a_ladder_is_every_combination_of_the_features_that_an_experiment_reads(write: Path) -> None:
    lists = "features: [fc7, resnet]\ncaption_features: [words, tfidf]\n"
    write.write_text(f"{lists}experiments: {{ vsepp: , vse0: {{ features: [resnet], caption_features: [tfidf] }} }}\n")
    assert [made.name for made in load_ladder("own").list_composed_names()] == [
        "vsepp@own+words+fc7",
        "vsepp@own+tfidf+fc7",
        "vsepp@own+words+resnet",
        "vsepp@own+tfidf+resnet",
        "vse0@own+tfidf+resnet",
    ]


def test_a_ladder_may_extend_another(write: Path) -> None:
    write.write_text("extends: demo\nseeds: [7]\n")
    assert (load_ladder("own").seeds, load_ladder("own").features) == ([7], load_ladder("demo").features)


def test_a_ladder_takes_every_correction_of_vse_eval() -> None:
    assert set(CORRECTIONS) == set(PARAMETER_CHOICES)


def test_only_models_that_compare_vectors_by_inner_products_are_corrected() -> None:
    assert select_correctable_experiments(["vsepp", "scan_t2i_avg", "order0", "cca"]) == ["vsepp", "cca"]


SOUND = {"features": "[fc7]", "caption_features": "[words]", "experiments": "{ vsepp: }", "seeds": "[0]"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": "[]"}, "ladder 'own': features: .* at least 1 item"),
        ({"corrections": "[cls]"}, "ladder 'own': corrections.*csls"),
        ({"features": "[fc7, fc7]"}, "ladder 'own': features: 'fc7' is given twice"),
        ({"seeds": "[1, 1]"}, "seeds: 1 is given twice"),
        ({"seeds": "[-1]"}, "seeds.0: .* greater than or equal to 0"),
        ({"experiments": "{}"}, "experiments: .* at least 1 item"),
        ({"experiments": "{ vspp: }"}, "ladder 'own': unknown experiment 'vspp' .did you mean 'vsepp'"),
        ({"experiments": "{ vsepp: { feature: [fc7] } }"}, "unknown setting 'experiments.vsepp.feature'"),
        ({"experiments": "{ vsepp: { features: [resnet] } }"}, "vsepp.features: 'resnet' is not one of the ladder's features"),
        ({"experiments": "[vsepp]"}, "experiments: Input should be a valid dictionary"),
        ({"sedes": "[1]"}, "unknown setting 'sedes' .did you mean 'seeds'"),
    ],
)
def test_a_mistake_is_one_line(changed: dict[str, str], message: str, write: Path) -> None:
    write.write_text("".join(f"{key}: {value}\n" for key, value in (SOUND | changed).items()))
    with pytest.raises(UserError, match=message):
        load_ladder("own")
