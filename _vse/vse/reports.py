"""Results in the Python interface: result files, tables, HTML reports, and the results of a search."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pandas as pd

from vse.arguments import Paths, StrPath, as_path, as_paths, describe_arguments, public_api
from vse.data_files import PathWrapper, SavableObject
from vse.eval.cli import TableCommand
from vse.eval.files.results import hash_file_content
from vse.eval.options import TableRequest
from vse.eval.report.pages import thumbnail_data_uri
from vse.eval.search.top_k import PhraseCandidates, SearchHit
from vse.eval.tables.table import BuiltTable, PrintedTable, format_latex_table, format_text_table
from vse.pipeline.files.images import BadImage
from vse.pipeline.files.outputs import OutputKind, check_output
from vse.pipeline.files.writing import write_json
from vse.pipeline.option_types import NonNegativeInteger
from vse.training.options import ReportRequest

_REPORT_HEIGHT = 600  # pixels, in a notebook
_THUMBNAIL_SIDE = 120  # pixels of the longer side
_PHOTOS_PER_ROW = 5


class SavableResult(SavableObject):
    """The content of a result file or of a comparison file, before or after it is saved to a file."""

    _output_kind: OutputKind

    def __init__(self, content: Mapping[str, Any], inputs: Sequence[Path]) -> None:
        self.json = dict(content)
        self._input_files, self._reference_folder = [path.absolute() for path in inputs], Path.cwd()

    @public_api
    def save(self, path: StrPath, *, force: bool = False) -> Self:
        """Write the result or comparison to a file (docs/formats.md), and return this object.

        ``force`` replaces a file of any kind. Raises [`vse.UserError`][] if ``path`` is one of the evaluated files.
        """
        out = as_path(path)
        check_output(out, self._output_kind, self._input_files)
        folder = Path.cwd() / out.parent
        self.json, self._reference_folder = rebase_file_references(self.json, self._reference_folder, folder), folder
        self.path = write_json(out, self.json)
        return self

    @property
    def expression(self) -> str:
        """The Python expression that returned this object. Files that the object writes record this expression."""
        return str(self.json["provenance"]["made"]["command"])


def rebase_file_references(content: dict[str, Any], old: Path, new: Path, excluded: Path | None = None) -> dict[str, Any]:
    """Return the content of a result or comparison, with file paths relative to the folder ``new`` instead of ``old``.

    Paths of files in the folder ``excluded`` are left out. The SHA-256 of the content is computed again.
    """

    def rebase(references: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        paths = [(reference, Path(os.path.normpath(old / reference["file"]))) for reference in references]
        kept = [(reference, path) for reference, path in paths if excluded is None or excluded not in path.parents]
        return [{**reference, "file": os.path.relpath(path, new)} for reference, path in kept]

    content = dict(content)
    for part in ("provenance", "a", "b"):
        if "embeddings" in content.get(part, {}):
            content[part] = {**content[part], "embeddings": rebase(content[part]["embeddings"])}
    if "unfinished" in content:
        content["unfinished"] = rebase(content["unfinished"])
    return {**content, "sha256": hash_file_content(content)}


class SearchResults:
    """The results of a search, best first. A notebook displays the photos.

    Attributes:
        query (str): the text, or the path of the photo
        frame (pandas.DataFrame): one row per result: ``rank`` (from 1), ``score``, ``image_id``, ``file`` (None for an image
        that is not in ``dataset.json``), ``caption_id`` (if captions were searched), ``caption``; for a search of a phrase in
        a photo, one row per box: ``rank``, ``score``, and ``x1``, ``y1``, ``x2``, ``y2`` in pixels
        json (list[dict[str, Any]]): the rows of the frame as objects
    """

    def __init__(self, query: str, results: Sequence[SearchHit] | PhraseCandidates, photo: Path | None = None) -> None:
        self.query, self._photo = query, photo
        if isinstance(results, PhraseCandidates):
            corners = pd.DataFrame(results.boxes, columns=["x1", "y1", "x2", "y2"])
            self.frame = pd.concat([pd.DataFrame({"score": results.scores}), corners], axis=1)
        else:
            rows = [
                (
                    hit.score,
                    hit.image_id,
                    None if hit.photo is None else str(hit.photo),
                    hit.caption_id,
                    hit.captions[0] if hit.captions else None,
                )
                for hit in results
            ]
            frame = pd.DataFrame(rows, columns=["score", "image_id", "file", "caption_id", "caption"])
            self.frame = frame.astype({"caption_id": "Int64"})
        self.frame.insert(0, "rank", range(1, len(self.frame) + 1))

    @property
    def json(self) -> list[dict[str, Any]]:
        return _frame_to_records(self.frame)

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        return f"{self.query!r}:\n{self.frame.to_string(index=False)}"

    def _repr_html_(self) -> str:
        title = f"<p><b>{html.escape(self.query)}</b></p>"
        if "file" not in self.frame:
            return title + _build_thumbnail_html(self._photo) + self.frame.to_html(index=False)
        cells = [
            f'<td style="vertical-align:top;text-align:left">{_build_thumbnail_html(row["file"])}<br>'
            f"{row['rank']}: {row['score']:.4f}<br>{html.escape(str(row['caption'] or row['image_id']))}</td>"
            for row in self.json
        ]
        rows = ("".join(cells[start : start + _PHOTOS_PER_ROW]) for start in range(0, len(cells), _PHOTOS_PER_ROW))
        return f"{title}<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


class HtmlReport(PathWrapper):
    """An HTML report that a notebook displays.

    Attributes:
        path (Path): the file
        html (str): the content of the file
    """

    @property
    def html(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{_REPORT_HEIGHT}px;border:0"
        return f'<iframe style="{style}" srcdoc="{html.escape(self.html)}"></iframe>'


class ResultTable:
    """A table of results, which prints like the output of ``vse-table``.

    Attributes:
        frame (pandas.DataFrame): all columns of the table, as in its CSV file
        json (list[dict[str, Any]]): the rows of the frame as objects
        latex (str): the printed table in LaTeX, for the package booktabs
        path (Path | None): the file that was written; None if no file was written
    """

    def __init__(self, table: BuiltTable, path: Path | None) -> None:
        self.frame, self._cells, self.path = table.frame, table.printed, path

    @property
    def json(self) -> list[dict[str, Any]]:
        return _frame_to_records(self.frame)

    @property
    def latex(self) -> str:
        return format_latex_table(self._cells)

    def __repr__(self) -> str:
        return format_text_table(self._cells)

    def _repr_html_(self) -> str:
        return build_html_table(self._cells)


@public_api
@describe_arguments(ReportRequest)
def report(
    results: Paths,
    out: StrPath,
    *,
    data: StrPath | None = None,
    embeddings: Paths = (),
    queries: NonNegativeInteger | None = None,
    gallery: bool = False,
    force: bool = False,
    allow_code: bool = False,
) -> HtmlReport:
    """Write an HTML report on one result, or on two results side by side (``vse-report``).

    The report has metrics, curves, and the results of some queries with photos.

    Args:
        results: One or two result files, or saved evaluations.
        embeddings: The embeddings of the first seed, one file for each result. If empty, the paths in the results are used.

    Raises:
        vse.UserError: if a result was edited, or if the embeddings are not those that were evaluated

    Examples:
        ```python
        page = vse.report("results/demo_vsepp.json", "report.html")
        page
        ```
    """
    from vse.eval.report.report import write_report
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.training.use.attention import open_attending_run

    files = [] if isinstance(embeddings, Sequence) and not embeddings else as_paths(embeddings)
    with allow_own_code(allow_code):
        return HtmlReport(
            write_report(as_paths(results), as_path(out), as_path(data), files, queries, 0, open_attending_run, gallery)
        )


@public_api
@describe_arguments(TableCommand)
def table(
    name: str,
    results: Paths = (),
    *,
    dataset: str | None = None,
    cost: str | None = None,
    out: StrPath | None = None,
    force: bool = False,
) -> ResultTable:
    """Build a table of result files (``vse-table``).

    Args:
        name: ``summary``: one row per result and protocol; ``ladder``: a comparison of experiments by rsum and cost, one row
            per result; ``significance``: one row per metric of a comparison; a published table such as ``vsepp_3``: the
            metrics of the paper next to our metrics; or another table of ``vse-table``.
        results: Result files, or saved evaluations and comparisons.

    Raises:
        vse.UserError: if no table has this name, or if a result was edited

    Examples:
        ```python
        rows = vse.table("summary", ["results/demo_vsepp.json", "results/demo_vse0.json"])
        print(rows.latex)
        ```
    """
    from vse.eval.tables import find_table_kind

    files = [] if isinstance(results, Sequence) and not results else as_paths(results)
    written_to = as_path(out)
    request = TableRequest(results=files, dataset=dataset, cost=cost)
    return ResultTable(find_table_kind(name).build(request, written_to), written_to)


def build_html_table(cells: PrintedTable) -> str:
    """Return a printed table as HTML."""
    titles = [" ".join(part for part in title if part) for title in cells.column_titles]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in cells.notes if note)
    return pd.DataFrame([list(line) for line in cells.lines], columns=titles).to_html(index=False) + notes


def _frame_to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return records


def _build_thumbnail_html(photo: str | Path | None) -> str:
    """Return the thumbnail of a photo as HTML; an empty text if ``photo`` is None or cannot be read."""
    try:
        return "" if photo is None else f'<img src="{thumbnail_data_uri(Path(photo), _THUMBNAIL_SIDE)}" alt="">'
    except BadImage:
        return ""
