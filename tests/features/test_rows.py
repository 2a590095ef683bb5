from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vse.features.cache.rows import Kind, TextRows, dataset_items, row_ids
from vse.features.cache.shards import shard_slice
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.dataset import load_dataset_file

KINDS: list[tuple[Kind, bool, TextRows]] = [
    ("image", False, "captions"),
    ("text", False, "captions"),
    ("text", True, "captions"),
    ("text", False, "phrases"),
]


@pytest.mark.parametrize(("kind", "raw", "of"), KINDS)
@pytest.mark.parametrize("n_shards", [1, 3, 7, 60])
def test_the_rows_of_shards_are_all_rows(kind: Kind, raw: bool, of: TextRows, n_shards: int, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    every = dataset_items(dataset, kind, raw, of)
    parts = [dataset_items(dataset, kind, raw, of, shard_slice(len(every), index, n_shards)) for index in range(n_shards)]
    assert [item for part in parts for item in part] == every
    assert row_ids(dataset, kind, of).tolist() == [item.id for item in every]


@pytest.mark.parametrize("from_columns", [False, True])
def test_images_have_any_number_of_captions(from_columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, sentid = [], 100
    for imgid, count in enumerate([0, 2, 0, 0, 5, 1, 0]):
        sentences = [{"sentid": sentid + k, "imgid": imgid, "raw": f"{imgid} {k}", "tokens": ["a"]} for k in range(count)]
        sentid += count
        images.append({"imgid": imgid, "filename": f"{imgid}.jpg", "split": "test", "sentences": sentences})
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"dataset": "made_up", "images": images}))
    monkeypatch.setattr(dataset_module, "_LARGE", 0 if from_columns else 2**23)
    for _ in range(2):
        dataset = load_dataset_file(path)
        every = np.arange(100, 108)
        assert row_ids(dataset, "text").tolist() == every.tolist()
        for start in range(9):
            for stop in range(start, 9):
                found = [item.id for item in dataset_items(dataset, "text", True, "captions", slice(start, stop))]
                assert found == every[start:stop].tolist()
