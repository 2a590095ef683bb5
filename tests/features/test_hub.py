"""Downloads from the Hugging Face hub are of one commit, which a cache or a run records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants

from tests.features.tiny_text import add_tiny_clip, tiny_bert
from vse.features.backbones.model_folder import download
from vse.features.backbones.networks import hash_weights, load_backbone
from vse.features.backbones.texts import load_text_backbone
from vse.features.backbones.transformer import read_transformer
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.rows import Item
from vse.features.cli import main
from vse.features.extractors.text import load_caption_reader
from vse.features.settings.images import CnnConfig
from vse.features.settings.texts import TextConfig
from vse.pipeline.errors import UserError

OLD, NEW = "1" * 40, "ab" * 20


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of earlier downloads, empty; the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(hub: Path, model: str, commit: str = NEW, branch: str = "main") -> Path:
    """The folder of a download as the hub's library lays it out, to be filled; ``branch`` is at this commit."""
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
        assert download("some/model", ["*.json"], revision).commit == commit
    assert download("some/model", ["*.json"]).folder == folder


def test_a_folder_that_is_not_of_a_commit_is_refused(hub: Path) -> None:
    snapshot(hub, "some/model", "main")
    with pytest.raises(UserError, match="cannot get some/model .*not the folder of a commit"):
        download("some/model", ["*.json"])


def test_the_trainable_encoder_knows_its_commit(hub: Path, tmp_path: Path) -> None:
    tiny_bert(snapshot(hub, "some/bert"))
    assert read_transformer("some/bert").commit == NEW
    assert read_transformer(str(tiny_bert(tmp_path / "local"))).commit is None


def test_a_cache_of_captions_records_the_commit_and_reads_others_with_it(hub: Path, few: Path, tmp_path: Path) -> None:
    tiny_bert(snapshot(hub, "tests/tiny", OLD))
    out = tmp_path / "few_minilm.h5"
    sets = ["--set", "model=tests/tiny"]
    with pytest.raises(SystemExit) as stop:
        main(["text", "--dataset", str(few), "--feature", "minilm", "--out", str(out), "--shards", "1", *sets])
    assert stop.value.code == 0
    cache = open_cache(out)
    assert cache.provenance["commit"] == OLD
    before = load_caption_reader(cache, device="cpu").encode_items([Item(0, raw="a red dog")])[0]
    tiny_bert(snapshot(hub, "tests/tiny", NEW), seed=1)  # the branch moves on
    assert torch.equal(load_caption_reader(cache, device="cpu").encode_items([Item(0, raw="a red dog")])[0], before)


def test_a_network_of_timm_is_read_at_a_commit_that_the_cache_records(
    hub: Path, few: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = timm.create_model("mobilenetv3_small_050", num_classes=1000)
    source = timm.get_pretrained_cfg("mobilenetv3_small_050")
    settings = ["--set", "model=timm/mobilenetv3_small_050", "--set", "weights=pretrained", "--set", "resize=32"]
    arguments = ["cnn", "--dataset", str(few), "--feature", "effnet", "--shards", "1", *settings, "--set", "crop=32"]
    out = tmp_path / "few_effnet.h5"
    line = fails(main, *arguments, "--out", out)
    assert f"cannot get {source.hf_hub_id} from the Hugging Face hub" in line
    assert "as mobilenetv3_small_050.pth and name the folder with --weights-dir" in line
    folder = snapshot(hub, source.hf_hub_id)
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    assert "cannot get model.safetensors of" in fails(main, *arguments, "--out", out), "no pickle is read"
    safetensors.torch.save_file(network.state_dict(), folder / "model.safetensors")
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(out)])
    assert stop.value.code == 0
    provenance = open_cache(out).provenance
    assert (provenance["commit"], provenance["weights_sha256"]) == (NEW, hash_weights(network))


@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_both_towers_of_openclip_are_read_at_a_commit(
    file: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    name = add_tiny_clip(tmp_path, "tiny-clip-of-the-hub").rpartition("/")[2]
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"some_tag": {"hf_hub": "some/clip/"}})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = open_clip.create_model(name)
    state = network.state_dict()
    folder = snapshot(hub, "some/clip")
    torch.save(state, folder / file) if file.endswith(".bin") else safetensors.torch.save_file(state, folder / file)
    notes: dict[str, str] = {}
    settings = {"name": "x", "model": f"open_clip/{name}", "weights": "some_tag"}
    images = load_backbone(CnnConfig(**settings, layer="output"), notes=notes)
    assert hash_weights(images) == hash_weights(network.visual)
    assert notes == {"commit": NEW}
    assert load_text_backbone(TextConfig(**settings)).notes == {"commit": NEW}
    with pytest.raises(UserError, match="unknown weights"):
        load_backbone(CnnConfig(**{**settings, "weights": "some/clip"}))
