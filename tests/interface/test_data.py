"""The functions that extract features and import data, against the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

import vse
from tests.eval.evaluating import succeeds
from vse.features.cli import main as extract_main


def test_a_feature_is_extracted_as_the_command_does(few: Path) -> None:
    settings = {"model": "squeezenet1_1", "layer": "features.2", "grid": 2, "weights": "random", "resize": 32, "crop": 32}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    succeeds(extract_main, "cnn", "--dataset", few, "--feature", "fc7", *sets, "--out", "command.h5", "--shards", 2)
    features = vse.extract(vse.open_dataset(few), "fc7", sets=settings, out="function.h5", shards=2)
    assert np.array_equal(features[:], vse.open_features("command.h5")[:])
    alike = vse.extract(few, like=features, out="alike.h5", shards=1)
    assert np.array_equal(alike[:], features[:])


def test_an_option_that_an_extractor_lacks_is_refused(few: Path) -> None:
    with pytest.raises(vse.UserError, match="words: feature 'fc7' .* cnn"):
        vse.extract(few, "fc7", options=vse.ExtractOptions(words="glove.txt"))
    with pytest.raises(vse.UserError, match="skip_bad: feature 'tfidf' .* tfidf"):
        vse.extract(few, "tfidf", options=vse.ExtractOptions(skip_bad=True))


def test_the_environment_s_folder_of_weights_is_read_where_the_extractor_has_one(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = torchvision.models.squeezenet1_1(weights=None)
    torch.save(network.state_dict(), tmp_path / "squeezenet1_1.pth")
    sets = {"model": "squeezenet1_1", "layer": "features.2", "weights": "pretrained", "resize": 32, "crop": 32}
    given = vse.extract(few, "fc7", sets=sets, out="given.h5", options=vse.ExtractOptions(weights_dir=tmp_path))
    monkeypatch.setenv("VSE_WEIGHTS_DIR", str(tmp_path))
    assert np.array_equal(vse.extract(few, "fc7", sets=sets, out="again.h5")[:], given[:])
    assert vse.extract(few, "tfidf", out="t.h5", sets={"min_count": 1}).kind == "text"


def test_photos_with_a_table_are_imported(demo: Path) -> None:
    data = vse.open_dataset(demo)
    data.frame[["file", "caption"]].rename(columns={"file": "picture"}).to_csv("captions.csv", index=False)
    photos, splits = demo.parent / "images", vse.SplitShares(test=0.5, seed=1)
    birds = vse.import_data(photos, "data/birds", captions="captions.csv", columns={"file": "picture"}, splits=splits)
    assert birds.features == ()
    assert birds.dataset.name == "birds"
    assert len(birds.dataset) == 66
    assert birds.dataset.splits.loc["test", "n_images"] == 33
    with pytest.raises(vse.UserError, match="format tabel: unknown"):
        vse.import_data(photos, "data/other", options=vse.ImportOptions(format="tabel"))
