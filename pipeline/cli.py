"""The command ``vse-data``. Each subcommand imports the modules that it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import Field

from vse.pipeline.errors import UserError
from vse.pipeline.option_types import (
    CliOption,
    FileOrFolderPath,
    Flag,
    Force,
    NonNegativeInteger,
    Seed,
    Share,
    Text,
    number_between,
    whole_number_from,
)
from vse.pipeline.options import Options, command

DatasetName = Annotated[Text | None, Field(description="Name of the new data set.  [default: the name of the output folder]")]


class _DataGroup(click.Group):
    """The group of ``vse-data``. Its commands are in this module and in :attr:`further_module`.

    ``further_module`` is imported when all commands are listed, or when a command is called that this module lacks. Its
    import adds commands to the group. :mod:`vse.cli` sets it, because this package imports no other package of ``vse``.
    """

    further_module = ""
    _added: MutableMapping[str, click.Command]

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """All commands by name."""
        if self.further_module:
            import_module(self.further_module)
        return self._added

    @commands.setter
    def commands(self, commands: MutableMapping[str, click.Command]) -> None:
        self._added = commands

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._added.get(cmd_name) or super().get_command(ctx, cmd_name)


@click.group("vse-data", cls=_DataGroup)
def data_group() -> None:
    """Create, prepare and check data sets."""


class DemoRequest(Options):
    """The arguments of ``vse-data demo``."""

    out: FileOrFolderPath
    """Folder to write, e.g. data/demo."""
    images: int | None = None
    """Number of images in all splits together.  [default: 5500]"""
    seed: Seed = 0
    """Seed of the random scenes."""
    force: Force = False


@command("demo", group=data_group)
def demo_command(request: DemoRequest) -> None:
    """Draw the built-in demo data set: scenes of simple shapes with five captions each."""
    from vse.pipeline.demo import DEFAULT_N_IMAGES, create_demo

    click.echo(create_demo(request.out, DEFAULT_N_IMAGES if request.images is None else request.images, request.seed))


class FetchRequest(Options):
    """The arguments of ``vse-data fetch``."""

    name: Annotated[Text, CliOption(is_argument=True)]
    out: FileOrFolderPath | None = None
    """Folder to write.  [default: data/NAME]"""
    base_url: Annotated[Text | None, CliOption(envvar="VSE_BASE_URL", show_envvar=True)] = None
    """Download from this mirror, e.g. http://host/folder/, instead of the publishers. The mirror must have all files under
    their published names."""
    images: Flag = True
    """Download the images, too, if their license allows it."""
    force: Force = False


@command("fetch", group=data_group)
def fetch_command(request: FetchRequest) -> None:
    """Download the published files of f8k, f30k, f30k_entities or coco, and create data/NAME/dataset.json.

    Files are checked by their SHA-256. An interrupted download resumes when the command is run again. If images must be
    requested from their owners, the command prints where to request them.
    """
    from vse.pipeline.dataset.downloads import fetch_dataset
    from vse.pipeline.dataset.preparation import load_published_preset

    out = request.out or Path("data", request.name)
    click.echo(fetch_dataset(load_published_preset(request.name), out, request.base_url, request.images))


class PrepareRequest(Options):
    """The arguments of ``vse-data prepare``."""

    name: Annotated[Text, CliOption(is_argument=True)]
    source: FileOrFolderPath | None = None
    """Folder with the published files.  [default: the folder in the environment variable VSE_<NAME>_DIR, e.g. VSE_F8K_DIR;
    without it, data/NAME]"""
    out: FileOrFolderPath | None = None
    """Folder to write.  [default: data/NAME]"""
    force: Force = False


@command("prepare", group=data_group)
def prepare_command(request: PrepareRequest) -> None:
    """Create data/NAME/dataset.json from the published files of f8k, f30k, f30k_entities or coco."""
    from vse.pipeline.dataset.preparation import find_source_folder, load_published_preset, prepare_dataset

    source, out = request.source or find_source_folder(request.name), request.out or Path("data", request.name)
    click.echo(prepare_dataset(load_published_preset(request.name), source, out))


class PhrasesRequest(Options):
    """The arguments of ``vse-data add-phrases``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    entities: FileOrFolderPath | None = None
    """Folder of Flickr30K Entities, with the folders Annotations and Sentences."""
    chunker: Annotated[Text | None, CliOption(metavar="PIPELINE")] = None
    """Instead of --entities: a spaCy pipeline that marks noun phrases, e.g. en_core_web_sm."""
    out: FileOrFolderPath
    """Folder to write, e.g. data/f8k_entities."""
    name: DatasetName = None
    similar: Annotated[float, number_between(0, 1, low_excluded=True)] = 0.7
    """Minimum share of equal words at which a caption of DATASET counts as the same caption as in Flickr30K Entities. With 1,
    only equal captions count."""
    force: Force = False


@command("add-phrases", group=data_group)
def add_phrases_command(request: PhrasesRequest) -> None:
    """Mark phrases of Flickr30K Entities, with boxes.

    The output is a copy of a dataset.json in which each caption has its phrases, and each phrase its boxes. A photo of DATASET
    is found in Flickr30K by the number in its file name, and a caption by its text. Splits and ids stay the same. With
    --chunker, the noun phrases of any captions are marked instead, without boxes.
    """
    from vse.pipeline.dataset.preparation import add_phrases

    if (request.entities is None) == (request.chunker is None):
        raise UserError("phrases come from --entities FOLDER or from --chunker PIPELINE: give one of them")
    click.echo(add_phrases(request.dataset, request.entities, request.out, request.name, request.similar, request.chunker))


class FoldsRequest(Options):
    """The arguments of ``vse-data folds``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write, e.g. data/f8k_folds."""
    count: Annotated[int, whole_number_from(3)] = 5
    """Number of folds."""
    seed: Seed = 0
    """Seed of the random division of the images."""
    only: Annotated[NonNegativeInteger | None, CliOption(metavar="K")] = None
    """Write only the file OUT/fold-K.json."""
    name: DatasetName = None
    force: Force = False


@command("folds", group=data_group)
def folds_command(request: FoldsRequest) -> None:
    """Split a dataset.json into folds for a cross-validation: OUT/fold-0.json, OUT/fold-1.json and so on.

    The images are divided into COUNT parts. In each fold, one part is the test split, another part is the validation split,
    and all other parts are the training split. A training on a fold reads the feature caches of DATASET.
    """
    from vse.pipeline.dataset.splits_and_noise import write_folds

    for path in write_folds(request.dataset, request.out, request.count, request.seed, request.name, request.only):
        click.echo(path)


class CaptionsRequest(Options):
    """The arguments of ``vse-data add-captions``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    file: FileOrFolderPath
    """File of captions to read: a CSV, JSON lines or parquet table, or a JSON object whose keys are names of image files."""
    language: Text
    """Language of the captions in FILE as a BCP 47 code, e.g. de."""
    own_language: Text = "en"
    """Language of the captions that DATASET already has, if the file does not state it."""
    out: FileOrFolderPath | None = None
    """Folder to write.  [default: the folder of DATASET, followed by _LANGUAGE, e.g. data/f8k_de]"""
    name: DatasetName = None
    force: Force = False


@command("add-captions", group=data_group)
def add_captions_command(request: CaptionsRequest) -> None:
    """Write a copy of a dataset.json with further captions in another language.

    The copy has the same images, ids and splits, and uses the same image features. The captions are read from --file, which
    names the image of each caption by its file name.
    """
    from vse.pipeline.imports.added_captions import add_captions

    named = request.language, request.own_language, request.out, request.name
    click.echo(add_captions(request.dataset, request.file, *named))


class NoiseRequest(Options):
    """The arguments of ``vse-data noise``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    rate: Share | None = None
    """Share of the captions, images or words to change, from 0 to 1. Required without --from-index."""
    kind: Literal["caption", "image", "word"] = "caption"
    """Kind of change. caption: single captions get another image. image: all captions of an image get another image. word:
    single words are replaced."""
    seed: Seed = 0
    """Seed of the random changes."""
    from_index: Annotated[FileOrFolderPath | None, CliOption(metavar="FILE")] = None
    """Convert this index file (.npy), instead of drawing changes at random. The programs NCR and DECL, which train on noisy
    pairs, publish such files."""
    out: FileOrFolderPath
    """The noise file to write, e.g. noise.json."""
    force: Force = False


@command("noise", group=data_group)
def noise_command(request: NoiseRequest) -> None:
    """Draw wrong training pairs for vse-train --noise.

    The output is a file of changes that make a share of the training pairs wrong. The dataset.json is not changed. Validation
    and test keep the correct pairs.
    """
    from vse.pipeline.dataset.splits_and_noise import import_noise_index, write_noise

    if request.from_index is not None:
        if request.rate is not None:
            raise UserError("--from-index: the index file determines which pairs are wrong; leave --rate out")
        click.echo(import_noise_index(request.dataset, request.from_index, request.out))
        return
    if request.rate is None:
        raise UserError("give a --rate, such as --rate 0.4, or the file of another program with --from-index")
    click.echo(write_noise(request.dataset, request.out, request.rate, request.kind, request.seed))


class SwapRequest(Options):
    """The arguments of ``vse-data swap-phrases``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    split: Text = "test"
    """The split whose captions are changed."""
    seed: Seed = 0
    """Seed of the random choice, if several pairs of phrases of a caption can be exchanged."""
    out: FileOrFolderPath | None = None
    """Folder to write. The new data set has the name of the folder.  [default: the folder of DATASET, followed by _swapped,
    e.g. data/f8k_swapped]"""
    force: Force = False


@command("swap-phrases", group=data_group)
def swap_phrases_command(request: SwapRequest) -> None:
    """Write wrong captions for vse-eval --choices, by exchanging two phrases of a caption.

    The phrases of the captions of DATASET must be marked (vse-data add-phrases). A caption is left out if no two of its
    phrases can be exchanged. The new captions are not checked: some are still right, and some make no sense.
    """
    from vse.pipeline.dataset.choices import swap_phrases

    click.echo(swap_phrases(request.dataset, request.out, request.split, request.seed))


class ChoicesRequest(Options):
    """The arguments of ``vse-data import-choices``."""

    files: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True, metavar="FILE...")]
    images: FileOrFolderPath
    """Folder of the images."""
    corpus: Annotated[FileOrFolderPath | None, CliOption(metavar="DATASET")] = None
    """Also write a baseline that does not see the images: a text model chooses the captions. The text model is fitted to the
    training captions of this dataset.json.  [default: no baseline]"""
    out: FileOrFolderPath
    """Folder to write. The data set has the name of the folder."""
    force: Force = False


@command("import-choices", group=data_group)
def import_choices_command(request: ChoicesRequest) -> None:
    """Import a benchmark for vse-eval --choices: SugarCrepe, ARO or Winoground.

    In these benchmarks, a model selects one of a few captions for an image. FILE is a published file of the benchmark. The
    command writes a data set, and a file that lists the choices.
    """
    from vse.pipeline.dataset.choices import import_choices

    click.echo(import_choices(request.files, request.images, request.out, request.corpus))


class AlbumRequest(Options):
    """The arguments of ``vse-data album``."""

    photos: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write, e.g. data/album."""
    name: DatasetName = None
    tokeniser: Annotated[Text | None, CliOption(metavar="NAME")] = None
    """How queries are split into words: unicode_words or nltk.  [default: as in the run that searches the album]"""
    force: Force = False


@command("album", group=data_group)
def album_command(request: AlbumRequest) -> None:
    """Create a data set without captions from a folder of photos, for vse-search."""
    from vse.pipeline.dataset.preparation import create_album

    click.echo(create_album(request.photos, request.out, request.name, request.tokeniser))


class CheckRequest(Options):
    """The argument of ``vse-data check``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]


@command("check", group=data_group)
def check_command(request: CheckRequest) -> None:
    """Validate a dataset.json and its image files, and print the counts of each split."""
    from vse.pipeline.dataset.preparation import check_and_describe_dataset

    click.echo(check_and_describe_dataset(request.dataset))


class ConvertRequest(Options):
    """The arguments of ``vse-data convert``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write."""
    force: Force = False


@command("convert", group=data_group)
def convert_command(request: ConvertRequest) -> None:
    """Convert a dataset.parquet to a dataset.json, or a dataset.json to a dataset.parquet.

    A dataset.json has the layout of the Karpathy splits.
    """
    from vse.pipeline.dataset.file_formats import convert_dataset

    click.echo(convert_dataset(request.dataset, request.out))


class AuditRequest(Options):
    """The arguments of ``vse-data audit``."""

    dataset: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    against: FileOrFolderPath | None = None
    """Also compare DATASET with this data set. The command then counts equal captions, equal images (by published id or by
    bytes) and photos that look the same. Give a dataset.json, or a name in data/, e.g. f30k."""
    look_alikes: Flag = True
    """Also find photos that look the same. This reads all photos."""


@command("audit", group=data_group)
def audit_command(request: AuditRequest) -> None:
    """Count leaks between splits: equal captions, photos that look the same, and images of known test sets.

    The known test sets are the test splits of coco, f30k and f8k, if you have prepared them as data/NAME/dataset.json. An
    image of DATASET is found in a test set by its number on Flickr or in MS-COCO.
    """
    from vse.pipeline.dataset.duplicates import audit_dataset

    click.echo(audit_dataset(request.dataset, request.against, request.look_alikes))
