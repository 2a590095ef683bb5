"""What the plan of the workflow knows of photographs: which changed since their shard, and which it had to open."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_FEATURE
from vse.features.cache.shards import shard_path
from vse.features.extraction import extract_shards
from vse.features.extractors.cnn import CnnExtractor
from vse.features.up_to_date import hash_changed_photos
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import write_dataset_file
from vse.pipeline.errors import UserError

opened: list[str] = []


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and "/images/" in str(arguments[0]):
        opened.append(Path(str(arguments[0])).name)


sys.addaudithook(note_opened)


@pytest.fixture
def made(own_cache: Path) -> Path:
    """A cache whose shards are newer than the photographs, as after an extraction."""
    wait_for_the_next_tick(own_cache)
    touch(*own_cache.with_suffix(".shards").glob("shard-*.h5"))
    wait_for_the_next_tick(own_cache)
    return own_cache


def dataset(cache: Path) -> Path:
    return cache.parent.parent / "data" / "dataset.json"


def photos(cache: Path) -> list[Path]:
    data = load_dataset_file(dataset(cache))
    return [data.image_path(image) for image in data.images]


def plan(cache: Path, splits: list[str] | None = None) -> tuple[list[str], list[str]]:
    """What is told of each of the three shards, and the names of the photographs that were opened for it."""
    opened.clear()
    told = [hash_changed_photos(dataset(cache), cache, k, 3, splits) for k in range(3)]
    return told, sorted(opened)


def wait_for_the_next_tick(cache: Path) -> None:
    """Files that are written from now on have a later time than all that exist."""
    probe = cache.with_name("probe")
    probe.touch()
    last = max(file.stat().st_ctime_ns for file in [*photos(cache), *cache.with_suffix(".shards").iterdir()])
    while probe.stat().st_ctime_ns <= last:
        os.utime(probe)


def extract_again(cache: Path, shard: int) -> None:
    """As the workflow does it: without the old shard and its record."""
    for suffix in (".h5", ".json"):
        shard_path(cache, shard, 3).with_suffix(suffix).unlink()
    extract_shards(dataset(cache), CnnExtractor(TINY_FEATURE), cache, 3, shard)
    wait_for_the_next_tick(cache)


def touch(*files: Path) -> None:
    for file in files:
        os.utime(file)


def test_before_and_after_an_extraction_no_photograph_is_opened(made: Path) -> None:
    assert plan(made) == (["", "", ""], [])
    for record in made.with_suffix(".shards").glob("shard-*.json"):
        record.unlink()
    touch(*photos(made))
    assert plan(made) == (["", "", ""], [])


def test_photographs_that_were_copied_after_the_extraction_are_opened_once(own_cache: Path) -> None:
    assert plan(own_cache) == (["", "", ""], sorted(photo.name for photo in photos(own_cache)))
    assert plan(own_cache) == (["", "", ""], [])


def test_a_touched_photograph_is_opened_once(made: Path) -> None:
    first = photos(made)[0]
    touch(first)
    assert plan(made) == (["", "", ""], [first.name])
    assert plan(made) == (["", "", ""], [])
    touch(first)
    assert plan(made) == (["", "", ""], [first.name])


@pytest.mark.parametrize("old_time", [False, True])
def test_another_photograph_makes_its_shard_again_and_only_once(made: Path, old_time: bool) -> None:
    first, last = photos(made)[0], photos(made)[-1]
    (shutil.copy2 if old_time else shutil.copyfile)(first, last)
    told, read = plan(made)
    assert (told[:2], bool(told[2]), read) == (["", ""], True, [last.name])
    assert plan(made) == (told, []), "until the shard is made"
    extract_again(made, 2)
    assert plan(made) == (told, []), "the same after it, so that it is not made for ever"
    shutil.copyfile(photos(made)[1], last)
    once_more = plan(made)[0]
    assert once_more[:2] == ["", ""]
    assert once_more[2] not in ("", told[2])


def test_a_photograph_that_is_put_back_leaves_the_shard_as_it_is(made: Path, tmp_path: Path) -> None:
    first = photos(made)[0]
    shutil.copyfile(first, tmp_path / "kept")
    shutil.copyfile(photos(made)[1], first)
    told = plan(made)[0]
    shutil.copyfile(tmp_path / "kept", first)
    assert plan(made) == (told, [first.name])
    extract_again(made, 0)
    assert plan(made) == (told, [])


def test_a_missing_photograph_makes_its_shard_again(made: Path) -> None:
    photos(made)[0].unlink()
    told = plan(made)[0]
    assert told[0]
    assert told[1:] == ["", ""]
    assert plan(made)[0] == told
    dataset(made).unlink()
    assert plan(made)[0] == told, "what is known without the data set"


def test_only_photographs_of_the_splits_count(made: Path) -> None:
    data = load_dataset_file(dataset(made))
    ids = {image.imgid: image.split for image in data.images}
    shutil.copyfile(photos(made)[-1], photos(made)[0])
    assert ids[data.images[0].imgid] == "train"
    assert plan(made, ["val", "test"]) == (["", "", ""], [])
    assert plan(made)[0][0]


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n no more", b"\0" * 200])
def test_a_damaged_record_is_written_again(made: Path, content: bytes) -> None:
    first = photos(made)[0]
    touch(first)
    plan(made)
    (record,) = made.with_suffix(".shards").glob("photos-*.h5")
    whole = record.read_bytes()
    record.write_bytes(content or whole[: len(whole) // 2])
    assert plan(made) == (["", "", ""], [first.name])
    assert plan(made) == (["", "", ""], [])


def test_a_split_that_the_data_set_lacks_is_named(made: Path) -> None:
    with pytest.raises(UserError, match="no images in split 'restval'"):
        plan(made, ["restval"])


def test_a_data_set_without_photographs_is_refused(made: Path) -> None:
    content = json.loads(dataset(made).read_text())
    write_dataset_file(dataset(made), {**content, "pictures": False})
    with pytest.raises(UserError, match="has no photographs, so .* cannot be extracted"):
        hash_changed_photos(dataset(made), made, 0, 2)
