"""The command ``vse-data``."""

from __future__ import annotations

from pathlib import Path

import click

from vse.pipeline import demo, presets, sources
from vse.pipeline.command import entry_point
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


@data.command("prepare")
@click.argument("name")
@click.option("--source", type=_FILE, help="Folder with the published files.  [default: $VSE_NAME_DIR or data/NAME]")
@click.option("--out", type=_FILE, help="Folder to write.  [default: data/NAME]")
def prepare_command(name: str, source: Path | None, out: Path | None) -> None:
    """Make data/NAME/dataset.json from the published files of f8k, f30k or coco."""
    config = presets.load_dataset(name)
    if config.annotations is None:
        raise UserError(f"{name!r} has no published files; draw it with: vse-data demo --out data/{name}")
    click.echo(sources.prepare_dataset(config, source or sources.source_folder(name), out or Path("data", name)))


@data.command("check")
@click.argument("dataset", type=_FILE)
def check_command(dataset: Path) -> None:
    """Validate a dataset.json and its pictures; print counts per split."""
    click.echo(sources.check_dataset(dataset))


main = entry_point(data)
