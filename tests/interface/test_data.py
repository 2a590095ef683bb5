"""Data sets and caches: extraction and import against the commands, and opened files against their contents."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import torchvision

import vse
from tests.eval.evaluating import succeeds
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cli import extract_main


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
        vse.import_data(demo.parent / "images", "data/other", options=vse.ImportOptions(format="tabel"))


def slow_rows(file: Path, ids: list[int]) -> list[np.ndarray]:
    """Return the rows of ids, read by HDF5 itself."""
    with h5py.File(file) as cache:
        place = {int(identity): k for k, identity in enumerate(cache["ids"][:])}
        if "offsets" not in cache:
            return [cache["features"][place[identity]] for identity in ids]
        ends = cache["offsets"][:]
        return [cache["features"][ends[place[identity]] : ends[place[identity] + 1]] for identity in ids]


def test_a_data_set_is_a_frame_of_captions(demo: Path) -> None:
    data, content = vse.open_dataset(demo), json.loads(demo.read_text())
    expected = [
        (image["imgid"], sentence["sentid"], image["split"], image["filename"], sentence["raw"])
        for image in content["images"]
        for sentence in image["sentences"]
    ]
    assert list(data.frame.itertuples(index=False, name=None)) == expected
    assert data.json == content
    assert data.splits.loc["test"].tolist() == [12, 60]
    assert data.image_ids("val").tolist() == [i["imgid"] for i in content["images"] if i["split"] == "val"]
    assert data.caption_ids().tolist() == [caption for _, caption, *_ in expected]
    assert data.photo(3).is_file()
    assert len(data) == len(data.images) == 66
    with pytest.raises(vse.UserError, match="has no image 1000"):
        data.photo(1000)


@pytest.mark.parametrize("ids", [[5, 2, 2], (5,), np.array([7, 1]), range(3), pd.Series([4, 3])])
def test_rows_come_in_the_order_of_the_ids(ids: object, cache: Path) -> None:
    features = vse.open_features(cache)
    expected = np.stack(slow_rows(cache, [int(i) for i in ids]))
    assert np.array_equal(features[ids], expected)
    tensor = features.tensor(ids)
    assert tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), expected.astype(np.float32))


def test_one_id_is_one_row_and_a_colon_all(cache: Path) -> None:
    features = vse.open_features(cache)
    assert (features.dataset, features.feature, features.kind) == ("demo", "tiny", "image")
    assert features.json == open_cache(cache).provenance
    assert np.array_equal(features[5], slow_rows(cache, [5])[0])
    assert np.array_equal(features[np.int64(5)], features[5])
    assert np.array_equal(features[:], FeatureReader(open_cache(cache)).read_rows(np.arange(66)))
    assert features[:].shape == features.tensor().shape == features.shape
    assert features.tensor(5).shape == features.shape[1:]
    assert list(features) == features.ids.tolist()
    assert (5 in features, 500 in features, "a" in features) == (True, False, False)
    assert features[[]].shape == (0, *features.shape[1:])
    with pytest.raises(vse.UserError, match="not ragged"):
        features.mask([1])
    with pytest.raises(vse.UserError, match=str(cache)):
        features.boxes([1])


def test_wrong_ids_are_errors_of_one_line(cache: Path) -> None:
    for ids, message in (([0, 999], "the first is id 999"), ([True], "a list of whole numbers"), (slice(1, 3), r"take \[:\]")):
        with pytest.raises(vse.UserError, match=message):
            vse.open_features(cache)[ids]


def test_regions_are_ragged_and_a_bank_of_crops_has_three_axes(regions: Path, bank: Path) -> None:
    assert vse.open_features(bank)[[4, 9]].shape[:2] == (2, 3)
    features, ids = vse.open_features(regions), [9, 0, 4]
    expected = slow_rows(regions, ids)
    assert (features.ragged, features.shape[1]) == (True, None)
    assert all(np.array_equal(row, other) for row, other in zip(features[ids], expected, strict=True))
    assert features.counts(ids).tolist() == [len(row) for row in expected]
    pad_sets, mask = features.tensor(ids), features.mask(ids)
    assert pad_sets.shape == (3, max(map(len, expected)), 16)
    for row, there, other in zip(pad_sets, mask, expected, strict=True):
        assert np.array_equal(row[there].numpy(), other.astype(np.float32))
        assert not row[~there].any()
    assert np.array_equal(features[9], expected[0])
    assert [box.shape for box in features.boxes(ids)] == [(len(row), 4) for row in expected]
    assert features.boxes(9).shape == (len(expected[0]), 4)
