"""Tables as spreadsheet programs save them: encodings, headers, columns, and names of photographs in other spellings."""

from __future__ import annotations

import codecs
import shutil
import unicodedata
from pathlib import Path

import pandas as pd
import pytest

import vse
from tests.conftest import succeeds
from tests.features.conftest import Fails
from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.imports.photos import PhotoNameIndex
from vse.pipeline.imports.rows import BadRow
from vse.pipeline.imports.spreadsheets import detect_encoding

GERMAN = {
    "Küste bei Ebbe.JPG": "Zwei Mädchen laufen über den großen Strand.",
    "Bär im Zoo.JPG": "Ein Bär öffnet die Tür – „schön“, sagt der Wärter.",
    "straße 1.jpg": "Ein Straßenmusiker spielt für 5 € Geige.",
    "wald.jpg": "Drei Rehe äsen früh am Waldrand.",
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "mac_roman")


@pytest.fixture
def photos(demo: Path, tmp_path: Path) -> Path:
    """Photographs whose names have umlauts in the decomposed form of old Macs, blanks and suffixes in capitals."""
    dataset, folder = load_dataset_file(demo), tmp_path / "Fotos"
    folder.mkdir()
    for image, name in zip(dataset.images, GERMAN, strict=False):
        shutil.copy(dataset.image_path(image), folder / unicodedata.normalize("NFD", name))
    return folder


def write_table(path: Path, encoding: str, rows: list[list[str]], delimiter: str = ";", end: str = "\r\n") -> Path:
    path.write_bytes("".join(delimiter.join(row) + end for row in rows).encode(encoding))
    return path


def imported(photos: Path, table: Path, *options: object) -> Dataset:
    out = table.with_suffix("") / "data"
    succeeds(main, "import", photos, "--captions", table, "--out", out, *options)
    return load_dataset_file(out / "dataset.json")


def captions_by_photo(dataset: Dataset) -> dict[str, list[str]]:
    return {
        unicodedata.normalize("NFC", Path(image.file).name): [caption.raw for caption in image.captions]
        for image in dataset.images
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_german_spreadsheet_is_imported_at_the_first_attempt_without_a_wrong_letter(
    encoding: str, photos: Path, tmp_path: Path
) -> None:
    texts = {name: text if encoding != "mac_roman" else text.replace("€", "Euro") for name, text in GERMAN.items()}
    rows = [["Bild", "Jahr", "Beschreibung"], *([name, "2019", text] for name, text in texts.items())]
    dataset = imported(photos, write_table(tmp_path / "captions.csv", encoding, rows))
    assert captions_by_photo(dataset) == {name: [text] for name, text in texts.items()}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "text", ["Zwei Mädchen über der Straße.\n", "Un garçon à côté d'une forêt, l'été.\n", "A dog – it’s “big” – café.\n"]
)
def test_an_encoding_is_detected_by_the_text(encoding: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    content = (codecs.BOM_UTF16_LE if encoding == "utf-16" else b"") + (text * 20).encode(
        "utf-16-le" if encoding == "utf-16" else encoding
    )
    file.write_bytes(content)
    assert content.decode(detect_encoding(file)) == text * 20


def test_one_wrong_byte_does_not_make_utf_8_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes("file;caption\na.jpg;Zwei Mädchen über der Straße\n".encode() + b"b.jpg;caf\xe9\n")
    assert detect_encoding(file) == "utf-8-sig"


def test_several_columns_of_captions_and_no_header_are_found(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[str(k), f"C:\\Fotos\\{name}", text, "ein zweiter Satz"] for k, (name, text) in enumerate(GERMAN.items())]
    dataset = imported(photos, write_table(tmp_path / "captions.csv", "cp1252", rows))
    assert captions_by_photo(dataset) == {name: [text, "ein zweiter Satz"] for name, text in GERMAN.items()}
    lines = capsys.readouterr().err.splitlines()
    start = next(k for k, line in enumerate(lines) if "cp1252, cells separated by semicolons, without a header" in line)
    assert lines[start + 1 : start + 3] == ["photographs: column 'column 2'", "captions: column 'column 3', column 'column 4'"]
    examples = [line.partition(" | ")[2][:10] for line in lines[start + 3 : start + 6]]
    assert examples == ["Zwei Mädch", "Ein Bär öf", "Ein Straße"]


def test_a_spreadsheet_of_excel_is_read(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "captions.xlsx"
    pd.DataFrame({"Foto": list(GERMAN), "Text": list(GERMAN.values())}).to_excel(table, index=False)
    assert captions_by_photo(imported(photos, table)) == {name: [text] for name, text in GERMAN.items()}


def test_options_overrule_what_was_detected(photos: Path, tmp_path: Path, fails: Fails) -> None:
    rows = [["file", "note", "caption"], *([name, text, "ein anderer Satz"] for name, text in GERMAN.items())]
    table = write_table(tmp_path / "captions.csv", "cp1252", rows)
    dataset = imported(photos, table, "--column", "caption=note", "--encoding", "cp1252")
    assert captions_by_photo(dataset) == {name: [text] for name, text in GERMAN.items()}
    command = ["import", photos, "--captions", table, "--out", tmp_path / "other", "--encoding"]
    assert "--encoding klingon: no such encoding" in fails(main, *command, "klingon")
    message = fails(main, *command, "utf-8")
    assert "name another one with --encoding" in message
    assert "--skip-bad" not in message


NAMES = {
    "the name itself": "Küste bei Ebbe.JPG",
    "with a folder": "archiv/2019/Küste bei Ebbe.JPG",
    "with a folder of Windows": "D:\\archiv\\Küste bei Ebbe.JPG",
    "in lower case": "küste bei ebbe.jpg",
    "without a suffix": "Küste bei Ebbe",
    "of an address": "K%C3%BCste%20bei%20Ebbe.JPG",
    "composed": unicodedata.normalize("NFC", "Küste bei Ebbe.JPG"),
    "decomposed": unicodedata.normalize("NFD", "Küste bei Ebbe.JPG"),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_photograph_is_found_by_other_spellings_of_its_name(name: str, photos: Path) -> None:
    assert unicodedata.normalize("NFC", PhotoNameIndex(photos).find_photo(name)) == "Küste bei Ebbe.JPG"


def test_a_name_that_fits_several_photographs_or_none_is_said(photos: Path, tmp_path: Path, fails: Fails) -> None:
    (photos / "2020").mkdir()
    shutil.copy(photos / "wald.jpg", photos / "2020" / "Wald.jpg")
    names = PhotoNameIndex(photos)
    assert names.find_photo("2020/wald") == "2020/Wald.jpg"
    with pytest.raises(BadRow, match="fits 2 photographs, such as 2020/Wald.jpg and wald.jpg"):
        names.find_photo("WALD")
    table = write_table(tmp_path / "captions.csv", "cp1252", [["file", "caption"], ["Küste bei Flut.jpg", "Ein Meer."]])
    message = fails(main, "import", photos, "--captions", table, "--out", tmp_path / "data")
    assert "the nearest names are" in message
    assert unicodedata.normalize("NFC", message).count("Küste bei Ebbe.JPG") == 1


def test_the_python_interface_imports_the_same(photos: Path, tmp_path: Path) -> None:
    rows = [["Bild", "Text"], *([name, text] for name, text in GERMAN.items())]
    table = write_table(tmp_path / "captions.csv", "cp1252", rows)
    found = vse.import_data(photos, tmp_path / "data", captions=table)
    assert captions_by_photo(load_dataset_file(found.dataset.path)) == {name: [text] for name, text in GERMAN.items()}
