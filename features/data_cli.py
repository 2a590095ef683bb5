"""The subcommands of ``vse-data`` for feature caches. Each imports what it runs, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from vse.pipeline.cli import TOKENISER, data
from vse.pipeline.command import FORCE, SEED, entry_point

_FILE = click.Path(path_type=Path)
_DATASET = click.option("--dataset", type=_FILE, required=True, help="The data set's dataset.json.")
_OUT = click.option("--out-features", type=_FILE, required=True, help="The cache to write, e.g. features/coco_butd.h5.")


@data.command("import")
@click.argument("sources", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. data/birds.")
@click.option("--name", help="What the data set is called.  [default: the name of that folder]")
@click.option(
    "--format", "format_name", metavar="NAME", help="table, webdataset, clip-retrieval or hugging-face.  [default: what it is]"
)
@click.option("--captions", type=_FILE, help="The table, if it is no captions.* or metadata.* among the photos.")
@click.option(
    "--images",
    type=_FILE,
    help="Folder of clip-retrieval's photos, or another one to which paths may lead.",
)
@click.option("--out-features", type=_FILE, default="features", show_default=True, help="Folder of the caches of vectors.")
@click.option(
    "--key-until",
    metavar="DOT",
    help="Where the key of a WebDataset member ends: first-dot or last-dot.  [default: first-dot]",
)
@click.option("--column", "columns", multiple=True, metavar="FIELD=NAME", help="The column of file, caption, split or an id.")
@click.option("--quoting", metavar="HOW", help="Of CSV: minimal, or none, where quotation marks are text.  [default: minimal]")
@click.option("--val", type=click.FloatRange(0, 1), help="Share of images to draw for val, without splits.  [default: 0.1]")
@click.option("--test", type=click.FloatRange(0, 1), help="The same for test.  [default: 0.1]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the drawing.")
@TOKENISER
@click.option("--skip-bad", is_flag=True, help="Leave bad rows out and list them in OUT/import.failures.jsonl.")
@FORCE
def import_command(
    sources: tuple[Path, ...],
    out: Path,
    name: str | None,
    format_name: str | None,
    captions: Path | None,
    images: Path | None,
    out_features: Path,
    key_until: str | None,
    columns: tuple[str, ...],
    quoting: str | None,
    val: float | None,
    test: float | None,
    seed: int,
    tokeniser: str | None,
    skip_bad: bool,
) -> None:
    """Make a data set of photos with a table of captions, WebDataset archives, clip-retrieval's vectors, or a saved data set.

    SOURCES is the folder of photos or vectors, archives, or, with --format hugging-face, the name of a data set on the hub.
    Tables are CSV, JSON lines or parquet: a row has a file and a caption, or several, and perhaps a split and ids. Splits that
    are not given are drawn by image.
    """
    from vse.features.exchange.formats import Import, import_data
    from vse.pipeline.imports.rows import import_settings

    settings = import_settings(out, name, val, test, seed, tokeniser, skip_bad, columns, quoting)
    for path in import_data(Import(sources, settings, captions, images, out_features, key_until), format_name):
        click.echo(path)


@data.command("import-precomp")
@click.argument("folder", type=_FILE)
@click.option("--dataset", required=True, help="Name of the data set.")
@_OUT
@click.option("--out-data", type=_FILE, required=True, help="The dataset.json to write.")
@click.option("--captions-per-image", default=5, show_default=True, type=click.IntRange(1))
@click.option("--test", type=click.Choice(["test", "testall"]), help="Which one is the test split.  [default: testall]")
@TOKENISER
@FORCE
def import_precomp_command(
    folder: Path,
    dataset: str,
    out_features: Path,
    out_data: Path,
    captions_per_image: int,
    test: str | None,
    tokeniser: str | None,
) -> None:
    """Import <split>_ims.npy, <split>_caps.txt and <split>_ids.txt, the layout of VSE++ and SCAN."""
    from vse.features.exchange.precomp import import_precomp

    click.echo(import_precomp(folder, dataset, out_features, out_data, captions_per_image, test, tokeniser))


@data.command("export-precomp")
@click.argument("features", type=_FILE)
@click.option("--out", type=_FILE, required=True, help="Folder to write.")
@click.option("--captions", type=_FILE, help="The data set's dataset.json.  [default: the one the cache names]")
@click.option("--repeat", type=click.IntRange(1), help="Rows per image.  [default: as imported, else 1]")
@FORCE
def export_precomp_command(features: Path, out: Path, captions: Path | None, repeat: int | None) -> None:
    """Write a cache and its captions in the layout of VSE++ and SCAN."""
    from vse.features.exchange.precomp_export import export_precomp

    click.echo(export_precomp(features, out, captions, repeat))


@data.command("import-npy")
@click.argument("features", type=_FILE)
@_DATASET
@_OUT
@click.option("--ids", type=_FILE, help="Ids of the rows, .txt or .npy; a .npz file holds its own.")
@click.option("--kind", type=click.Choice(["image", "text"]), default="image", show_default=True, help="Whose ids they are.")
@FORCE
def import_npy_command(
    features: Path, dataset: Path, out_features: Path, ids: Path | None, kind: Literal["image", "text"]
) -> None:
    """Import a .npy file with ids, or a .npz file with the arrays features and ids."""
    from vse.features.exchange.arrays import import_arrays

    click.echo(import_arrays(features, ids, dataset, out_features, kind))


@data.command("import-tsv")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@_DATASET
@_OUT
@click.option("--match", type=click.Choice(["cocoid", "imgid", "filename"]), help="What an image_id is.  [default: cocoid]")
@FORCE
def import_tsv_command(files: tuple[Path, ...], dataset: Path, out_features: Path, match: str | None) -> None:
    """Import regions from bottom-up-attention TSV files."""
    from vse.features.exchange.arrays import import_tsv

    click.echo(import_tsv(files, dataset, out_features, match))


@data.command("pack")
@click.argument("features", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. demo_bundle, or an archive, demo_bundle.tar.")
@click.option("--with-dataset", is_flag=True, help="Add the dataset.json that the caches name.")
@click.option("--notes", type=_FILE, help="Add a text for its readers, on the licence for example.")
@FORCE
def pack_command(features: tuple[Path, ...], out: Path, with_dataset: bool, notes: Path | None) -> None:
    """Pack caches of one data set as a bundle that others can fetch and check.

    Each file is listed in bundle.json with its SHA-256. The SHA-256 of that list, which is printed, names the bundle.
    """
    from vse.features.exchange.bundles import pack

    click.echo(f"{out}: {pack(features, out, with_dataset, notes).describe()}")


@data.command("fetch-features")
@click.argument("source")
@click.option("--out", type=_FILE, default="features", show_default=True, help="Folder to write the caches to.")
@click.option("--out-data", type=_FILE, help="Folder for its dataset.json.  [default: data/DATASET beside that folder]")
@click.option("--sha256", help="SHA-256 of the bundle's list, as vse-data pack printed it: no other bundle is taken.")
@click.option("--check", "checking", is_flag=True, help="Compare all of its files with the list, and write nothing.")
@FORCE
def fetch_features_command(source: str, out: Path, out_data: Path | None, sha256: str | None, checking: bool) -> None:
    """Fetch a bundle of caches from SOURCE: a folder, a .tar archive, or the address of either (http://, https://).

    Every file is checked by its SHA-256. What was interrupted is continued when the command is run again.
    """
    from vse.features.exchange.bundle_fetch import check_bundle, fetch_features

    if checking:
        click.echo(f"{source}: {check_bundle(source, sha256).describe()}")
        return
    for path in fetch_features(source, out, out_data, sha256):
        click.echo(path)


@data.command("plan")
@click.argument("targets", nargs=-1, required=True)
@click.option("--config", "settings", multiple=True, metavar="KEY=VALUE", help="As of snakemake --config, e.g. seeds=[0,1].")
@click.option("--rates", type=_FILE, help="Rates of your machine, in the form of config/rates.yaml, which they count before.")
def plan_command(targets: tuple[str, ...], settings: tuple[str, ...], rates: Path | None) -> None:
    """Estimate what TARGETS of the workflow take: bytes to download, GB of caches, hours. Nothing is run.

    Run it where snakemake is run. Jobs that are done are left out. What is not known is said.
    """
    from vse.features.plan import plan_target

    click.echo(plan_target(targets, settings, rates))


main = entry_point(data)
