"""The file of what each query got: a row per query, as CSV or parquet."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vse.eval.ranking.best_answers import BestAnswers
from vse.pipeline.errors import UserError
from vse.pipeline.files import written
from vse.pipeline.outputs import OutputKind, check_out, csv_kind

if TYPE_CHECKING:
    import pandas as pd

_KINDS = (".csv", ".parquet")
_COLUMNS = (
    *("seed", "protocol", "fold", "direction", "query_id", "rank"),
    *("right_id", "right_score", "wrong_id", "wrong_score"),
)
_NAME = "a file of queries that vse-eval wrote"


class FoldAnswers(NamedTuple):
    """The best answers of one direction in a fold (from 0) of a protocol, of the embeddings of a seed if they name one."""

    seed: int | None
    protocol: str
    fold: int
    direction: str
    answers: BestAnswers


def check_per_query(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Check the name of a file of queries before any work; :class:`UserError` says what is wrong with it."""
    check_out(out, csv_kind(_NAME, *_COLUMNS) if out.suffix == ".csv" else OutputKind(_NAME, _is_parquet), inputs)
    if out.suffix not in _KINDS:
        raise UserError(f"{out}: the file of queries is written as {' or '.join(_KINDS)}")
    if out.suffix == ".parquet" and not find_spec("pyarrow"):
        raise UserError(f"{out}: parquet needs a package: pip install 'vse-pipeline[parquet]', or name a .csv")


def write_per_query(out: Path, folds: Iterable[FoldAnswers]) -> Path:
    """Write a row per query, atomically; returns ``out``.

    The columns are ``seed``, ``protocol``, ``fold``, ``direction``, ``query_id``, ``rank`` (0-based, ties against the model:
    R@K counts ranks below K), ``right_id`` and ``right_score`` of the best right answer, ``wrong_id`` and ``wrong_score`` of
    the best wrong one, missing where there is none. Scores are in the precision in which they were ranked.
    """
    import pandas as pd

    check_per_query(out)
    table = pd.concat([_rows(fold) for fold in folds], ignore_index=True)
    with written(out) as stream:
        if out.suffix == ".parquet":
            table.to_parquet(stream, engine="pyarrow", index=False)
        else:
            table.to_csv(stream, index=False, lineterminator="\n")
    return out


def _is_parquet(path: Path) -> bool:
    return tuple(import_module("pyarrow.parquet").read_schema(path).names) == _COLUMNS


def _rows(fold: FoldAnswers) -> pd.DataFrame:
    import pandas as pd

    answers, none = fold.answers, np.isneginf(fold.answers.wrong_scores)
    n_queries = len(answers.queries)
    return pd.DataFrame(
        {
            "seed": pd.array([fold.seed] * n_queries, dtype="Int64"),
            "protocol": fold.protocol,
            "fold": fold.fold,
            "direction": fold.direction,
            "query_id": answers.queries,
            "rank": answers.ranks,
            "right_id": answers.right,
            "right_score": answers.right_scores,
            "wrong_id": pd.arrays.IntegerArray(answers.wrong.copy(), none),
            "wrong_score": np.where(none, np.nan, answers.wrong_scores),
        }
    )
