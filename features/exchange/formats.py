"""The formats that ``vse-data import`` reads, and which of them lies in a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vse.features.exchange.clip_retrieval import import_clip, is_clip_folder
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.imports.hugging_face import import_hugging_face, is_saved_dataset
from vse.pipeline.imports.rows import ImportSettings, check_import_out
from vse.pipeline.imports.tables import find_table, import_table
from vse.pipeline.imports.webdataset import find_archives, import_webdataset

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Import:
    """What is imported: the ``sources``, a table of captions and a folder of photos beside them, and where caches go.

    ``key_until`` is where the key of a WebDataset member ends; None is the first dot.
    """

    sources: Sequence[Path]
    settings: ImportSettings
    captions: Path | None = None
    images: Path | None = None
    out_features: Path = field(default=Path("features"))
    key_until: str | None = None

    @property
    def source(self) -> Path:
        """The only source; :class:`UserError` if there are several."""
        if len(self.sources) > 1:
            raise UserError(f"{self.sources[1]}: of this format one source is imported at a time")
        return self.sources[0]


@dataclass(frozen=True)
class ImportFormat:
    """A format: whether sources look like it, the import, which returns what it wrote, and which options it reads."""

    fits: Callable[[Import], bool]
    run: Callable[[Import], Sequence[Path]]
    reads: tuple[str, ...] = ()


def _table(job: Import) -> Sequence[Path]:
    table = job.captions or find_table(job.source)
    if table is None:
        raise UserError(f"{job.source}: no captions.csv or the like in it; name the table with --captions FILE")
    return [import_table(job.source, table, job.settings, job.images)]


FORMATS: Mapping[str, ImportFormat] = {
    "table": ImportFormat(
        lambda job: job.captions is not None or find_table(job.sources[0]) is not None,
        _table,
        reads=("captions", "images", "quoting"),
    ),
    "clip-retrieval": ImportFormat(
        lambda job: is_clip_folder(job.sources[0]),
        lambda job: import_clip(job.source, job.settings, job.out_features, job.images),
        reads=("images", "quoting"),
    ),
    "hugging-face": ImportFormat(
        lambda job: is_saved_dataset(job.sources[0]),
        lambda job: [import_hugging_face(job.source, job.settings, job.images)],
        reads=("images",),
    ),
    "webdataset": ImportFormat(
        lambda job: bool(find_archives(job.sources[0])),
        lambda job: [import_webdataset(job.sources, job.settings, job.key_until or "first-dot")],
        reads=("key_until",),
    ),
}


def import_data(job: Import, format_name: str | None = None) -> Sequence[Path]:
    """Import data of the named format, or of the first one that they look like; returns what was written."""
    if format_name is not None and format_name not in FORMATS:
        raise UserError(f"--format {format_name}: unknown{did_you_mean(format_name, FORMATS)}")
    for source in job.sources:
        if not source.exists() and format_name != "hugging-face":
            hint = "; --format hugging-face loads a data set of that name" if _HUB_NAME.fullmatch(str(source)) else ""
            raise UserError(f"{source}: no such file or folder{hint}")
    name = format_name or next((name for name, each in FORMATS.items() if each.fits(job)), None)
    if name is None:
        raise UserError(
            f"{job.sources[0]}: holds nothing that can be imported: neither captions.csv or metadata.jsonl and the like (else "
            "name the table with --captions), nor tar archives, vectors of clip-retrieval, or a saved Hugging Face data set"
        )
    options = {"captions": job.captions, "images": job.images, "key-until": job.key_until, "quoting": job.settings.quoting}
    for option, given in options.items():
        if given is not None and option.replace("-", "_") not in FORMATS[name].reads:
            raise UserError(f"--{option}: not read of the format {name}; leave it out")
    check_import_out(job.settings)
    return FORMATS[name].run(job)
