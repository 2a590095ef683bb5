from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vse.features.extractors.cnn import cut_crops, normalize_pixels
from vse.features.feature_job import extract_feature
from vse.features.options import ExtractOptions, FeatureRequest
from vse.features.settings import EXTRACTORS, has_auto_precision, load_feature_preset
from vse.features.settings.captions import FittedCaptionSettings, HglmmConfig, TextConfig, TfidfConfig
from vse.features.settings.images import BoxesConfig, CnnConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.presets import list_preset_names

# SHA-256 of the settings that are part of a cache's key: another one would make every such cache of a user stale.
CONTENT = {
    "fc7": "74b0d14d76be1eff748e1e1877f7875d6451ab44e19ca8685c6e295c0c7817aa",
    "resnet_grid": "4bdb7ca48ba2505894b3438f8f58c6ee8391eecbcfaf07663b8b1a27e4d4297b",
    "clip": "c9fb6f4e34a502dd211f1e596517037411608a01b63721e218ccee644948646e",
    "regions_adaptive": "360394c210d7868b10434d1152e5738e1f1db4ace895a0f5b0872333816094c2",
    "boxes": "eef970ab7b4d9891940adea3c244621f77872117c0edfc0e2602760a5e0b093f",
    "hglmm": "75c1be5c21acfa7f7033124c692b8f0bfca70a0c4ca9a13fd1f5ef4840a3bb74",
    "gmm_hglmm": "ae2103e07a96c2d9ac27443a7b11b21c8899f951d31ec121797c44881a1321cf",
    "tfidf": "ecdafa1767bea8069d888823acba5d1bd024fa2fa606bf3d25165f6b8340244d",
    "mean_vector": "05e68368b6e2ac268ffff47c904eeed20e437302928d1313591afc111814b957",
    "minilm": "907fc9ec05356019c417dba96df9ce50599db86aa974226ff44bc8b090fe0e2c",
    "minilm_tokens": "7ef5607ead829946545d7ec66589f50952958f0bbe36cbd0b770bf23b2520573",
    "clip_text": "17127be827a0084b1f422bac99350c0fdb8f524f3835f34a1c9d4a3177ed6e98",
}


# Of Flickr8k, whose preset keeps what other data sets take from timm since.
CONTENT_ON_FLICKR8K = {
    "effnet": "8f9caeadbbdc9cdecfb2b7e2df9e3d355ab42319a289bf604de51bdb0fb2241b",
    "effnet_10c": "43ad151e23791a61ffbb712e6616609e3dfcf467af068217c781fb5f2746c415",
    "effnet_rc": "1a164f563a0a132300480e7282576070075c513321c52f8933d42cfab7741d23",  # of plain crops
    "effnet_rc_of_the_authors": "637314b751d2e92ee372d99403be6f4b0aad72ef70e1763a29b6b61ed7ca8b8f",
    "dino": "406954533fb53a73fcdd2efeb8adf7f5ceebc07c9d97e63c75c94d694d104d9b",
}


@pytest.mark.parametrize("name", [*CONTENT, *CONTENT_ON_FLICKR8K])
def test_the_content_of_a_preset_stays_what_it_was_so_that_caches_stay_valid(name: str) -> None:
    unfolded = ["fold_batch_norm=false"] if name.startswith(("effnet", "resnet")) else []  # until presets folded batch norms
    if name in CONTENT:
        assert sha256_json(load_feature_preset(name, None, unfolded).list_cache_key_settings()) == CONTENT[name]
        return
    before = ["random_crop=resized"] if name == "effnet_rc_of_the_authors" else []  # until plain crops were seen to do better
    preset = name.removesuffix("_of_the_authors")
    in_bf16 = ["precision=bf16"] if has_auto_precision(preset, "f8k") else []  # as a processor with bf16 makes them
    assert (
        sha256_json(load_feature_preset(preset, "f8k", [*before, *in_bf16, *unfolded]).list_cache_key_settings())
        == CONTENT_ON_FLICKR8K[name]
    )


def from_timm() -> list[str]:
    configs = [load_feature_preset(name) for name in list_preset_names("features")]
    return [config.name for config in configs if isinstance(config, CnnConfig) and config.model.startswith("timm/")]


@pytest.mark.parametrize("name", from_timm())
def test_a_preset_from_timm_takes_timm_s_own_transform(name: str) -> None:
    config = load_feature_preset(name)
    assert isinstance(config, CnnConfig)
    own = timm.get_pretrained_cfg(config.model.removeprefix("timm/"))
    side = own.input_size[1]
    assert (config.resize_mode, config.resize, config.crop) == ("library", int(side / own.crop_pct), side)
    assert (config.interpolation, config.mean, config.std) == (own.interpolation, own.mean, own.std)


def test_a_photo_is_cut_as_timm_cuts_it() -> None:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (20, 33, 3), dtype=np.uint8))
    photo = coarse.resize((640, 427), Image.Resampling.BICUBIC)
    config = load_feature_preset("effnet")
    assert isinstance(config, CnnConfig)
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(model=timm.create_model(config.model.split("/")[1])))
    ours = normalize_pixels(cut_crops(photo, config), config.mean, config.std, torch.device("cpu"))[0]
    torch.testing.assert_close(ours, theirs(photo))
    square = config.model_copy(update={"resize_mode": "square"})
    squashed = normalize_pixels(cut_crops(photo, square), config.mean, config.std, torch.device("cpu"))[0]
    assert (squashed - theirs(photo)).abs().mean() > 0.25


@pytest.mark.parametrize("dataset", list_preset_names("datasets"))
def test_every_preset_is_valid_for_every_data_set(dataset: str) -> None:
    for name in list_preset_names("features"):
        assert load_feature_preset(name, dataset).name == name


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'fc7'"):
        load_feature_preset("fc7x")
    (tmp_path / "mine.yaml").write_text("extractor: cn\nmodel: vgg19\n")
    with pytest.raises(UserError, match="unknown extractor 'cn' .did you mean 'cnn'"):
        load_feature_preset(str(tmp_path / "mine.yaml"))


def test_changes_by_the_preset_of_the_data_set_are_logged(few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vse")
    asked = FeatureRequest(
        dataset=few,
        feature="resnet",
        out=tmp_path / "demo_resnet.h5",
        sets=("model=resnet18",),
        shards=1,
        options=ExtractOptions(weights_dir=tmp_path),
    )
    extract_feature(asked)
    assert "data set preset 'demo' changes" in caplog.text
    assert "weights: IMAGENET1K_V1 -> random" in caplog.text
    assert f"--weights-dir {tmp_path} is not read: the weights of resnet are random" in caplog.text


@pytest.mark.parametrize("name", list(EXTRACTORS))
def test_an_extractor_says_what_its_command_and_its_jobs_need(name: str) -> None:
    settings = EXTRACTORS[name]
    assert settings.extractor_name() == name
    assert settings.fits_encoder == issubclass(settings, FittedCaptionSettings)
    assert (settings.kind == "text") == (settings.fits_encoder or settings.reads_raw_text)
    assert load_feature_preset(settings.default_preset or name).extractor_name() == name


def test_files_of_the_user_are_those_that_settings_name() -> None:
    assert CnnConfig(name="x", model="vgg19").list_input_files() == []
    boxes = BoxesConfig(
        name="x", model="vgg19", map="y", weights="w.pth", boxes="b.json", proposer_weights="p.pt", edge_model="m.yml.gz"
    )
    assert boxes.list_input_files() == ["w.pth", "b.json", "p.pt", "m.yml.gz"]
    assert BoxesConfig(name="x", model="vgg19", map="y").list_input_files() == []
    assert TextConfig(name="x", model="a/b").list_input_files() == []
    assert TextConfig(name="x", model="a/b", weights="random").list_input_files() == []
    assert TextConfig(name="x", model="a/b", weights="folder").list_input_files() == ["folder"]
    assert TextConfig(name="x", model="open_clip/b", weights="laion2b_s34b_b79k").list_input_files() == []
    assert TextConfig(name="x", model="open_clip/b", weights="w.pth").list_input_files() == ["w.pth"]


def test_a_revision_that_is_asked_for_makes_a_job_run_again_and_no_cache_stale() -> None:
    one, other = TextConfig(name="x", model="a/b"), TextConfig(name="x", model="a/b", revision="v2")
    assert one.list_rerun_settings() != other.list_rerun_settings()
    assert one.list_cache_key_settings() == other.list_cache_key_settings()


def test_word_vectors_given_for_all_features_are_before_those_of_a_preset() -> None:
    assert str(HglmmConfig(name="x", words="preset.txt").find_word_file("given.txt")) == "given.txt"
    assert str(HglmmConfig(name="x", words="preset.txt").find_word_file("")) == "preset.txt"
    assert HglmmConfig(name="x").find_word_file() is None
    assert TfidfConfig(name="x").find_word_file("given.txt") is None, "it reads none"


def test_the_name_of_an_extractor_is_a_feature_with_its_default_settings() -> None:
    feature = load_feature_preset("cnn", None, ("model=resnet18", "layer=avgpool"))
    assert (feature.name, feature.extractor_name(), feature.crop) == ("cnn", "cnn", load_feature_preset("resnet").crop)
    assert load_feature_preset("tfidf") == load_feature_preset("tfidf", "unknown data set"), "the preset of this name"
