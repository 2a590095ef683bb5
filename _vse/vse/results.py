"""What the functions of the Python interface return to be looked at: as a frame, as JSON, and as a table in a notebook."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.files.results import Result, read_comparison
from vse.eval.protocols.result_content import result_lines
from vse.eval.report.pages import thumbnail
from vse.eval.search.top_k import PhraseHit, SearchHit
from vse.eval.tables.significance import build_significance, difference_lines, significance_cells
from vse.eval.tables.summary import summarise_results, summary_cells
from vse.eval.tables.table import BuiltTable, Cells, as_latex, as_text
from vse.handles import OpenFile
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage
from vse.pipeline.files.writing import read_json

_HIGH = 600  # pixels of a report in a notebook
_SIDE = 120  # of a photo among the results of a search


class Evaluation:
    """The metrics of a model on a split. Printed, it is a line per protocol.

    Attributes
    ----------
    frame : pandas.DataFrame
        a row per protocol, as ``vse-table summary`` has it: e.g. ``i2t_r1``, its 95% interval ``i2t_r1_low`` and
        ``i2t_r1_high``, with several seeds its deviation ``i2t_r1_std``, and ``rsum``
    json : dict[str, Any]
        the content of the result file (docs/formats.md)
    path : Path | None
        the result file; None if it was not written
    """

    def __init__(self, content: Mapping[str, Any], path: Path | None) -> None:
        self.json, self.path = dict(content), path
        self._result = Result.model_validate(content)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per protocol."""
        return summarise_results([(self.path or Path("result.json"), self._result)])

    def __fspath__(self) -> str:
        if self.path is None:
            raise UserError('this evaluation was not written to a file; give evaluate(..., out="results/name.json")')
        return str(self.path)

    def __repr__(self) -> str:
        return "\n".join(result_lines(self._result))

    def _repr_html_(self) -> str:
        return _table_html(summary_cells(self.frame))


class ModelComparison(OpenFile):
    """How far two models are apart, metric by metric, on the same queries. Printed, it is a line per protocol.

    Attributes
    ----------
    frame : pandas.DataFrame
        a row per protocol and metric: both values, ``difference``, its 95% interval ``low`` and ``high``, ``p``
    json : dict[str, Any]
        the content of the file (docs/formats.md)
    path : Path
        the comparison file
    """

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per protocol and metric."""
        return build_significance([self.path])

    @property
    def json(self) -> dict[str, Any]:
        """The content of the file."""
        content: dict[str, Any] = read_json(self.path)
        return content

    def __repr__(self) -> str:
        return "\n".join(difference_lines(read_comparison(self.path)))

    def _repr_html_(self) -> str:
        return _table_html(significance_cells(self.frame))


class SearchResults:
    """What a search returned, best first; a notebook shows the photos.

    Attributes
    ----------
    frame : pandas.DataFrame
        a row per result: ``rank`` (from 1), ``score``, ``image_id``, ``file`` (None if ``dataset.json`` does not know the
        image), ``caption_id`` (where captions were searched), ``caption``; of a phrase in a photo ``rank``, ``score``, ``x1``,
        ``y1``, ``x2``, ``y2`` in its pixels
    json : list[dict[str, Any]]
        the same as a list of objects
    """

    def __init__(self, query: str, results: Sequence[SearchHit] | PhraseHit, photo: Path | None = None) -> None:
        self.query, self._photo = query, photo
        if isinstance(results, PhraseHit):
            corners = pd.DataFrame(results.boxes, columns=["x1", "y1", "x2", "y2"])
            self.frame = pd.concat([pd.DataFrame({"score": results.scores}), corners], axis=1)
        else:
            rows = [(hit.score, hit.image_id, _name(hit.photo), hit.caption_id, _caption(hit)) for hit in results]
            frame = pd.DataFrame(rows, columns=["score", "image_id", "file", "caption_id", "caption"])
            self.frame = frame.astype({"caption_id": "Int64"})
        self.frame.insert(0, "rank", range(1, len(self.frame) + 1))

    @property
    def json(self) -> list[dict[str, Any]]:
        """A list of objects."""
        return _records(self.frame)

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        return f"{self.query!r}:\n{self.frame.to_string(index=False)}"

    def _repr_html_(self) -> str:
        title = f"<p><b>{html.escape(self.query)}</b></p>"
        if "file" not in self.frame:
            return title + _image(self._photo) + self.frame.to_html(index=False)
        cells = [
            f'<td style="vertical-align:top;text-align:left">{_image(row["file"])}<br>{row["rank"]}: {row["score"]:.4f}<br>'
            f"{html.escape(str(row['caption'] or row['image_id']))}</td>"
            for row in self.json
        ]
        return f"{title}<table><tr>{'</tr><tr>'.join(''.join(cells[k : k + 5]) for k in range(0, len(cells), 5))}</tr></table>"


class HtmlReport(OpenFile):
    """A report that was written as one HTML file; a notebook shows it.

    Attributes
    ----------
    path : Path
        the file
    html : str
        its content
    """

    @property
    def html(self) -> str:
        """Its content."""
        return self.path.read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:{_HIGH}px;border:0" srcdoc="{html.escape(self.html)}"></iframe>'


class ShownTable:
    """A table of results. Printed, it is what ``vse-table`` prints.

    Attributes
    ----------
    frame : pandas.DataFrame
        all that the table has, as its CSV
    json : list[dict[str, Any]]
        the rows of the frame as objects
    latex : str
        what is shown of it, for booktabs
    path : Path | None
        the file that was written, if one was
    """

    def __init__(self, made: BuiltTable, path: Path | None) -> None:
        self.frame, self._cells, self.path = made.frame, made.cells, path

    @property
    def json(self) -> list[dict[str, Any]]:
        """The rows as objects."""
        return _records(self.frame)

    @property
    def latex(self) -> str:
        """What is shown of it, for booktabs."""
        return as_latex(self._cells)

    def __repr__(self) -> str:
        return as_text(self._cells)

    def _repr_html_(self) -> str:
        return _table_html(self._cells)


def _table_html(cells: Cells) -> str:
    """What people are shown of a table, as HTML."""
    titles = [" ".join(part for part in title if part) for title in cells.titles]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in cells.notes if note)
    return pd.DataFrame([list(line) for line in cells.lines], columns=titles).to_html(index=False) + notes


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return records


def _name(photo: Path | None) -> str | None:
    return None if photo is None else str(photo)


def _caption(hit: SearchHit) -> str | None:
    """The caption that was returned, or the first one of the image that was."""
    return hit.captions[0] if hit.captions else None


def _image(photo: str | Path | None) -> str:
    """A small photo, or nothing where it cannot be read."""
    try:
        return "" if photo is None else f'<img src="{thumbnail(Path(photo), _SIDE)}" alt="">'
    except BadImage:
        return ""
