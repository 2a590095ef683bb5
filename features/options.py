"""The options of ``vse-extract`` and of ``vse-data import``.

``--help`` imports this module, so the module imports no large library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from vse.pipeline.option_types import (
    CliOption,
    Device,
    FileOrFolderPath,
    Flag,
    Force,
    PathOrUrl,
    PositiveInteger,
    Seed,
    SettingChanges,
    Share,
    SkipBad,
    Text,
    ThreadCount,
    WeightsDir,
    WordVectorsFile,
)
from vse.pipeline.options import Options

TokeniserOption = Annotated[
    Text | None,
    CliOption(metavar="NAME"),
    Field(
        description="How captions are split into words: letters_and_digits (for English), unicode_words (for any language) "
        "or nltk (as in VSE++ and SCAN).  [default: unicode_words]"
    ),
]


class ExtractOptions(Options):
    """Rarely used options of an extraction."""

    skip_bad: SkipBad = False
    weights_dir: WeightsDir = None
    words: WordVectorsFile = None
    device: Device = "auto"
    threads: ThreadCount = None
    force: Force = False


class FeatureRequest(Options):
    """A request to extract a feature of a data set, or to fit the feature's encoder."""

    dataset: FileOrFolderPath
    """The data set's dataset.json."""
    feature: Text = ""
    """The feature to extract: a preset of config/features, or a YAML file."""
    out: FileOrFolderPath | None = None
    """Path of the cache to extract.  [default: features/DATASET_FEATURE.h5]"""
    shards: PositiveInteger | None = None
    """Number of shards (files) of the cache.  [default: the number of the existing cache OUT; for a new cache, the number in
    config/datasets/DATASET.yaml; without such a number, 4, or 1 per 50,000 captions if that is more]"""
    shard: int | None = None
    """Extract only the shard with this number (the first is 0), without merging. After the last shard, run vse-extract
    merge."""
    like: FileOrFolderPath | None = None
    """Use the settings and weights of this existing cache instead of a preset. The two caches are then compatible: a model
    that was trained on one can read the other."""
    sets: SettingChanges = ()
    """Change a setting of the preset. May be repeated."""
    options: ExtractOptions = Field(default_factory=ExtractOptions)


class MergeRequest(Options):
    """A request to merge the shards of a cache."""

    dataset: FileOrFolderPath
    """The data set's dataset.json."""
    out: FileOrFolderPath
    """The cache to write, next to the folder of its shards."""
    shards: PositiveInteger | None = None
    """Number of shards (files) of the cache.  [default: the number of the existing cache OUT; for a new cache, the number in
    config/datasets/DATASET.yaml; without such a number, 4, or 1 per 50,000 captions if that is more]"""
    force: Force = False


class VerifyRequest(Options):
    """A request to verify a cache."""

    cache_file: Annotated[FileOrFolderPath, CliOption(is_argument=True)]
    no_sources: Flag = False
    """Do not check whether the original images or captions have changed."""
    write: Flag = False
    """Add checksums to a cache that an older version of vse wrote without checksums. Later commands then detect changed
    features."""


class SplitShares(Options):
    """The shares of images to sample for the splits val and test, if the imported data have no splits."""

    val: Share | None = None
    """Share of the images to sample for the split val, if SOURCES have no splits.  [default: 0.1]"""
    test: Share | None = None
    """Share of the images to sample for the split test, if SOURCES have no splits.  [default: 0.1]"""
    seed: Seed = 0
    """Seed of the random choice of images for val and test."""


class ImportOptions(Options):
    """Rarely used options of an import."""

    format: Annotated[Text | None, CliOption(metavar="NAME")] = None
    """Format of SOURCES: table (photos with a table), webdataset (the photos are unpacked), webdataset-in-place (the photos
    stay in the archives), clip-retrieval or hugging-face.  [default: detected]"""
    key_until: Annotated[Text | None, CliOption(metavar="DOT")] = None
    """Part of a file name that the photo and the caption of a WebDataset sample have in common: up to the first dot
    (first-dot) or up to the last dot (last-dot).  [default: first-dot]"""
    quoting: Annotated[Text | None, CliOption(metavar="HOW")] = None
    """minimal: quotation marks in a CSV table enclose fields. none: quotation marks are part of the text.  [default:
    minimal]"""
    encoding: Annotated[Text | None, CliOption(metavar="NAME")] = None
    """Encoding of a CSV table, such as utf-8, utf-16, cp1252 or mac_roman.  [default: detected]"""
    tokeniser: TokeniserOption = None
    skip_bad: Flag = False
    """Skip invalid rows and list them in OUT/import.failures.jsonl. Without this option, an invalid row is an error."""
    out_features: FileOrFolderPath = Path("features")
    """For clip-retrieval, whose files contain vectors: folder for the feature caches to write."""
    force: Force = False


class ImportRequest(Options):
    """A request to import photos and captions, or vectors, as a data set."""

    sources: Annotated[tuple[PathOrUrl, ...], CliOption(is_argument=True)]
    out: FileOrFolderPath
    """Folder to write, e.g. data/birds."""
    name: Text | None = None
    """Name of the data set.  [default: the name of the folder OUT]"""
    captions: FileOrFolderPath | None = None
    """The table of captions.  [default: a file named metadata or captions in the folder of photos, e.g. captions.csv]"""
    images: FileOrFolderPath | None = None
    """For clip-retrieval: the folder of the photos. For other formats: one more folder of photos. It is needed if the table
    names photos outside SOURCES, or if photos in SOURCES are symbolic links to files elsewhere."""
    columns: Annotated[tuple[Text, ...], CliOption(("--column",), metavar="FIELD=NAME")] = ()
    """Name of the column that holds a field: caption=text if the captions are in the column text. Fields are file, caption,
    split, imgid, sentid and cocoid. May be repeated.  [default: detected]"""
    splits: SplitShares = Field(default_factory=SplitShares)
    yes: Flag = False
    """Do not ask for a confirmation. Without this option, the command displays the first rows of a table in the terminal, and
    asks whether to import them."""
    options: ImportOptions = Field(default_factory=ImportOptions)
