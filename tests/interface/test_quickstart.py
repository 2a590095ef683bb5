"""``vse quickstart`` leads from photographs with captions, or from nothing, to a report."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import torchvision

from tests.conftest import succeeds
from vse import quickstart
from vse.cli import main
from vse.pipeline.dataset.dataset import load_dataset_file

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working folder, and a folder with weights of MobileNetV2, which are random."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_HOME", "HF_HOME", "VSE_WEIGHTS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    torch.save(torchvision.models.mobilenet_v2().state_dict(), tmp_path / "weights/mobilenet_v2.pth")
    return tmp_path


def write_photos(demo: Path, folder: Path, n: int) -> None:
    """Copy photographs of the demo, and write a table of their first captions."""
    dataset = load_dataset_file(demo)
    (folder / "Meine Fotos").mkdir()
    with (folder / "captions.csv").open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["file", "caption"])
        for image in dataset.images[:n]:
            photo = dataset.image_path(image)
            shutil.copy(photo, folder / "Meine Fotos")
            table.writerow([photo.name, image.captions[0].raw.replace("red", "röt")])


@pytest.mark.nightly
def test_few_photographs_are_evaluated_in_folds_and_a_second_call_keeps_what_is_finished(
    folder: Path, demo: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(quickstart, "N_FOLDS", 3)
    monkeypatch.setattr(quickstart, "CCA_REGULARIZATIONS", (1, 10))
    write_photos(demo, folder, 24)
    words = ("quickstart", "Meine Fotos", "captions.csv", "--threads", "1")
    succeeds(main, *words)
    text = capsys.readouterr()
    result = json.loads((folder / "results/meine-fotos_quickstart.json").read_text())
    assert (result["n_images"], result["split"]) == (24, "test of 3 folds")
    assert result["provenance"]["config"]["solver"]["name"] == "cca"
    assert result["provenance"]["features"].keys() == {"mobilenet", "tfidf"}
    assert (result["correction"]["method"], result["correction"]["bank"]) == ("inverted-softmax", "train")
    assert (folder / "runs/meine-fotos_quickstart/seed-0/correction.safetensors").is_file(), "which vse-serve uses"
    assert "of the captions of the test find their image among the first 10 of 8 [" in text.out
    assert "24 pairs are too few for one test split: the result covers 3 folds" in text.err
    assert "report: results/meine-fotos_quickstart.html" in text.out
    assert (folder / "results/meine-fotos_quickstart.html").stat().st_size > 10_000
    commands = text.out[text.out.index("These commands were run") :].splitlines()[1:]
    assert [line.split()[0] for line in commands] == [
        *("vse-data", "vse-extract", "vse-extract", "vse-train", "vse-embed", "vse-data", "vse-eval", "vse-report")
    ]
    assert commands[0].strip() == "vse-data import 'Meine Fotos' --captions captions.csv --out data/meine-fotos"
    before = (folder / "runs/meine-fotos_quickstart/seed-0/run.json").read_bytes()
    succeeds(main, *words)
    again = capsys.readouterr()
    assert again.out == text.out
    assert "finished, kept" in again.err
    assert (folder / "runs/meine-fotos_quickstart/seed-0/run.json").read_bytes() == before


@pytest.mark.nightly
def test_many_pairs_have_a_test_split(folder: Path, own_demo: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(quickstart, "MIN_PAIRS_FOR_SPLIT", 200)
    shutil.copytree(own_demo.parent, folder / "data/demo")
    succeeds(main, "quickstart")
    result = json.loads((folder / "results/demo_quickstart.json").read_text())
    assert (result["split"], result["n_images"]) == ("test", 12)
    assert "effnet" in result["provenance"]["features"], "which the demo computes with random weights"


def test_english_captions_are_read_by_minilm_if_its_weights_are_there(folder: Path, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    assert quickstart.choose_caption_feature(dataset) == "tfidf"
    (folder / "weights/all-MiniLM-L6-v2").mkdir()
    assert quickstart.choose_caption_feature(dataset) == "minilm"
