"""The command ``vse-data``."""

from __future__ import annotations

from pathlib import Path

import click

from vse.pipeline import demo, downloads, presets, sources
from vse.pipeline.command import entry_point
from vse.pipeline.config import DatasetConfig
from vse.pipeline.errors import UserError

_FILE = click.Path(path_type=Path)


@click.group("vse-data")
def data() -> None:
    """Make, prepare and check data sets."""


@data.command("demo")
@click.option("--out", type=_FILE, required=True, help="Folder to write, data/demo say.")
@click.option("--images", default=demo.DEFAULT_IMAGES, show_default=True, help="Number of pictures, all splits together.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other scenes.")
def demo_command(out: Path, images: int, seed: int) -> None:
    """Draw the embedded demo data set: scenes of simple shapes with five captions each."""
    click.echo(demo.make_demo(out, images, seed))


@data.command("fetch")
@click.argument("name")
@click.option("--out", type=_FILE, help="Folder to write.  [default: data/NAME]")
@click.option(
    "--base-url",
    envvar="VSE_BASE_URL",
    show_envvar=True,
    help="A mirror: the folder, http://host/folder/, that has all the files under their published names.",
)
@click.option("--images/--no-images", default=True, show_default=True, help="Download the pictures too, where one may.")
def fetch_command(name: str, out: Path | None, base_url: str | None, images: bool) -> None:
    """Download what may be downloaded of f8k, f30k or coco, and make data/NAME/dataset.json.

    Files are checked by their SHA-256. An interrupted download goes on when the command is run again. Where pictures
    must be asked for, it says what to get where.
    """
    click.echo(downloads.fetch_dataset(_published(name), out or Path("data", name), base_url, images))


@data.command("prepare")
@click.argument("name")
@click.option("--source", type=_FILE, help="Folder with the published files.  [default: $VSE_NAME_DIR or data/NAME]")
@click.option("--out", type=_FILE, help="Folder to write.  [default: data/NAME]")
def prepare_command(name: str, source: Path | None, out: Path | None) -> None:
    """Make data/NAME/dataset.json from the published files of f8k, f30k or coco."""
    config = _published(name)
    click.echo(sources.prepare_dataset(config, source or sources.source_folder(name), out or Path("data", name)))


@data.command("check")
@click.argument("dataset", type=_FILE)
def check_command(dataset: Path) -> None:
    """Validate a dataset.json and its pictures; print counts per split."""
    click.echo(sources.check_dataset(dataset))


def _published(name: str) -> DatasetConfig:
    """The preset of a data set that is not drawn."""
    config = presets.load_dataset(name)
    if config.annotations is None:
        raise UserError(f"{name!r} has no published files; draw it with: vse-data demo --out data/{name}")
    return config


main = entry_point(data)
