"""The commands ``vse-train``, ``vse-embed``, ``vse-search``, ``vse-report``, ``vse model``, ``vse check`` and ``vse new``.

Each command imports the code that it needs only when it runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from vse.pipeline.command import entry_point
from vse.pipeline.errors import to_printable_line
from vse.pipeline.options import command
from vse.pipeline.presets.preset_files import list_preset_names_and_descriptions
from vse.training.options import (
    CheckRequest,
    EmbedRequest,
    NewRequest,
    PackRequest,
    PushRequest,
    ReportRequest,
    SearchCommandRequest,
    TrainRequest,
)

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


class _ExperimentListCommand(click.Command):
    """A command whose help text ends with a list of all experiments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Experiments"):
            formatter.write_dl(list_preset_names_and_descriptions("experiments", without_key="ensemble_of"), col_max=24)


@command("vse-train", cls=_ExperimentListCommand)
def train_command(request: TrainRequest) -> None:
    """Train a model on a feature cache.

    Without --experiment, VSE++ is trained with the settings of its paper. Ctrl-C and SIGTERM save a checkpoint before the
    program ends, and --resume continues from this checkpoint. Several processes can train one model together, if torchrun,
    srun or mpirun starts them, e.g. torchrun --nproc-per-node N -m vse.training --features ...
    """
    from vse.training.training import is_first_process, train_experiment

    run = train_experiment(request)
    if is_first_process():
        click.echo(run)


@command("vse-embed", leave_out={"images"})
def embed_command(request: EmbedRequest) -> None:
    """Write the embeddings of a split, for vse-eval.

    To test a run on another data set than its training data, give a cache of that data set with --features. --split is then a
    split of that data set. Images that the model was trained on are an error without --allow-leak.

    With --as-features, the embeddings of all splits become two feature caches, to train another model on. Instead of a run,
    you may then give embeddings files of another program, one file for each split.
    """
    from vse.features.backbones.device import set_thread_count
    from vse.training.use.embed import embed_runs

    set_thread_count(request.threads)
    click.echo("\n".join(map(str, embed_runs(request))))


@command("vse-search")
def search_command(request: SearchCommandRequest) -> None:
    """Search a split with a run: a text finds images, an image file finds captions.

    RUN is the folder of a run or of a packed model, or hf://user/name on the Hugging Face hub. With --images, a folder of
    photos is searched instead of a split.

    QUERY is a text, or the path of a JPEG, PNG, WebP, GIF or BMP file. A result is a line with rank, score, file name of the
    image and caption. An image without a file name has its id there. For a text QUERY, the caption is the first one of the
    image. With --image, QUERY is a phrase to find in one image. A line then has rank, score and the corners of a box (x1, y1,
    x2, y2 in pixels).
    """
    from vse.features.backbones.device import set_thread_count
    from vse.training.share.pack import fetch_model_folder
    from vse.training.use.localise import find_phrase
    from vse.training.use.search import search_run

    set_thread_count(request.threads)
    run, query, search, files = fetch_model_folder(request.run), request.query, request.search, request.files
    if request.image is not None:
        best = find_phrase(run, request.image, query, search, files, request.device).select_best(search.k)
        for rank, (score, box) in enumerate(zip(best.scores.tolist(), best.boxes.tolist(), strict=True), 1):
            click.echo("\t".join([str(rank), f"{score:.4f}", *(f"{corner:.0f}" for corner in box)]))
        return
    for rank, hit in enumerate(search_run(run, query, search, files, request.device), 1):
        caption = hit.captions[:1] if hit.caption is None else [hit.caption]
        click.echo("\t".join([str(rank), f"{hit.score:.4f}", *map(to_printable_line, [hit.photo or hit.image_id, *caption])]))


@command("vse-report")
def report_command(request: ReportRequest) -> None:
    """Write a report on one or two results, side by side: metrics, curves, and the photos and captions that queries find.

    A RESULT is a JSON file of vse-eval --out. The report is one HTML file that needs no network and runs no script.
    """
    from vse.eval.report.report import write_report
    from vse.training.use.attention import open_attending_run

    click.echo(
        write_report(
            request.results,
            request.out,
            request.data,
            request.embeddings,
            request.queries,
            request.seed,
            open_attending_run,
            request.gallery,
        )
    )


train_main = entry_point(train_command)
embed_main = entry_point(embed_command)
search_main = entry_point(search_command)
report_main = entry_point(report_command)


@command("check")
def check_command(request: CheckRequest) -> None:
    """Try your own loss, similarity, encoder or extractor on a small batch.

    PART is a Python file and the name of an object in it, such as my_loss.py:my_loss. vse-train and vse-extract make the same
    check before they start.
    """
    from vse.pipeline.presets.own_code import allow_named_code
    from vse.training.own_parts.check import check_part

    with allow_named_code([request.part]):
        click.echo(f"{request.part}: this {check_part(request.part, request.sets)} is sound")


@command("new")
def new_command(request: NewRequest) -> None:
    """Write a commented template of a loss, a similarity or an extractor to FILE, and a test of the template next to FILE."""
    from vse.training.own_parts.templates import write_template

    click.echo("\n".join(write_template(request.kind, request.file)))


@click.group("model")
def model_group() -> None:
    """Pack a trained model into a folder that needs no data, and publish the folder."""


@command("pack", group=model_group)
def pack_command(request: PackRequest) -> None:
    """Write the model of RUN to the folder OUT.

    vse-search, vse-serve and the Python function vse.load open this folder without data set and caches. The folder has the
    layout of Hugging Face: weights, settings, vocabulary, and a model card, README.md.
    """
    from vse.training.share.pack import pack

    click.echo(pack(request.run, request.out, request.options))


@command("push", group=model_group)
def push_command(request: PushRequest) -> None:
    """Upload a packed model to the Hugging Face hub as the repository NAME, such as user/name.

    First run "hf auth login", or set HF_TOKEN. To use another hub, set HF_ENDPOINT to its address.
    """
    from vse.training.share.pack import push_model

    click.echo(push_model(request.folder, request.name, request.private))
