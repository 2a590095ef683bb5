"""The command ``vse-extract``, and the subcommands of ``vse-data`` that import or export features, or plan their extraction.

Each subcommand imports its code when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import Field

from vse.features.options import FeatureRequest, ImportRequest, MergeRequest, TokeniserOption, VerifyRequest
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import FeatureSettings
from vse.pipeline.cli import data_group
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import CliOption, FileOrFolderPath, Flag, Force, NearestChoice, PositiveInteger, Text
from vse.pipeline.options import Options, command
from vse.pipeline.presets.own_code import allow_named_code, is_code_name

_EXTRACTOR_OPTIONS = frozenset({"skip_bad", "weights_dir", "words"})  # options that only some extractors have
_SHARD_OPTIONS = frozenset({"shards", "shard", "like"})  # options without a meaning for the subcommand fit


class _ExtractorGroup(click.Group):
    """A group with a subcommand for each registered extractor. A user's own extractor is the subcommand ``FILE.py:NAME``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*EXTRACTORS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in EXTRACTORS:
            return super().get_command(ctx, cmd_name)
        if is_code_name(cmd_name):
            with allow_named_code([cmd_name]):
                return _build_extractor_command(cmd_name, EXTRACTORS[cmd_name])
        try:
            return _build_extractor_command(cmd_name, EXTRACTORS[cmd_name])
        except UserError as error:  # an invalid extractor must not break the other subcommands
            return _build_failing_command(cmd_name, error)


@click.group("vse-extract", cls=_ExtractorGroup)
def extract() -> None:
    """Extract the features of a data set into a cache.

    A cache is a file with a row for each image or caption, which vse-train reads. The rows are extracted in several parts, the
    shards. Then the shards are merged. If you repeat an interrupted command, it keeps the finished shards.
    """


def _build_extractor_command(extractor: str, settings: type[FeatureSettings]) -> click.Command:
    class ExtractorCommand(click.Command):
        """A command whose help text ends with the settings of the extractor."""

        def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Settings of a preset, changed by --set KEY=VALUE"):
                fields = settings.model_fields.items()
                formatter.write_dl([(name, field.description) for name, field in fields if field.description], col_max=24)

    missing_options = _EXTRACTOR_OPTIONS.difference(settings.option_names)
    default = settings.default_preset or extractor

    @command(extractor, cls=ExtractorCommand, leave_out=missing_options, defaults={"feature": default}, text=settings.__doc__)
    def run(request: FeatureRequest) -> None:
        from vse.features.feature_job import extract_feature

        with allow_named_code([extractor]):
            click.echo(extract_feature(request, extractor))

    return run


def _build_failing_command(name: str, error: UserError) -> click.Command:
    """Return a command that raises ``error`` whatever its arguments are."""

    def fail() -> None:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, help=str(error), context_settings=any_arguments)


@command("fit", group=extract, leave_out=_SHARD_OPTIONS | (_EXTRACTOR_OPTIONS - {"words"}), defaults={"feature": ...})
def fit_command(request: FeatureRequest) -> None:
    """Fit the encoder of a caption feature on the training captions, and write the encoder to a file next to the cache OUT.

    The features tfidf, mean_vector and hglmm have such an encoder. This command does not write the cache itself. After this
    command, parallel jobs can extract the shards of the cache (vse-extract EXTRACTOR --shard).
    """
    from vse.features.feature_job import fit_feature

    click.echo(fit_feature(request))


@command("merge", group=extract)
def merge_command(request: MergeRequest) -> None:
    """Merge the shards of a cache, after vse-extract EXTRACTOR --shard has extracted all of them."""
    from vse.features import extraction
    from vse.features.cache.shards import build_cache_output_kind
    from vse.features.feature_job import choose_shard_count
    from vse.pipeline.dataset.dataset import load_dataset_file
    from vse.pipeline.files.outputs import check_output

    dataset, out = load_dataset_file(request.dataset), request.out
    check_output(out, build_cache_output_kind(out), [request.dataset])
    click.echo(extraction.merge_feature(request.dataset, out, request.shards or choose_shard_count(dataset, out)))


@command("verify", group=extract)
def verify_command(request: VerifyRequest) -> None:
    """Verify a cache: the number of its rows, their ids, and the hash of every shard.

    The images or captions from which the rows were extracted are hashed again, too, to detect changes.
    """
    from vse.features import extraction

    cache = extraction.verify_feature(request.cache_file, request.write)
    sources = "not checked" if request.no_sources else extraction.verify_inputs(cache)
    shards = f"{len(cache.shard_arrays)} shards"
    click.echo(f"{request.cache_file}: sound, {cache.describe()} in {shards}, sources {sources}, key {cache.key}")


extract_main = entry_point(extract)


DatasetJsonPath = Annotated[FileOrFolderPath, Field(description="The data set's dataset.json.")]
NewCachePath = Annotated[FileOrFolderPath, Field(description="The cache to write, e.g. features/coco_butd.h5.")]


@command("import", group=data_group)
def import_command(request: ImportRequest) -> None:
    """Build a data set from photos with a table of captions, or from files of another program.

    SOURCES is a folder of photos, WebDataset archives, a folder that clip-retrieval wrote, or a data set that Hugging Face's
    library saved. With --format hugging-face, SOURCES is the name of a data set on the hub. A folder of photos needs a table
    of captions: CSV, JSON lines or parquet. Each row of the table has the file of a photo, one or several captions, and
    optionally a split and ids. If there are no splits, images are sampled for val and test.
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
    """Read the test split from the files test_* (test) or testall_* (testall).  [default: testall, if FOLDER has these files,
    else test]"""
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
    """The dataset.json with the captions.  [default: the file that the cache names]"""
    repeat: PositiveInteger | None = None
    """Write the row of each image this many times in succession. The number must be 1 or the number of captions
    of an image.
    [default: as often as in the imported files, if the cache comes from vse-data import-precomp; otherwise once]"""
    force: Force = False


@command("export-precomp", group=data_group)
def export_precomp_command(request: PrecompExportRequest) -> None:
    """Export a feature cache and the captions of its data set, as files in the layout of VSE++ and SCAN.

    FEATURES is the cache. The files of a split are <split>_ims.npy, <split>_caps.txt and, as a rule, <split>_ids.txt.
    """
    from vse.features.exchange.precomp import export_precomp

    click.echo(export_precomp(request.features, request.out, request.captions, request.repeat))


class ArrayImportRequest(Options):
    """The arguments of ``vse-data import-npy``."""

    features: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    dataset: DatasetJsonPath
    out_features: NewCachePath
    ids: FileOrFolderPath | None = None
    """File (.txt or .npy) with an id for each row: the imgid of an image, or the sentid of a caption. A .npz file contains the
    ids itself."""
    kind: Literal["image", "text"] = "image"
    """image: each row has the features of an image. text: each row has the features of a caption."""
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
    """How an image_id in the TSV files names an image of dataset.json: by its cocoid, by its imgid, or by the digits at the
    end of its filename.  [default: cocoid if all images have one, else imgid]"""
    force: Force = False


@command("import-tsv", group=data_group)
def import_tsv_command(request: TsvImportRequest) -> None:
    """Import regions from the TSV files that are published for bottom-up attention."""
    from vse.features.exchange.arrays import import_bottom_up_tsv

    click.echo(import_bottom_up_tsv(request.files, request.dataset, request.out_features, request.match))


class PackRequest(Options):
    """The arguments of ``vse-data pack``."""

    features: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder or archive to write, e.g. demo_bundle or demo_bundle.tar."""
    with_dataset: Flag = False
    """Also pack the dataset.json (or dataset.parquet) of the caches."""
    notes: FileOrFolderPath | None = None
    """Text file to add, e.g. with the licence."""
    force: Force = False


@command("pack", group=data_group)
def pack_command(request: PackRequest) -> None:
    """Pack feature caches of one data set into a bundle that others can fetch with vse-data fetch-features.

    The file bundle.json in the bundle contains the SHA-256 of each other file. The SHA-256 of bundle.json itself is printed
    and identifies the bundle.
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
    """Folder to write the dataset.json (or dataset.parquet) to, if the bundle has one.  [default: the folder data/DATASET next
    to the folder OUT]"""
    sha256: Text | None = None
    """SHA-256 that bundle.json must have; vse-data pack prints it. A bundle with another SHA-256 is refused."""
    check: Flag = False
    """Only compare each file of the bundle with its SHA-256 in bundle.json. Nothing is written."""
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
    """A setting of the workflow, as in snakemake --config, e.g. seeds=[0,1]. May be repeated."""
    rates: FileOrFolderPath | None = None
    """YAML file with the speeds of your machine, such as images per second. Entries of this file replace the same entries of
    config/rates.yaml."""
    calibrate: Flag = False
    """Measure the speed of this machine for ten seconds. The estimated times then take into account how fast this machine is,
    compared with the machine of config/rates.yaml."""


@command("plan", group=data_group)
def plan_command(request: PlanRequest) -> None:
    """Estimate the downloads, the size of the caches and the hours that TARGETS of the workflow need. Nothing is run.

    The workflow is the Snakefile in the current folder. A target is a file that snakemake makes, such as
    results/f30k_vsepp.json.

    Finished jobs are left out. Unknown sizes and times are listed as unknown. A time is a range, unless this machine has
    already run the same extraction or training.
    """
    from vse.features.plan import describe_plan

    click.echo(describe_plan(request.targets, request.config, request.rates, request.calibrate))
