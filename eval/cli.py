"""The commands ``vse-eval``, ``vse-table`` and ``vse-report``."""

from __future__ import annotations

from pathlib import Path

import click

from vse.eval.protocols.evaluate import evaluate, index_line, summary_line
from vse.eval.protocols.protocols import PROTOCOLS
from vse.eval.ranking.bootstrap import COMPARED, SAMPLES
from vse.eval.report.report import QUERIES, write_report
from vse.eval.tables.printed import published_tables
from vse.eval.tables.published_table import compared, write_compared
from vse.eval.tables.significance import compare, difference_lines, significance, write_significance
from vse.eval.tables.summary import TABLES, summary, write_summary
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out, read_json

_FILE = click.Path(path_type=Path)


@click.command("vse-eval")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "--protocol",
    type=click.Choice(["auto", *PROTOCOLS]),
    multiple=True,
    default=("auto",),
    show_default=True,
    help="May be repeated. auto: full, 1k if there are 1,000 images, cxc and eccv on the test set of COCO if eccv-caption "
    "is installed; sentence: captions query captions.",
)
@click.option("--compare", "comparing", is_flag=True, help="FILES are two models: test the difference of each figure.")
@click.option("--ensemble", is_flag=True, help="FILES are members of an ensemble: average their scores.")
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    help=f"Samples of the images for 95% intervals, 0 for none.  [default: {SAMPLES}, with --compare {COMPARED}]",
)
@click.option("--index", metavar="FACTORY", help="Try an approximate FAISS index, too: IVF1024,Flat or HNSW32, say.")
@click.option("--index-parameters", default="", metavar="TEXT", help="How thoroughly it is searched: nprobe=16, say.")
@click.option("--out", type=_FILE, help="The file to write (JSON).  [required; with --compare: results/DATASET_A_vs_B.json]")
@click.option("--cross-check/--no-cross-check", default=True, show_default=True, help="Compare the ranks with a FAISS search.")
def eval_command(
    files: tuple[Path, ...],
    protocol: tuple[str, ...],
    comparing: bool,
    ensemble: bool,
    bootstrap: int | None,
    index: str | None,
    index_parameters: str,
    out: Path | None,
    cross_check: bool,
) -> None:
    """R@K, Med r, mean r and rsum of embeddings files, with 95% intervals: one model, a file per seed.

    With --compare two models, or as many seeds of two; with --ensemble one model made of several.
    """
    if comparing and (ensemble or index):
        raise UserError(f"--compare and {'--ensemble' if ensemble else '--index'} do not go together")
    if index_parameters and not index:
        raise UserError("--index-parameters are those of an index: name it with --index")
    if comparing:
        written = compare(files, out, protocol, cross_check, COMPARED if bootstrap is None else bootstrap)
        lines = difference_lines(read_json(written))
    elif out is None:
        raise click.UsageError("Missing option '--out'.")
    else:
        samples = SAMPLES if bootstrap is None else bootstrap
        if 0 < samples < 100:
            raise UserError(f"--bootstrap {samples}: an interval takes 100 samples at least, or 0 for none")
        written = evaluate(files, out, protocol, cross_check, samples, ensemble, index, index_parameters)
        result = read_json(written)
        lines = [summary_line(result, name) for name in result["protocols"]]
        lines += [index_line(result)] if index else []
    for line in lines:
        click.echo(line, err=True)
    click.echo(written)


@click.command("vse-table")
@click.argument("name", type=click.Choice([*TABLES, *published_tables()]))
@click.argument("results", nargs=-1, type=_FILE)
@click.option("--dataset", help="Of a published table: take our figures from this data set, not from that of each row.")
@click.option("--out", type=_FILE, required=True, help="The table to write, .csv or .tex.")
def table_command(name: str, results: tuple[Path, ...], dataset: str | None, out: Path) -> None:
    """Make a table of result files.

    summary has a row per result and protocol; significance one per figure of files that vse-eval --compare wrote. Any
    other NAME is a published table, printed figures and ours side by side; what no result was given for stays blank.
    """
    check_out(out, results)
    if name not in TABLES:
        click.echo(write_compared(compared(name, results, dataset), out))
    elif not results or dataset:
        raise UserError(f"{name} takes no --dataset" if dataset else f"{name} needs result files")
    elif name == "summary":
        click.echo(write_summary(summary(results), out))
    else:
        click.echo(write_significance(significance(results), out))


@click.command("vse-report")
@click.argument("results", nargs=-1, required=True, type=_FILE)
@click.option("--out", type=_FILE, required=True, help="The page to write (HTML).")
@click.option("--data", type=_FILE, help="dataset.json, if it does not lie where the embeddings say.")
@click.option(
    "--embeddings",
    type=_FILE,
    multiple=True,
    help="The embeddings of the first seed, if they do not lie where the result says; given for each RESULT.",
)
@click.option(
    "--queries", type=click.IntRange(min=0), default=QUERIES, show_default=True, help="Queries shown each direction."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides which of many like queries are shown.")
def report_command(
    results: tuple[Path, ...], out: Path, data: Path | None, embeddings: tuple[Path, ...], queries: int, seed: int
) -> None:
    """Make a page of a result, or of two side by side: figures, curves, and what queries find, as pictures and captions.

    The page is one file that needs no network and runs no script.
    """
    click.echo(write_report(results, out, data, embeddings, queries, seed))


eval_main = entry_point(eval_command)
report_main = entry_point(report_command)
table_main = entry_point(table_command)
