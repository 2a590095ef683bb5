"""Folded batch norms against the network as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vse.features.backbones.networks import fold_batch_norms
from vse.features.cache.rows import dataset_items
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def used(network: nn.Module) -> nn.Module:
    """In evaluation, with statistics that are not those of the start."""
    rng = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)
    return network.eval()


def norm(**options: bool) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(4, **options)


class Forked(nn.Module):
    """Something else reads the convolution, too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), norm()

    def forward(self, images: Tensor) -> Tensor:
        convolved = self.convolution(images)
        return self.norm(convolved) + convolved


class Repeated(nn.Module):
    """One convolution and one norm run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(self.norm(self.convolution(images))))


@pytest.mark.parametrize(
    ("network", "folded"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), norm(affine=False)), 2),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), norm()), 0),
        (nn.Sequential(nn.Conv2d(3, 4, 3), norm(track_running_stats=False)), 0),
        (Repeated(), 0),
    ],
)
def test_the_output_stays_what_it_was(network: nn.Module, folded: int) -> None:
    before = used(network)(IMAGES)
    assert fold_batch_norms(network, IMAGES) == folded
    torch.testing.assert_close(network(IMAGES), before, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(module, nn.Identity) for module in network.modules()) == folded


def test_a_layer_that_is_read_stays() -> None:
    network = used(nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.Conv2d(4, 4, 3), norm()))
    read: list[Tensor] = []
    network[0].register_forward_hook(lambda _, __, output: read.append(output))
    assert fold_batch_norms(network, IMAGES) == 1
    torch.testing.assert_close(read[-1], read[0])


def test_a_convolution_that_something_else_reads_is_an_error() -> None:
    with pytest.raises(UserError, match="fold_batch_norm: folding changes"):
        fold_batch_norms(used(Forked()), IMAGES)


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small", "timm/efficientnet_lite0"])
def test_features_are_equal_to_1e_5_and_have_a_key_of_their_own(demo: Path, model: str) -> None:
    if model.startswith("timm/"):
        pytest.importorskip("timm")
    config = CnnConfig(name="x", model=model, weights="random", resize=64, crop=64, dtype="float32")
    folded = config.model_copy(update={"fold_batch_norm": True})
    dataset = load_dataset_file(demo)
    items = dataset_items(dataset, "image")[:4]
    plain, fast = CnnExtractor(config), CnnExtractor(folded)
    np.testing.assert_allclose(fast.extract(items).features, plain.extract(items).features, rtol=0, atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.network.modules())
    assert plain.weights_sha256 == fast.weights_sha256
    assert plain.identity(dataset).key != fast.identity(dataset).key


def test_features_without_folding_keep_the_key_that_they_had() -> None:
    assert "fold_batch_norm" not in CnnConfig(name="x", model="resnet18").content()
    assert CnnConfig(name="x", model="resnet18", fold_batch_norm=True).content()["fold_batch_norm"] is True
