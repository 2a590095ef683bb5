"""The commands ``vse-eval`` and ``vse-table``. They import their modules only when they run, which keeps ``--help`` fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from vse.eval.defaults import (
    BOOTSTRAP_SAMPLES,
    COMPARISON_SAMPLES,
    CROSS_CHECK_QUERIES,
    IOU,
    LADDER_COSTS,
    PHRASE,
    PROTOCOLS,
    RECALLS,
    TREC_DEPTH,
)
from vse.eval.protocols.options import EvaluationOptions
from vse.eval.tables import table_kind, table_names
from vse.pipeline.command import FORCE, entry_point
from vse.pipeline.errors import UserError, printable

_FILE = click.Path(path_type=Path)


@click.command("vse-eval")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "--protocol",
    type=click.Choice(["auto", *PROTOCOLS, PHRASE]),
    multiple=True,
    default=("auto",),
    show_default=True,
    help="Protocol to evaluate. May be repeated. full: the whole split. 1k: the mean over folds of 1,000 images. sentence, "
    "sentence-1k: captions query captions. cxc, eccv: the COCO test set with further right answers (needs eccv-caption). "
    "phrase: phrase scores. auto: full, 1k if there are 1,000 images, and cxc and eccv where they apply.",
)
@click.option(
    "--compare", "comparing", is_flag=True, help="Treat FILES as two models, and test the difference of each metric."
)
@click.option("--ensemble", is_flag=True, help="Treat FILES as members of an ensemble, and average their scores.")
@click.option("--experiment", help="With --ensemble: preset that lists the members.  [default: any members]")
@click.option(
    "--alpha",
    type=float,
    help="With --ensemble of an image-sentence model and a phrase model: share of phrases, from 0 to 1.  "
    "[default: the best on the validation split]",
)
@click.option(
    "--save",
    type=_FILE,
    help="With --ensemble: also write its embeddings or scores to this file, e.g. for --compare. With several seeds the seed "
    "is added to the name.",
)
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    help="Number of bootstrap samples of the images for 95% intervals; 0 computes no intervals.  "
    f"[default: {BOOTSTRAP_SAMPLES}, with --compare {COMPARISON_SAMPLES}]",
)
@click.option(
    "--index", metavar="FACTORY", help="Also report the recall of an approximate FAISS index, e.g. IVF1024,Flat or HNSW32."
)
@click.option("--index-parameters", default="", metavar="TEXT", help="Search parameters of --index, e.g. nprobe=16.")
@click.option(
    "--rerank",
    metavar="K",
    type=click.IntRange(1),
    multiple=True,
    help="Also report the metrics of a two-stage search that scores only the best K candidates of a fast first stage. May be "
    "repeated.",
)
@click.option(
    "--iou",
    type=float,
    help=f"With phrase scores: lowest IoU with the true box at which a candidate box is right.  [default: {IOU}]",
)
@click.option(
    "--k",
    "ks",
    metavar="K,...",
    help=f"Further K of R@K, e.g. 20,50, besides {', '.join(map(str, RECALLS))}. They do not count in rsum.",
)
@click.option(
    "--cxc",
    type=_FILE,
    metavar="FOLDER",
    help="Folder with sis_test.csv and sts_test.csv of Crisscrossed Captions. The protocol cxc then also reports "
    "image-to-image (i2i) and text-to-text (t2t) retrieval.",
)
@click.option(
    "--per-query",
    type=_FILE,
    metavar="FILE",
    help="Also write a row per query to this .csv or .parquet file: its rank (from 0), and the best right and wrong answer.",
)
@click.option(
    "--trec",
    type=_FILE,
    metavar="FOLDER",
    help="Also write TREC run and qrels files of the whole split to this folder, for trec_eval, ranx and ir_measures.",
)
@click.option(
    "--trec-depth",
    type=click.IntRange(0),
    help=f"With --trec: number of answers per query in a run file, 0 for all.  [default: {TREC_DEPTH}]",
)
@click.option("--unfinished", is_flag=True, help="Accept runs whose training did not finish; the result lists them.")
@click.option("--out", type=_FILE, help="File to write (JSON).  [default: none, with --compare results/DATASET_A_vs_B.json]")
@click.option(
    "--cross-check/--no-cross-check", default=True, show_default=True, help="Compare the exact ranks with a FAISS search."
)
@click.option(
    "--cross-checked",
    type=click.IntRange(0),
    metavar="N",
    default=CROSS_CHECK_QUERIES,
    show_default=True,
    help="Number of queries per direction and protocol that are compared with FAISS, sampled at random; 0 for all.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    envvar="VSE_DEVICE",
    help="Device on which FAISS searches: auto, cpu, cuda or cuda:N.",
)
@FORCE
def eval_command(
    files: tuple[Path, ...],
    protocol: tuple[str, ...],
    comparing: bool,
    ensemble: bool,
    experiment: str | None,
    alpha: float | None,
    save: Path | None,
    bootstrap: int | None,
    index: str | None,
    index_parameters: str,
    rerank: tuple[int, ...],
    iou: float | None,
    ks: str | None,
    cxc: Path | None,
    per_query: Path | None,
    trec: Path | None,
    trec_depth: int | None,
    unfinished: bool,
    out: Path | None,
    cross_check: bool,
    cross_checked: int,
    device: str,
) -> None:
    """Evaluate a model: R@K, Med r, mean r and rsum with 95% intervals.

    FILES are those of one model, a file per seed, with embeddings or with scores of all pairs. They may also hold phrase
    scores, that is, scores of phrases for the boxes of their images; the metrics are then R@K at an IoU, the upper bound and
    the mean IoU. With --compare FILES are two models, or equally many seeds of two models. With --ensemble FILES are the
    members of one ensemble. Without --out the metrics are only printed.
    """
    samples = (COMPARISON_SAMPLES if comparing else BOOTSTRAP_SAMPLES) if bootstrap is None else bootstrap
    options = EvaluationOptions(
        cross_check=cross_check,
        cross_checked=cross_checked,
        bootstrap=samples,
        unfinished=unfinished,
        ks=_parse_ks(ks or ""),
        cxc=cxc,
        ensemble=ensemble,
        experiment=experiment,
        alpha=alpha,
        save=save,
        index=index,
        index_parameters=index_parameters,
        rerank=rerank,
        per_query=per_query,
        trec=trec,
        trec_depth=trec_depth,
    )
    if comparing and options.embeddings_only:
        raise UserError(f"--compare and {options.embeddings_only} cannot be used together")
    (replace(options, bootstrap=0) if comparing else options).check()
    from vse.eval.search.gpu import use_device

    use_device(device)
    *lines, last = (_compare if comparing else _evaluate)(files, out, protocol, options, iou)
    for line in lines:
        click.echo(printable(line), err=out is not None or comparing)
    click.echo(last)


def _parse_ks(text: str) -> list[int]:
    """Split the K of ``--k`` at commas and blanks. Raises UserError if one is not a positive integer."""
    ks = text.replace(",", " ").split()
    wrong = next((k for k in ks if not (k.isascii() and k.isdecimal() and 0 < int(k) < 10**9)), None)
    if wrong is not None:
        raise UserError(f"--k {text}: {wrong} is not a positive integer; give e.g. --k 20,50")
    return [int(k) for k in ks]


def _evaluate(
    files: tuple[Path, ...], out: Path | None, protocol: tuple[str, ...], options: EvaluationOptions, iou: float | None
) -> list[str]:
    """Evaluate a model; return the lines to print, and the file that was written, if one was."""
    from vse.eval.files.results import Result
    from vse.eval.protocols.evaluate import evaluate_files
    from vse.eval.protocols.result_content import result_lines

    result = Result.model_validate(evaluate_files(files, out, protocol, options, iou))
    return [*result_lines(result), *([str(out)] if out else [])]


def _compare(
    files: tuple[Path, ...], out: Path | None, protocol: tuple[str, ...], options: EvaluationOptions, iou: float | None
) -> list[str]:
    """Compare two models; return a line per protocol, and the file that was written."""
    from vse.eval.files.results import read_comparison
    from vse.eval.tables.significance import compare_files, difference_lines

    written = compare_files(
        files, out, protocol, options.cross_check, options.bootstrap, options.unfinished, iou, options.cross_checked
    )
    return [*difference_lines(read_comparison(written)), str(written)]


@click.command("vse-table")
@click.argument("name", type=click.Choice(table_names()))
@click.argument("results", nargs=-1, type=_FILE)
@click.option("--dataset", help="For a published table: use our results on this data set instead of the data set of each row.")
@click.option(
    "--cost",
    type=click.Choice(LADDER_COSTS),
    help="For the table ladder: the cost, in seconds or MB, that is weighed against rsum.  [default: total_s]",
)
@click.option(
    "--out",
    type=_FILE,
    help="File to write: .csv or .tex, for a ladder also a chart, .svg or .png.  [default: print the table]",
)
@FORCE
def table_command(name: str, results: tuple[Path, ...], dataset: str | None, cost: str | None, out: Path | None) -> None:
    """Build a table of result files.

    summary has a row per result and protocol. ladder has a row per result with its costs, and marks the best trade-offs.
    significance has a row per metric of the files that vse-eval --compare wrote. Any other NAME is a published table, with its
    printed metrics next to ours; rows without a result stay blank.
    """
    from vse.eval.tables.table import TableRequest, as_text

    table = table_kind(name).build(TableRequest(results, dataset, cost), out)
    click.echo(as_text(table.cells) if out is None else out)


eval_main = entry_point(eval_command)
table_main = entry_point(table_command)
