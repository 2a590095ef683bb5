"""The commands ``vse-eval`` and ``vse-table``. Evaluation code is imported only when a command runs: ``--help`` stays fast."""

from __future__ import annotations

from typing import Annotated

import click

from vse.eval.options import OPTIONS_ALLOWED_WITH_COMPARE, EvaluationRequest, TableRequest
from vse.eval.tables import find_table_kind, table_names
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.option_types import CliOption, FileOrFolderPath, Force, NearestChoice, Text
from vse.pipeline.options import Options, command


@command("vse-eval")
def eval_command(request: EvaluationRequest) -> None:
    """Evaluate a model: R@K, Med r, mean r and rsum with 95% intervals.

    FILES belong to one model, one file for each seed, such as the files test.h5 of vse-embed. A file has embeddings, or scores
    of all pairs. For a model that localises phrases, a file has phrase scores, that is, scores of phrases with the boxes of
    their images. The metrics are then R@K at an IoU, the upper bound of R@K (the share of phrases with a right box among the
    candidates) and the mean IoU. With --compare, FILES belong to two models, which must have the same number of seeds. With
    --ensemble, FILES are the members of one ensemble. Without --out the metrics are only printed.
    """
    options = request.options
    allowed = [None, *(f"--{name}" for name in OPTIONS_ALLOWED_WITH_COMPARE)]
    if request.compare and options.first_embeddings_option not in allowed:
        raise UserError(f"--compare and {options.first_embeddings_option} cannot be used together")
    (options.model_copy(update={"bootstrap": 0}) if request.compare else options).check_combinations()
    from vse.eval.search.gpu import choose_faiss_device

    choose_faiss_device(options.device)
    *lines, last = (_compare if request.compare else _evaluate)(request)
    for line in lines:
        click.echo(to_printable_line(line), err=request.out is not None or request.compare)
    click.echo(last)


def _evaluate(request: EvaluationRequest) -> list[str]:
    """Evaluate a model and return the lines to print. The last line is the path of the result file, if one was written."""
    from vse.eval.files.results import Result
    from vse.eval.protocols.evaluate import evaluate_files
    from vse.eval.protocols.result_content import format_result_lines

    result = Result.model_validate(evaluate_files(request.files, request.out, request.protocol, request.options))
    return [*format_result_lines(result), *([str(request.out)] if request.out else [])]


def _compare(request: EvaluationRequest) -> list[str]:
    """Compare two models and return the lines to print. The last line is the path of the comparison file."""
    from vse.eval.files.results import read_comparison
    from vse.eval.protocols.compare import compare_files
    from vse.eval.tables.significance import format_difference_lines

    written = compare_files(request.files, request.out, request.protocol, request.options)
    return [*format_difference_lines(read_comparison(written)), str(written)]


class TableCommand(Options):
    """The arguments of ``vse-table``."""

    name: Annotated[Text, CliOption(is_argument=True, metavar="TABLE", click_type=NearestChoice(table_names()))]
    request: TableRequest = TableRequest()
    out: FileOrFolderPath | None = None
    """File to write, .csv or .tex. The ladder can also be a chart, .svg or .png.  [default: print the table]"""
    force: Force = False


@command("vse-table")
def table_command(command: TableCommand) -> None:
    """Build a table of result files.

    TABLE is summary, ladder, significance, compression, cards, compare or the name of a published table.

    The table summary has a row per result and protocol. The table ladder has a row per result with its costs, and marks the
    best trade-offs of cost and rsum. The table significance has a row per metric of the files that vse-eval --compare wrote.
    The table compression has a row per codec of the results of vse-eval --compress. The table cards has the data, seeds,
    features and training of each result. The table compare has a row per pair of results, with the difference and its p-value.

    A name such as vsepp_3 (Table 3 of the VSE++ paper) stands for a published table. The built table has the printed metrics
    and, in rows for which you pass a result, your metrics next to the printed metrics.
    """
    from vse.eval.tables.table import format_text_table

    table = find_table_kind(command.name).build(command.request, command.out)
    click.echo(format_text_table(table.printed) if command.out is None else command.out)


eval_main = entry_point(eval_command)
table_main = entry_point(table_command)
