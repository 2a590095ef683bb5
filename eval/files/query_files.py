"""The file of what each query got: a row per query, as CSV or parquet.

Run and qrels files, which trec_eval, ranx and ir_measures read.

Images are called ``image-<id>``, captions ``caption-<id>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.answers import BestAnswers, BestList, falling, lists_of_captions, lists_of_images
from vse.pipeline.errors import UserError, printable
from vse.pipeline.files.outputs import OutputKind, check_output, csv_kind, read_first_bytes
from vse.pipeline.files.writing import open_atomic
from vse.pipeline.progress import progress_bar

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
    check_output(out, csv_kind(_NAME, *_COLUMNS) if out.suffix == ".csv" else OutputKind(_NAME, _is_parquet), inputs)
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
    with open_atomic(out) as stream:
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


_LINE = re.compile(rb"(image|caption)-\d+ (0 (image|caption)-\d+ 1|Q0 (image|caption)-\d+ \d+ \S+ \S+)")
_TREC = OutputKind("a run or qrels file of vse-eval", lambda path: _LINE.fullmatch(_first_line(path)) is not None)


def check_trec(folder: Path, inputs: Sequence[Path] = ()) -> None:
    """Check a folder for run files before any work.

    Raises UserError if it is something else, or if a file in it would be replaced that is an input or no run file.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: run files are written to a folder, and this is none")
    for file in sorted([*folder.glob("*.run"), *folder.glob("*.qrels")]):
        if file.name.startswith(("i2t", "t2i")):
            check_output(file, _TREC, inputs)


def write_trec(folder: Path, runs: Sequence[Embeddings], depth: int) -> list[Path]:
    """Write what is right, and the best ``depth`` answers (0: all) of some seeds of a model, to a folder; returns the files.

    ``i2t.qrels`` and ``t2i.qrels`` say what is right: an image's own captions, and a caption's image. ``i2t.run`` and
    ``t2i.run``, of several seeds ``i2t-<seed>.run`` and so on, have the answers over the whole split. They are in our order,
    ties against the model; :func:`vse.eval.ranking.answers.falling` makes their scores strictly descending.
    """
    check_trec(folder)
    first = runs[0]
    images, captions = _names("image", first.image_ids), _names("caption", first.caption_ids)
    image_of_caption = first.image_of_caption()
    by_image = np.argsort(image_of_caption, kind="stable")
    pairs = [
        ("i2t", ((images[image_of_caption[c]], captions[c]) for c in by_image)),
        ("t2i", ((captions[c], images[image]) for c, image in enumerate(image_of_caption))),
    ]
    files = []
    for direction, right in pairs:
        files.append(folder / f"{direction}.qrels")
        with open_atomic(files[-1]) as stream:
            stream.writelines(f"{query} 0 {answer} 1\n".encode() for query, answer in right)
    seeds = [run.seed for run in runs]
    for k, run in enumerate(runs):
        seed = k if None in seeds else seeds[k]
        name = "" if len(runs) == 1 else f"-{seed}"
        tag = re.sub(r"\s+", "_", f"{printable(run.experiment or '')}{name}") or "vse"
        i2t, t2i = run.score_blocks()
        files.append(folder / f"i2t{name}.run")
        _write_run(files[-1], lists_of_images(i2t, depth), len(np.unique(image_of_caption)), images, captions, tag)
        files.append(folder / f"t2i{name}.run")
        _write_run(files[-1], lists_of_captions(t2i or i2t, depth), len(captions), captions, images, tag)
    return files


def _write_run(
    path: Path, lists: Iterable[BestList], n_queries: int, queries: Sequence[str], answers: Sequence[str], tag: str
) -> None:
    with open_atomic(path) as stream:
        for query, rows, scores in progress_bar(lists, desc=path.name, total=n_queries, unit="queries"):
            ranked = enumerate(zip(rows.tolist(), falling(scores).tolist(), strict=True), 1)
            lines = (f"{queries[query]} Q0 {answers[row]} {place} {score:.9g} {tag}\n" for place, (row, score) in ranked)
            stream.write("".join(lines).encode())


def _first_line(path: Path) -> bytes:
    return read_first_bytes(path, 4096).partition(b"\n")[0]


def _names(kind: str, ids: NDArray[np.int64]) -> list[str]:
    return [f"{kind}-{number}" for number in ids.tolist()]
