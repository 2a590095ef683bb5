from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import TINY_FEATURE
from tests.training.conftest import Patch
from vse.features.cache.feature_cache import open_cache
from vse.features.extractors.cnn import CnnExtractor, rebuild_cnn_extractor
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError
from vse.training.models.build import TrainableCnn
from vse.training.settings import ImagesConfig

WITH_NORMS = CnnConfig(name="norms", model="shufflenet_v2_x0_5", layer="stage2", weights="random", resize=32, crop=32)


def tiny(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update=changes)


def pixels(n: int = 4, n_crops: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, n_crops, 3, 32, 32), generator=generator, dtype=torch.uint8)


def gradients(cnn: TrainableCnn, seen: Tensor) -> dict[str, Tensor]:
    cnn.zero_grad()
    vectors = cnn(seen)
    (vectors * torch.linspace(-1, 2, vectors.numel()).view_as(vectors)).sum().backward()
    return {name: parameter.grad for name, parameter in cnn.named_parameters() if parameter.grad is not None}


def statistics(cnn: TrainableCnn) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in cnn.named_buffers()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("crops", "n_crops"), [("1c", 1), ("10c", 10)])
@pytest.mark.parametrize("config", [TINY_FEATURE, WITH_NORMS], ids=["squeezenet", "shufflenet"])
def test_vectors_are_those_of_the_extractor(config: CnnConfig, crops: str, n_crops: int, normalize: bool) -> None:
    extractor = CnnExtractor(config.model_copy(update={"crops": crops, "normalize": normalize}))
    seen = pixels(3, n_crops)
    before = extractor.compute_features(seen)
    cnn = TrainableCnn(extractor)
    for training in (False, True):
        torch.testing.assert_close(cnn.train(training)(seen), before)
    torch.testing.assert_close(extractor.compute_features(seen), before)


@pytest.mark.parametrize("crops", ["10c_bank", "rc_bank"])
def test_crops_that_a_bank_keeps_apart_are_averaged(crops: str) -> None:
    extractor = CnnExtractor(tiny(crops=crops))
    seen = pixels(3, 4)
    mean = nn.functional.normalize(CnnExtractor(tiny(crops=crops, normalize=False)).compute_features(seen).mean(1), dim=1)
    torch.testing.assert_close(TrainableCnn(extractor)(seen), mean)


def test_what_follows_the_layer_is_dropped_batch_norms_included() -> None:
    names = {f"network.model.features.0.{name}" for name in ("weight", "bias")}
    cnn = TrainableCnn(CnnExtractor(TINY_FEATURE))
    assert set(cnn.state_dict()) == names == {name for name, _ in cnn.named_parameters()}
    deeper = TrainableCnn(CnnExtractor(tiny(layer="features.3")))
    assert {name.split(".")[3] for name in deeper.state_dict()} == {"0", "3"}
    names = TrainableCnn(CnnExtractor(WITH_NORMS)).state_dict()
    assert {name.split(".")[2] for name in names} == {"conv1", "stage2"}
    assert any(name.endswith("running_var") for name in names)


@pytest.mark.parametrize("config", [tiny(layer="features.3"), WITH_NORMS], ids=["squeezenet", "shufflenet"])
@pytest.mark.parametrize("batch_norm", ["frozen", "train"])
def test_checkpointing_keeps_vectors_and_gradients_of_every_parameter(config: CnnConfig, batch_norm: Any) -> None:
    plain, thrifty = (TrainableCnn(CnnExtractor(config), batch_norm, flag).train() for flag in (False, True))
    seen = pixels()
    torch.testing.assert_close(thrifty(seen), plain(seen))
    torch.testing.assert_close(gradients(thrifty, seen), gradients(plain, seen))
    cnn = TrainableCnn(CnnExtractor(config), batch_norm).train()
    taken = gradients(cnn, pixels())
    assert taken.keys() == {name for name, _ in cnn.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in taken.values())
    assert all(gradient.any() for gradient in taken.values())


def test_checkpointing_needs_no_gradients_and_no_trained_statistics() -> None:
    plain, thrifty = (TrainableCnn(CnnExtractor(WITH_NORMS), "frozen", flag) for flag in (False, True))
    with torch.inference_mode():
        assert torch.equal(thrifty(pixels()), plain(pixels()))
    with pytest.raises(ValueError, match="would count each batch twice"):
        ImagesConfig(source="pictures", finetune=True, batch_norm="train", gradient_checkpointing=True)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_network_gives_the_same_vectors_and_gradients(checkpointing: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    networks = (TrainableCnn(CnnExtractor(tiny(layer="features.3")), "frozen", checkpointing, flag) for flag in (False, True))
    plain, compiled = (network.train() for network in networks)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(compiled(pixels()), plain(pixels()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(compiled, pixels()), gradients(plain, pixels()), rtol=1e-3, atol=1e-4)


def test_statistics_move_in_training_on_request_only() -> None:
    cnn = TrainableCnn(CnnExtractor(WITH_NORMS), "frozen").train()
    before = statistics(cnn)
    assert before
    gradients(cnn, pixels())
    assert equal(statistics(cnn), before)
    assert cnn.training
    assert not any(module.training for module in cnn.network.modules())
    cnn = TrainableCnn(CnnExtractor(WITH_NORMS), "train")
    before = statistics(cnn)
    cnn.train()
    gradients(cnn, pixels())
    after = statistics(cnn)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    cnn.eval()
    gradients(cnn, pixels(seed=1))
    assert equal(statistics(cnn), after)
    assert not any(module.training for module in cnn.modules())


def test_trained_norms_use_the_statistics_of_the_batch() -> None:
    frozen, trained = (TrainableCnn(CnnExtractor(WITH_NORMS), how) for how in ("frozen", "train"))
    a, b = pixels(4), torch.cat([pixels(1), pixels(3, seed=1)])
    for cnn, training, depends in ((frozen, True, False), (trained, True, True), (trained, False, False)):
        cnn.train(training)
        assert torch.allclose(cnn(a)[0], cnn(b)[0], atol=1e-5) != depends


@pytest.mark.parametrize("batch_norm", ["frozen", "train"])
def test_dropout_is_off(batch_norm: Any) -> None:
    cnn = TrainableCnn(CnnExtractor(tiny(layer="output", grid=1)), batch_norm)
    assert any(isinstance(module, nn.Dropout) for module in cnn.modules())
    expected = cnn.eval()(pixels())
    assert torch.equal(cnn.train()(pixels()), expected)
    nn.Sequential(cnn).train()
    assert torch.equal(cnn(pixels()), expected), "also as a part of a model"


def test_a_cache_is_enough_to_rebuild_its_network_but_not_one_of_positions(cache: Path, positions: Path) -> None:
    extractor = rebuild_cnn_extractor(open_cache(cache))
    assert extractor.config.list_cache_key_settings() == TINY_FEATURE.list_cache_key_settings()
    assert extractor.config.name == "tiny"
    assert torch.equal(extractor.compute_features(pixels()), CnnExtractor(TINY_FEATURE).compute_features(pixels()))
    with pytest.raises(UserError, match="its features are not vectors of a CNN"):
        rebuild_cnn_extractor(open_cache(positions))


def rewrite(cache: Path, **changes: object) -> Path:
    """Change what a cache notes of how it was made."""
    with h5py.File(cache, "r+") as file:
        provenance = json.loads(file.attrs["provenance"])
        file.attrs["provenance"] = json.dumps({**provenance, **changes})
    return cache


@pytest.mark.parametrize("changes", [{"weights_sha256": "0" * 64}, {"seed": 1}])
def test_other_weights_than_those_of_the_cache_are_refused(changes: dict[str, object], own_cache: Path) -> None:
    opened = open_cache(rewrite(own_cache, **changes))
    with pytest.raises(UserError, match="demo_tiny.h5 .* other weights of squeezenet1_1 .* SHA-256 differ"):
        rebuild_cnn_extractor(opened)
    assert rebuild_cnn_extractor(opened, random_weights=True).config.model == "squeezenet1_1", (
        "trained weights take their place"
    )


def test_trained_weights_need_no_others_first(own_cache: Path) -> None:
    opened = open_cache(rewrite(own_cache, weights="/nowhere/weights.pth"))
    with pytest.raises(UserError, match="/nowhere/weights.pth: no such weights file"):
        rebuild_cnn_extractor(opened)
    assert rebuild_cnn_extractor(opened, random_weights=True).config.weights == "random"


@pytest.mark.parametrize("made", [{"config": {"extractor": "regions", "model": "x"}}, {"config": {}}, {"config": {"a": 1}}])
def test_a_cache_that_no_network_made_is_refused(made: dict[str, object], own_cache: Path) -> None:
    with pytest.raises(UserError, match="demo_tiny.h5: its features are not vectors of a CNN"):
        rebuild_cnn_extractor(open_cache(rewrite(own_cache, **made)))
