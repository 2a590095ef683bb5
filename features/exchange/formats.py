"""List the formats that ``vse-data import`` reads, detect the format of a source, and import it."""

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
class ImportJob:
    """The sources of an import and its options.

    sources : folders, archives, or the name of a data set on the Hugging Face hub
    settings : options that all formats share
    captions : the table of captions; by default one in the folder
    images : a folder of photos besides the source
    out_features : folder of the caches of imported vectors
    key_until : end of the key in the name of a WebDataset member, ``first-dot`` (the default) or ``last-dot``
    """

    sources: Sequence[Path]
    settings: ImportSettings
    captions: Path | None = None
    images: Path | None = None
    out_features: Path = field(default=Path("features"))
    key_until: str | None = None

    @property
    def source(self) -> Path:
        """The only source. Raises UserError if there are several."""
        if len(self.sources) > 1:
            raise UserError(f"{self.sources[1]}: this format allows only one source per import")
        return self.sources[0]


@dataclass(frozen=True)
class ImportFormat:
    """A format of sources: a test for it, a function that imports a job and returns the written files, and further options."""

    matches: Callable[[ImportJob], bool]
    run: Callable[[ImportJob], Sequence[Path]]
    options: tuple[str, ...] = ()


def _import_table(job: ImportJob) -> Sequence[Path]:
    table = job.captions or find_table(job.source)
    if table is None:
        raise UserError(f"{job.source}: has no table such as captions.csv; name the table with --captions FILE")
    return [import_table(job.source, table, job.settings, job.images)]


FORMATS: Mapping[str, ImportFormat] = {
    "table": ImportFormat(
        lambda job: job.captions is not None or find_table(job.sources[0]) is not None,
        _import_table,
        options=("captions", "images", "quoting"),
    ),
    "clip-retrieval": ImportFormat(
        lambda job: is_clip_folder(job.sources[0]),
        lambda job: import_clip(job.source, job.settings, job.out_features, job.images),
        options=("images", "quoting"),
    ),
    "hugging-face": ImportFormat(
        lambda job: is_saved_dataset(job.sources[0]),
        lambda job: [import_hugging_face(job.source, job.settings, job.images)],
        options=("images",),
    ),
    "webdataset": ImportFormat(
        lambda job: bool(find_archives(job.sources[0])),
        lambda job: [import_webdataset(job.sources, job.settings, job.key_until or "first-dot")],
        options=("key_until",),
    ),
}


def import_data(job: ImportJob, format_name: str | None = None) -> Sequence[Path]:
    """Import data of the named format, by default the first format that matches, and return the written files.

    Raises UserError if a source does not exist, if no format matches, or if an option belongs to another format.
    """
    if format_name is not None and format_name not in FORMATS:
        raise UserError(f"--format {format_name}: unknown{did_you_mean(format_name, FORMATS)}")
    for source in job.sources:
        if not source.exists() and format_name != "hugging-face":
            hint = "; --format hugging-face loads a data set of that name" if _HUB_NAME.fullmatch(str(source)) else ""
            raise UserError(f"{source}: no such file or folder{hint}")
    name = format_name or next((name for name, each in FORMATS.items() if each.matches(job)), None)
    if name is None:
        raise UserError(
            f"{job.sources[0]}: holds nothing that can be imported: no table such as captions.csv or metadata.jsonl (else "
            "name it with --captions), no tar archives, no vectors of clip-retrieval, and no saved Hugging Face data set"
        )
    options = {"captions": job.captions, "images": job.images, "key-until": job.key_until, "quoting": job.settings.quoting}
    for option, value in options.items():
        if value is not None and option.replace("-", "_") not in FORMATS[name].options:
            raise UserError(f"--{option}: the format {name} has no such option; leave it out")
    check_import_out(job.settings)
    return FORMATS[name].run(job)
