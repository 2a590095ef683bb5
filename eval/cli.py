"""The commands ``vse-eval`` and ``vse-table``."""

from __future__ import annotations

from pathlib import Path

import click

from vse.eval.comparison import compared, write_comparison
from vse.eval.published import published_tables
from vse.eval.result import PROTOCOLS, evaluate, summary_line
from vse.eval.tables import TABLES, summary, write_table
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json

_FILE = click.Path(path_type=Path)


@click.command("vse-eval")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "--protocol",
    type=click.Choice(["auto", *PROTOCOLS]),
    multiple=True,
    default=("auto",),
    show_default=True,
    help="May be repeated. auto: full, and 1k if there are 1,000 images; sentence: captions query captions.",
)
@click.option("--out", type=_FILE, required=True, help="The result file to write (JSON).")
@click.option("--cross-check/--no-cross-check", default=True, show_default=True, help="Compare the ranks with a FAISS search.")
def eval_command(files: tuple[Path, ...], protocol: tuple[str, ...], out: Path, cross_check: bool) -> None:
    """R@K, Med r, mean r and rsum of embeddings files: one model, a file per seed."""
    evaluate(files, out, protocol, cross_check)
    result = read_json(out)
    for name in result["protocols"]:
        click.echo(summary_line(result, name), err=True)
    click.echo(out)


@click.command("vse-table")
@click.argument("name", type=click.Choice([*TABLES, *published_tables()]))
@click.argument("results", nargs=-1, type=_FILE)
@click.option("--dataset", help="Of a published table: take our figures from this data set, not from that of each row.")
@click.option("--out", type=_FILE, required=True, help="The table to write, .csv or .tex.")
def table_command(name: str, results: tuple[Path, ...], dataset: str | None, out: Path) -> None:
    """Make a table of result files.

    summary has a row per result and protocol. Any other NAME is a published table, printed figures and ours side by side;
    what no result was given for stays blank.
    """
    if name not in TABLES:
        click.echo(write_comparison(compared(name, results, dataset), out))
    elif not results or dataset:
        raise UserError("summary takes no --dataset" if dataset else "summary needs result files")
    else:
        click.echo(write_table(summary(results), out))


eval_main = entry_point(eval_command)
table_main = entry_point(table_command)
