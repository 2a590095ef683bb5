"""The commands ``vse-train``, ``vse-embed``, ``vse-search`` and ``vse-report``.

Each command imports the code that it needs only when it runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from vse.eval.defaults import REPORT_QUERIES
from vse.pipeline.command import ALLOW_CODE, FORCE, SEED, THREADS, entry_point
from vse.pipeline.errors import printable
from vse.pipeline.presets.preset_files import preset_descriptions

_FILE = click.Path(path_type=Path)
_DEVICE = click.option("--device", default="auto", show_default=True, envvar="VSE_DEVICE", help="auto, cpu, cuda or cuda:N.")


class _WithExperiments(click.Command):
    """A command whose help text ends with a list of all experiments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Experiments"):
            formatter.write_dl(preset_descriptions("experiments"), col_max=24)


@click.command("vse-train", cls=_WithExperiments)
@click.option("--features", type=_FILE, required=True, help="The feature cache to train on.")
@click.option("--experiment", default="vsepp", show_default=True, help="A preset of config/experiments, or a YAML file.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. loss.margin=0.1.")
@click.option("--name", "label", help="Name of the run in tables.  [default: the experiment and the changes by --set]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the initial weights and of the order of pairs.")
@click.option("--out", type=_FILE, help="The run folder.  [default: runs/DATASET_EXPERIMENT/seed-SEED]")
@click.option("--captions", type=_FILE, help="The data set's dataset.json.  [default: the one the cache names]")
@click.option("--eval-features", type=_FILE, help="Cache for validation.  [default: the experiment's, next to --features]")
@click.option(
    "--caption-features", type=_FILE, help="Cache of captions to read instead of words.  [default: the experiment's]"
)
@click.option(
    "--truth-features", type=_FILE, help="Cache of the ground-truth regions of phrases.  [default: the experiment's]"
)
@click.option("--start-from", type=_FILE, help="Run whose weights to start from.  [default: the experiment's, same seed]")
@click.option("--weights-dir", type=_FILE, envvar="VSE_WEIGHTS_DIR", help="Folder of CNN weights, for training on photos.")
@click.option("--words", type=_FILE, help="File of word vectors to initialise word embeddings.  [default: the experiment's]")
@click.option(
    "--log-negatives",
    default=0,
    type=click.IntRange(0),
    metavar="N",
    help="List the N hardest negatives of each epoch and direction.",
)
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard events as well.")
@click.option("--resume", is_flag=True, help="Continue an unfinished run from its last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace a run with different settings.")
@ALLOW_CODE
@_DEVICE
@THREADS
@FORCE
def train_command(
    features: Path,
    experiment: str,
    sets: tuple[str, ...],
    label: str | None,
    seed: int,
    out: Path | None,
    captions: Path | None,
    eval_features: Path | None,
    caption_features: Path | None,
    truth_features: Path | None,
    start_from: Path | None,
    weights_dir: Path | None,
    words: Path | None,
    log_negatives: int,
    tensorboard: bool,
    resume: bool,
    overwrite: bool,
    device: str,
    threads: int | None,
) -> None:
    """Train an embedding on a feature cache. With --features alone, train VSE++ with the paper's settings.

    Ctrl-C and SIGTERM save a checkpoint before the program ends; --resume continues from it. On several GPUs or machines:
    torchrun --nproc-per-node N -m vse.train --features ...
    """
    from vse.train.named_experiment import is_first_process, train_experiment
    from vse.train.run.inputs import InputPaths
    from vse.train.run.resume import Existing, Extras

    run = train_experiment(
        features,
        experiment,
        sets,
        label,
        seed=seed,
        out=out,
        device=device,
        threads=threads,
        inputs=InputPaths(captions, eval_features, caption_features, start_from, weights_dir, words, truth_features),
        existing=Existing(resume, overwrite),
        extras=Extras(log_negatives, tensorboard),
    )
    if is_first_process():
        click.echo(run)


@click.command("vse-embed")
@click.argument("runs", metavar="RUN", nargs=-1, required=True, type=_FILE)
@click.option("--split", help="The split.  [default: test]")
@click.option(
    "--as-features",
    metavar="OUT",
    type=_FILE,
    help="Write the embeddings of all splits as the caches OUT_images.h5 and OUT_captions.h5 instead, to train on them.",
)
@click.option(
    "--out", type=_FILE, help="The file to write.  [default: RUN/SPLIT.h5, or RUN/DATASET_SPLIT.h5 for another data set]"
)
@click.option(
    "--features", type=_FILE, help="The cache, if it was moved, or a cache of another data set by the same extractor."
)
@click.option("--captions", type=_FILE, help="The dataset.json, if it was moved.  [default: the one the cache names]")
@click.option("--caption-features", type=_FILE, help="The cache of captions, if it was moved.")
@click.option(
    "--weights-dir",
    type=_FILE,
    envvar="VSE_WEIGHTS_DIR",
    help="Folder of the weights of a text encoder, for another data set.",
)
@click.option("--unfinished", is_flag=True, help="Allow a run whose training did not finish; the result records it.")
@click.option("--allow-leak", is_flag=True, help="Allow images that the run was trained on; the result records it.")
@click.option(
    "--sentences",
    is_flag=True,
    help="For a run that localises phrases: write the scores of all captions with all images, for vse-eval --ensemble.",
)
@ALLOW_CODE
@_DEVICE
@THREADS
@FORCE
def embed_command(
    runs: tuple[Path, ...],
    split: str | None,
    as_features: Path | None,
    out: Path | None,
    features: Path | None,
    captions: Path | None,
    caption_features: Path | None,
    weights_dir: Path | None,
    unfinished: bool,
    allow_leak: bool,
    sentences: bool,
    device: str,
    threads: int | None,
) -> None:
    """Write the embeddings of a split, for vse-eval.

    With --features of another data set, --split names a split of that data set, to test a run on data that it was not trained
    on. Images that the model was trained on are refused. With --as-features, each RUN may also be an embeddings file, written
    by any program, one file for each split.
    """
    from vse.features.backbones.device import use_threads
    from vse.train.use.embed import embed_runs
    from vse.train.use.trained_run import RunPlaces

    use_threads(threads)
    places = RunPlaces(features, captions, caption_features, weights_dir)
    written = embed_runs(runs, split, out, as_features, places, device, unfinished, allow_leak, sentences)
    click.echo("\n".join(map(str, written)))


@click.command("vse-search")
@click.argument("run", type=_FILE)
@click.argument("query")
@click.option("-k", default=10, show_default=True, type=click.IntRange(1), help="Number of results.")
@click.option("--split", help="The split.  [default: test]")
@click.option("--features", type=_FILE, help="The cache, if it was moved, or a cache of your album by the same extractor.")
@click.option("--captions", type=_FILE, help="The dataset.json, if it was moved.  [default: the one the cache names]")
@click.option("--caption-features", type=_FILE, help="The cache of captions, if it was moved.")
@click.option("--weights-dir", type=_FILE, envvar="VSE_WEIGHTS_DIR", help="Folder of the weights of a CNN or a text encoder.")
@click.option("--corpus", type=_FILE, help="Embeddings file of this run to search instead of embedding the split.")
@click.option(
    "--index", type=_FILE, help="FAISS index file: written by the first search, then read instead of embedding the split."
)
@click.option("--index-type", metavar="FACTORY", help="Type of a new index, such as IVF1024,Flat or HNSW32.  [default: Flat]")
@click.option(
    "--index-parameters",
    default="",
    metavar="NAME=NUMBER",
    help="Search parameters of the index, such as nprobe=16 or efSearch=64.",
)
@click.option(
    "--rerank",
    metavar="K",
    type=click.IntRange(1),
    help="For a model that scores every pair: score only the best K by pooled vectors.  [default: all; 200 for order scores]",
)
@click.option("--image", type=_FILE, help="Photo of --features in which to find the phrase QUERY, for a run of phrases.")
@click.option("--html", type=_FILE, help="Write a report with photos as well.")
@ALLOW_CODE
@_DEVICE
@THREADS
@FORCE
def search_command(
    run: Path,
    query: str,
    k: int,
    split: str | None,
    features: Path | None,
    captions: Path | None,
    caption_features: Path | None,
    weights_dir: Path | None,
    corpus: Path | None,
    index: Path | None,
    index_type: str | None,
    index_parameters: str,
    rerank: int | None,
    image: Path | None,
    html: Path | None,
    device: str,
    threads: int | None,
) -> None:
    """Search a split with a run: a text finds images, an image file finds captions.

    QUERY is a text, or the path of a JPEG, PNG or WebP file. Each result is a line with rank, score, image and caption; the
    image is an id if dataset.json has no file name. With --image, QUERY is a phrase and the results are boxes of that photo:
    rank, score and corners (x1, y1, x2, y2 in its pixels).
    """
    from vse.features.backbones.device import use_threads
    from vse.train.use.search import SearchRequest, find_phrase, search_run
    from vse.train.use.trained_run import RunPlaces

    use_threads(threads)
    places = RunPlaces(features, captions, caption_features, weights_dir)
    asked = SearchRequest(k, split, corpus, index, index_type, index_parameters, rerank, html)
    if image is not None:
        best = find_phrase(run, image, query, asked, places, device).best(k)
        for rank, (score, box) in enumerate(zip(best.scores.tolist(), best.boxes.tolist(), strict=True), 1):
            click.echo("\t".join([str(rank), f"{score:.4f}", *(f"{corner:.0f}" for corner in box)]))
        return
    for rank, hit in enumerate(search_run(run, query, asked, places, device), 1):
        caption = [] if hit.caption is None else [hit.caption]
        click.echo("\t".join([str(rank), f"{hit.score:.4f}", *map(printable, [hit.photo or hit.image_id, *caption])]))


@click.command("vse-report")
@click.argument("results", nargs=-1, required=True, type=_FILE)
@click.option("--out", type=_FILE, required=True, help="The report to write (HTML).")
@click.option("--data", type=_FILE, help="dataset.json, if it is not at the path that the embeddings record.")
@click.option(
    "--embeddings",
    type=_FILE,
    multiple=True,
    help="The embeddings of the first seed, if they are not at the path that RESULT records; once for each RESULT.",
)
@click.option(
    "--queries",
    type=click.IntRange(min=0),
    default=REPORT_QUERIES,
    show_default=True,
    help="Number of queries to display in each direction.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the choice among many similar queries.")
@ALLOW_CODE
@FORCE
def report_command(
    results: tuple[Path, ...], out: Path, data: Path | None, embeddings: tuple[Path, ...], queries: int, seed: int
) -> None:
    """Write a report on one result, or on two side by side: metrics, curves, and retrieved photos and captions of queries.

    The report is one HTML file that needs no network and runs no script.
    """
    from vse.eval.report.report import write_report
    from vse.train.use.attention import attention_of_run

    click.echo(write_report(results, out, data, embeddings, queries, seed, attention_of_run))


train_main = entry_point(train_command)
embed_main = entry_point(embed_command)
search_main = entry_point(search_command)
report_main = entry_point(report_command)
