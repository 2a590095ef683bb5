"""The subcommands of ``vse-data`` that read or write feature caches, and ``vse-data plan``."""

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
@click.option("--name", help="Name of the data set.  [default: the name of the folder OUT]")
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Format of SOURCES: table, webdataset, clip-retrieval or hugging-face.  [default: detected]",
)
@click.option(
    "--captions", type=_FILE, help="The table of captions, if it is not a captions.* or metadata.* next to the photos."
)
@click.option(
    "--images",
    type=_FILE,
    help="Folder of the photos of clip-retrieval. For other formats, a second folder in which photos may lie.",
)
@click.option("--out-features", type=_FILE, default="features", show_default=True, help="Folder of the caches of vectors.")
@click.option(
    "--key-until",
    metavar="DOT",
    help="Where the key ends in the name of a WebDataset member: first-dot or last-dot.  [default: first-dot]",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="FIELD=NAME",
    help="Name of the table's column for a field: file, caption, split or an id.",
)
@click.option(
    "--quoting",
    metavar="HOW",
    help="Quotation marks in CSV: minimal (they enclose fields) or none (they are text).  [default: minimal]",
)
@click.option(
    "--val",
    type=click.FloatRange(0, 1),
    help="Share of the images to sample for the split val, if SOURCES have no splits.  [default: 0.1]",
)
@click.option("--test", type=click.FloatRange(0, 1), help="The same for the split test.  [default: 0.1]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the sample.")
@TOKENISER
@click.option("--skip-bad", is_flag=True, help="Skip invalid rows and list them in OUT/import.failures.jsonl.")
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
    """Build a data set from photos with a table of captions, or from files of another program.

    SOURCES is the folder of photos, WebDataset archives, the folder that clip-retrieval wrote, or a data set that Hugging
    Face's library saved. With --format hugging-face it is the name of a data set on the hub. Tables are CSV, JSON lines or
    parquet: a row has a file, one or several captions, and optionally a split and ids. Without splits, images are sampled for
    val and test.
    """
    from vse.features.exchange.formats import ImportJob, import_data
    from vse.pipeline.imports.rows import build_import_settings

    settings = build_import_settings(out, name, val, test, seed, tokeniser, skip_bad, columns, quoting)
    for path in import_data(ImportJob(sources, settings, captions, images, out_features, key_until), format_name):
        click.echo(path)


@data.command("import-precomp")
@click.argument("folder", type=_FILE)
@click.option("--dataset", required=True, help="Name of the data set.")
@_OUT
@click.option("--out-data", type=_FILE, required=True, help="The dataset.json to write.")
@click.option("--captions-per-image", default=5, show_default=True, type=click.IntRange(1))
@click.option("--test", type=click.Choice(["test", "testall"]), help="The files of the test split.  [default: testall]")
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
    """Import features and captions in the layout of VSE++ and SCAN.

    FOLDER holds <split>_ims.npy, <split>_caps.txt and optionally <split>_ids.txt.
    """
    from vse.features.exchange.precomp import import_precomp

    click.echo(import_precomp(folder, dataset, out_features, out_data, captions_per_image, test, tokeniser))


@data.command("export-precomp")
@click.argument("features", type=_FILE)
@click.option("--out", type=_FILE, required=True, help="Folder to write.")
@click.option("--captions", type=_FILE, help="The data set's dataset.json.  [default: the one to which the cache refers]")
@click.option(
    "--repeat", type=click.IntRange(1), help="How often the row of an image is written.  [default: as imported, else 1]"
)
@FORCE
def export_precomp_command(features: Path, out: Path, captions: Path | None, repeat: int | None) -> None:
    """Write a cache and its captions in the layout of VSE++ and SCAN."""
    from vse.features.exchange.precomp import export_precomp

    click.echo(export_precomp(features, out, captions, repeat))


@data.command("import-npy")
@click.argument("features", type=_FILE)
@_DATASET
@_OUT
@click.option("--ids", type=_FILE, help="File with the ids of the rows, .txt or .npy; a .npz file has them itself.")
@click.option(
    "--kind",
    type=click.Choice(["image", "text"]),
    default="image",
    show_default=True,
    help="Kind of the ids: of images or of captions.",
)
@FORCE
def import_npy_command(
    features: Path, dataset: Path, out_features: Path, ids: Path | None, kind: Literal["image", "text"]
) -> None:
    """Import features from a .npy file with a file of ids, or from a .npz file with the arrays features and ids."""
    from vse.features.exchange.arrays import import_arrays

    click.echo(import_arrays(features, ids, dataset, out_features, kind))


@data.command("import-tsv")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@_DATASET
@_OUT
@click.option(
    "--match",
    type=click.Choice(["cocoid", "imgid", "filename"]),
    help="How an image_id identifies an image: by its cocoid, its imgid, or the digits of its file name.  [default: cocoid]",
)
@FORCE
def import_tsv_command(files: tuple[Path, ...], dataset: Path, out_features: Path, match: str | None) -> None:
    """Import regions from bottom-up-attention TSV files."""
    from vse.features.exchange.arrays import import_tsv

    click.echo(import_tsv(files, dataset, out_features, match))


@data.command("pack")
@click.argument("features", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FILE, required=True, help="Folder to write, e.g. demo_bundle, or an archive, demo_bundle.tar.")
@click.option("--with-dataset", is_flag=True, help="Add the dataset.json to which the caches refer.")
@click.option("--notes", type=_FILE, help="A text file to add, on the licence for example.")
@FORCE
def pack_command(features: tuple[Path, ...], out: Path, with_dataset: bool, notes: Path | None) -> None:
    """Pack caches of one data set into a bundle that others can fetch and check.

    The bundle's list, bundle.json, has each file with its SHA-256. The SHA-256 of the list itself is printed and identifies
    the bundle.
    """
    from vse.features.exchange.bundles import pack

    click.echo(f"{out}: {pack(features, out, with_dataset, notes).describe()}")


@data.command("fetch-features")
@click.argument("source")
@click.option("--out", type=_FILE, default="features", show_default=True, help="Folder to write the caches to.")
@click.option("--out-data", type=_FILE, help="Folder for its dataset.json.  [default: data/DATASET next to the folder OUT]")
@click.option("--sha256", help="SHA-256 of the bundle's list, as vse-data pack printed it; another bundle is refused.")
@click.option("--check", "check_only", is_flag=True, help="Compare all files of the bundle with its list, and write nothing.")
@FORCE
def fetch_features_command(source: str, out: Path, out_data: Path | None, sha256: str | None, check_only: bool) -> None:
    """Fetch a bundle of caches from SOURCE: a folder, a .tar archive, or the address of either (http://, https://).

    Every file is checked by its SHA-256. If the command was interrupted, run it again to continue.
    """
    from vse.features.exchange.bundle_fetch import check_bundle, fetch_features

    if check_only:
        click.echo(f"{source}: {check_bundle(source, sha256).describe()}")
        return
    for path in fetch_features(source, out, out_data, sha256):
        click.echo(path)


@data.command("plan")
@click.argument("targets", nargs=-1, required=True)
@click.option(
    "--config", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of snakemake --config, e.g. seeds=[0,1]."
)
@click.option(
    "--rates", type=_FILE, help="Rates of your machine, in the form of config/rates.yaml; they replace the rates there."
)
def plan_command(targets: tuple[str, ...], settings: tuple[str, ...], rates: Path | None) -> None:
    """Estimate the downloads, the size of the caches and the hours that TARGETS of the workflow need. Nothing is run.

    Run the command in the folder of the workflow. Finished jobs are left out. Sizes and times that are not known are listed.
    """
    from vse.features.plan import plan_target

    click.echo(plan_target(targets, settings, rates))


main = entry_point(data)
