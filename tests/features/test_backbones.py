"""Networks of images, their layers and weights, and batch norms that are folded."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn
from torch._dynamo.utils import is_compile_supported

from tests.conftest import TINY_FEATURE
from vse.features.backbones.networks import TruncatedNetwork, fold_batch_norms, hash_weights, load_backbone
from vse.features.cache.rows import list_extractor_inputs
from vse.features.extractors.cnn import CnnExtractor
from vse.features.libraries import replace_compiler
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update={"model": "squeezenet1_1", "layer": "features", **changes})


def test_the_penultimate_output_is_what_the_last_layer_reads() -> None:
    """Also of a classifier of several layers, as VGG's, whose fc7 it is."""
    model = torchvision.models.mobilenet_v3_small(weights=None).eval()
    with torch.inference_mode():
        slow = model.classifier[:2](torch.flatten(model.avgpool(model.features(IMAGES)), 1))
        torch.testing.assert_close(TruncatedNetwork(copy.deepcopy(model), "classifier.1")(IMAGES), slow)
        torch.testing.assert_close(TruncatedNetwork(model, "penultimate")(IMAGES), slow)
    resnet = torchvision.models.resnet18(weights=None).eval()
    with torch.inference_mode():
        found = TruncatedNetwork(resnet, "penultimate")(IMAGES)
        resnet.fc = torch.nn.Identity()
        torch.testing.assert_close(found, resnet(IMAGES))


@pytest.mark.parametrize("positions", [False, True])
def test_all_positions_are_the_map_itself_which_a_grid_of_its_size_is_too(positions: bool) -> None:
    with torch.inference_mode():
        whole = load_backbone(small()).features(IMAGES)
        flat = whole.flatten(2).transpose(1, 2) if positions else whole.flatten(1)
        assert whole.shape[2] == whole.shape[3] > 1
        pooled = torch.nn.functional.adaptive_avg_pool2d(whole, 2).flatten(1)
        torch.testing.assert_close(TruncatedNetwork(load_backbone(small()), "features", grid=2)(IMAGES), pooled)
        for grid in ("all", whole.shape[2]):
            assert torch.equal(TruncatedNetwork(load_backbone(small()), "features", grid, positions)(IMAGES), flat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vgg20"}, "unknown torchvision model 'vgg20'.*did you mean 'vgg1"),
        ({"weights": "IMAGENET1K_V7"}, "unknown weights 'IMAGENET1K_V7' of squeezenet1_1"),
        ({"model": "timm/tf_efficientnet_lite00"}, "did you mean 'tf_efficientnet_lite0'"),
        ({"model": "tim/resnet18"}, "unknown library 'tim' of model tim/resnet18"),
        ({"model": "open_clip/RN51"}, "unknown OpenCLIP model 'RN51'.*did you mean"),
        ({"model": "open_clip/RN50", "weights": "openia"}, "unknown weights 'openia' of open_clip/RN50.*mean 'openai'"),
    ],
)
def test_an_unknown_network_or_layer_is_answered_with_the_nearest(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_backbone(small(**changes))
    with pytest.raises(UserError, match="unknown layer 'featurs'.*did you mean 'features'"):
        TruncatedNetwork(load_backbone(small()), "featurs")
    with pytest.raises(UserError, match="a grid needs a layer with height and width"), torch.inference_mode():
        TruncatedNetwork(load_backbone(small(layer="x")), "output", positions=True)(IMAGES)


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    a = hash_weights(load_backbone(small(seed=3)))
    torch.manual_seed(2)
    assert hash_weights(load_backbone(small(seed=3))) == a
    assert hash_weights(load_backbone(small(seed=4))) != a


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_come_from_a_file_or_from_a_folder(suffix: str, tmp_path: Path) -> None:
    saved = load_backbone(small(seed=5))
    file = tmp_path / f"squeezenet1_1.{suffix}"
    if suffix == "pth":
        torch.save(saved.state_dict(), file)
    else:
        safetensors.torch.save_file(saved.state_dict(), file)
    expected = hash_weights(saved)
    assert hash_weights(load_backbone(small(weights=str(file), weights_sha256=sha256_file(file)))) == expected
    assert hash_weights(load_backbone(small(weights="IMAGENET1K_V1"), weights_dir=tmp_path)) == expected
    with pytest.raises(UserError, match=f"{file}: sha256 is .* expected"):
        load_backbone(small(weights=str(file), weights_sha256="0" * 64))


def test_timm_models_give_their_pooled_vector() -> None:
    pytest.importorskip("timm")
    model = load_backbone(small(model="timm/mobilenetv3_small_050", weights="random"))
    with torch.inference_mode():
        found = TruncatedNetwork(model, "penultimate")(IMAGES)
        torch.testing.assert_close(found, model.forward_head(model.forward_features(IMAGES), pre_logits=True))


def test_the_patches_of_a_transformer_are_a_grid_without_its_class_token() -> None:
    model = torchvision.models.VisionTransformer(64, 16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64).eval()
    with torch.inference_mode():
        tokens = model.encoder(torch.cat([model.class_token.expand(2, -1, -1), model._process_input(IMAGES)], dim=1))
        positions = TruncatedNetwork(copy.deepcopy(model), "encoder.ln", grid=4, positions=True)(IMAGES)
        pooled = TruncatedNetwork(copy.deepcopy(model), "encoder.ln")(IMAGES)
        token = TruncatedNetwork(model, "penultimate")(IMAGES)
    torch.testing.assert_close(positions, tokens[:, 1:])
    torch.testing.assert_close(pooled, tokens[:, 1:].mean(1))
    torch.testing.assert_close(token, tokens[:, 0])


def test_a_model_with_its_channels_last_is_read_the_same_way() -> None:
    model = torchvision.models.SwinTransformer([4, 4], 16, [1, 1, 1, 1], [2, 2, 2, 2], [7, 7]).eval()
    with torch.inference_mode():
        maps = model.norm(model.features(IMAGES))
        pooled = TruncatedNetwork(copy.deepcopy(model), "norm")(IMAGES)
        positions = TruncatedNetwork(model, "norm", grid=2, positions=True)(IMAGES)
    assert maps.shape == (2, 2, 2, 128)
    torch.testing.assert_close(pooled, maps.mean((1, 2)))
    torch.testing.assert_close(positions, maps.flatten(1, 2))


SMALL_IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


norm, conv = nn.BatchNorm2d, partial(nn.Conv2d, 3, 4, 3)


class Twice(nn.Module):
    """A convolution and a norm, one of which is computed or read twice by a rule."""

    def __init__(self, rule: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.rule = nn.Sequential(nn.Conv2d(3, 3, 1), norm(3)), rule

    def forward(self, images: Tensor) -> Tensor:
        return self.rule(self.part, images)


def used(network: nn.Module) -> nn.Module:
    rng = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)
    return network.eval()


@pytest.mark.parametrize(
    ("network", "folded"),
    [
        (nn.Sequential(conv(), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), norm(4, affine=False)), 2),
        (nn.Sequential(conv(), nn.ReLU(), norm(4)), 0),
        (nn.Sequential(conv(), norm(4, track_running_stats=False)), 0),
        (Twice(lambda part, images: part(part(images))), 0),
    ],
)
def test_the_output_stays_what_it_was(network: nn.Module, folded: int) -> None:
    before = used(network)(SMALL_IMAGES)
    assert fold_batch_norms(network, SMALL_IMAGES) == folded
    torch.testing.assert_close(network(SMALL_IMAGES), before, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(module, nn.Identity) for module in network.modules()) == folded


def test_a_layer_that_is_read_stays() -> None:
    network = used(nn.Sequential(conv(), norm(4), nn.Conv2d(4, 4, 3), norm(4)))
    read: list[Tensor] = []
    network[0].register_forward_hook(lambda _, __, output: read.append(output))
    assert fold_batch_norms(network, SMALL_IMAGES) == 1
    torch.testing.assert_close(read[-1], read[0])
    with pytest.raises(UserError, match="fold_batch_norm: folding changes"):
        fold_batch_norms(
            used(Twice(lambda part, images: (lambda convolved: part[1](convolved) + convolved)(part[0](images)))), SMALL_IMAGES
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small", "timm/efficientnet_lite0"])
def test_features_are_equal_to_1e_5_and_have_a_key_of_their_own(demo: Path, model: str) -> None:
    if model.startswith("timm/"):
        pytest.importorskip("timm")
    config = CnnConfig(name="x", model=model, weights="random", resize=64, crop=64, dtype="float32")
    folded = config.model_copy(update={"fold_batch_norm": True})
    dataset = load_dataset_file(demo)
    items = list_extractor_inputs(dataset, "image")[:4]
    plain, fast = CnnExtractor(config), CnnExtractor(folded)
    np.testing.assert_allclose(fast.extract(items).features, plain.extract(items).features, rtol=0, atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.network.modules())
    assert plain.weights_sha256 == fast.weights_sha256
    assert plain.build_cache_identity(dataset).sha256 != fast.build_cache_identity(dataset).sha256


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_question_is_answered_by_the_compiler(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    with replace_compiler():
        from torch._dynamo.utils import is_compile_supported as asked
    assert "torch._dynamo.utils" not in sys.modules
    monkeypatch.undo()
    assert asked(device) == is_compile_supported(device)
