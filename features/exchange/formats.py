"""List the formats that ``vse-data import`` reads, detect the format of a source, and import it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.features.exchange.clip_retrieval import import_clip_folder, is_clip_folder
from vse.features.options import ImportRequest
from vse.pipeline.dataset.captions import IMPORT_TOKENISER
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.archives import is_remote, to_path_or_url
from vse.pipeline.imports.hugging_face import import_hugging_face, is_saved_dataset
from vse.pipeline.imports.photos import find_archives
from vse.pipeline.imports.rows import ImportSettings, check_import_output, parse_column_options
from vse.pipeline.imports.tables import find_captions_table, import_table
from vse.pipeline.imports.webdataset import IN_PLACE_FORMAT, import_webdataset

_HUB_NAME_PATTERN = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class ImportFormat:
    """A format that can be imported.

    matches : function that returns whether the sources have this format
    import_sources : function that imports the sources and returns the written files
    option_names : names of the accepted options, without the options that every format accepts
    """

    matches: Callable[[ImportRequest], bool]
    import_sources: Callable[[ImportRequest, ImportSettings], Sequence[Path]]
    option_names: tuple[str, ...] = ()


def _require_single_source(request: ImportRequest) -> Path:
    if len(request.sources) > 1:
        raise UserError(f"{request.sources[1]}: this format allows only one source per import")
    return _get_first_source_path(request)


def _get_first_source_path(request: ImportRequest) -> Path:
    return Path(to_path_or_url(request.sources[0]))


def _import_table(request: ImportRequest, settings: ImportSettings) -> Sequence[Path]:
    source = _require_single_source(request)
    table = request.captions or find_captions_table(source)
    if table is None:
        raise UserError(f"{source}: has no table such as captions.csv; name the table with --captions FILE")
    return [import_table(source, table, settings, request.images)]


IMPORT_FORMATS: Mapping[str, ImportFormat] = {
    IN_PLACE_FORMAT: ImportFormat(
        lambda request: any(map(is_remote, request.sources)),
        lambda request, settings: [import_webdataset(request.sources, settings, request.options.key_until, in_place=True)],
        option_names=("key_until",),
    ),
    "table": ImportFormat(
        lambda request: request.captions is not None or find_captions_table(_get_first_source_path(request)) is not None,
        _import_table,
        option_names=("captions", "images", "quoting", "encoding"),
    ),
    "clip-retrieval": ImportFormat(
        lambda request: is_clip_folder(_get_first_source_path(request)),
        lambda request, settings: import_clip_folder(
            _require_single_source(request), settings, request.options.out_features, request.images
        ),
        option_names=("images", "quoting"),
    ),
    "hugging-face": ImportFormat(
        lambda request: is_saved_dataset(_get_first_source_path(request)),
        lambda request, settings: [import_hugging_face(_require_single_source(request), settings, request.images)],
        option_names=("images",),
    ),
    "webdataset": ImportFormat(
        lambda request: bool(find_archives(request.sources[0])),
        lambda request, settings: [import_webdataset(request.sources, settings, request.options.key_until)],
        option_names=("key_until",),
    ),
}


def import_data(request: ImportRequest) -> Sequence[Path]:
    """Import data of the requested format, or else of the first format that matches; return the written files.

    Raises UserError if a source does not exist, if no format matches, or if an option belongs to another format.
    """
    options, splits, first = request.options, request.splits, request.sources[0]
    settings = ImportSettings(
        request.name or request.out.resolve().name,
        request.out,
        splits.val,
        splits.test,
        splits.seed,
        options.tokeniser or IMPORT_TOKENISER,
        options.skip_bad,
        parse_column_options(request.columns),
        options.quoting,
        options.encoding,
        needs_confirmation=not request.yes and sys.stdin.isatty() and sys.stderr.isatty(),
    )
    if options.format is not None and options.format not in IMPORT_FORMATS:
        raise UserError(f"--format {options.format}: unknown{did_you_mean(options.format, IMPORT_FORMATS)}")
    for source in request.sources:
        if not is_remote(source) and not Path(to_path_or_url(source)).exists() and options.format != "hugging-face":
            hint = "; --format hugging-face loads a data set of that name" if _HUB_NAME_PATTERN.fullmatch(source) else ""
            raise UserError(f"{source}: no such file or folder{hint}")
    name = options.format or next((name for name, entry in IMPORT_FORMATS.items() if entry.matches(request)), None)
    if name is None:
        raise UserError(
            f"{first}: holds nothing that can be imported: no table such as captions.csv or metadata.jsonl (else name it "
            "with --captions), no tar archives, no vectors of clip-retrieval, and no saved Hugging Face data set"
        )
    given = {
        "captions": request.captions,
        "images": request.images,
        "key_until": options.key_until,
        "quoting": options.quoting,
        "encoding": options.encoding,
    }
    for option, value in given.items():
        if value is not None and option not in IMPORT_FORMATS[name].option_names:
            raise UserError(f"--{option.replace('_', '-')}: the format {name} has no such option; leave it out")
    check_import_output(settings)
    return IMPORT_FORMATS[name].import_sources(request, settings)
