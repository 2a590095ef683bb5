"""Writers of the answers to each query: a table, or run and qrels files for trec_eval, ranx and ir_measures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.answers import RankedList, break_ties, rank_captions, rank_images
from vse.eval.ranking.metrics import IMAGE_TEXT_DIRECTIONS, BestAnswers
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.outputs import OutputKind, check_output, csv_kind, read_first_bytes
from vse.pipeline.files.writing import open_atomic
from vse.pipeline.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd


_TABLE_SUFFIXES = (".csv", ".parquet")
_TABLE_COLUMNS = (
    *("seed", "protocol", "fold", "direction", "query_id", "rank"),
    *("right_id", "right_score", "wrong_id", "wrong_score"),
)
_TABLE_DESCRIPTION = "a file of queries that vse-eval wrote"
_PARQUET_KIND = OutputKind(
    _TABLE_DESCRIPTION, lambda path: (*import_module("pyarrow.parquet").read_schema(path).names,) == _TABLE_COLUMNS
)
_TREC_LINE_PATTERN = re.compile(rb"(image|caption)-\d+ (0 (image|caption)-\d+ 1|Q0 (image|caption)-\d+ \d+ \S+ \S+)")
_TREC_KIND = OutputKind(
    "a run or qrels file of vse-eval",
    lambda path: _TREC_LINE_PATTERN.fullmatch(read_first_bytes(path, 4096).partition(b"\n")[0]) is not None,
)


class FoldAnswers(NamedTuple):
    """The best answers to all queries of one fold and one direction, such as ``i2t``.

    ``fold`` is the 0-based index of the fold. ``seed`` is the seed of the training, or None if it is not known.
    """

    seed: int | None
    protocol: str
    fold: int
    direction: str
    answers: BestAnswers


def check_query_table_path(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Raise UserError if a table of queries must not be written to ``out``.

    The suffix must be ``.csv`` or ``.parquet``. ``out`` must not be one of ``inputs``, nor an existing file of another kind.
    """
    check_output(out, csv_kind(_TABLE_DESCRIPTION, *_TABLE_COLUMNS) if out.suffix == ".csv" else _PARQUET_KIND, inputs)
    if out.suffix not in _TABLE_SUFFIXES:
        raise UserError(f"{out}: the file of queries is written as {' or '.join(_TABLE_SUFFIXES)}")


def write_query_table(out: Path, folds: Iterable[FoldAnswers]) -> Path:
    """Write a table with a row per query atomically, and return ``out``.

    The columns are ``seed``, ``protocol``, ``fold``, ``direction``, ``query_id``, ``rank`` (0-based; ties count against the
    model), ``right_id``, ``right_score``, ``wrong_id`` and ``wrong_score``. The last four columns have the best right and the
    best wrong answer. If a query has no wrong answer, ``wrong_id`` and ``wrong_score`` are missing.
    """
    import pandas as pd

    check_query_table_path(out)
    table = pd.concat([_build_query_rows(fold) for fold in folds], ignore_index=True)
    with open_atomic(out) as stream:
        if out.suffix == ".parquet":
            table.to_parquet(stream, engine="pyarrow", index=False)
        else:
            table.to_csv(stream, index=False, lineterminator="\n")
    return out


def _build_query_rows(fold: FoldAnswers) -> pd.DataFrame:
    import pandas as pd

    answers, without_wrong = fold.answers, np.isneginf(fold.answers.wrong_scores)
    n_queries = len(answers.queries)
    return pd.DataFrame(
        {
            "seed": pd.array([fold.seed] * n_queries, dtype="Int64"),
            "protocol": fold.protocol,
            "fold": fold.fold,
            "direction": fold.direction,
            "query_id": answers.queries,
            "rank": answers.ranks,
            "right_id": answers.right_answers,
            "right_score": answers.right_scores,
            "wrong_id": pd.arrays.IntegerArray(answers.wrong_answers.copy(), without_wrong),
            "wrong_score": np.where(without_wrong, np.nan, answers.wrong_scores),
        }
    )


def check_trec_folder(folder: Path, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError if run and qrels files must not be written to ``folder``.

    ``folder`` must not be a file. The run and qrels files that are already in the folder must be in TREC format, because they
    are replaced, and they must not be among the ``inputs``.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: run files are written to a folder, but this is not one")
    for file in sorted([*folder.glob("*.run"), *folder.glob("*.qrels")]):
        if file.name.startswith(tuple(direction.name for direction in IMAGE_TEXT_DIRECTIONS)):
            check_output(file, _TREC_KIND, inputs)


def write_trec_files(folder: Path, seed_embeddings: Sequence[Embeddings], depth: int) -> list[Path]:
    """Write the right answers (qrels) and the ranked lists (run files) of a model on the complete split; return the paths.

    ``i2t.qrels`` lists the captions of each image, and ``t2i.qrels`` the image of each caption. ``i2t.run`` and ``t2i.run``
    have the best ``depth`` answers to each query; 0 lists all answers. With several seeds the run files are named
    ``i2t-<seed>.run`` and ``t2i-<seed>.run``. Among answers with equal scores, wrong answers come first. Equal scores are then
    lowered until they differ (:func:`vse.eval.ranking.answers.break_ties`).
    """
    check_trec_folder(folder)
    first = seed_embeddings[0]
    ids = {"image": first.image_ids, "caption": first.caption_ids}
    names = {kind: [f"{kind}-{number}" for number in numbers.tolist()] for kind, numbers in ids.items()}
    image_of_caption = first.image_of_caption()
    n_queries = {"image": len(np.unique(image_of_caption)), "caption": len(image_of_caption)}
    files = []
    for direction in IMAGE_TEXT_DIRECTIONS:
        files.append(folder / f"{direction.name}.qrels")
        # Both files list the pairs query by query.
        order = (
            np.argsort(image_of_caption, kind="stable") if direction.query_kind == "image" else range(len(image_of_caption))
        )
        pairs = ({"image": names["image"][image_of_caption[c]], "caption": names["caption"][c]} for c in order)
        with open_atomic(files[-1]) as stream:
            stream.writelines(
                f"{pair[direction.query_kind]} 0 {pair[direction.candidate_kind]} 1\n".encode() for pair in pairs
            )
    has_seeds = all(one.seed is not None for one in seed_embeddings)
    for k, embeddings in enumerate(seed_embeddings):
        suffix = "" if len(seed_embeddings) == 1 else f"-{embeddings.seed if has_seeds else k}"
        tag = re.sub(r"\s+", "_", f"{to_printable_line(embeddings.experiment or '')}{suffix}") or "vse"
        i2t, t2i = embeddings.score_blocks()
        lists = {"i2t": rank_captions(i2t, depth), "t2i": rank_images(t2i or i2t, depth)}
        for direction in IMAGE_TEXT_DIRECTIONS:
            files.append(folder / f"{direction.name}{suffix}.run")
            query_names, answer_names = names[direction.query_kind], names[direction.candidate_kind]
            _write_trec_run(files[-1], lists[direction.name], n_queries[direction.query_kind], query_names, answer_names, tag)
    return files


def _write_trec_run(
    path: Path, lists: Iterable[RankedList], n_queries: int, queries: Sequence[str], answers: Sequence[str], tag: str
) -> None:
    with open_atomic(path) as stream:
        for query, rows, scores in progress_bar(lists, desc=path.name, total=n_queries, unit="queries"):
            ranked = enumerate(zip(rows.tolist(), break_ties(scores).tolist(), strict=True), 1)
            lines = (f"{queries[query]} Q0 {answers[row]} {place} {score:.9g} {tag}\n" for place, (row, score) in ranked)
            stream.write("".join(lines).encode())
