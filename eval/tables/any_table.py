"""Any table by its name: ``summary``, ``ladder``, ``significance``, or a published one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from vse.eval.defaults import TABLES, published_tables
from vse.eval.tables.ladder import ladder, ladder_cells, write_ladder
from vse.eval.tables.published import compared, compared_cells, write_compared
from vse.eval.tables.summary import MARKER, Cells, summary, summary_cells, write_summary
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import OutputKind, check_output, csv_kind, text_kind

_COLUMNS = {
    "summary": ("dataset", "experiment", "split", "protocol", "n_images", "n_captions", "seeds"),
    "ladder": ("method", "captions", "images", "experiment", "dataset", "split", "protocol", "total_s", "best"),
    "significance": ("dataset", "split", "protocol", "a", "b", "difference", "low", "high", "p", "significant"),
}
_PUBLISHED = ("row", "method", "images", "our_images")


class MadeTable(NamedTuple):
    """A table: all that it has as a ``frame``, and what people are shown of it as ``cells``."""

    frame: pd.DataFrame
    cells: Cells


def make_table(
    name: str, results: Sequence[Path], dataset: str | None = None, out: Path | None = None, cost: str | None = None
) -> MadeTable:
    """Make a table of result files, and write it to ``out``, ``.csv`` or ``.tex``, unless that is None.

    ``summary`` has a row per result and protocol, ``ladder`` one per result with its costs and the best trade-offs of rsum
    and ``cost`` marked (``out`` may be its picture, too, ``.svg`` or ``.png``), ``significance`` one per metric of files that
    ``vse-eval --compare`` wrote.
    Any other name is that of a published table, with our results beside the printed ones; ``dataset`` then takes our results
    on this data set. :class:`UserError` for another name, or if there are no results for what needs some.
    """
    known = [*TABLES, *published_tables()]
    if name not in known:
        raise UserError(f"unknown table {name!r}{did_you_mean(name, known)}")
    if out is not None:
        check_output(out, _kind(name, out), results)
    if name in TABLES and (dataset or not results):
        raise UserError(f"{name} takes no --dataset" if results else f"{name} needs result files")
    if cost is not None and name != "ladder":
        raise UserError(f"--cost is of a ladder, and {name} is none; leave it out")
    write: Callable[[pd.DataFrame, Path], Path]
    if name == "ladder":
        weighed = cost or "total_s"
        frame = ladder(results, weighed)
        made, write = MadeTable(frame, ladder_cells(frame, weighed)), partial(write_ladder, cost=weighed)
    elif name == "summary":
        frame = summary(results)
        made, write = MadeTable(frame, summary_cells(frame)), write_summary
    elif name == "significance":
        from vse.eval.tables.significance import significance, significance_cells, write_significance  # imports torch

        frame = significance(results)
        made, write = MadeTable(frame, significance_cells(frame)), write_significance
    else:
        frame = compared(name, results, dataset)
        made, write = MadeTable(frame, compared_cells(frame)), write_compared
    if out is not None:
        write(frame, out)
    return made


def _kind(name: str, out: Path) -> OutputKind:
    """Return the kind of file that a table is written as, by the suffix of ``out``."""
    if out.suffix == ".csv":
        return csv_kind(f"a table {name!r} of vse-table", *_COLUMNS.get(name, _PUBLISHED))
    return text_kind("a table or chart of vse-table", MARKER)
