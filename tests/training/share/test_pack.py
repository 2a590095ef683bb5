"""A packed model needs neither the data set nor the caches nor the run that it comes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

import vse
from tests.conftest import TINY_FEATURE
from tests.features.tiny_text import tiny_bert
from tests.training.conftest import Capture, Edit, Fails, Log, done, experiment, printed
from tests.training.share.conftest import TEXT, Travelled, extract, fit_tfidf
from tests.transformers_made import make_bert
from vse.cli import main
from vse.eval.cli import eval_main
from vse.features.cache.feature_cache import open_cache
from vse.features.cli import extract_main
from vse.features.extractors.cnn import CnnExtractor
from vse.features.extractors.text import TextExtractor
from vse.features.settings.captions import TextConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo
from vse.training.cli import embed_main, search_main
from vse.training.options import PackOptions, TrainInputs
from vse.training.serve.cli import serve_main
from vse.training.share.pack import pack
from vse.training.training import train


def test_a_colleague_searches_a_folder_of_photos_without_data_and_caches(travelled: Travelled, capsys: Capture) -> None:
    lines, _ = printed(capsys, travelled.packed, TEXT, "-k", 12, "--images", travelled.album)
    assert [Path(line[2]).name for line in lines] == travelled.names
    np.testing.assert_allclose([float(line[1]) for line in lines], travelled.scores, atol=2e-3)  # caches round to float16
    done(serve_main, travelled.packed, "--images", travelled.album, "--check")
    assert "image " in capsys.readouterr().out


def test_python_opens_it_and_encodes_photos_and_captions(travelled: Travelled) -> None:
    model = vse.load(travelled.packed)
    photos = [travelled.album / name for name in travelled.names]
    images, text = model.encode_images(photos), model.encode_captions(TEXT)
    np.testing.assert_allclose(images @ text, travelled.scores, atol=2e-3)
    found = model.search(TEXT, k=3, corpus=travelled.album)
    assert [Path(file).name for file in found.frame["file"]] == travelled.names[:3]
    assert model.json["dataset"] == "demo"
    assert model.settings["name"] == "vsepp"
    assert len(model.frame) == 3


def test_it_is_tested_on_data_of_the_colleague(travelled: Travelled, tmp_path: Path) -> None:
    other = create_demo(tmp_path / "data", n_images=12, seed=4, name="other")
    cnn = CnnExtractor(TINY_FEATURE.model_copy(update={"weights": str(travelled.weights)}))
    features = extract(other, tmp_path / "other_tiny.h5", cnn)
    done(embed_main, travelled.packed, "--features", features, "--out", tmp_path / "test.h5")
    done(eval_main, tmp_path / "test.h5", "--out", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["trained_on"] == "demo"


def test_an_index_keeps_the_vectors_until_the_photos_change(travelled: Travelled, tmp_path: Path, capsys: Capture) -> None:
    album = Path(shutil.copytree(travelled.album, tmp_path / "album"))
    arguments = (travelled.packed, TEXT, "-k", 3, "--images", album, "--index", tmp_path / "album.faiss")
    first, told = printed(capsys, *arguments)
    assert "built a Flat index of 12 images" in told
    assert printed(capsys, *arguments)[0] == first
    (album / travelled.names[0]).unlink()
    with pytest.raises(SystemExit):
        search_main(list(map(str, arguments)))
    assert "album.faiss" in capsys.readouterr().err


def test_damaged_photos_do_not_stop_a_search(travelled: Travelled, tmp_path: Path, capsys: Capture) -> None:
    album = Path(shutil.copytree(travelled.album, tmp_path / "album"))
    (album / "text.jpg").write_text("no image")
    cut = album / travelled.names[-1]
    cut.write_bytes(cut.read_bytes()[:-200])
    lines, told = printed(capsys, travelled.packed, TEXT, "-k", 3, "--images", album)
    assert [Path(line[2]).name for line in lines] == travelled.names[:3]
    assert "1 files in" in told
    assert f"{cut}: not a readable image" in told


def test_without_photos_a_search_says_how_to_name_them(travelled: Travelled, tmp_path: Path, fails: Fails) -> None:
    line = fails(search_main, travelled.packed, TEXT)
    assert "a model without photos; name a folder of photos with --images" in line
    assert "no JPEG, PNG or WebP file" in fails(search_main, travelled.packed, TEXT, "--images", travelled.packed)
    assert "no such folder" in fails(search_main, travelled.packed, TEXT, "--images", tmp_path / "none")
    arguments = (search_main, travelled.packed, TEXT, "--images", travelled.album)
    assert "does not go with --images" in fails(*arguments, "--features", tmp_path / "x.h5")
    assert "leave --split val out" in fails(*arguments, "--split", "val")
    assert "has a caption for a photo to find" in fails(
        search_main, travelled.packed, travelled.album / travelled.names[0], "--images", travelled.album
    )


PLACES: dict[str, Callable[[Path], Path]] = {
    "the folder of weights": lambda home: home / "weights" / "old" / "renamed.pth",
    "the cache of torch": lambda home: home / "torch" / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth",
    "the cache of Hugging Face": lambda home: home / "hub" / "models--some--model" / "snapshots" / ("1" * 40) / "model.pth",
}


@pytest.mark.parametrize("place", PLACES)
def test_the_network_is_found_by_its_hash(travelled: Travelled, tmp_path: Path, capsys: Capture, place: str) -> None:
    for decoy in PLACES.values():  # files of the same size, with other bytes
        decoy(tmp_path).parent.mkdir(parents=True)
        decoy(tmp_path).with_stem("other").write_bytes(bytes(travelled.weights.stat().st_size))
    shutil.copy(travelled.weights, PLACES[place](tmp_path))
    arguments = (travelled.light, TEXT, "-k", 12, "--images", travelled.album, "--weights-dir", tmp_path / "weights")
    assert [Path(line[2]).name for line in printed(capsys, *arguments)[0]] == travelled.names


def test_a_missing_network_is_named_with_its_hash(travelled: Travelled, tmp_path: Path, fails: Fails) -> None:
    line = fails(search_main, travelled.light, TEXT, "--images", travelled.album)
    config = json.loads((travelled.light / "config.json").read_text())
    record = config["run"]["features"]["description"]["provenance"]["weights_file"]
    assert record["name"] == "squeezenet.pth"
    for part in ("squeezenet.pth", record["sha256"], f"{record['bytes']:,} bytes", "--weights-dir or VSE_WEIGHTS_DIR"):
        assert part in line


def test_a_run_remembers_its_network_without_its_cache(home: Path, tmp_path: Path, capsys: Capture, fails: Fails) -> None:
    own = Path(shutil.copytree(home, tmp_path / "own"))
    album = (own / "run", TEXT, "-k", 3, "--images", own / "data" / "images")
    before, _ = printed(capsys, *album, "--weights-dir", own / "weights")
    cache, data = own / "features" / "demo_tiny.h5", own / "data" / "dataset.json"
    out = tmp_path / "again.h5"
    done(extract_main, "cnn", "--dataset", data, "--like", cache, "--weights-dir", own / "weights", "--out", out)
    assert open_cache(out).key == open_cache(cache).key
    shutil.rmtree(own / "features")
    (own / "data" / "dataset.json").unlink()
    assert printed(capsys, *album, "--weights-dir", own / "weights")[0] == before
    assert "put it into a folder and name the folder" in fails(search_main, *album)


def test_the_card_has_data_metrics_licence_limits_and_how_to_load(travelled: Travelled) -> None:
    card = (travelled.packed / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "vse"
    assert header["license"] == "cc-by-4.0"
    for part in (
        "`demo`, 240 pairs",
        "| full | text to image |",
        "95% interval",
        "cc-by-4.0",
        "## Limits",
        'vse.load("packed")',
        "`squeezenet1_1`",
    ):
        assert part in card
    (result,) = ModelCard(card).data.eval_results[:1]
    stored = json.loads((travelled.packed / "config.json").read_text())["results"][0]["protocols"]["full"]
    assert result.metric_value == pytest.approx(stored["i2t"]["r1"], abs=0.005)
    low, high = stored["ci95"]["i2t"]["r1"]
    assert f"{stored['i2t']['r1']:.1f} ({low:.1f} to {high:.1f})" in card
    assert "The author gave no licence" in (travelled.light / "README.md").read_text()


def test_nothing_of_the_author_s_machine_is_in_the_folder(travelled: Travelled) -> None:
    for file in travelled.packed.rglob("*"):
        assert str(travelled.packed.parent).encode() not in file.read_bytes(), file.name
    settings = json.loads((travelled.packed / "preprocessor_config.json").read_text())
    assert settings["size"] == {"height": 32, "width": 32}


def test_a_changed_file_and_code_are_refused(travelled: Travelled, tmp_path: Path, edit: Edit, fails: Fails) -> None:
    arguments = ("--images", travelled.album, "--allow-code")
    changed = Path(shutil.copytree(travelled.packed, tmp_path / "changed"))
    (changed / "model.safetensors").write_bytes((changed / "image_network.safetensors").read_bytes())
    assert "model.safetensors: its SHA-256 is not the one in config.json" in fails(search_main, changed, TEXT, *arguments)
    hostile = Path(shutil.copytree(travelled.packed, tmp_path / "hostile"))
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(hostile / "config.json", lambda config: config["settings"]["model"].update(similarity={"name": f"{code}:Evil"}))
    assert "code of a packed model is never run" in fails(search_main, hostile, TEXT, *arguments)
    assert not (tmp_path / "ran").exists()
    broken = Path(shutil.copytree(travelled.packed, tmp_path / "broken"))
    edit(broken / "config.json", lambda config: config.pop("settings"))
    assert "not a model of this version of vse (settings: Field required)" in fails(search_main, broken, TEXT, *arguments)


def test_what_cannot_be_packed_is_one_line(home: Path, travelled: Travelled, tmp_path: Path, edit: Edit, fails: Fails) -> None:
    assert "is packed already" in fails(main, "model", "pack", travelled.packed, tmp_path / "x")
    assert "not a run folder" in fails(main, "model", "pack", tmp_path, tmp_path / "x")
    (tmp_path / "letters").mkdir()
    assert "is not a packed model" in fails(main, "model", "pack", home / "run", tmp_path / "letters")
    existing = Path(shutil.copytree(travelled.packed, tmp_path / "packed"))
    assert "replace it with --force" in fails(main, "model", "pack", home / "run", existing)
    done(main, "model", "pack", home / "run", existing, "--force")
    assert not (existing / "image_network.safetensors").exists()
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    edit(run / "run.json", lambda record: record.update(state="running"))
    assert "did not finish" in fails(main, "model", "pack", run, tmp_path / "x")
    result = tmp_path / "result.json"
    done(eval_main, home / "run" / "test.h5", "--out", result)
    edit(run / "run.json", lambda record: record.update(state="finished", seed=3))
    assert "is a result of vsepp, seeds [0]" in fails(main, "model", "pack", run, tmp_path / "x", "--result", result)
    assert not (tmp_path / "x").exists()


def test_result_files_and_notes_go_into_the_card(home: Path, tmp_path: Path, caplog: Log) -> None:
    done(eval_main, home / "run" / "test.h5", "--out", tmp_path / "result.json", "--protocol", "full")
    (tmp_path / "notes.md").write_text("Only for photographs of circles.")
    pack(home / "run", tmp_path / "out", PackOptions(results=(tmp_path / "result.json",), notes=tmp_path / "notes.md"))
    assert "Only for photographs of circles." in (tmp_path / "out" / "README.md").read_text()
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    (run / "test.h5").unlink()
    shutil.copytree(home / "features", tmp_path / "features")
    pack(run, tmp_path / "bare", PackOptions(weights_dir=home / "weights"))
    assert "has no metrics of a test split; run vse-embed" in caplog.text
    assert "not evaluated on a test split" in (tmp_path / "bare" / "README.md").read_text()


def test_a_fitted_caption_encoder_travels(home: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(home, tmp_path / "own"))
    captions = fit_tfidf(own / "data" / "dataset.json", own / "features" / "demo_tfidf.h5")
    config = experiment("caption_feature=tfidf", "train.epochs=1")
    run = train(own / "features" / "demo_tiny.h5", config, out=own / "run2", inputs=TrainInputs(caption_features=captions))
    expected = vse.load(run).encode_captions([TEXT])
    pack(run, tmp_path / "packed", PackOptions(with_backbone=True, weights_dir=own / "weights"))
    shutil.rmtree(own)
    assert (tmp_path / "packed" / "caption_encoder.safetensors").is_file()
    np.testing.assert_array_equal(vse.load(tmp_path / "packed").encode_captions([TEXT]), expected)


def test_a_text_network_travels_or_is_found_by_its_hash(home: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(home, tmp_path / "own"))
    tiny_bert(own / "weights" / "tiny")
    encoder = TextExtractor(TextConfig(name="bert", model="tests/tiny"), own / "weights")
    captions = extract(own / "data" / "dataset.json", own / "features" / "demo_bert.h5", encoder)
    config = experiment("caption_feature=bert", "train.epochs=1")
    run = train(own / "features" / "demo_tiny.h5", config, out=own / "run2", inputs=TrainInputs(caption_features=captions))
    expected = vse.load(run, weights_dir=own / "weights").encode_captions([TEXT])
    for name, inside in (("packed", True), ("light", False)):
        pack(run, tmp_path / name, PackOptions(with_backbone=inside, weights_dir=own / "weights"))
    snapshot = tmp_path / "hub" / "models--tests--renamed" / "snapshots" / ("2" * 40)
    shutil.copytree(own / "weights" / "tiny", tmp_path / "weights" / "renamed")
    shutil.rmtree(own)
    np.testing.assert_allclose(vse.load(tmp_path / "packed").encode_captions([TEXT]), expected, atol=1e-6)
    light = tmp_path / "light"
    np.testing.assert_allclose(vse.load(light, weights_dir=tmp_path / "weights").encode_captions([TEXT]), expected, atol=1e-6)
    with pytest.raises(vse.UserError, match=r"tests/tiny are the file model.safetensors with .* SHA-256"):
        vse.load(light).encode_captions([TEXT])
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "weights" / "renamed").rename(snapshot)
    np.testing.assert_allclose(vse.load(light).encode_captions([TEXT]), expected, atol=1e-6)


def test_a_transformer_and_a_cnn_that_were_trained_are_in_the_weights(home: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(home, tmp_path / "own"))
    bert = make_bert(tmp_path / "bert")
    sets = (
        "images.source=pictures",
        "images.finetune=true",
        "train.epochs=1",
        f"model.caption_encoder={{name: bert, model: {bert}}}",
    )
    weights = TrainInputs(weights_dir=own / "weights")
    run = train(own / "features" / "demo_tiny.h5", experiment(*sets), out=own / "run2", inputs=weights)
    photo = load_dataset_file(own / "data" / "dataset.json")
    photo = Path(shutil.copy(photo.image_path(photo.images[0]), tmp_path / "photo.jpg"))
    model = vse.load(run)
    expected = model.encode_captions([TEXT]), model.encode_images([photo])
    pack(run, tmp_path / "packed", PackOptions(with_backbone=True))
    shutil.rmtree(own)
    model = vse.load(tmp_path / "packed")
    np.testing.assert_allclose(model.encode_captions([TEXT]), expected[0], atol=1e-6)
    np.testing.assert_allclose(model.encode_images([photo]), expected[1], atol=1e-6)
    assert not (tmp_path / "packed" / "image_network.safetensors").exists()


def test_a_model_of_regions_reads_captions_alone(regions: Path, photo: Path, tmp_path: Path, caplog: Log) -> None:
    run = train(regions, experiment("model.image_encoder={name: gpo}", "train.epochs=1"), out=tmp_path / "run")
    pack(run, tmp_path / "packed")
    assert "the packed model reads no photos" in caplog.text
    assert "reads vectors of images instead of photos" in (tmp_path / "packed" / "README.md").read_text()
    model = vse.load(tmp_path / "packed")
    assert model.encode_captions([TEXT]).shape == (1, 16)
    with pytest.raises(vse.UserError, match="not vectors of a CNN"):
        model.encode_images([photo])


def test_a_model_that_was_fitted_to_arrays_travels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    captions = np.repeat(images, 2, axis=0)[:, :6].copy()
    fitted = vse.fit(images, captions, np.repeat(np.arange(40), 2), experiment="cca")
    pack(fitted.save(tmp_path / "run"), tmp_path / "packed")
    shutil.rmtree(tmp_path / "run")
    model = vse.load(tmp_path / "packed")
    np.testing.assert_allclose(model.encode_images(images), fitted.encode_images(images), atol=1e-6)
    np.testing.assert_allclose(model.encode_captions(captions), fitted.encode_captions(captions), atol=1e-6)
    with pytest.raises(vse.UserError, match="pass the vectors"):
        model.encode_captions([TEXT])
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "encode_captions(vectors)  # (n, 6)" in card
