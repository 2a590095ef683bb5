"""The command ``vse-extract``. Each subcommand imports its code when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click

from vse.features.settings import EXTRACTORS
from vse.features.settings.base import FeatureSettings, Option
from vse.pipeline.command import FORCE, THREADS, entry_point

_FILE = click.Path(path_type=Path)
_DATASET = click.option("--dataset", type=_FILE, required=True, help="The data set's dataset.json.")
_OUT = click.option("--out", type=_FILE, help="The cache to write.  [default: features/DATASET_FEATURE.h5]")
_SHARDS = click.option("--shards", type=click.IntRange(1), help="Number of shards.  [default: the data set's]")
_SHARD = click.option("--shard", type=int, help="Extract only this shard (counted from 0) and do not merge.")
_LIKE = click.option(
    "--like",
    type=_FILE,
    help="A cache whose settings and weights to use; a model trained on that cache can then read the new one.",
)
_SETS = click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting of the preset.")
_DEVICE = click.option("--device", default="auto", show_default=True, envvar="VSE_DEVICE", help="auto, cpu, cuda or cuda:N.")
_OPTIONS: dict[Option, Callable[[Any], Any]] = {
    "skip_bad": click.option(
        "--skip-bad",
        is_flag=True,
        envvar="VSE_SKIP_BAD",
        help="Skip unreadable images and list them in OUT.failures.jsonl.",
    ),
    "weights_dir": click.option(
        "--weights-dir",
        type=_FILE,
        envvar="VSE_WEIGHTS_DIR",
        help="Folder with weights to use instead of downloads: <model>.pth files, or model folders for text.",
    ),
    "words": click.option(
        "--words",
        type=_FILE,
        envvar="VSE_WORDS",
        help="File of word vectors, word2vec or GloVe.  [default: vectors trained on the training captions]",
    ),
}


@click.group("vse-extract")
def extract() -> None:
    """Extract the features of a data set into a cache. Models are trained on caches.

    A cache consists of shards. Finished shards are kept, missing ones are extracted, and then all are merged to the cache.
    """


def _add_command(extractor: str, settings: type[FeatureSettings]) -> None:
    """Add the command of one extractor; its help text is the docstring of its settings."""
    feature = click.option(
        "--feature",
        default=settings.default_preset or extractor,
        show_default=True,
        help="A preset of config/features, or a YAML file.",
    )

    def run(
        dataset: Path,
        feature: str,
        out: Path | None,
        shards: int | None,
        shard: int | None,
        like: Path | None,
        sets: tuple[str, ...],
        device: str,
        threads: int | None,
        skip_bad: bool = False,
        weights_dir: Path | None = None,
        words: Path | None = None,
    ) -> None:
        from vse.features.feature_job import FeatureRequest, extract_feature

        request = FeatureRequest(dataset, feature, out, sets, like, shards, skip_bad, weights_dir, words, device, threads)
        click.echo(extract_feature(request, extractor, shard))

    own_options = [_OPTIONS[option] for option in settings.options]
    options: list[Callable[[Any], Any]] = [
        _DATASET,
        feature,
        _OUT,
        _SHARDS,
        _SHARD,
        _LIKE,
        _SETS,
        *own_options,
        _DEVICE,
        THREADS,
        FORCE,
    ]
    decorated = reduce(lambda function, option: option(function), reversed(options), run)
    extract.command(extractor, help=cleandoc(settings.__doc__ or ""))(decorated)


for _extractor in EXTRACTORS:
    _add_command(_extractor, EXTRACTORS[_extractor])


@extract.command("fit")
@_DATASET
@click.option("--feature", required=True, help="A preset of a caption feature, or a YAML file.")
@_OUT
@_SETS
@_OPTIONS["words"]
@_DEVICE
@THREADS
@FORCE
def fit_command(
    dataset: Path,
    feature: str,
    out: Path | None,
    sets: tuple[str, ...],
    words: Path | None,
    device: str,
    threads: int | None,
) -> None:
    """Fit the encoder of a caption feature on the training captions, and write it next to the cache OUT.

    After that, the shards of the cache can be extracted by parallel jobs.
    """
    from vse.features.feature_job import FeatureRequest, fit_feature

    click.echo(fit_feature(FeatureRequest(dataset, feature, out, sets, words=words, device=device, threads=threads)))


@extract.command("merge")
@_DATASET
@click.option("--out", type=_FILE, required=True, help="The cache to write; the folder of its shards lies next to it.")
@_SHARDS
@FORCE
def merge_command(dataset: Path, out: Path, shards: int | None) -> None:
    """Merge finished shards to a cache."""
    from vse.features import extraction
    from vse.features.cache.shards import cache_kind
    from vse.features.feature_job import default_shards
    from vse.pipeline.dataset.dataset import load_dataset_file
    from vse.pipeline.files.outputs import check_output

    loaded = load_dataset_file(dataset)
    check_output(out, cache_kind(out), [dataset])
    click.echo(extraction.merge(dataset, out, shards or default_shards(loaded)))


@extract.command("verify")
@click.argument("cache_file", type=_FILE)
@click.option("--no-sources", is_flag=True, help="Do not hash the images or captions from which the rows were extracted.")
@click.option(
    "--write",
    is_flag=True,
    help="Add block checksums to a cache that has none. With them, changed features are detected when they are read.",
)
def verify_command(cache_file: Path, no_sources: bool, write: bool) -> None:
    """Verify a cache: its counts, its ids and the hash of every shard.

    The images or captions from which the rows were extracted are hashed again, too.
    """
    from vse.features import extraction

    cache = extraction.verify(cache_file, write)
    sources = "not checked" if no_sources else extraction.verify_sources(cache)
    shards = f"{len(cache.shards)} shards"
    click.echo(f"{cache_file}: sound, {cache.describe()} in {shards}, sources {sources}, key {cache.key}")


main = entry_point(extract)
