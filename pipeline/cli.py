"""The command ``vse-data``. Each subcommand imports its own modules, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path

import click

from vse.pipeline.command import FORCE, SEED, entry_point
from vse.pipeline.errors import UserError

_FILE = click.Path(path_type=Path)
TOKENISER = click.option(
    "--tokeniser",
    metavar="NAME",
    help="How to split captions into words: letters_and_digits, unicode_words or nltk.  [default: unicode_words]",
)


@click.group("vse-data")
def data() -> None:
    """Create, prepare and check data sets."""


@data.command("demo")
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. data/demo.")
@click.option("--images", type=int, help="Number of images in all splits together.  [default: 5500]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the random scenes.")
@FORCE
def demo_command(out: Path, images: int | None, seed: int) -> None:
    """Draw the embedded demo data set: scenes of simple shapes with five captions each."""
    from vse.pipeline.demo import DEFAULT_IMAGES, create_demo

    click.echo(create_demo(out, DEFAULT_IMAGES if images is None else images, seed))


@data.command("fetch")
@click.argument("name")
@click.option("--out", type=_FILE, help="Folder to write.  [default: data/NAME]")
@click.option(
    "--base-url",
    envvar="VSE_BASE_URL",
    show_envvar=True,
    help="Address of a mirror, http://host/folder/, which has all files under their published names.",
)
@click.option(
    "--images/--no-images", default=True, show_default=True, help="Download the images, too, if their license allows it."
)
@FORCE
def fetch_command(name: str, out: Path | None, base_url: str | None, images: bool) -> None:
    """Download the public files of f8k, f30k, f30k_entities or coco, and create data/NAME/dataset.json.

    Files are checked by their SHA-256. An interrupted download resumes when the command is run again. If images must be
    requested from their owners, the command prints where to get them.
    """
    from vse.pipeline.dataset.downloads import fetch_dataset
    from vse.pipeline.dataset.sources import load_published_preset

    click.echo(fetch_dataset(load_published_preset(name), out or Path("data", name), base_url, images))


@data.command("prepare")
@click.argument("name")
@click.option("--source", type=_FILE, help="Folder with the published files.  [default: $VSE_NAME_DIR or data/NAME]")
@click.option("--out", type=_FILE, help="Folder to write.  [default: data/NAME]")
@FORCE
def prepare_command(name: str, source: Path | None, out: Path | None) -> None:
    """Make data/NAME/dataset.json from the published files of f8k, f30k, f30k_entities or coco."""
    from vse.pipeline.dataset.sources import load_published_preset, prepare_dataset, source_folder

    click.echo(prepare_dataset(load_published_preset(name), source or source_folder(name), out or Path("data", name)))


@data.command("add-phrases")
@click.argument("dataset", type=_FILE)
@click.option("--entities", type=_FILE, help="Folder of Flickr30K Entities, with the folders Annotations and Sentences.")
@click.option(
    "--chunker",
    metavar="PIPELINE",
    help="Instead of --entities: a spaCy pipeline that marks noun phrases, e.g. en_core_web_sm.",
)
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. data/f8k_entities.")
@click.option("--name", help="Name of the data set.  [default: the name of the output folder]")
@click.option(
    "--similar",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.7,
    show_default=True,
    help="Smallest share of equal words for which captions of different spelling count as the same; 1: equal captions only.",
)
@FORCE
def add_phrases_command(
    dataset: Path, entities: Path | None, chunker: str | None, out: Path, name: str | None, similar: float
) -> None:
    """Mark the phrases of Flickr30K Entities, with their boxes, in the captions of a dataset.json of the same photos.

    Photos are matched by the number in their file names, captions by their text. Splits and ids stay the same. With --chunker,
    the noun phrases of any captions are marked instead, without boxes.
    """
    from vse.pipeline.dataset.sources import add_phrases

    if (entities is None) == (chunker is None):
        raise UserError("phrases come from --entities FOLDER or from --chunker PIPELINE: give one of them")
    click.echo(add_phrases(dataset, entities, out, name, similar, chunker))


@data.command("album")
@click.argument("photos", type=_FILE)
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. data/album.")
@click.option("--name", help="Name of the data set.  [default: the name of the output folder]")
@FORCE
def album_command(photos: Path, out: Path, name: str | None) -> None:
    """Make a data set of a folder of photos without captions, which vse-search can then search."""
    from vse.pipeline.dataset.sources import create_album

    click.echo(create_album(photos, out, name))


@data.command("check")
@click.argument("dataset", type=_FILE)
def check_command(dataset: Path) -> None:
    """Validate a dataset.json and its image files, and print the counts of each split."""
    from vse.pipeline.dataset.sources import check_dataset

    click.echo(check_dataset(dataset))


@data.command("audit")
@click.argument("dataset", type=_FILE)
@click.option(
    "--against",
    type=_FILE,
    help="Another dataset.json, or the name of a data set in data/, to count the images and captions of both.",
)
@click.option(
    "--look-alikes/--no-look-alikes", default=True, show_default=True, help="Read all photos to find those that look the same."
)
def audit_command(dataset: Path, against: Path | None, look_alikes: bool) -> None:
    """Count the data that leak between splits: equal captions, photos that look the same, images of known test sets.

    Images of two data sets are the same if they have the same number on Flickr or in MS-COCO, or if their files have the same
    bytes. Published data sets are compared if their dataset.json lies in data/.
    """
    from vse.pipeline.dataset.duplicates import audit_dataset

    click.echo(audit_dataset(dataset, against, look_alikes))


main = entry_point(data)
