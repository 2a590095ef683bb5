"""The table ``cards``: a row for each result file, with the facts that a reader needs to compare it with others."""

from __future__ import annotations

import pandas as pd

from vse.eval.files.cards import build_card
from vse.eval.files.results import drop_comparisons, read_result
from vse.eval.options import TableRequest
from vse.eval.tables.summary import describe_result
from vse.eval.tables.table import PrintedTable, TableKind
from vse.pipeline.errors import UserError


class CardsTable(TableKind):
    """``vse-table cards``: data, seeds, features, epochs, selection, seconds, processor and precision of each result."""

    first_columns = ("dataset", "experiment", "split", "n_images", "seeds", "features", "epochs", "selection")

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        """Return a row for each result file; comparison files are left out. Raises UserError if there is no result file."""
        rows = []
        for path in drop_comparisons(request.results):
            result = read_result(path)
            names = {"dataset": result.dataset, "experiment": result.display_name, "split": result.split}
            counts = {"n_images": result.n_images, "seeds": " ".join(map(str, result.seeds))}
            described = describe_result(path, result)
            rows.append({**names, **counts, **build_card(result.provenance), "run": described["run"]})
        if not rows:
            raise UserError("no result among the files, so there is no table")
        return pd.DataFrame(rows)

    def build_cells(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        """Return all columns but ``run``."""
        printed = frame.drop(columns="run")
        return PrintedTable(printed.to_numpy().tolist(), [("", str(name)) for name in printed], len(printed.columns), [])
