"""Add captions in another language to a data set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.columns import count_languages
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.languages import check_language_tag
from vse.pipeline.dataset.preparation import (
    check_dataset_name,
    check_dataset_output,
    load_and_check_dataset,
    read_dataset_content,
    write_json_dataset,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json
from vse.pipeline.imports.photos import list_lookup_names
from vse.pipeline.imports.rows import BadRow, BadRowList, ImportSettings, flatten_captions
from vse.pipeline.imports.spreadsheets import detect_encoding
from vse.pipeline.imports.tables import build_imported_row, read_table_rows

log = logging.getLogger(__name__)


def add_captions(
    dataset_file: Path,
    captions_file: Path,
    language: str,
    own_language: str = "en",
    out: Path | None = None,
    name: str | None = None,
) -> Path:
    """Write a copy of a data set with further captions in ``language``, and return the path of its ``dataset.json``.

    ``captions_file`` is a JSON object from the names of image files to captions, or a table (CSV, JSON lines, parquet, xlsx)
    with a row for each image or caption. Captions of the data set without a language get ``own_language``. The copy has
    the same images, ids and splits, and reads the same caches of image features.

    The copy is written to ``out``; None stands for ``data/f8k_de`` for German captions of ``data/f8k``. ``name`` is the name
    of the copy; None stands for the name of the folder. If the data set has the default tokeniser, which reads only the
    letters a to z and digits, new captions are split into words by ``unicode_words``.

    Rows of unknown images are left out with a warning. Raises UserError if no row names an image of the data set, if a
    caption has no word, or if the data set already has captions in this language.
    """
    check_language_tag(language, "--language")
    check_language_tag(own_language, "--own-language")
    dataset = load_and_check_dataset(dataset_file)
    if dataset.fold:
        raise UserError(f"{dataset_file}: is a fold; add captions to {dataset.parent!r}, and split the result into folds")
    if language in count_languages(dataset.images):
        raise UserError(f"{dataset_file}: has captions in the language {language!r} already")
    out = out or dataset_file.absolute().parent.with_name(f"{dataset_file.absolute().parent.name}_{language}")
    name = name or out.resolve().name
    check_dataset_name(name)
    if name == dataset.name:
        raise UserError(f"{out}: the copy needs another name than its data set {name!r}; give another --out or --name")
    check_dataset_output(out, name, [dataset_file, captions_file])
    found = _read_captions(captions_file, dataset)
    tokeniser = IMPORT_TOKENISER if dataset.tokeniser == DEFAULT_TOKENISER else dataset.tokeniser
    tokenise, tokenise_own = find_tokeniser(tokeniser, dataset_file), find_tokeniser(dataset.tokeniser, dataset_file)
    content = read_dataset_content(dataset_file)
    next_id = 1 + max((caption.sentid for image in dataset.images for caption in image.captions), default=-1)
    images = []
    for entry in content["images"]:
        own: list[dict[str, Any]] = [
            {"tokens": tokenise_own(sentence["raw"]), **sentence, "language": sentence.get("language", own_language)}
            for sentence in entry.get("sentences", ())
        ]
        for text in found.get(entry["imgid"], ()):
            more = {"sentid": next_id, "imgid": entry["imgid"], "raw": text, "tokens": tokenise(text), "language": language}
            own.append(more)
            next_id += 1
        images.append({**entry, "sentences": own, "sentids": [sentence["sentid"] for sentence in own]})
    about = {"dataset": name, "parent": dataset.parent or dataset.name, "tokeniser": tokeniser}
    pictures = dataset_file.parent / "images" if dataset.has_image_files else None
    written = write_json_dataset({**content, **about, "images": images}, out, pictures, [dataset_file, captions_file])
    n_captions = sum(map(len, found.values()))
    log.info("%s: %d captions in %s for %d of %d images", written, n_captions, language, len(found), len(images))
    return written


def _read_captions(file: Path, dataset: Dataset) -> dict[int, list[str]]:
    """Return the captions in a file by image id. Raises UserError if a row is invalid, or if no row names an image."""
    imgids_by_key: dict[str, set[int]] = {}
    for image in dataset.images:
        for key in list_lookup_names(image.file):
            imgids_by_key.setdefault(key, set()).add(image.imgid)
    tokenise = find_tokeniser(IMPORT_TOKENISER, file)
    bad_rows, found, unknown = BadRowList(skip_bad=False), dict[int, list[str]](), list[str]()
    n_rows = 0
    for place, name, texts in _read_rows(file, dataset, bad_rows):
        n_rows += 1
        matches = next((imgids_by_key[key] for key in list_lookup_names(name) if key in imgids_by_key), set())
        if len(matches) > 1:
            bad_rows.add(place, f"{name!r} fits {len(matches)} images; give the folder, too")
        elif not matches:
            unknown.append(name)
        elif empty := [text for text in texts if not tokenise(text)]:
            bad_rows.add(place, f"the caption {empty[0][:50]!r} of {name} has no word")
        else:
            found.setdefault(min(matches), []).extend(text.strip() for text in texts)
    if bad_rows.places_and_faults:
        place, reason = bad_rows.places_and_faults[0]
        raise UserError(f"{place}: {reason} ({len(bad_rows.places_and_faults)} of {n_rows} rows are wrong)")
    if not found:
        raise UserError(f"{file}: none of its {n_rows} rows has the name of an image of {dataset.path}")
    if unknown:
        log.warning("%s: %d of %d rows are left out, because %s is no image", file, len(unknown), n_rows, unknown[0])
    return found


def _read_rows(file: Path, dataset: Dataset, bad_rows: BadRowList) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield three values for each row: its file and line, the name of its image, and its captions.

    Invalid rows are added to ``bad_rows``. ``dataset`` is the data set to which the captions are added.
    """
    if file.suffix.lower() == ".json":
        content = read_json(file)
        if not isinstance(content, dict) or not content:
            raise UserError(f"{file}: not an object that maps the names of image files to captions")
        for name, captions in content.items():
            try:
                yield f"{file}: {name}", name, flatten_captions([captions])
            except BadRow as reason:
                bad_rows.add(f"{file}: {name}", reason)
        return
    encoding = detect_encoding(file) if file.suffix.lower() in (".csv", ".tsv", ".txt") and file.is_file() else None
    settings = ImportSettings(dataset.name, file.parent, encoding=encoding)
    for place, values in read_table_rows(file, settings, bad_rows.add):
        try:
            row = build_imported_row(place, values)
            yield place, row.file, row.captions
        except BadRow as reason:
            bad_rows.add(place, reason)
