"""The command ``vse-serve``, which imports its code only when it runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vse.pipeline.command import ALLOW_CODE, THREADS, entry_point
from vse.pipeline.errors import UserError, import_extra

if TYPE_CHECKING:
    import flask

    from vse.train.use.trained_run import RunPlaces

_FILE = click.Path(path_type=Path)
log = logging.getLogger(__name__)


@click.command("vse-serve")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_FILE)
@click.option(
    "-k",
    default=10,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of results per query; a query may ask for more.",
)
@click.option("--split", default="test", show_default=True, help="The split to search.")
@click.option(
    "--features", multiple=True, type=_FILE, help="The feature cache of each RUN, if it was moved, or of your album."
)
@click.option("--captions", type=_FILE, help="The dataset.json, if it was moved.  [default: the one the caches name]")
@click.option("--caption-features", multiple=True, type=_FILE, help="The caption cache of each RUN, if it was moved.")
@click.option("--weights-dir", type=_FILE, envvar="VSE_WEIGHTS_DIR", help="Folder with the weights of a CNN or text encoder.")
@click.option("--index-type", metavar="FACTORY", help="The FAISS index, such as IVF1024,Flat or HNSW32.  [default: Flat]")
@click.option(
    "--index-parameters", default="", metavar="NAME=NUMBER", help="Parameters of the index, such as nprobe=16 or efSearch=64."
)
@click.option(
    "--rerank",
    default=200,
    show_default=True,
    metavar="K",
    type=click.IntRange(1),
    help="For a model that scores every pair: score only the best K candidates by pooled vectors.",
)
@click.option(
    "--held-gb",
    default=4.0,
    show_default=True,
    type=click.FloatRange(0),
    help="For a model that scores every pair: memory for the encoded images or captions of each run.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 also accepts other machines."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="The port; 0 chooses a free one.")
@click.option(
    "--upload-mb", default=20, show_default=True, type=click.IntRange(1, 1024), help="Largest size of a photo in MB."
)
@click.option(
    "--max-megapixels",
    default=25.0,
    show_default=True,
    type=click.FloatRange(0.01, 80),
    help="Largest size of a photo in megapixels.",
)
@click.option("--check", is_flag=True, help="Load everything, answer one query, print what each run finds, and end.")
@ALLOW_CODE
@click.option("--device", default="auto", show_default=True, envvar="VSE_DEVICE", help="auto, cpu, cuda or cuda:N.")
@THREADS
def serve_command(
    runs: tuple[Path, ...],
    k: int,
    split: str,
    features: tuple[Path, ...],
    captions: Path | None,
    caption_features: tuple[Path, ...],
    weights_dir: Path | None,
    index_type: str | None,
    index_parameters: str,
    rerank: int,
    held_gb: float,
    host: str,
    port: int,
    upload_mb: int,
    max_megapixels: float,
    check: bool,
    device: str,
    threads: int | None,
) -> None:
    """Serve a page on which captions and photographs search a split with one or more runs, side by side.

    The runs search one data set. Everything is loaded once, nothing is written, and Ctrl-C stops it. Scripts ask
    /search?q=TEXT&as=json.
    """
    for package in ("flask", "waitress"):
        import_extra(package, "vse-serve", "serve")
    from vse.features.backbones.device import memory_guard, use_threads
    from vse.train.serve.answers import ServedRuns
    from vse.train.serve.app import PageSettings, create_app
    from vse.train.serve.server import PageServer, is_loopback, trusted_hosts
    from vse.train.use.searcher import SearchOptions

    use_threads(threads)
    if not is_loopback(host):
        log.warning("--host %s: whoever reaches this address can search and see the photos of the split", host)
    options = SearchOptions(None, None, index_type, index_parameters, rerank, many=True, held_bytes=int(held_gb * 1e9))
    with memory_guard("--device cpu does without it"):
        served = ServedRuns(runs, split, _places(runs, features, captions, caption_features, weights_dir), options, device)
        settings = PageSettings(k, upload_mb * 2**20, trusted_hosts(host), int(max_megapixels * 1e6))
        app = create_app(served, settings)
        if check:
            _check(app, served.runs[0].searcher.some_text())
            return
        server = PageServer(app, host, port, upload_mb * 2**20)
        with server.stopped_by_signals():
            try:
                click.echo(server.url)
                log.info("Ctrl-C stops it")
                server.run()
            finally:
                server.close()
            log.info("stopped")
            _leave()


def _places(
    runs: Sequence[Path],
    features: Sequence[Path],
    captions: Path | None,
    caption_features: Sequence[Path],
    weights_dir: Path | None,
) -> list[RunPlaces]:
    from vse.train.use.trained_run import RunPlaces

    for option, files in (("--features", features), ("--caption-features", caption_features)):
        if len(files) not in (0, len(runs)):
            raise UserError(f"{option} is given {len(files)} times for {len(runs)} runs; give it for each, in their order")
    each = [files or (None,) * len(runs) for files in (features, caption_features)]
    return [RunPlaces(images, captions, texts, weights_dir) for images, texts in zip(*each, strict=True)]


def _leave() -> None:
    """End the process at once: threads that still compute and the unloading of libraries could take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _check(app: flask.Flask, text: str) -> None:
    """Print a line for each run: its name, seconds, and the best image's id and score for a text, or its error."""
    answer = app.test_client().get("/search", query_string={"q": text, "as": "json", "k": 1}).get_json()
    for run in answer["runs"]:
        found = [f"image {hit['image']}\t{hit['score']:.4f}" for hit in run["hits"]] or [run["error"]]
        click.echo(f"{run['name']}\t{run['seconds']:.3f} s\t{found[0]}")


serve_main = entry_point(serve_command, may_spin=False)
