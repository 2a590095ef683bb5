"""Images that a table names by a path are imported only from the folders of the import; others are listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from tests.pipeline.conftest import Fails
from tests.pipeline.import_files import photo_bytes, write_photos, write_table
from tests.pipeline.test_import_table import failures, imported
from vse.cli import data_main as main

OUTSIDE = ["absolute", "parent", "link", "linked folder", "address"]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Write a photo in a folder that no import may read."""
    path = tmp_path / "home" / "private.jpg"
    path.parent.mkdir()
    path.write_bytes(photo_bytes(200))
    return path


def leading_out(folder: Path, private: Path) -> dict[str, str]:
    """Return names by which a row in ``folder`` could reach the private photo."""
    (folder / "link.jpg").symlink_to(private)
    (folder / "linked").symlink_to(private.parent)
    return {
        "absolute": str(private),
        "parent": "../home/private.jpg",
        "link": "link.jpg",
        "linked folder": "linked/private.jpg",
        "address": f"file://{private}",
        "address of a member": f"zip://private.jpg::{private}",
    }


def is_copied(out: Path, private: Path) -> bool:
    """Return whether a file below ``out``, with links followed, is the private photo."""
    return any(path.is_file() and path.read_bytes() == private.read_bytes() for path in (out / "images").rglob("*"))


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_leads_to_no_photo_outside_of_its_folder(tmp_path: Path, private: Path, kind: str) -> None:
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    names = leading_out(photos, private)
    rows = [{"file": name, "caption": "a gull"} for name in ("a.jpg", *names.values())]
    table = write_table(tmp_path / f"captions.{kind}", rows)
    dataset = imported(photos, "--captions", table, "--out", tmp_path / "out", "--skip-bad")
    assert [image.file for image in dataset.images] == ["a.jpg"]
    assert len(failures(tmp_path / "out")) == len(names)


def test_links_of_a_table_may_lead_to_the_folder_that_is_given(tmp_path: Path, private: Path) -> None:
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    leading_out(photos, private)
    table = write_table(tmp_path / "captions.csv", [{"file": name, "caption": "a gull"} for name in ("a.jpg", "link.jpg")])
    dataset = imported(photos, "--captions", table, "--images", private.parent, "--out", tmp_path / "out")
    assert [image.file for image in dataset.images] == ["a.jpg", "link.jpg"]


@pytest.mark.parametrize("reach", [*OUTSIDE, "address of a member"])
def test_a_hugging_face_row_leads_out_of_no_folder(tmp_path: Path, private: Path, fails: Fails, reach: str) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    name = leading_out(saved, private)[reach]
    write_photos(saved, ["photos/own.jpg"])
    rows: list[dict[str, Any]] = [
        {"image": {"bytes": None, "path": "photos/own.jpg"}, "caption": "a gull"},
        {"image": {"bytes": None, "path": name}, "caption": "a gull"},
        {"image": {"bytes": photo_bytes(7), "path": name}, "caption": "a gull"},
    ]
    save_unembedded(saved, rows)
    out = tmp_path / "out"
    line = fails(main, "import", saved, "--out", out)
    assert "row 1: the image" in line
    assert not is_copied(out, private)
    dataset = imported(saved, "--out", out, "--skip-bad")
    assert len(dataset.images) == 2
    assert [place.rpartition(" ")[2] for place, _ in failures(out)] == ["1"]
    assert not is_copied(out, private)


def save_unembedded(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Save rows without the content of their files, as a hostile program would."""
    import datasets  # seconds, which only few tests need

    made = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as stream, pyarrow.ipc.new_stream(stream, made.data.schema) as out:
        out.write_table(made.data.table)
    state = dict.fromkeys(("_format_columns", "_format_type", "_split")) | {"_format_kwargs": {}, "_output_all_columns": False}
    (folder / "state.json").write_text(json.dumps(state | {"_fingerprint": "0", "_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": made.features.to_dict()}))


@pytest.mark.parametrize("reach", OUTSIDE)
def test_a_row_of_clip_retrieval_leads_out_of_no_folder(tmp_path: Path, private: Path, fails: Fails, reach: str) -> None:
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    name = leading_out(photos, private)[reach]
    clip = tmp_path / "clip"
    clip.mkdir()
    for side in ("img_emb", "text_emb"):
        np.save(clip / f"{side}_0.npy", np.eye(2, 4, dtype=np.float16))
    write_table(clip / "metadata_0.jsonl", [{"image_path": each, "caption": "a gull"} for each in ("a.jpg", name)])
    line = fails(main, "import", clip, "--images", photos, "--out", tmp_path / "out", "--out-features", tmp_path / "features")
    assert "metadata_0.jsonl: line 2" in line
