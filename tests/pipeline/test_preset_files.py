from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vse.pipeline.errors import UserError
from vse.pipeline.presets.preset_files import (
    list_preset_names,
    list_preset_names_and_descriptions,
    read_preset_layers,
    read_yaml,
)
from vse.pipeline.presets.presets import load_experiment_outline, read_preset_settings

Write = Callable[[str, str], Path]
FAMILY = """
presets:
  warm:
    about: The first one.
    extends: vsepp
    tip: 1
  hot: { extends: warm, tip: 2 }
  cold:
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file into the user's own folder of experiments."""
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    (tmp_path / "experiments").mkdir()

    def write(name: str, text: str) -> Path:
        path = tmp_path / "experiments" / name
        path.write_text(text)
        return path

    return write


def test_the_presets_of_a_family_are_known_by_their_own_names(write: Write) -> None:
    write("family.yaml", FAMILY)
    assert {"warm", "hot", "cold", "vsepp", "vse0"} <= set(list_preset_names("experiments"))
    assert "family" not in list_preset_names("experiments")
    assert read_preset_settings("experiments", "hot")["tip"] == 2
    assert read_preset_settings("experiments", "cold") == {"name": "cold"}


def test_layers_begin_with_what_is_extended_in_the_end_whatever_file_it_is_in(write: Write) -> None:
    write("family.yaml", FAMILY)
    write("single.yaml", "extends: hot\ntip: 3\n")
    layers = read_preset_layers("experiments", "single")
    assert [layer["name"] for layer in layers] == ["vsepp", "warm", "hot", "single"]
    assert [layer.get("tip") for layer in layers] == [None, 1, 2, 3]
    assert not any("extends" in layer for layer in layers)
    assert read_preset_settings("experiments", "warm")["about"] == "The first one."
    assert {"about", "rows"}.isdisjoint(read_preset_settings("experiments", "hot")), "neither is inherited"


def test_descriptions_are_listed_in_the_order_in_which_they_are_written_and_each_name_once(write: Write) -> None:
    write("family.yaml", FAMILY)
    write("vse0.yaml", "about: mine\n")
    described = list_preset_names_and_descriptions("experiments")
    assert described[:4] == [("warm", "The first one."), ("hot", ""), ("cold", ""), ("vse0", "mine")]
    assert sorted(name for name, _ in described) == list_preset_names("experiments")


def test_every_experiment_that_ships_has_a_description_of_its_own() -> None:
    described = [about for _, about in list_preset_names_and_descriptions("experiments")]
    assert all(described)
    assert len(set(described)) == len(list_preset_names("experiments"))


def test_the_same_name_in_two_files_of_a_folder_is_refused_with_both(write: Write) -> None:
    write("family.yaml", FAMILY)
    write("hot.yaml", "tip: 3\n")
    with pytest.raises(UserError, match=r"the preset 'hot' is in two files, .*family.yaml and .*hot.yaml; rename one of them"):
        list_preset_names("experiments")


def test_a_user_s_preset_comes_before_one_of_the_same_name_in_a_family_that_ships(write: Write) -> None:
    write("mine.yaml", "presets: { vse0: { extends: vsepp, seeds: [5] } }")
    assert load_experiment_outline("vse0").seeds == [5]
    assert load_experiment_outline("vse0_10c").seeds == [5]


def test_a_path_names_a_file_with_one_preset(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.yaml"
    path.write_text("extends: vse0\nseeds: [1, 2]\n")
    outline = load_experiment_outline(str(path))
    assert (outline.name, outline.seeds) == ("elsewhere", [1, 2])
    family = write("family.yaml", FAMILY)
    with pytest.raises(UserError, match=r"family.yaml: is a family of presets \(warm, hot, cold\)"):
        load_experiment_outline(str(family))
    path = write("one.yaml", "presets: { alone: { tip: 1 } }")
    assert read_preset_settings("experiments", "alone") == {"name": "alone", "tip": 1}
    with pytest.raises(UserError, match=r"is a family of presets \(alone\)"):
        read_preset_settings("experiments", str(path))
    with pytest.raises(UserError, match=r"none.yaml: no such preset file"):
        load_experiment_outline("none.yaml")


def test_a_file_that_changes_is_read_again_and_readers_do_not_share_settings(write: Write) -> None:
    path = write("mine.yaml", "seeds: [1]\n")
    read_preset_settings("experiments", "mine")["seeds"].append(2)
    assert read_preset_settings("experiments", "mine")["seeds"] == [1]
    path.write_text("seeds: [3]\n")
    os.utime(path, ns=(1, 1))
    assert read_preset_settings("experiments", "mine")["seeds"] == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "bad.yaml: a preset is a YAML mapping"), ("a: [", "bad.yaml: not valid YAML"),
        ("tip: 1\ntip: 2", "bad.yaml: not valid YAML .'tip' is given twice .*line 2"),
        ("presets: {a: {}, a: {}}", "'a' is given twice"),
        ("presets: [a]", "bad.yaml: presets: is a YAML mapping of names to settings"),
        ("presets: {a: 3}", "bad.yaml: presets: is a YAML mapping of names to settings"),
        ("presets: {a: {}}\ntip: 3", "bad.yaml: .*'tip'"), ("extends: 3", "bad.yaml: extends: .*not 3"),
        ("extends: vsep", "unknown experiment 'vsep' .did you mean 'vsepp'"),
        ("extends: bad", "bad.yaml: extends itself .bad -> bad"),
        ("extends: other", "bad.yaml: extends itself .bad -> other -> bad"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_preset_is_refused_in_one_line(text: str, message: str, write: Write) -> None:
    write("other.yaml", "extends: bad\n")
    write("bad.yaml", text)
    with pytest.raises(UserError, match=message) as refusal:
        read_preset_settings("experiments", "bad")
    assert "\n" not in str(refusal.value)


def test_settings_may_be_shared_by_anchors(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_text("a: &a { x: 1, y: 2 }\nb: { <<: *a, y: 3 }\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}
