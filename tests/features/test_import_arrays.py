from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.features.conftest import Edit, Fails
from vse.cli import data_main as main
from vse.features.cache.feature_cache import verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.exchange.arrays import import_arrays, import_bottom_up_tsv
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError


def ids_of(demo: Path, kind: str = "image") -> list[int]:
    images = load_dataset_file(demo).images
    return [i.imgid for i in images] if kind == "image" else [c.sentid for i in images for c in i.captions]


@pytest.mark.parametrize(
    ("form", "kind", "shape"), [("npy and txt", "image", (3,)), ("npy and npy", "text", (3,)), ("npz", "image", (2, 3))]
)
def test_rows_are_joined_by_id_in_any_order(form: str, kind: Any, shape: tuple[int, ...], demo: Path, tmp_path: Path) -> None:
    wanted = ids_of(demo, kind)
    ids = np.random.default_rng(0).permutation([*wanted, 99_999])
    rows = np.stack([np.full(shape, identity, np.float32) for identity in ids])
    features, ids_file = tmp_path / "x.npy", tmp_path / "ids.npy"
    if form == "npz":
        features, ids_file = tmp_path / "x.npz", None
        np.savez(features, features=rows, ids=ids)
    else:
        np.save(features, rows)
        np.save(ids_file, ids)
    if form == "npy and txt":
        ids_file = tmp_path / "ids.txt"
        ids_file.write_text("\n".join(map(str, ids)))
    cache = verify_cache(import_arrays(features, ids_file, demo, tmp_path / "f" / "demo_x.h5", kind))
    assert (cache.kind, cache.feature, cache.row_shape) == (kind, "x", shape)
    assert cache.ids.tolist() == wanted
    found = FeatureReader(cache).read_rows(np.arange(len(wanted)))
    np.testing.assert_array_equal(found.reshape(len(wanted), -1)[:, 0], wanted)


def test_ids_per_caption_beside_rows_per_image_are_reduced(demo: Path, tmp_path: Path) -> None:
    wanted = ids_of(demo)
    np.save(tmp_path / "x.npy", np.asarray(wanted, np.float32)[::-1, None])
    (tmp_path / "ids.txt").write_text("\r\n".join(str(identity) for identity in reversed(wanted) for _ in range(5)))
    cache = verify_cache(import_arrays(tmp_path / "x.npy", tmp_path / "ids.txt", demo, tmp_path / "f" / "demo_x.h5"))
    np.testing.assert_array_equal(FeatureReader(cache).read_rows(np.arange(len(wanted)))[:, 0], wanted)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, wanted * 5)))
    with pytest.raises(UserError, match="66 rows, but 330 ids"):
        import_arrays(tmp_path / "x.npy", tmp_path / "ids.txt", demo, tmp_path / "f" / "demo_x.h5")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (lambda ids: ids[:-1], "66 rows, but 65 ids"),
        (lambda ids: [*ids[:-1], 0], "id 0 occurs more than once"),
        (lambda ids: [*ids[:-1], 777], "1 of the data set's 66 ids are not in it, the first is 65"),
        (lambda ids: np.arange(66) + 0.7, "ids are float64"),
    ],
)
def test_ids_that_do_not_fit_are_named(ids: Callable[..., list[int]], message: str, demo: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((66, 3), np.float32))
    np.save(tmp_path / "ids.npy", ids(ids_of(demo)))
    with pytest.raises(UserError, match=message):
        import_arrays(tmp_path / "x.npy", tmp_path / "ids.npy", demo, tmp_path / "f.h5")


def test_files_that_hold_something_else_are_refused(demo: Path, tmp_path: Path, fails: Fails) -> None:
    np.savez(tmp_path / "x.npz", other=np.zeros(3))
    np.save(tmp_path / "x.npy", np.zeros((66, 3), np.float32))
    np.save(tmp_path / "int.npy", np.zeros((66, 3), np.int32))
    np.save(tmp_path / "ids.npy", ids_of(demo))
    common = ["--dataset", demo, "--out-features", tmp_path / "f" / "demo_x.h5"]
    assert "with the arrays 'features' and 'ids'" in fails(main, "import-npy", tmp_path / "x.npz", *common)
    assert "the ids of its rows are needed: --ids FILE" in fails(main, "import-npy", tmp_path / "x.npy", *common)
    ids = ["--ids", tmp_path / "ids.npy"]
    assert "features are int32" in fails(main, "import-npy", tmp_path / "int.npy", *ids, *common)
    rows = np.zeros((66, 2, 3), np.float32)
    rows[5, 1, 1] = np.nan
    np.save(tmp_path / "x.npy", rows)
    assert "NaN or infinite in float32, the first has id 5" in fails(main, "import-npy", tmp_path / "x.npy", *ids, *common)
    assert not [path for path in (tmp_path / "f").rglob("*") if path.is_file()]


def tsv(demo: Path, path: Path, name: Callable[[int], int] = lambda k: k) -> Path:
    """Rows in an order of their own; image k has 1 + k % 4 boxes, and vectors filled with k."""
    lines = []
    for k in np.random.default_rng(0).permutation(ids_of(demo)).tolist():
        n = 1 + k % 4
        boxes = np.tile(np.asarray([k / 10, 1, k / 10 + 5, 9], np.float32), (n, 1))
        vectors = np.full((n, 6), k, np.float32)
        fields = [name(k), 128, 96, n, *(base64.b64encode(a.tobytes()).decode() for a in (boxes, vectors))]
        lines.append("\t".join(map(str, fields)) + "\n")
    path.write_text("".join(lines))
    return path


def test_bottom_up_files_become_regions(demo: Path, tmp_path: Path) -> None:
    cache = verify_cache(import_bottom_up_tsv([tsv(demo, tmp_path / "x.tsv")], demo, tmp_path / "f" / "demo_butd.h5"))
    found = FeatureReader(cache).read_padded_regions(np.arange(66))
    for k in range(66):
        assert found.mask[k].sum() == 1 + k % 4
        assert (found.features[k][found.mask[k]] == k).all()
    boxes = np.concatenate([shard["boxes"].map_to_memory() for shard in cache.shard_arrays])
    np.testing.assert_array_equal(boxes[cache.offsets[:-1], 0], np.arange(66, dtype=np.float32) / np.float32(10))
    assert np.concatenate([shard["image_size"].map_to_memory() for shard in cache.shard_arrays])[3].tolist() == [128, 96]


def test_several_files_and_rows_that_occur_twice_alike(demo: Path, tmp_path: Path) -> None:
    lines = tsv(demo, tmp_path / "x.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "a.tsv").write_text("".join(lines[:40]))
    (tmp_path / "b.tsv").write_text("".join([*lines[35:], lines[0].replace(lines[0].split("\t")[0], "123456", 1)]))
    cache = import_bottom_up_tsv([tmp_path / "a.tsv", tmp_path / "b.tsv"], demo, tmp_path / "f" / "demo_butd.h5")
    assert len(verify_cache(cache).ids) == 66


@pytest.mark.parametrize("match", ["cocoid", "filename"])
def test_images_are_found_by_their_names(match: str, own_demo: Path, tmp_path: Path, edit: Edit) -> None:
    def rename(content: Any) -> None:
        for image in content["images"]:
            image["cocoid"] = 5000 + image["imgid"]
            image["filename"] = f"COCO_val2014_{9000 + image['imgid']:012d}.jpg"

    edit(own_demo, rename)
    path = tsv(own_demo, tmp_path / "x.tsv", name=lambda k: k + (5000 if match == "cocoid" else 9000))
    cache = import_bottom_up_tsv([path], own_demo, tmp_path / "f" / "demo_x.h5", None if match == "cocoid" else match)
    assert verify_cache(cache).ids.tolist() == list(range(66))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: lines[1:], "1 of 66 images are not there"),
        (lambda lines: [lines[0].replace("\t128\t", "\t"), *lines[1:]], "line 1 has 5 fields, 6 are needed"),
        (lambda lines: [lines[0][:-9] + "\n", *lines[1:]], "boxes or features of image_id 19 "),
        (lambda lines: [*lines, lines[0].replace("\t128\t", "\t127\t")], "line 67: image_id .* occurs twice, with other"),
    ],
)
def test_a_fault_in_a_tsv_is_named(spoil: Callable[..., list[str]], message: str, demo: Path, tmp_path: Path) -> None:
    path = tsv(demo, tmp_path / "x.tsv")
    path.write_text("".join(spoil(path.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match=message):
        import_bottom_up_tsv([path], demo, tmp_path / "f" / "demo_x.h5")
    assert not (tmp_path / "f" / "demo_x.h5").exists()


def test_another_meaning_of_the_image_ids_is_refused(own_demo: Path, tmp_path: Path, edit: Edit) -> None:
    edit(own_demo, lambda content: [image.update(cocoid=65 - image["imgid"]) for image in content["images"]])
    path, out = tsv(own_demo, tmp_path / "x.tsv"), tmp_path / "f" / "demo_x.h5"
    import_bottom_up_tsv([path], own_demo, out, "imgid")
    with pytest.raises(UserError, match="imported.image_ids_sha256"):
        import_bottom_up_tsv([path], own_demo, out, "cocoid")


def test_a_changed_file_of_the_same_name_in_another_folder_is_refused(demo: Path, tmp_path: Path) -> None:
    lines = tsv(demo, tmp_path / "x.tsv").read_text().splitlines(keepends=True)
    parts = [tmp_path / "a" / "p.tsv", tmp_path / "b" / "p.tsv"]
    for path, mine in zip(parts, (lines[:30], lines[30:]), strict=True):
        path.parent.mkdir()
        path.write_text("".join(mine))
    import_bottom_up_tsv(parts, demo, tmp_path / "f" / "demo_x.h5")
    parts[0].write_text("".join([*lines[1:30], lines[0]]))
    with pytest.raises(UserError, match="imported.files_sha256"):
        import_bottom_up_tsv(parts, demo, tmp_path / "f" / "demo_x.h5")


def test_boxes_outside_the_image_are_clipped_or_refused(demo: Path, tmp_path: Path) -> None:
    path = tsv(demo, tmp_path / "x.tsv")
    path.write_text(path.read_text().replace("\t128\t", "\t9\t"))
    cache = verify_cache(import_bottom_up_tsv([path], demo, tmp_path / "f" / "demo_x.h5"))
    assert np.concatenate([shard["boxes"].map_to_memory() for shard in cache.shard_arrays])[:, 2].max() == 9
    path.write_text(path.read_text().replace("\t9\t", "\t6\t"))
    with pytest.raises(UserError, match="does not overlap the image, which is 6 x 96"):
        import_bottom_up_tsv([path], demo, tmp_path / "g" / "demo_x.h5")
