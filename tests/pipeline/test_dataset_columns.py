from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset import columns
from vse.pipeline.dataset import dataset as module
from vse.pipeline.dataset.columns import IdIndex, ImageColumns, select_images
from vse.pipeline.dataset.dataset import SPLITS, Dataset, load_dataset_file, parquet_copy_path

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9).filter(lambda text: bool(text.strip()))


@st.composite
def phrases(draw: st.DrawFn, n_tokens: int) -> dict[str, Any]:
    """Draw a phrase of a caption with ``n_tokens`` tokens; optional fields may be missing or empty."""
    first = draw(st.integers(0, n_tokens - 1))
    box = st.tuples(st.integers(-9, 9), st.floats(-9, 9), st.integers(10, 90), st.floats(10, 90)).map(list)
    optional = {"chain": TEXT, "types": st.lists(TEXT, max_size=2), "boxes": st.lists(box, max_size=2)}
    span = {"first_token": first, "n_tokens": draw(st.integers(1, n_tokens - first))}
    return span | draw(st.fixed_dictionaries({}, optional=optional))


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a ``dataset.json`` with any number of captions of any words, with or without phrases."""
    images, sentid = [], 0
    for imgid in draw(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5, unique=True)):
        sentences = []
        for _ in range(draw(st.integers(0, 3))):
            tokens = draw(st.lists(TEXT, min_size=1, max_size=4))
            sentence = {"sentid": sentid, "imgid": imgid, "raw": draw(TEXT), "tokens": tokens}
            some = draw(st.none() | st.lists(phrases(len(tokens)), max_size=3))
            sentences.append(sentence if some is None else {**sentence, "phrases": some})
            sentid += 1
        image = {"imgid": imgid, "filename": f"é{imgid}.jpg", "split": draw(st.sampled_from(SPLITS)), "sentences": sentences}
        images.append(image | ({"cocoid": imgid + 1} if draw(st.booleans()) else {}))
    return {"dataset": "made_up", "images": images, "pictures": draw(st.booleans())}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every ``dataset.json`` as a large one."""
    monkeypatch.setattr(module, "MIN_LARGE_JSON_BYTES", 0)


def load_twice(path: Path) -> Dataset:
    """Load a data set from its copy in columns, which the first call writes."""
    load_dataset_file(path)
    return load_dataset_file(path)


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "dataset.json"
    path.write_text(json.dumps(content))
    return path


def small(text: str = "a dog", imgid: int = 1) -> dict[str, Any]:
    sentence = {"sentid": 7, "imgid": imgid, "raw": text, "tokens": text.split()}
    return {"dataset": "made_up", "images": [{"imgid": imgid, "filename": "1.jpg", "split": "test", "sentences": [sentence]}]}


@given(content=contents())
def test_columns_hold_what_was_parsed(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("data"), content)
    parsed = load_dataset_file(path)
    assert not parquet_copy_path(path).exists()  # it is small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_LARGE_JSON_BYTES", 0)
        patch.setattr(columns, "IMAGES_PER_GROUP", 2)
        again = load_twice(path)
    images = again.images
    assert isinstance(images, ImageColumns)
    assert again == parsed
    assert tuple(images) == tuple(parsed.images) == tuple(images[index] for index in range(len(images)))
    assert (images[-1], tuple(images[1:])) == (parsed.images[-1], tuple(parsed.images[1:]))
    assert {name: tuple(some) for name, some in again.splits.items()} == parsed.splits
    keep = np.arange(len(images)) % 2 == 0
    for values in (columns.caption_texts, columns.count_words, columns.caption_languages):
        assert values(select_images(parsed.images, keep)) == values(select_images(images, keep))
    for arrays in (columns.image_ids, columns.caption_ids, columns.count_captions_per_image, columns.coco_ids):
        for some, same in ((parsed.images, images), (select_images(parsed.images, keep), select_images(images, keep))):
            np.testing.assert_array_equal(arrays(some), arrays(same), strict=True)
    assert tuple(select_images(images, keep)) == parsed.images[::2]
    sentids = [caption.sentid for image in parsed.images for caption in image.captions]
    for dataset in (parsed, again):
        rows, indices = dataset.find_caption_rows(np.asarray([*sentids, -1]))
        places = list(zip(rows.tolist(), indices.tolist(), strict=True))
        assert places.pop()[0] == -1
        assert [dataset.images[row].captions[index].sentid for row, index in places] == sentids
        assert [dataset.find_image(image.imgid) for image in parsed.images] == list(parsed.images)
        assert dataset.find_image(-1) is None or any(image.imgid == -1 for image in parsed.images)


@pytest.mark.parametrize("name", ["photo.jpg", "0e001.jpg"])  # the second name looks like a large number
def test_equal_words_are_one_object_in_memory(name: str, tmp_path: Path) -> None:
    content = small("a gull and a gull")
    content["images"][0]["filename"] = name
    tokens = load_dataset_file(written(tmp_path, content)).images[0].captions[0].tokens
    assert tokens[1] is tokens[4]


@pytest.mark.usefixtures("large")
def test_a_large_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, small())
    first = load_dataset_file(path)
    monkeypatch.setattr(module, "parse_json", None)
    assert load_dataset_file(path) == first


@pytest.mark.usefixtures("large")
def test_columns_of_another_file_are_written_again(tmp_path: Path) -> None:
    load_dataset_file(written(tmp_path, small()))
    path = written(tmp_path, small("a cat"))
    for _ in range(2):
        assert load_dataset_file(path).images[0].captions[0].raw == "a cat"
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path, moved, ignore=shutil.ignore_patterns("elsewhere"))
    assert load_dataset_file(moved / "dataset.json").images[0].captions[0].raw == "a cat"


@pytest.mark.usefixtures("large")
def test_a_file_whose_copy_cannot_be_written_is_parsed_each_time(tmp_path: Path) -> None:
    path = written(tmp_path, small())
    parquet_copy_path(path).mkdir()
    assert load_dataset_file(path) == load_dataset_file(path)
    assert not parquet_copy_path(path).is_file()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, None])
def test_a_file_of_columns_that_was_changed_or_cut_short_is_not_believed(place: float | None, tmp_path: Path) -> None:
    path = written(tmp_path, small(" ".join(f"word{k}" for k in range(3000))))
    first, file = load_dataset_file(path), parquet_copy_path(path)
    content = bytearray(file.read_bytes())
    if place is None:
        del content[len(content) // 2 :]
    else:
        content[int(place * len(content))] ^= 0xFF
    file.write_bytes(content)
    assert load_dataset_file(path) == first


IDS = st.integers(-(2**63), 2**63 - 1)


@given(ids=st.lists(IDS, unique=True, max_size=20), others=st.lists(IDS, max_size=20))
def test_rows_of_ids_are_those_of_a_loop(ids: list[int], others: list[int]) -> None:
    wanted = [*others, *ids[::-1]]
    rows = IdIndex(np.asarray(ids, np.int64)).find_rows(np.asarray(wanted, np.int64))
    assert rows.tolist() == [ids.index(one) if one in ids else -1 for one in wanted]
