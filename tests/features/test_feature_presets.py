from __future__ import annotations

from pathlib import Path

import pytest

from vse.features.extractors.cnn import CnnConfig
from vse.features.feature_presets import load_feature
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_json
from vse.pipeline.presets import known_presets

# SHA-256 of the settings that are part of a cache's key: another one would make every such cache of a user stale.
CONTENT = {
    "fc7": "74b0d14d76be1eff748e1e1877f7875d6451ab44e19ca8685c6e295c0c7817aa",
    "effnet_rc": "637314b751d2e92ee372d99403be6f4b0aad72ef70e1763a29b6b61ed7ca8b8f",
    "resnet_grid": "4bdb7ca48ba2505894b3438f8f58c6ee8391eecbcfaf07663b8b1a27e4d4297b",
    "clip": "c9fb6f4e34a502dd211f1e596517037411608a01b63721e218ccee644948646e",
    "regions_adaptive": "360394c210d7868b10434d1152e5738e1f1db4ace895a0f5b0872333816094c2",
    "boxes": "eef970ab7b4d9891940adea3c244621f77872117c0edfc0e2602760a5e0b093f",
    "hglmm": "75c1be5c21acfa7f7033124c692b8f0bfca70a0c4ca9a13fd1f5ef4840a3bb74",
    "gmm_hglmm": "ae2103e07a96c2d9ac27443a7b11b21c8899f951d31ec121797c44881a1321cf",
    "tfidf": "ecdafa1767bea8069d888823acba5d1bd024fa2fa606bf3d25165f6b8340244d",
    "mean_vector": "05e68368b6e2ac268ffff47c904eeed20e437302928d1313591afc111814b957",
}


@pytest.mark.parametrize("name", CONTENT)
def test_the_content_of_a_preset_stays_what_it_was_so_that_caches_stay_valid(name: str) -> None:
    assert sha256_json(load_feature(name).content()) == CONTENT[name]


@pytest.mark.parametrize("dataset", known_presets("datasets"))
def test_every_preset_is_valid_for_every_data_set(dataset: str) -> None:
    for name in known_presets("features"):
        assert load_feature(name, dataset).name == name


def test_fc7_is_the_paper_s() -> None:
    config = load_feature("fc7")
    assert isinstance(config, CnnConfig)
    assert (config.model, config.layer, config.resize, config.crop, config.crops) == ("vgg19", "classifier.4", 256, 224, "1c")


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'fc7'"):
        load_feature("fc7x")
    (tmp_path / "mine.yaml").write_text("extractor: cn\nmodel: vgg19\n")
    with pytest.raises(UserError, match="unknown extractor 'cn' .did you mean 'cnn'"):
        load_feature(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("laier=x", "unknown setting 'laier' .did you mean 'layer'"),
        ("extractor=regions", "unknown setting 'extractor'"),
        ("crop=300", "crop 300 is larger than resize 256"),
        ("crops=11c", "crops: Input should be"),
    ],
)
def test_a_wrong_setting_is_one_line(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_feature("fc7", sets=[setting])
