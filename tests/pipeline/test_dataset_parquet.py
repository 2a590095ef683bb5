"""A data set in ``dataset.parquet``: the same content as in ``dataset.json``, and one line for a file that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given

from tests.conftest import succeeds
from tests.pipeline.conftest import Fails
from tests.pipeline.test_dataset_columns import contents
from vse.cli import data_main as main
from vse.pipeline.dataset.columns import build_tables
from vse.pipeline.dataset.dataset import find_dataset_file, load_dataset_file, read_dataset_head
from vse.pipeline.dataset.file_formats import choose_dataset_format, convert_dataset
from vse.pipeline.dataset.identity import build_identity
from vse.pipeline.dataset.images import Phrase
from vse.pipeline.dataset.preparation import read_dataset_content

Row = dict[str, Any]


def convert(folder: Path, content: dict[str, Any]) -> tuple[Path, Path]:
    """Write a data set in both forms."""
    path = folder / "json" / "dataset.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    return path, convert_dataset(path, folder / "parquet")


@given(content=contents())
def test_both_forms_hold_the_same_data_set(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    first, parquet = convert(folder, content)
    assert find_dataset_file(folder / "parquet") == parquet
    ours, theirs = load_dataset_file(first), load_dataset_file(parquet)
    assert tuple(theirs.images) == tuple(ours.images)
    assert {name: tuple(some) for name, some in theirs.splits.items()} == ours.splits
    assert (theirs.name, theirs.has_image_files, theirs.tokeniser) == (ours.name, ours.has_image_files, ours.tokeniser)
    assert build_identity(theirs.images).checksums == build_identity(ours.images).checksums
    assert read_dataset_head(parquet) == read_dataset_head(first)
    again = convert_dataset(parquet, folder / "again")
    assert load_dataset_file(again).images == ours.images
    assert read_dataset_content(again) == read_dataset_content(parquet)


def test_a_data_set_is_not_rewritten_and_has_one_form(tmp_path: Path, fails: Fails) -> None:
    path, parquet = convert(tmp_path, read_content_of(rows()))
    before = parquet.stat().st_mtime_ns
    succeeds(main, "convert", path, "--out", parquet.parent)
    assert parquet.stat().st_mtime_ns == before
    changed = read_content_of(rows())
    changed["images"][0]["sentences"][0]["raw"] = "another gull"
    path.write_text(json.dumps(changed))
    assert "already exists with other content" in fails(main, "convert", path, "--out", parquet.parent)
    succeeds(main, "convert", path, "--out", parquet.parent, "--force")
    assert load_dataset_file(parquet).images[0].captions[0].raw == "another gull"
    assert "a data set has one form" in fails(main, "convert", path, "--out", path.parent)
    succeeds(main, "check", parquet)
    assert [choose_dataset_format(n_pairs) for n_pairs in (10**6, 10**6 + 1)] == ["json", "parquet"]


def rows() -> list[Row]:
    return [
        {
            "imgid": k,
            "filename": f"a/{k}.jpg",
            "split": "train",
            "cocoid": None,
            "sentences": [{"sentid": k, "raw": f"gull {k}", "tokens": ["gull", str(k)], "language": None}],
        }
        for k in range(2)
    ]


def read_content_of(some: list[Row]) -> dict[str, Any]:
    images = [{**row, "sentences": [{**s, "language": s["language"] or ""} for s in row["sentences"]]} for row in some]
    return {"dataset": "gulls", "pictures": False, "images": images}


def write(path: Path, some: list[Row], head: object = {"dataset": "gulls", "pictures": False}) -> Path:
    """Write rows as another program might, with types that pyarrow infers."""
    table = pyarrow.Table.from_pylist(some)
    pyarrow.parquet.write_table(table.replace_schema_metadata({"vse-dataset": json.dumps(head)}), path)
    return path


def change(**values: object) -> Callable[[Row], None]:
    return lambda row: row.update(values)


def change_caption(**values: object) -> Callable[[Row], None]:
    return lambda row: row["sentences"][0].update(values)


def drop_column(name: str) -> Callable[[Row], None]:
    return lambda row: row.pop(name)


PHRASE: Row = {"first_token": 0, "n_tokens": 2, "chain": None, "types": ["animals"], "boxes": [[0.0, 0.0, 9.0, 9.5]]}


def add_phrase(**values: object) -> Callable[[Row], None]:
    """Return a function that adds two phrases to each caption. Those of image 0 have ``values``."""
    return lambda row: row["sentences"][0].update(phrases=[PHRASE, PHRASE if row["imgid"] else {**PHRASE, **values}])


FAULTS: dict[str, tuple[Callable[[Row], Any], str]] = {
    "a text as id": (change(imgid="one"), "the column imgid has the type string; it must be int64"),
    "a fraction as id": (change(imgid=0.5), "the column imgid has the type double"),
    "no split": (drop_column("split"), "no column 'split'"),
    "captions that are texts": (change(sentences=["gull"]), "the column sentences"),
    "no tokens": (lambda row: row["sentences"][0].pop("tokens"), "the sentences have no field 'tokens'"),
    "tokens in a text": (change_caption(tokens="gull"), "the column tokens has the type string"),
    "a null file": (lambda row: row["imgid"] or row.update(filename=None), "the column filename has a null value"),
    "a null caption": (lambda row: row["imgid"] or row["sentences"][0].update(raw=None), "caption 0: its raw is null"),
    "a null token": (lambda row: row["imgid"] or row["sentences"][0].update(tokens=["a", None]), "a token is null"),
    "an id twice": (change(imgid=7), "duplicate imgid 7"),
    "a caption twice": (change_caption(sentid=7), "duplicate sentid 7"),
    "a file twice": (change(filename="a.jpg"), "duplicate image file a.jpg"),
    "another split": (change(split="tarin"), "image 0: unknown split (did you mean 'train'?"),
    "a file elsewhere": (change(filename="../x.jpg"), "image 0: the file '../x.jpg' is not a path inside the images folder"),
    "a blank caption": (change_caption(raw=" \n"), "caption 0 is empty"),
    "no words": (lambda row: row["imgid"] or row["sentences"][0].update(tokens=[]), "caption 0 is empty"),
    "another language": (change_caption(language="german!"), "caption 0: 'language' must be a tag"),
    "phrases that are texts": (change_caption(phrases=["a gull"]), "the column phrases"),
    "phrases without a span": (change_caption(phrases=[{"chain": "1"}]), "the phrases have no field 'first_token'"),
    "a null phrase": (
        lambda row: row["sentences"][0].update(phrases=[PHRASE, None]),
        "caption 0: phrase 2: must be an",
    ),
    "a null span": (add_phrase(n_tokens=None), "caption 0: phrase 2: 'n_tokens' must be an integer, not None"),
    "a phrase before the caption": (add_phrase(first_token=-1), "caption 0: phrase 2: 2 tokens from token -1 are not a span"),
    "a phrase after the caption": (add_phrase(first_token=1), "caption 0: phrase 2: 2 tokens from token 1 are not a span"),
    "a phrase of a huge length": (add_phrase(n_tokens=2**63 - 1), "caption 0: phrase 2: 9223372036854775807 tokens"),
    "a phrase far away": (add_phrase(first_token=2**63 - 1), "caption 0: phrase 2: 2 tokens from token 9223372036854775807"),
    "phrases that are null": (change_caption(phrases=[None]), "caption 0: phrase 1: must be an object"),
    "a phrase of no tokens": (add_phrase(n_tokens=0), "caption 0: phrase 2: 0 tokens from token 0 are not a span"),
    "a null type": (add_phrase(types=["people", None]), "caption 0: phrase 2: 'types' must be a list of strings"),
    "three numbers": (
        add_phrase(boxes=[[0.0, 1.0, 2.0]]),
        "caption 0: phrase 2: the box [0.0, 1.0, 2.0] must be",
    ),
    "a box without an end": (add_phrase(boxes=[[0.0, 0.0, 1.0, float("inf")]]), "must be four numbers"),
    "a box without height": (add_phrase(boxes=[[0.0, 5.0, 9.0, 5.0]]), "caption 0: phrase 2: the box [0.0, 5.0, 9.0, 5.0] is"),
    "boxes of integers": (change_caption(phrases=[{**PHRASE, "boxes": [[0, 0, 9, 9]]}]), "boxes has the type int64"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_value_is_one_line(fault: str, tmp_path: Path, fails: Fails) -> None:
    spoil, message = FAULTS[fault]
    some = rows()
    for row in some:
        spoil(row)
    line = fails(main, "check", write(tmp_path / "dataset.parquet", some))
    assert message in line
    assert "dataset.parquet" in line


@pytest.mark.parametrize("head", [None, [], {}, {"dataset": "../x"}, {"dataset": "x", "tokeniser": "none"}])
def test_wrong_metadata_are_one_line(head: object, tmp_path: Path, fails: Fails) -> None:
    assert "dataset.parquet" in fails(main, "check", write(tmp_path / "dataset.parquet", rows(), head))


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "dataset.parquet", [{name: row[name] for name in row if name != "cocoid"} for row in rows()])
    images = load_dataset_file(path).images
    assert [(image.imgid, image.file, image.captions[0].tokens) for image in images] == [
        (0, "a/0.jpg", ("gull", "0")),
        (1, "a/1.jpg", ("gull", "1")),
    ]


@pytest.mark.parametrize("some", [[], None])
def test_captions_may_have_empty_lists_of_phrases(some: list[Any] | None, tmp_path: Path) -> None:
    first, second = rows()
    first["sentences"][0]["phrases"], second["sentences"][0]["phrases"] = [], some
    images = load_dataset_file(write(tmp_path / "dataset.parquet", [first, second])).images
    assert [image.captions[0].phrases for image in images] == [(), ()]
    assert images[0].captions[0].phrases == ()


def test_a_file_without_the_column_of_phrases_is_not_rewritten(tmp_path: Path) -> None:
    path, parquet = convert(tmp_path, read_content_of(rows()))
    earlier = pyarrow.parquet.read_table(parquet)
    sentences = earlier.schema.field("sentences")
    caption = pyarrow.struct([field for field in sentences.type.value_type if field.name != "phrases"])
    lists = pyarrow.list_(pyarrow.field("element", caption, nullable=False))
    schema = earlier.schema.set(earlier.schema.get_field_index("sentences"), sentences.with_type(lists))
    pyarrow.parquet.write_table(earlier.cast(schema), parquet)
    before = parquet.read_bytes()
    assert convert_dataset(path, parquet.parent) == parquet
    assert parquet.read_bytes() == before


def test_phrases_of_another_program_are_read(tmp_path: Path) -> None:
    spans = [{"first_token": 1, "n_tokens": 1, "note": "a field that no command reads"}]
    first, second = rows()
    first["sentences"][0]["phrases"] = spans
    images = load_dataset_file(write(tmp_path / "dataset.parquet", [first, second])).images
    assert [image.captions[0].phrases for image in images] == [(Phrase(1, 2),), ()]


def test_splits_may_be_categories_that_no_image_has(tmp_path: Path) -> None:
    path = write(
        tmp_path / "dataset.parquet", [{**row, "split": split} for row, split in zip(rows(), ("train", "test"), strict=True)]
    )
    table = pyarrow.parquet.read_table(path)
    splits = pyarrow.DictionaryArray.from_arrays(pyarrow.array([1, 2]), pyarrow.array(["unused", "train", "test"]))
    pyarrow.parquet.write_table(table.set_column(table.schema.names.index("split"), "split", splits), path)
    assert [image.split for image in load_dataset_file(path).images] == ["train", "test"]


@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.98, None])
def test_a_damaged_file_is_one_line_or_a_data_set(place: float | None, tmp_path: Path, fails: Fails) -> None:
    path = tmp_path / "dataset.parquet"
    with path.open("wb") as stream:
        from vse.pipeline.dataset.parquet_io import ParquetColumnsWriter

        words = [f"word{k}" for k in range(3000)]
        some = [row | {"sentences": [{**row["sentences"][0], "tokens": words}]} for row in rows()]
        source = load_dataset_file(write(tmp_path / "other.parquet", some))
        writer = ParquetColumnsWriter(stream)
        for table in build_tables(source.images):
            writer.write(table)
        writer.close({"dataset": "gulls", "pictures": False})
    content = bytearray(path.read_bytes())
    if place is None:
        del content[len(content) // 2 :]
    else:
        content[int(place * len(content))] ^= 0xFF
    path.write_bytes(content)
    assert "dataset.parquet" in fails(main, "check", path)


def test_texts_that_decode_to_gigabytes_are_refused(tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSE_MAX_DECODED_GB", "0.001")
    some = rows()
    for row in some:
        row["sentences"] = [{**row["sentences"][0], "sentid": row["imgid"] * 100 + k, "raw": "a" * 10**5} for k in range(50)]
    assert "decode to" in fails(main, "check", write(tmp_path / "dataset.parquet", some))


def test_build_tables_of_no_images_is_empty() -> None:
    assert not list(build_tables([]))
