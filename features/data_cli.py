"""Define the subcommands of ``vse-data`` that read or write feature caches, and ``vse-data plan``.

Each subcommand imports its code when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import Field

from vse.features.options import ImportRequest, TokeniserOption
from vse.pipeline.cli import data_group
from vse.pipeline.command import entry_point
from vse.pipeline.option_types import CliOption, FileOrFolderPath, Flag, Force, NearestChoice, PositiveInteger, Text
from vse.pipeline.options import Options, command

DatasetJsonPath = Annotated[FileOrFolderPath, Field(description="The data set's dataset.json.")]
NewCachePath = Annotated[FileOrFolderPath, Field(description="The cache to write, e.g. features/coco_butd.h5.")]


@command("import", group=data_group)
def import_command(request: ImportRequest) -> None:
    """Build a data set from photos with a table of captions, or from files of another program.

    SOURCES is the folder of photos, WebDataset archives, the folder that clip-retrieval wrote, or a data set that Hugging
    Face's library saved. With --format hugging-face, SOURCES is the name of a data set on the hub. Tables are CSV, JSON lines
    or parquet: a row has a file, one or several captions, and optionally a split and ids. Without splits, images are sampled
    for val and test.
    """
    from vse.features.exchange.formats import import_data

    for path in import_data(request):
        click.echo(path)


class PrecompImportRequest(Options):
    """The arguments of ``vse-data import-precomp``."""

    folder: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    dataset: Text
    """Name of the data set."""
    out_features: NewCachePath
    out_data: FileOrFolderPath
    """The dataset.json to write."""
    captions_per_image: PositiveInteger = 5
    """Number of captions of each image."""
    test: Annotated[Text | None, CliOption(click_type=NearestChoice(["test", "testall"]))] = None
    """The files of the test split.  [default: testall]"""
    tokeniser: TokeniserOption = None
    force: Force = False


@command("import-precomp", group=data_group)
def import_precomp_command(request: PrecompImportRequest) -> None:
    """Import features and captions in the layout of VSE++ and SCAN.

    FOLDER holds <split>_ims.npy, <split>_caps.txt and optionally <split>_ids.txt.
    """
    from vse.features.exchange.precomp import import_precomp

    click.echo(import_precomp(**request.model_dump(exclude={"force"})))


class PrecompExportRequest(Options):
    """The arguments of ``vse-data export-precomp``."""

    features: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write."""
    captions: FileOrFolderPath | None = None
    """The dataset.json with the captions.  [default: the file to which the cache refers]"""
    repeat: PositiveInteger | None = None
    """Number of times that each image's row is written.  [default: as imported, else 1]"""
    force: Force = False


@command("export-precomp", group=data_group)
def export_precomp_command(request: PrecompExportRequest) -> None:
    """Write a feature cache, and the captions of its data set, in the layout of VSE++ and SCAN."""
    from vse.features.exchange.precomp import export_precomp

    click.echo(export_precomp(request.features, request.out, request.captions, request.repeat))


class ArrayImportRequest(Options):
    """The arguments of ``vse-data import-npy``."""

    features: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    dataset: DatasetJsonPath
    out_features: NewCachePath
    ids: FileOrFolderPath | None = None
    """File with the ids of the rows, .txt or .npy; a .npz file contains the ids itself."""
    kind: Literal["image", "text"] = "image"
    """Kind of the rows: images or captions."""
    force: Force = False


@command("import-npy", group=data_group)
def import_npy_command(request: ArrayImportRequest) -> None:
    """Import features from a .npy file with a file of ids, or from a .npz file whose arrays are named features and ids."""
    from vse.features.exchange.arrays import import_arrays

    click.echo(import_arrays(request.features, request.ids, request.dataset, request.out_features, request.kind))


class TsvImportRequest(Options):
    """The arguments of ``vse-data import-tsv``."""

    files: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)]
    dataset: DatasetJsonPath
    out_features: NewCachePath
    match: Annotated[Text | None, CliOption(click_type=NearestChoice(["cocoid", "imgid", "filename"]))] = None
    """Field of an image that an image_id equals: cocoid, imgid, or filename for the digits in it.  [default: cocoid]"""
    force: Force = False


@command("import-tsv", group=data_group)
def import_tsv_command(request: TsvImportRequest) -> None:
    """Import regions from bottom-up-attention TSV files."""
    from vse.features.exchange.arrays import import_bottom_up_tsv

    click.echo(import_bottom_up_tsv(request.files, request.dataset, request.out_features, request.match))


class PackRequest(Options):
    """The arguments of ``vse-data pack``."""

    features: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write, e.g. demo_bundle, or an archive, demo_bundle.tar."""
    with_dataset: Flag = False
    """Add the data set file to which the caches refer."""
    notes: FileOrFolderPath | None = None
    """A text file to add, on the licence for example."""
    force: Force = False


@command("pack", group=data_group)
def pack_command(request: PackRequest) -> None:
    """Pack feature caches of one data set into a bundle that others can fetch and check.

    The bundle's list, bundle.json, contains the SHA-256 of each file. The SHA-256 of the list itself is printed and
    identifies the bundle.
    """
    from vse.features.exchange.bundles import pack_bundle

    out = request.out
    click.echo(f"{out}: {pack_bundle(request.features, out, request.with_dataset, request.notes).describe()}")


class FetchFeaturesRequest(Options):
    """The arguments of ``vse-data fetch-features``."""

    source: Annotated[Text, CliOption(is_argument=True)]
    out: FileOrFolderPath = Path("features")
    """Folder to write the caches to."""
    out_data: FileOrFolderPath | None = None
    """Folder for the bundle's data set file.  [default: data/DATASET next to the folder OUT]"""
    sha256: Text | None = None
    """SHA-256 of the bundle's list, as vse-data pack printed it; another bundle is refused."""
    check: Flag = False
    """Compare all files of the bundle with its list, and write nothing."""
    force: Force = False


@command("fetch-features", group=data_group)
def fetch_features_command(request: FetchFeaturesRequest) -> None:
    """Fetch a bundle of feature caches from SOURCE: a folder, a .tar archive, or the address of either (http://, https://).

    Every file is checked by its SHA-256. If the command was interrupted, run it again to continue.
    """
    from vse.features.exchange.bundle_fetch import check_bundle, fetch_features

    if request.check:
        click.echo(f"{request.source}: {check_bundle(request.source, request.sha256).describe()}")
        return
    for path in fetch_features(request.source, request.out, request.out_data, request.sha256):
        click.echo(path)


class PlanRequest(Options):
    """The arguments of ``vse-data plan``."""

    targets: Annotated[tuple[Text, ...], CliOption(is_argument=True)]
    config: Annotated[tuple[Text, ...], CliOption(metavar="KEY=VALUE")] = ()
    """A setting of snakemake --config, e.g. seeds=[0,1]."""
    rates: FileOrFolderPath | None = None
    """YAML file with the speeds of your machine, such as images per second; its entries replace those of config/rates.yaml."""
    calibrate: Flag = False
    """Run a fixed computation for ten seconds, to compare this machine with the machine on which the rates were measured."""


@command("plan", group=data_group)
def plan_command(request: PlanRequest) -> None:
    """Estimate the downloads, the size of the caches and the hours that TARGETS of the workflow need. Nothing is run.

    A target is a file that snakemake makes, such as results/f30k_vsepp.json.

    Run the command in the folder of the workflow. Finished jobs are left out. Sizes and times that are not known are listed. A
    time is a range, unless this machine has run the same extraction or training.
    """
    from vse.features.plan import describe_plan

    click.echo(describe_plan(request.targets, request.config, request.rates, request.calibrate))


main = entry_point(data_group)
