"""The base class of all tables, and functions that write a table as CSV, LaTeX, text for a terminal, or a chart."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pandas as pd

from vse.eval.files.results import drop_transductive_results
from vse.eval.options import TableRequest
from vse.eval.ranking.metrics import DIRECTIONS, metric_title
from vse.pipeline.errors import UserError, escape_csv_cell, to_printable_line
from vse.pipeline.files.outputs import OutputKind, check_output, csv_kind, text_kind
from vse.pipeline.files.writing import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_MARKER = "made by vse-table"  # LaTeX tables and charts have this text; only files with this text may be replaced
_BOLD_PATTERN = re.compile(r"\*\*(.*?)\*\*")
_MAX_UNWRAPPED_CHARACTERS = 30  # LaTeX wraps columns with longer texts
COMPARED_PROTOCOL = "full"  # two results are compared by their queries of this protocol
_LATEX_SCALING = "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"


EMPTY_TABLE_REQUEST = TableRequest()


class BuiltTable(NamedTuple):
    """A table: the complete ``frame`` for CSV, and the ``printed`` part for the terminal and LaTeX."""

    frame: pd.DataFrame
    printed: PrintedTable


class ResultGroups(NamedTuple):
    """The groups of results that do not differ significantly, and a ``note`` for the table.

    ``letters_by_path`` has the letters of each result file: results in one group share a letter. For each set of test images,
    ``best`` has the best result and the results that do not differ significantly from the best.
    """

    letters_by_path: dict[Path, str]
    best: frozenset[Path]
    note: str


class TableKind(ABC):
    """A kind of table, such as ``summary``.

    To add a kind, write a subclass in a new file, and add a line to :data:`vse.eval.tables.TABLE_CLASS_PATHS`.

    Attributes
    ----------
    first_columns : the first columns of the CSV file; the table may replace an existing file only if it has these columns
    file_suffixes : the suffixes of the files that the table can be written to
    option_names : the fields of :class:`TableRequest` that the table accepts besides ``results``
    needs_results : whether the table needs at least one result file
    """

    first_columns: ClassVar[tuple[str, ...]]
    file_suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tex")
    option_names: ClassVar[frozenset[str]] = frozenset()
    needs_results: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        """Return the complete table."""

    @abstractmethod
    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        """Return the printed part of the table."""

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = EMPTY_TABLE_REQUEST) -> Path:
        """Write the complete table (``.csv``) or its printed part (``.tex``), by the suffix of ``out``; return ``out``."""
        if out.suffix == ".tex":
            text = format_latex_table(self.build_printed_table(frame, request))
            return write_text(out, _BOLD_PATTERN.sub(r"\\textbf{\1}", text) if "family" in self.option_names else text)
        return write_csv_table(frame, out)

    def output_kind(self, out: Path) -> OutputKind:
        if out.suffix == ".csv":
            return csv_kind(f"a table {self.name!r} of vse-table", *self.first_columns)
        return text_kind("a table or chart of vse-table", FILE_MARKER)

    def build(self, request: TableRequest, out: Path | None = None) -> BuiltTable:
        """Build the table, and write it to ``out`` unless ``out`` is None.

        Raises UserError if result files are missing, if an option does not apply to this table, or if ``out`` must not be
        replaced.
        """
        for option in ("dataset", "cost", "family", "metric"):
            if getattr(request, option) is not None and option not in self.option_names:
                raise UserError(f"--{option}: the table {self.name} has no such option; leave it out")
        if self.needs_results and not request.results:
            raise UserError(f"the table {self.name} needs result files")
        if out is not None:
            check_output(out, self.output_kind(out), request.results)
            if out.suffix not in self.file_suffixes:
                raise UserError(f"{out}: the table {self.name} is written as {', '.join(self.file_suffixes)}")
        if not request.transductive:
            request = request.model_copy(update={"results": tuple(drop_transductive_results(request.results))})
        frame = self.build_frame(request)
        if out is not None:
            self.write(frame, out, request)
        return BuiltTable(frame, self.build_printed_table(frame, request))


def write_csv_table(table: pd.DataFrame, out: Path) -> Path:
    """Write a table to the CSV file ``out``, and return ``out``. Raises UserError if the suffix is not ``.csv``."""
    if out.suffix != ".csv":
        raise UserError(f"{out}: a table is written as .csv or .tex")
    texts = {
        str(name): column.map(escape_csv_cell) for name, column in table.items() if not pd.api.types.is_numeric_dtype(column)
    }
    return write_text(out, table.assign(**texts).to_csv(index=False, float_format="%.4f", lineterminator="\n"))


class PrintedTable(NamedTuple):
    """The printed part of a table.

    Attributes
    ----------
    lines : the cells, line by line
    column_titles : for each column, the title of its group of columns (may be blank) and its own title
    n_text_columns : the number of leading columns that hold texts; the other columns hold numbers
    notes : remarks below the table
    """

    lines: Sequence[Sequence[object]]
    column_titles: Sequence[tuple[str, str]]
    n_text_columns: int
    notes: Sequence[str]


def format_text_table(printed: PrintedTable) -> str:
    """Return a table in Markdown, aligned for a terminal, with the notes below it."""
    short = {direction.title: direction.name for direction in DIRECTIONS.values()}
    header = [f"{short.get(group, group)} {title}".strip() for group, title in printed.column_titles]
    lines = [header, *([to_printable_line(cell) for cell in line] for line in printed.lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [True] * printed.n_text_columns + [False] * (len(header) - printed.n_text_columns)
    lines.insert(1, ["-" * width if text else "-" * (width - 1) + ":" for width, text in zip(widths, texts, strict=True)])
    rows = [
        " | ".join(cell.ljust(n) if text else cell.rjust(n) for cell, n, text in zip(line, widths, texts, strict=True))
        for line in lines
    ]
    notes = [to_printable_line(note) for note in printed.notes if note]
    return "\n".join([*(f"| {row} |" for row in rows), *([""] if notes else []), *notes])


def format_latex_table(printed: PrintedTable) -> str:
    """Return a LaTeX table for booktabs, with the notes as comments above it.

    A table that is wider than the text of the page is scaled down. Columns with a cell of more than 30 characters are wrapped.
    Texts are escaped, and their line breaks are removed.
    """
    lines, titles, n_texts, notes = printed
    lines = [[to_printable_line(cell) if isinstance(cell, str) else cell for cell in line] for line in lines]
    titles = [(to_printable_line(group), to_printable_line(title)) for group, title in titles]
    grouped = any(group for group, _ in titles)
    columns = pd.MultiIndex.from_tuples(titles) if grouped else pd.Index([title for _, title in titles])
    frame = pd.DataFrame(lines, columns=columns)
    long = [
        max(len(str(line[column])) for line in lines) > _MAX_UNWRAPPED_CHARACTERS if lines else False
        for column in range(n_texts)
    ]
    aligned = "".join("p{4.5cm}" if is_long else "l" for is_long in long) + "r" * (len(titles) - n_texts)
    text = frame.to_latex(index=False, escape=True, multicolumn_format="c", column_format=aligned, float_format="%.1f")
    comments = [f"% {to_printable_line(note)}" for note in notes if note]
    for sign, latex in (("±", "$\\pm$"), ("−", "$-$"), ("<", "$<$")):
        text = text.replace(sign, latex)
    return "\n".join(
        ["% \\usepackage{booktabs,graphicx}", f"% {FILE_MARKER}", *comments, _LATEX_SCALING, text.rstrip("\n") + "}", ""]
    )


def column_title(metric: str) -> tuple[str, str]:
    """Return the titles of the column of a metric such as ``i2t_r1``: the direction (may be blank), and the metric."""
    direction, _, name = metric.partition("_")
    return (DIRECTIONS[direction].title, metric_title(name)) if direction in DIRECTIONS else ("", metric_title(metric))


def metric_cell(value: float, digits: int, deviation: float = math.nan, signed: bool = False) -> str:
    """Return a metric and its standard deviation (if known) as a text; a blank for NaN. ``signed`` adds a plus sign."""
    if math.isnan(value):
        return ""
    text = f"{value:{'+' if signed else '-'}.{digits}f}".replace("-", "−")
    return text if math.isnan(deviation) else f"{text} ± {deviation:.{digits}f}"


_CHART_SIZE = (8.0, 5.2)  # inches
_FILE_METADATA = {
    "svg": {"Creator": FILE_MARKER, **dict.fromkeys(("Date", "Format", "Type"))},
    "png": {"Software": FILE_MARKER},
}


def write_chart_file(out: Path, draw: Callable[[Axes], None], name: str) -> Path:
    """Call ``draw``, write its chart to the ``.svg`` or ``.png`` file ``out``, and return ``out``.

    Ids in an SVG depend on ``name``, so that equal charts have equal bytes.
    """
    import matplotlib  # only charts need it, and it starts slowly
    from matplotlib.figure import Figure

    suffix = out.suffix.removeprefix(".")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
        figure = Figure(figsize=_CHART_SIZE, layout="constrained")
        draw(figure.add_subplot())
        for text in figure.findobj(matplotlib.text.Text):
            text.set_parse_math(False)  # dollar signs in names do not begin a formula
        content = BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=_FILE_METADATA[suffix])
    return write_bytes(out, content.getvalue())
