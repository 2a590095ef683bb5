"""The commands ``vse-eval`` and ``vse-table``; each imports what it runs when it runs."""

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
    help="May be repeated. auto: full, 1k if there are 1,000 images, cxc and eccv on the test set of COCO if eccv-caption "
    "is installed; sentence: captions query captions; sentence-1k: over folds of 1,000 images; phrase: of phrase scores.",
)
@click.option("--compare", "comparing", is_flag=True, help="FILES are two models: test the difference of each metric.")
@click.option("--ensemble", is_flag=True, help="FILES are members of an ensemble: average their scores.")
@click.option("--experiment", help="With --ensemble: the preset that says what its members are.  [default: none]")
@click.option(
    "--alpha",
    type=float,
    help="With --ensemble of a model and one of phrases: the share of phrases.  [default: the best by validation]",
)
@click.option(
    "--save", type=_FILE, help="With --ensemble: write its embeddings or scores, too, for --compare (FILE-SEED of several)."
)
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    help="Samples of the images for 95% intervals, 0 for none.  "
    f"[default: {BOOTSTRAP_SAMPLES}, with --compare {COMPARISON_SAMPLES}]",
)
@click.option("--index", metavar="FACTORY", help="Try an approximate FAISS index, too, e.g. IVF1024,Flat or HNSW32.")
@click.option("--index-parameters", default="", metavar="TEXT", help="How thoroughly it is searched, e.g. nprobe=16.")
@click.option(
    "--rerank",
    metavar="K",
    type=click.IntRange(1),
    multiple=True,
    help="Say, too, what is lost if only the best K of a fast first stage are scored. May be repeated.",
)
@click.option(
    "--iou",
    type=float,
    help=f"Of phrase scores: from which IoU with its truth on a candidate box is right.  [default: {IOU}]",
)
@click.option(
    "--k",
    "ks",
    metavar="K,...",
    help=f"The K of R@K, beside {', '.join(map(str, RECALLS))}, whose recalls are rsum: e.g. 20,50.",
)
@click.option(
    "--cxc",
    type=_FILE,
    metavar="FOLDER",
    help="Where sis_test.csv and sts_test.csv of Crisscrossed Captions lie: the protocol cxc then has i2i and t2t, too.",
)
@click.option(
    "--per-query",
    type=_FILE,
    metavar="FILE",
    help="Write what each query got, too, .csv or .parquet: its rank (from 0), the best right answer and the best wrong one.",
)
@click.option(
    "--trec",
    type=_FILE,
    metavar="FOLDER",
    help="Write run and qrels files of both directions over the whole split, too, for trec_eval, ranx and ir_measures.",
)
@click.option(
    "--trec-depth",
    type=click.IntRange(0),
    help=f"How many answers to a query a run file has, 0 for all.  [default: {TREC_DEPTH}]",
)
@click.option("--unfinished", is_flag=True, help="Evaluate runs whose training did not finish, too; the result says so.")
@click.option("--out", type=_FILE, help="The file to write (JSON).  [with --compare: results/DATASET_A_vs_B.json]")
@click.option("--cross-check/--no-cross-check", default=True, show_default=True, help="Compare the ranks with a FAISS search.")
@click.option(
    "--cross-checked",
    type=click.IntRange(0),
    metavar="N",
    default=CROSS_CHECK_QUERIES,
    show_default=True,
    help="Of how many queries of each direction of a protocol, drawn at random; 0 for all.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    envvar="VSE_DEVICE",
    help="Where FAISS searches: auto, cpu, cuda or cuda:N.",
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
    """R@K, Med r, mean r and rsum of embeddings files, with 95% intervals: one model, a file per seed.

    Without --out the metrics are printed and not written. FILES hold embeddings, or scores of all pairs; or how phrases score
    the boxes of their images: then the metrics are R@K at an IoU, the upper bound and the mean IoU. With --compare they are
    two models, or as many seeds of two; with --ensemble one model made of several, or of the same seeds of several.
    """
    samples = (COMPARISON_SAMPLES if comparing else BOOTSTRAP_SAMPLES) if bootstrap is None else bootstrap
    asked = EvaluationOptions(
        cross_check=cross_check,
        cross_checked=cross_checked,
        bootstrap=samples,
        unfinished=unfinished,
        ks=_recalls(ks or ""),
        cxc=cxc,
        together=ensemble,
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
    if comparing and asked.of_embeddings:
        raise UserError(f"--compare and {asked.of_embeddings} do not go together")
    (asked if not comparing else replace(asked, bootstrap=0)).check()
    from vse.eval.search.gpu import use_device

    use_device(device)
    *for_people, last = (_compare if comparing else _evaluate)(files, out, protocol, asked, iou)
    for line in for_people:
        click.echo(printable(line), err=out is not None or comparing)
    click.echo(last)


def _recalls(text: str) -> list[int]:
    """The K of ``--k``, between commas or blanks; :class:`UserError` if one is no number from 1 on."""
    ks = text.replace(",", " ").split()
    wrong = next((k for k in ks if not (k.isascii() and k.isdecimal() and 0 < int(k) < 10**9)), None)
    if wrong is not None:
        raise UserError(f"--k {text}: {wrong} is no number from 1 on; give e.g. --k 20,50")
    return [int(k) for k in ks]


def _compare(
    files: tuple[Path, ...], out: Path | None, protocol: tuple[str, ...], asked: EvaluationOptions, iou: float | None
) -> list[str]:
    """Compare two models; returns a line per protocol, and the file that was written."""
    from vse.eval.files.results import read_comparison
    from vse.eval.tables.significance import compare_files, difference_lines

    written = compare_files(
        files, out, protocol, asked.cross_check, asked.bootstrap, asked.unfinished, iou, asked.cross_checked
    )
    return [*difference_lines(read_comparison(written)), str(written)]


def _evaluate(
    files: tuple[Path, ...], out: Path | None, protocol: tuple[str, ...], asked: EvaluationOptions, iou: float | None
) -> list[str]:
    """Evaluate a model; returns a line per protocol, index and re-ranking, and the file that was written, if one was."""
    from vse.eval.files.results import Result
    from vse.eval.protocols.phrase_evaluation import evaluate_files, result_lines

    result = Result.model_validate(evaluate_files(files, out, protocol, asked, iou))
    return [*result_lines(result), *([str(out)] if out else [])]


@click.command("vse-table")
@click.argument("name", type=click.Choice(table_names()))
@click.argument("results", nargs=-1, type=_FILE)
@click.option("--dataset", help="Of a published table: take our results on this data set, not on that of each row.")
@click.option(
    "--cost",
    type=click.Choice(LADDER_COSTS),
    help="Of a ladder: the cost against which rsum is weighed, in seconds or MB.  [default: total_s]",
)
@click.option(
    "--out", type=_FILE, help="The table to write, .csv or .tex; a ladder's picture .svg or .png.  [default: printed]"
)
@FORCE
def table_command(name: str, results: tuple[Path, ...], dataset: str | None, cost: str | None, out: Path | None) -> None:
    """Make a table of result files.

    summary has a row per result and protocol; ladder one per result, with its costs and the best trade-offs marked;
    significance one per metric of files that vse-eval --compare wrote. Any other NAME is a published table, printed numbers
    and ours side by side; what no result was given for stays blank.
    """
    from vse.eval.tables.table import TableRequest, as_text

    table = table_kind(name).build(TableRequest(results, dataset, cost), out)
    click.echo(as_text(table.cells) if out is None else out)


eval_main = entry_point(eval_command)
table_main = entry_point(table_command)
