from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision

from tests.conftest import TINY_FEATURE
from vse.features.backbones.networks import LayerOutput, hash_weights, load_backbone
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def config(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update={"model": "squeezenet1_1", "layer": "features", **changes})


def test_fc7_of_vgg_is_what_its_last_layer_reads() -> None:
    model = torchvision.models.vgg11(weights=None).eval()
    with torch.inference_mode():
        slow = model.classifier[:5](torch.flatten(model.avgpool(model.features(IMAGES)), 1))
        fc7 = LayerOutput(copy.deepcopy(model), "classifier.4")(IMAGES)
        penultimate = LayerOutput(model, "penultimate")(IMAGES)
    assert fc7.shape == (2, 4096)
    assert (fc7 >= 0).all()
    torch.testing.assert_close(fc7, slow)
    torch.testing.assert_close(penultimate, slow)


def test_the_penultimate_layer_of_a_resnet_is_its_pooled_vector() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    with torch.inference_mode():
        found = LayerOutput(model, "penultimate")(IMAGES)
        model.fc = torch.nn.Identity()
        torch.testing.assert_close(found, model(IMAGES))


def test_a_layer_with_height_and_width_is_pooled_to_a_grid() -> None:
    model = load_backbone(config())
    with torch.inference_mode():
        whole = model.features(IMAGES)
        found = LayerOutput(model, "features", grid=2)(IMAGES)
    torch.testing.assert_close(found, torch.nn.functional.adaptive_avg_pool2d(whole, 2).flatten(1))


@pytest.mark.parametrize("positions", [False, True])
def test_all_positions_are_the_map_itself_which_a_grid_of_its_size_is_too(positions: bool) -> None:
    with torch.inference_mode():
        whole = load_backbone(config()).features(IMAGES)
        flat = whole.flatten(2).transpose(1, 2) if positions else whole.flatten(1)
        assert whole.shape[2] == whole.shape[3] > 1
        for grid in ("all", whole.shape[2]):
            assert torch.equal(LayerOutput(load_backbone(config()), "features", grid, positions)(IMAGES), flat)


def test_nothing_behind_the_layer_is_computed() -> None:
    model = load_backbone(config())
    model.classifier.register_forward_hook(lambda *_: pytest.fail("the classifier ran"))
    with torch.inference_mode():
        LayerOutput(model, "features.3")(IMAGES)


def test_an_unknown_layer_or_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown layer 'featurs'.*did you mean 'features'"):
        LayerOutput(load_backbone(config()), "featurs")
    with pytest.raises(UserError, match="unknown torchvision model 'vgg20'.*did you mean 'vgg1"):
        load_backbone(config(model="vgg20"))
    with pytest.raises(UserError, match="unknown weights 'IMAGENET1K_V7' of squeezenet1_1"):
        load_backbone(config(weights="IMAGENET1K_V7"))


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    a = hash_weights(load_backbone(config(seed=3)))
    torch.manual_seed(2)
    assert hash_weights(load_backbone(config(seed=3))) == a
    assert hash_weights(load_backbone(config(seed=4))) != a


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_come_from_a_file_or_from_a_folder(suffix: str, tmp_path: Path) -> None:
    saved = load_backbone(config(seed=5))
    file = tmp_path / f"squeezenet1_1.{suffix}"
    if suffix == "pth":
        torch.save(saved.state_dict(), file)
    else:
        safetensors.torch.save_file(saved.state_dict(), file)
    expected = hash_weights(saved)
    assert hash_weights(load_backbone(config(weights=str(file), weights_sha256=sha256_file(file)))) == expected
    assert hash_weights(load_backbone(config(weights="IMAGENET1K_V1"), weights_dir=tmp_path)) == expected
    with pytest.raises(UserError, match=f"{file}: sha256 is .* expected"):
        load_backbone(config(weights=str(file), weights_sha256="0" * 64))


def test_a_file_of_other_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"x\.pth: not weights of this model"):
        load_backbone(config(weights=str(tmp_path / "x.pth")))
    (tmp_path / "y.pth").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"y\.pth: not weights of this model"):
        load_backbone(config(weights=str(tmp_path / "y.pth")))


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a weights file ran code",))


def test_a_weights_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"a": _Payload()}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="not weights of this model"):
        load_backbone(config(weights=str(tmp_path / "x.pth")))


def test_timm_models_give_their_pooled_vector() -> None:
    pytest.importorskip("timm")
    model = load_backbone(config(model="timm/mobilenetv3_small_050", weights="random"))
    with torch.inference_mode():
        found = LayerOutput(model, "penultimate")(IMAGES)
        torch.testing.assert_close(found, model.forward_head(model.forward_features(IMAGES), pre_logits=True))


def test_the_patches_of_a_transformer_are_a_grid_without_its_class_token() -> None:
    model = torchvision.models.vit_b_16(weights=None, image_size=64).eval()
    with torch.inference_mode():
        tokens = model.encoder(torch.cat([model.class_token.expand(2, -1, -1), model._process_input(IMAGES)], dim=1))
        positions = LayerOutput(copy.deepcopy(model), "encoder.ln", grid=4, positions=True)(IMAGES)
        pooled = LayerOutput(copy.deepcopy(model), "encoder.ln")(IMAGES)
        token = LayerOutput(model, "penultimate")(IMAGES)
    torch.testing.assert_close(positions, tokens[:, 1:])
    torch.testing.assert_close(pooled, tokens[:, 1:].mean(1))
    torch.testing.assert_close(token, tokens[:, 0])


def test_a_grid_needs_height_and_width() -> None:
    with pytest.raises(UserError, match="a grid needs a layer with height and width"), torch.inference_mode():
        LayerOutput(load_backbone(config(layer="x")), "output", positions=True)(IMAGES)


@pytest.mark.slow
def test_the_image_tower_of_openclip_is_a_backbone(tmp_path: Path) -> None:
    import open_clip

    small = config(model="open_clip/RN50", layer="output", weights="random")
    model = load_backbone(small)
    with torch.inference_mode():
        found = LayerOutput(model, "output")(torch.zeros(1, 3, 224, 224))
    assert found.shape == (1, 1024)
    whole = open_clip.create_model("RN50")
    torch.save(whole.state_dict(), tmp_path / "RN50.pth")
    loaded = load_backbone(config(model="open_clip/RN50", weights="openai"), weights_dir=tmp_path)
    assert hash_weights(loaded) == hash_weights(whole.visual)
    with pytest.raises(UserError, match="unknown OpenCLIP model 'RN51'.*did you mean"):
        load_backbone(config(model="open_clip/RN51"))
    with pytest.raises(UserError, match="unknown weights 'openia' of open_clip/RN50.*did you mean 'openai'"):
        load_backbone(config(model="open_clip/RN50", weights="openia"))


def test_an_unknown_library_is_named() -> None:
    with pytest.raises(UserError, match="unknown library 'tim' of model tim/resnet18"):
        load_backbone(config(model="tim/resnet18"))


def test_a_model_with_its_channels_last_is_read_the_same_way() -> None:
    model = torchvision.models.swin_t(weights=None).eval()
    with torch.inference_mode():
        maps = model.norm(model.features(IMAGES))
        pooled = LayerOutput(copy.deepcopy(model), "norm")(IMAGES)
        positions = LayerOutput(model, "norm", grid=2, positions=True)(IMAGES)
    assert maps.shape == (2, 2, 2, 768)
    torch.testing.assert_close(pooled, maps.mean((1, 2)))
    torch.testing.assert_close(positions, maps.flatten(1, 2))
