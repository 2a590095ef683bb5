"""The named test splits are those that are known by these names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from vse.eval.files.embeddings import Embeddings
from vse.eval.files.split import split_identity, split_name
from vse.pipeline.errors import UserError


def made(image_ids: list[int], dataset: str = "coco", coco_ids: list[int] | None = None) -> Embeddings:
    ids = np.asarray(image_ids)
    coco = None if coco_ids is None else np.asarray(coco_ids)
    return Embeddings(ids, ids, ids, dataset, "test", scores=np.zeros((len(ids), len(ids)), np.float32), coco_ids=coco)


def test_the_identity_is_the_hash_of_the_sorted_ids() -> None:
    expected = hashlib.sha256(b"[2,7,10]").hexdigest()
    for run, ids in ((made([10, 2, 7]), "image_ids"), (made([0, 1, 2], coco_ids=[2, 10, 7]), "coco_ids")):
        identity = split_identity(run)
        assert (identity.sha256, identity.ids, identity.name) == (expected, ids, None)


def test_karpathy_s_test_images_of_coco_are_known_by_their_numbers() -> None:
    package = pytest.importorskip("eccv_caption")
    answers = json.loads((Path(package.__file__).parent / "data" / "original_image_to_caption.json").read_text())
    numbers = [int(number) for number in answers]
    assert len(numbers) == 5000
    assert split_identity(made(list(range(5000)), coco_ids=numbers)).name == "karpathy"
    assert split_identity(made(list(range(4999)), coco_ids=numbers[:-1])).name is None
    assert split_identity(made(list(range(5000)), "f30k", coco_ids=numbers)).name is None


def test_a_folder_of_presets_names_further_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    first, second = split_identity(made([1])).sha256, split_identity(made([2])).sha256
    assert split_name("birds", first) is None
    (tmp_path / "published").mkdir()
    file = tmp_path / "published" / "splits.yaml"
    file.write_text(f"birds: {{ spring: [{first}, {second}] }}\n")
    assert (split_name("birds", first), split_name("birds", second)) == ("spring", "spring")
    file.write_text("birds: spring\n")
    with pytest.raises(UserError, match=r"splits.yaml: names splits as DATASET"):
        split_name("birds", first)
