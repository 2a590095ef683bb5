from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vse
from tests.features.conftest import Fails, succeed
from tests.pipeline.import_files import write_photos, write_table
from tests.pipeline.test_import_table import failures
from vse.cli import data_main as main
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.dataset import load_dataset_file

DIM = 5
ROW = np.ones((1, DIM), np.float32)
PAIR = {"key": "x", "caption": "a gull"}


def write_part(
    folder: Path, number: int, images: Any, texts: Any, rows: Sequence[dict[str, Any]], kind: str = "jsonl", deep: bool = True
) -> None:
    for name, values in (("img_emb", images), ("text_emb", texts)):
        path = folder / (name if deep else ".") / f"{name}_{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values)
    write_table(folder / ("metadata" if deep else ".") / f"metadata_{number}.{kind}", rows)


def vectors(rng: np.random.Generator, n_rows: int) -> Any:
    return rng.standard_normal((n_rows, DIM)).astype(np.float16)


def written(tmp_path: Path, *arguments: object) -> tuple[Path, Path, Path]:
    out = tmp_path / "gulls"
    given = [*arguments, "--out", out, "--out-features", tmp_path / "features"]
    succeed(main, "import", *given)
    return out / "dataset.json", *(tmp_path / "features" / f"gulls_{name}.h5" for name in ("img_emb", "text_emb"))


@pytest.mark.parametrize(("kind", "deep"), [("jsonl", True), ("csv", False), ("parquet", True)])
def test_pairs_of_vectors_become_a_data_set_and_two_caches(tmp_path: Path, kind: str, deep: bool) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    images, texts = vectors(rng, 30), vectors(rng, 30)
    images[20:] = images[:10]  # ten images have a second caption, in another part
    rows = [{"image_path": f"/data/{k % 20:03d}.jpg", "caption": f"gull number {k}"} for k in range(30)]
    for number, start, end in ((10, 23, 30), (9, 12, 23), (2, 0, 12)):  # parts are in the order of their numbers
        write_part(tmp_path / "clip", number, images[start:end], texts[start:end], rows[start:end], kind, deep)
    file, image_cache, text_cache = written(tmp_path, tmp_path / "clip")
    dataset = load_dataset_file(file)
    assert not dataset.has_image_files
    assert [image.file for image in dataset.images] == [f"data/{k:03d}.jpg" for k in range(20)]
    by_image = FeatureReader(open_cache(image_cache))
    by_text = FeatureReader(open_cache(text_cache))
    for image in dataset.images:
        np.testing.assert_array_equal(by_image.read_rows(by_image.find_rows([image.imgid])), images[[image.imgid]])
        for caption in image.captions:
            number = int(caption.raw.split()[-1])
            assert number % 20 == image.imgid
            np.testing.assert_array_equal(by_text.read_rows(by_text.find_rows([caption.sentid])), texts[[number]])
    for cache in (image_cache, text_cache):
        verify_cache(cache)


def test_photos_are_linked_where_their_folder_is_given(tmp_path: Path, fails: Fails) -> None:
    rng = np.random.default_rng(0)
    photos = write_photos(tmp_path / "photos", ["a.jpg", "b.jpg"])
    rows = [{"image_path": str(photos / "a.jpg"), "caption": "a gull"}, {"image_path": "b.jpg", "caption": "a tern"}]
    write_part(tmp_path / "clip", 0, vectors(rng, 2), vectors(rng, 2), rows)
    dataset = load_dataset_file(written(tmp_path, tmp_path / "clip", "--images", photos)[0])
    assert all(dataset.image_path(image).is_file() for image in dataset.images)
    (photos / "b.jpg").unlink()
    line = fails(main, "import", tmp_path / "clip", "--images", photos, "--out", tmp_path / "other")
    assert "b.jpg: no such image file" in line


def test_hundreds_of_pairs_with_faults_among_them(tmp_path: Path, fails: Fails) -> None:
    rng = np.random.default_rng(0)
    n_rows = 300
    images, texts = vectors(rng, n_rows), vectors(rng, n_rows)
    rows: list[dict[str, Any]] = [{"image_path": f"{k}.jpg", "caption": f"gull {k}"} for k in range(n_rows)]
    images[7, 2], texts[11, 0] = np.nan, np.inf
    rows[150]["caption"], rows[151]["image_path"], rows[152]["image_path"] = "", "../x.jpg", "3.jpg"
    for number in range(3):
        part = slice(100 * number, 100 * (number + 1))
        write_part(tmp_path / "clip", number, images[part], texts[part], rows[part])
    metadata = tmp_path / "clip" / "metadata" / "metadata_2.jsonl"
    lines = metadata.read_text().splitlines()
    lines[50] = "{"
    metadata.write_text("\n".join(lines))
    line = fails(main, "import", tmp_path / "clip", "--out", tmp_path / "x", "--out-features", tmp_path / "features")
    assert "line 8: its vector in img_emb_0.npy is not finite (6 of 300 rows " in line
    assert not (tmp_path / "features").exists()
    file, image_cache, text_cache = written(tmp_path, tmp_path / "clip", "--skip-bad")
    reasons = [reason for _, reason in failures(file.parent)]
    expected = ["vector in img_emb_0.npy is not finite", "vector in text_emb_0.npy is not finite", "the caption is empty"]
    expected += ["../x.jpg", "3.jpg has another vector than in row 3 of img_emb_0.npy", "not valid JSON"]
    assert all(text in reason for text, reason in zip(expected, reasons, strict=True)), reasons
    kept = [k for k in range(n_rows) if k not in (7, 11, 150, 151, 152, 250)]
    dataset = load_dataset_file(file)
    assert [image.file for image in dataset.images] == [f"{k}.jpg" for k in kept]
    for cache, wanted in ((image_cache, images), (text_cache, texts)):
        np.testing.assert_array_equal(FeatureReader(open_cache(cache)).read_rows(np.arange(len(kept))), wanted[kept])


def test_a_caption_without_an_id_is_a_fault_if_others_of_the_image_have_one(tmp_path: Path, fails: Fails) -> None:
    rows: list[dict[str, Any]] = [{"image_path": "a.jpg", "caption": "a gull", "sentid": 4}]
    rows += [{"image_path": "a.jpg", "caption": "a tern"}]
    for number, row in enumerate(rows):
        write_part(tmp_path / "clip", number, ROW, ROW, [row])
    photos = write_photos(tmp_path / "photos", ["a.jpg"])
    write_table(photos / "captions.jsonl", [{"file": "a.jpg", **row} for row in rows])
    for source in (tmp_path / "clip", photos):
        line = fails(main, "import", source, "--out", tmp_path / "x", "--out-features", tmp_path / "features")
        assert "a.jpg has captions with and without an id" in line


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no texts": (lambda f: (f / "text_emb/text_emb_0.npy").unlink(), "part 0 has no text_emb_0"),
    "no metadata": (lambda f: (f / "metadata/metadata_0.jsonl").unlink(), "part 0 has no metadata_0"),
    "too few rows": (lambda f: np.save(f / "text_emb/text_emb_0.npy", ROW), "(1, 5) does not fit img_emb_0.npy"),
    "few lines": (lambda f: write_table(f / "metadata/metadata_0.jsonl", [PAIR]), "metadata_0.jsonl: 1 rows, "),
    "another width": (lambda f: write_part(f, 1, ROW[:, :3], ROW, [PAIR]), "img_emb_1.npy: 3 float32 per row, "),
    "objects": (lambda f: np.save(f / "img_emb/img_emb_0.npy", [{}, {}], allow_pickle=True), "not a readable .npy file"),
    "two of one part": (lambda f: np.save(f / "img_emb_0.npy", ROW), "are the same part"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_lacks_something_is_one_line(tmp_path: Path, fails: Fails, fault: str) -> None:
    rng = np.random.default_rng(0)
    rows = [{"key": f"{k}", "caption": "a gull"} for k in range(2)]
    write_part(tmp_path / "clip", 0, vectors(rng, 2), vectors(rng, 2), rows)
    spoil, message = FAULTS[fault]
    spoil(tmp_path / "clip")
    line = fails(main, "import", tmp_path / "clip", "--out", tmp_path / "x", "--out-features", tmp_path / "features")
    assert message in line
    assert not (tmp_path / "x" / "dataset.json").exists()


def test_the_python_interface_returns_the_data_set_and_both_caches(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [{"image_path": f"/data/{k}.jpg", "caption": f"gull number {k}"} for k in range(12)]
    write_part(tmp_path / "clip", 0, vectors(rng, 12), vectors(rng, 12), rows, "jsonl", True)
    options = vse.ImportOptions(out_features=tmp_path / "features")
    gulls = vse.import_data(tmp_path / "clip", tmp_path / "gulls", options=options)
    assert sum(map(len, load_dataset_file(gulls.dataset.path).splits.values())) == 12
    assert [cache.path.name for cache in gulls.features] == ["gulls_img_emb.h5", "gulls_text_emb.h5"]
