"""The command ``vse-serve``. It imports the code of the server only when it runs, so that ``--help`` is fast."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.options import command
from vse.training.options import RunInputOptions, ServeRequest

if TYPE_CHECKING:
    import flask

log = logging.getLogger(__name__)


@command("vse-serve")
def serve_command(request: ServeRequest) -> None:
    """Serve a web page to search a split: a text finds photographs, a photograph finds captions.

    If several runs are given, the page displays their results side by side. All runs must search the same data set. The server
    loads all runs at the start and writes no files; Ctrl-C stops the server. Scripts get JSON from /search?q=TEXT&as=json.

    A RUN is the folder of a run or of a packed model, or hf://user/name. With --images, a folder of photos is searched instead
    of a split.
    """
    for package in ("flask", "waitress"):
        import_extra(package, "vse-serve", "serve")
    # Set before torch is imported: in huge pages of memory, a search reads the vectors almost twice as fast.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from vse.features.backbones.device import set_thread_count, wrap_memory_errors
    from vse.training.serve.answers import ServedRuns
    from vse.training.serve.app import PageSettings, create_app
    from vse.training.serve.server import PageServer, is_loopback, list_trusted_hosts
    from vse.training.share.pack import fetch_model_folder
    from vse.training.use.searcher import SearcherOptions

    set_thread_count(request.threads)
    if not is_loopback(request.host):
        log.warning("--host %s: whoever reaches this address can search and see the photos of the split", request.host)
    options = SearcherOptions(
        None,
        None,
        request.index_type,
        request.index_parameters,
        request.rerank,
        expects_many_queries=True,
        max_held_bytes=int(request.held_gb * 1e9),
    )
    upload_bytes, pixels = request.upload_mb * 2**20, int(request.max_megapixels * 1e6)
    with wrap_memory_errors("--device cpu does without it"):
        runs, files = [fetch_model_folder(run) for run in request.runs], _list_run_input_options(request)
        served = ServedRuns(runs, request.split, files, options, request.device)
        app = create_app(served, PageSettings(request.k, upload_bytes, list_trusted_hosts(request.host), pixels))
        if request.check:
            _print_best_hits(app, served.runs[0].searcher.choose_sample_text())
            return
        server = PageServer(app, request.host, request.port, upload_bytes)
        with server.stop_on_signals():
            try:
                click.echo(server.url)
                log.info("Ctrl-C stops it")
                server.run()
            finally:
                server.close()
            log.info("stopped")
            _exit_at_once()


def _list_run_input_options(request: ServeRequest) -> list[RunInputOptions]:
    n_runs = len(request.runs)
    for option, files in (("--features", request.features), ("--caption-features", request.caption_features)):
        if len(files) not in (0, n_runs):
            raise UserError(f"{option} is given {len(files)} times for {n_runs} runs; give it for each, in their order")
    features, caption_features = (files or (None,) * n_runs for files in (request.features, request.caption_features))
    return [
        RunInputOptions(
            features=cache,
            captions=request.captions,
            caption_features=texts,
            weights_dir=request.weights_dir,
            images=request.images,
        )
        for cache, texts in zip(features, caption_features, strict=True)
    ]


def _exit_at_once() -> None:
    """End the process at once, because the unloading of libraries takes seconds on a busy machine."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _print_best_hits(app: flask.Flask, text: str) -> None:
    """Print the best image of each run for a text (name of the run, seconds, image id, score), or the error of the run."""
    answer = app.test_client().get("/search", query_string={"q": text, "as": "json", "k": 1}).get_json()
    for run in answer["runs"]:
        found = [f"image {hit['image']}\t{hit['score']:.4f}" for hit in run["hits"]] or [run["error"]]
        click.echo(f"{run['name']}\t{run['seconds']:.3f} s\t{found[0]}")


serve_main = entry_point(serve_command)
