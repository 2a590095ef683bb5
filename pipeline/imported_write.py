"""An imported data set is written, unless something else is there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json
from vse.pipeline.imported_rows import ImportSettings, log
from vse.pipeline.input_files import is_name
from vse.pipeline.outputs import check_out, may_replace_others, text_kind
from vse.pipeline.sources import check_dataset_out, write_dataset

_FAILURES = text_kind("a list of rows that were left out", '{"place": ', within=10)


def check_name(name: str) -> None:
    """:class:`UserError` if ``name`` cannot be that of a data set."""
    if not is_name(name):
        raise UserError(f"{name!r} cannot be the name of a data set, which becomes a part of file names; give another --name")


def check_import_out(settings: ImportSettings) -> None:
    """Check before any work that the folder ``settings.out`` may be written; raises UserError if not."""
    check_dataset_out(settings.out, settings.name)
    check_out(settings.out / "import.failures.jsonl", _FAILURES)


def write_imported_data(content: dict[str, Any], settings: ImportSettings, images: Path | None, inputs: list[Path]) -> Path:
    """Write ``dataset.json``, and a link to the folder of images; returns its path.

    :class:`UserError` if another data set is there.
    """
    check_name(settings.name)
    file = settings.out / "dataset.json"
    if file.exists() and read_json(file) != content and not may_replace_others():
        raise UserError(f"{file} is there and holds something else; move it away, or give another --out or --force")
    counts = Counter(image["split"] for image in content["images"])
    n_captions = sum(len(image["sentences"]) for image in content["images"])
    of_splits = ", ".join(f"{count} {split}" for split, count in counts.items())
    written = write_dataset(content, settings.out, images, inputs)
    log.info("%s: %d images (%s) with %d captions", file, len(content["images"]), of_splits, n_captions)
    return written
