"""What the settings of extractors say of them, which commands and the workflow's rules rely on."""

from __future__ import annotations

from typing import Any

import pytest

from vse.features.settings import DEFAULT, EXTRACTORS, load_feature
from vse.features.settings.captions import CaptionSettings
from vse.features.settings.images import BoxesConfig, CnnConfig
from vse.features.settings.texts import HglmmConfig, TextConfig, TfidfConfig
from vse.pipeline.presets.presets import known_presets


@pytest.mark.parametrize("name", list(EXTRACTORS))
def test_an_extractor_says_what_its_command_and_its_jobs_need(name: str) -> None:
    settings = EXTRACTORS[name]
    assert settings.extractor_name() == name
    assert settings.__doc__
    assert settings.fits_encoder == issubclass(settings, CaptionSettings)
    assert (settings.kind == "text") == (settings.fits_encoder or settings.reads_raw)
    assert load_feature(settings.default_preset or name).extractor_name() == name


def test_a_preset_without_an_extractor_is_of_a_cnn() -> None:
    assert DEFAULT == "cnn"
    assert isinstance(load_feature("fc7"), CnnConfig)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "vectors"),
        ({"crops": "10c"}, "vectors"),
        ({"crops": "rc_bank"}, "crops"),
        ({"positions": True, "grid": 2}, "sets"),
    ],
)
def test_what_a_row_of_a_cnn_is_depends_on_its_settings(changes: dict[str, Any], kind: str) -> None:
    assert CnnConfig(name="x", model="vgg19", **changes).row_kind == kind


def test_files_of_the_user_are_those_that_settings_name() -> None:
    assert CnnConfig(name="x", model="vgg19").files() == []
    assert CnnConfig(name="x", model="vgg19", weights="w.pth").files() == ["w.pth"]
    boxes = BoxesConfig(
        name="x", model="vgg19", map="y", weights="w.pth", boxes="b.json", proposer_weights="p.pt", edge_model="m.yml.gz"
    )
    assert boxes.files() == ["w.pth", "b.json", "p.pt", "m.yml.gz"]
    assert BoxesConfig(name="x", model="vgg19", map="y").files() == []


def test_weights_of_a_text_encoder_are_files_of_the_user_if_they_are_a_folder_or_a_file() -> None:
    assert TextConfig(name="x", model="a/b").files() == []
    assert TextConfig(name="x", model="a/b", weights="random").files() == []
    assert TextConfig(name="x", model="a/b", weights="folder").files() == ["folder"]
    assert TextConfig(name="x", model="open_clip/b", weights="laion2b_s34b_b79k").files() == []
    assert TextConfig(name="x", model="open_clip/b", weights="w.pth").files() == ["w.pth"]


def test_a_revision_that_is_asked_for_makes_a_job_run_again_and_no_cache_stale() -> None:
    one, other = TextConfig(name="x", model="a/b"), TextConfig(name="x", model="a/b", revision="v2")
    assert one.triggers() != other.triggers()
    assert one.content() == other.content()


def test_word_vectors_given_for_all_features_are_before_those_of_a_preset() -> None:
    assert str(HglmmConfig(name="x", words="preset.txt").word_file("given.txt")) == "given.txt"
    assert str(HglmmConfig(name="x", words="preset.txt").word_file("")) == "preset.txt"
    assert HglmmConfig(name="x").word_file() is None
    assert TfidfConfig(name="x").word_file("given.txt") is None, "it reads none"


EXTRAS = {
    "effnet": "timm",
    "effnet_10c": "timm",
    "effnet2": "timm",
    "effnet_rc": "timm",
    "effnet_grid": "timm",
    "effnet_map": "timm",
    "dino": "timm",
    "boxes_effnet": "timm",
    "boxes_effnet_truth": "timm",
    "boxes_effnet_map": "timm",
    "boxes_effnet_map_truth": "timm",
    "clip": "openclip",
    "clip_text": "openclip",
    "minilm": "text",
    "minilm_phrases": "text",
    "minilm_tokens": "text",
    "bert": "text",
    "e5": "text",
}


@pytest.mark.parametrize("name", known_presets("features"))
def test_a_preset_says_which_extra_it_needs(name: str) -> None:
    assert load_feature(name).extra == EXTRAS.get(name)
