"""Tables of results and of comparisons, and published tables next to our results.

To add a kind of table, write a file with a subclass of :class:`vse.eval.tables.table.TableKind`, and add a line to
:data:`TABLE_CLASS_PATHS`. To add a published table, write a CSV file in ``config/published``. This module imports no large
library, because the help of ``vse-table`` reads the names of the tables here.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from vse.eval.options import published_table_names

if TYPE_CHECKING:
    from vse.eval.tables.table import TableKind

TABLE_CLASS_PATHS = {
    "summary": "vse.eval.tables.summary:SummaryTable",
    "significance": "vse.eval.tables.significance:SignificanceTable",
    "compare": "vse.eval.tables.significance:PairwiseTable",
    "ladder": "vse.eval.tables.ladder:LadderTable",
    "compression": "vse.eval.tables.compression:CompressionTable",
    "cards": "vse.eval.tables.summary:CardsTable",
}
_PUBLISHED_CLASS_PATH = "vse.eval.tables.published:PublishedTable"


def table_names() -> Sequence[str]:
    """Return the names of all tables, as ``vse-table`` lists them."""
    return [*TABLE_CLASS_PATHS, *published_table_names()]


def find_table_kind(name: str) -> TableKind:
    """Return an object that builds the table with this name. Raises UserError if there is no such table."""
    from vse.pipeline.errors import UserError, did_you_mean

    if name not in table_names():
        raise UserError(f"unknown table {name!r}{did_you_mean(name, table_names())}")
    module, _, kind = TABLE_CLASS_PATHS.get(name, _PUBLISHED_CLASS_PATH).partition(":")
    table: TableKind = getattr(import_module(module), kind)(name)
    return table
