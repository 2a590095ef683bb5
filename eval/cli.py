"""The commands ``vse-eval`` and ``vse-table``; each imports what it runs when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from vse.eval.defaults import (
    COMPARED,
    IOU,
    LADDER_COSTS,
    PHRASE,
    PROTOCOLS,
    RECALLS,
    SAMPLES,
    TABLES,
    TREC_DEPTH,
    published_tables,
)
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out
from vse.pipeline.plain_text import printable

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
    help=f"Samples of the images for 95% intervals, 0 for none.  [default: {SAMPLES}, with --compare {COMPARED}]",
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
    "--device",
    default="auto",
    show_default=True,
    envvar="VSE_DEVICE",
    help="Where FAISS searches: auto, cpu, cuda or cuda:N.",
)
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
    device: str,
) -> None:
    """R@K, Med r, mean r and rsum of embeddings files, with 95% intervals: one model, a file per seed.

    Without --out the metrics are printed and not written. FILES hold embeddings, or scores of all pairs; or how phrases score
    the boxes of their images: then the metrics are R@K at an IoU, the upper bound and the mean IoU. With --compare they are
    two models, or as many seeds of two; with --ensemble one model made of several, or of the same seeds of several.
    """
    given = {
        "--ensemble": ensemble,
        "--index": index,
        "--rerank": rerank,
        "--per-query": per_query,
        "--trec": trec,
        "--k": ks,
        "--cxc": cxc,
    }
    of_one_model = next((option for option, value in given.items() if value), None)
    if comparing and of_one_model:
        raise UserError(f"--compare and {of_one_model} do not go together")
    if experiment is not None and not ensemble:
        raise UserError("--experiment names the preset of an ensemble: give --ensemble, too")
    for option, value in (("--alpha", alpha), ("--save", save)):
        if value is not None and not ensemble:
            raise UserError(f"{option} is of an ensemble: give --ensemble, too")
    if index_parameters and not index:
        raise UserError("--index-parameters are those of an index: name it with --index")
    if trec_depth is not None and trec is None:
        raise UserError("--trec-depth is that of run files: name their folder with --trec")
    samples = (COMPARED if comparing else SAMPLES) if bootstrap is None else bootstrap
    if 0 < samples < 100 and not comparing:
        raise UserError(f"--bootstrap {samples}: an interval takes 100 samples at least, or 0 for none")
    from vse.eval.protocols.phrase_evaluation import check_protocol, of_phrases
    from vse.eval.search.gpu import use_device

    use_device(device)
    phrases = of_phrases(files)
    check_protocol(files, protocol, phrases)
    if phrases and of_one_model:
        raise UserError(f"{files[0]} holds phrase scores, and {of_one_model} is not of these; leave it out")
    if iou is not None and not phrases:
        raise UserError(f"--iou is of phrase scores, and {files[0]} holds none; leave it out")
    if phrases:
        lines = _of_phrases(files, out, comparing, IOU if iou is None else iou, samples, unfinished)
    elif comparing:
        lines = _compare(files, out, protocol, cross_check, samples, unfinished)
    else:
        asked = {
            "protocol": protocol,
            "cross_check": cross_check,
            "bootstrap": samples,
            "together": ensemble,
            "index": index,
            "index_parameters": index_parameters,
            "unfinished": unfinished,
            "experiment": experiment,
            "rerank": rerank,
            "alpha": alpha,
            "save": save,
            "per_query": per_query,
            "trec": trec,
            "trec_depth": TREC_DEPTH if trec_depth is None else trec_depth,
            "ks": _recalls(ks or ""),
            "cxc": cxc,
        }
        lines = _evaluate(files, out, asked)
    *for_people, last = lines
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
    files: tuple[Path, ...],
    out: Path | None,
    protocol: tuple[str, ...],
    cross_check: bool,
    samples: int,
    unfinished: bool,
) -> list[str]:
    """Compare two models; returns a line per protocol, and the file that was written."""
    from vse.eval.files.results import read_comparison
    from vse.eval.tables.significance import compare, difference_lines

    written = compare(files, out, protocol, cross_check, samples, unfinished)
    return [*difference_lines(read_comparison(written)), str(written)]


def _of_phrases(
    files: tuple[Path, ...], out: Path | None, comparing: bool, iou: float, samples: int, unfinished: bool
) -> list[str]:
    """Evaluate or compare models that localise phrases; returns a line for people, and the file that was written, if any."""
    from vse.eval.files.results import read_comparison, read_result
    from vse.eval.protocols.phrase_evaluation import evaluate_phrases, phrase_line
    from vse.eval.tables.significance import compare_phrases, difference_lines

    if comparing:
        written = compare_phrases(files, out, iou, samples, unfinished)
        return [*difference_lines(read_comparison(written)), str(written)]
    with TemporaryDirectory() as folder:
        result = read_result(evaluate_phrases(files, out or Path(folder, "result.json"), iou, samples, unfinished))
    return [phrase_line(result), *([str(out)] if out else [])]


def _evaluate(files: tuple[Path, ...], out: Path | None, asked: Mapping[str, Any]) -> list[str]:
    """Evaluate a model; returns a line per protocol, index and re-ranking, and the file that was written, if one was.

    ``asked`` are arguments of :func:`vse.eval.protocols.evaluate.evaluate`.
    """
    from vse.eval.files.results import read_result
    from vse.eval.protocols.evaluate import evaluate
    from vse.eval.protocols.result_lines import combination_line, index_line, rerank_line, summary_line

    with TemporaryDirectory() as folder:
        result = read_result(evaluate(files, out or Path(folder, "result.json"), **asked))
    lines = [summary_line(result, name) for name in result.protocols]
    tried = [*([index_line(result.index)] if result.index else []), *map(rerank_line, result.rerank)]
    tried += [combination_line(result.combination)] if result.combination else []
    return [*lines, *tried, *([str(out)] if out else [])]


@click.command("vse-table")
@click.argument("name", type=click.Choice([*TABLES, *published_tables()]))
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
def table_command(name: str, results: tuple[Path, ...], dataset: str | None, cost: str | None, out: Path | None) -> None:
    """Make a table of result files.

    summary has a row per result and protocol; ladder one per result, with its costs and the best trade-offs marked;
    significance one per metric of files that vse-eval --compare wrote. Any other NAME is a published table, printed numbers
    and ours side by side; what no result was given for stays blank.
    """
    if out is not None:
        check_out(out, results)
    if name in TABLES and (dataset or not results):
        raise UserError(f"{name} takes no --dataset" if results else f"{name} needs result files")
    if cost is not None and name != "ladder":
        raise UserError(f"--cost is of a ladder, and {name} is none; leave it out")
    if name == "ladder":
        from vse.eval.tables.ladder import ladder, ladder_cells, write_ladder
        from vse.eval.tables.summary import as_text

        cost = cost or "total_s"
        table = ladder(results, cost)
        click.echo(as_text(ladder_cells(table, cost)) if out is None else write_ladder(table, out, cost))
    elif name == "summary":
        from vse.eval.tables.summary import as_text, summary, summary_cells, write_summary

        table = summary(results)
        click.echo(as_text(summary_cells(table)) if out is None else write_summary(table, out))
    elif name == "significance":
        from vse.eval.tables.significance import significance, significance_cells, write_significance
        from vse.eval.tables.summary import as_text

        table = significance(results)
        click.echo(as_text(significance_cells(table)) if out is None else write_significance(table, out))
    else:
        from vse.eval.tables.published_table import compared, compared_cells, write_compared
        from vse.eval.tables.summary import as_text

        table = compared(name, results, dataset)
        click.echo(as_text(compared_cells(table)) if out is None else write_compared(table, out))


eval_main = entry_point(eval_command)
table_main = entry_point(table_command)
