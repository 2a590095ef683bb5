"""The command ``vse-extract``."""

from __future__ import annotations

from pathlib import Path

import click

from vse.features import cache, cnn
from vse.features.hardware import use_threads
from vse.pipeline import presets
from vse.pipeline.command import entry_point
from vse.pipeline.dataset import load_dataset_file

_FILE = click.Path(path_type=Path)
_DATASET = click.option("--dataset", type=_FILE, required=True, help="The data set's dataset.json.")
_SHARDS = click.option("--shards", type=click.IntRange(1), help="Number of shards.  [default: the data set's]")


@click.group("vse-extract")
def extract() -> None:
    """Extract features once, into a cache that the trainers read."""


@extract.command("cnn")
@_DATASET
@click.option("--feature", default="fc7", show_default=True, help="A preset of config/features, or a YAML file.")
@click.option("--out", type=_FILE, help="The cache to write.  [default: features/DATASET_FEATURE.h5]")
@_SHARDS
@click.option("--shard", type=int, help="Make this shard alone (from 0) and do not merge.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting of the preset.")
@click.option(
    "--skip-bad", is_flag=True, envvar="VSE_SKIP_BAD", help="Leave unreadable images out and list them in OUT.failures.jsonl."
)
@click.option("--weights-dir", type=_FILE, envvar="VSE_WEIGHTS_DIR", help="Folder of <model>.pth files, instead of downloads.")
@click.option("--device", default="auto", show_default=True, envvar="VSE_DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(1), help="Processor cores to use.  [default: all]")
def cnn_command(
    dataset: Path,
    feature: str,
    out: Path | None,
    shards: int | None,
    shard: int | None,
    sets: tuple[str, ...],
    skip_bad: bool,
    weights_dir: Path | None,
    device: str,
    threads: int | None,
) -> None:
    """Extract a CNN feature: the shards that are not finished yet, then the cache that joins them."""
    name = load_dataset_file(dataset).name
    config = presets.load_feature(feature, name, sets)
    out = out or Path("features", f"{name}_{config.name}.h5")
    n_shards = shards or _default_shards(name)
    use_threads(threads)
    made = cnn.extract_shards(dataset, config, out, n_shards, shard, skip_bad, weights_dir, device)
    click.echo(made if shard is not None else cnn.merge(dataset, out, n_shards))


@extract.command("merge")
@_DATASET
@click.option("--out", type=_FILE, required=True, help="The cache to write; its shards lie beside it.")
@_SHARDS
def merge_command(dataset: Path, out: Path, shards: int | None) -> None:
    """Join finished shards to a cache."""
    click.echo(cnn.merge(dataset, out, shards or _default_shards(load_dataset_file(dataset).name)))


@extract.command("verify")
@click.argument("cache_file", type=_FILE)
def verify_command(cache_file: Path) -> None:
    """Re-hash every shard of a cache and check its row counts and ids."""
    found = cache.verify_cache(cache_file)
    rows = f"{len(found.ids)} rows of {' x '.join(map(str, found.row_shape))} {found.dtype}"
    click.echo(f"{cache_file}: sound, {rows} in {len(found.shards)} shards, key {found.key}")


def _default_shards(dataset: str) -> int:
    return presets.load_dataset(dataset).shards if dataset in presets.known_presets("datasets") else 4


main = entry_point(extract)
