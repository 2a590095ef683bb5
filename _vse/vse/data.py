"""Functions of the Python interface that open, draw and import data sets, and extract features."""

from __future__ import annotations

from vse.arguments import (
    ChangedSettings,
    ColumnMapping,
    Paths,
    StrPath,
    as_path,
    as_paths,
    as_paths_or_urls,
    describe_arguments,
    public_api,
    settings_as_texts,
)
from vse.data_files import DatasetFile, FeatureFile, ImportedData
from vse.features.options import ExtractOptions, FeatureRequest, ImportOptions, ImportRequest, SplitShares
from vse.pipeline.cli import DemoRequest
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import NonNegativeInteger, PositiveInteger
from vse.training.options import EmbedRequest, RunInputOptions


@public_api
def open_dataset(path: StrPath) -> DatasetFile:
    """Open a data set, ``dataset.json`` (docs/formats.md), and check it.

    Args:
        path: the file

    Returns:
        DatasetFile: the data set; its ``frame`` has one row per caption

    Raises:
        vse.UserError: if the file is not a valid data set, for example if an id occurs twice; the message names the image or
            caption

    Examples:
        ```python
        data = vse.open_dataset("data/demo/dataset.json")
        data.frame[data.frame["split"] == "test"]["caption"]
        ```
    """
    return DatasetFile(as_path(path))


@public_api
def open_features(path: StrPath) -> FeatureFile:
    """Open a feature cache.

    Args:
        path: the cache, e.g. ``features/demo_fc7.h5``

    Returns:
        FeatureFile: the cache; ``features[ids]`` reads the rows of some ids from the disk

    Raises:
        vse.UserError: if the cache or one of its shards is missing or damaged

    Examples:
        ```python
        features = vse.open_features("features/demo_fc7.h5")
        features[vse.open_dataset("data/demo/dataset.json").image_ids("test")].shape
        ```
    """
    return FeatureFile(as_path(path))


@public_api
@describe_arguments(DemoRequest)
def draw_demo(
    out: StrPath, images: PositiveInteger | None = None, seed: NonNegativeInteger = 0, *, force: bool = False
) -> DatasetFile:
    """Draw the images of the demo data set and write their captions (``vse-data demo``).

    Each image is a scene of simple shapes with five captions.

    Raises:
        vse.UserError: if ``images`` is below 6, or ``out`` holds another data set

    Examples:
        ```python
        data = vse.draw_demo("data/shapes", images=110)
        data.splits
        ```
    """
    from vse.pipeline.demo import DEFAULT_N_IMAGES, create_demo

    return DatasetFile(create_demo(as_path(out), DEFAULT_N_IMAGES if images is None else images, seed))


@public_api
@describe_arguments(ImportRequest)
def import_data(
    sources: Paths,
    out: StrPath,
    *,
    name: str | None = None,
    captions: StrPath | None = None,
    images: StrPath | None = None,
    columns: ColumnMapping | None = None,
    splits: SplitShares = SplitShares(),
    options: ImportOptions = ImportOptions(),
) -> ImportedData:
    """Create a data set from your own photos or vectors (``vse-data import``).

    Args:
        sources: A folder of photos, a folder of vectors, or archives. Archives may be URLs.
        columns: A mapping from a field (``file``, ``caption``, ``split`` or an id) to the name of its column in the captions
            table, or to a list of names.

    Raises:
        vse.UserError: if a file or a row cannot be read; the message names it

    Examples:
        ```python
        birds = vse.import_data("birds/images", "data/birds", captions="birds/captions.csv")
        birds.dataset.splits
        ```
    """
    from vse.features.exchange.formats import import_data as import_sources
    from vse.pipeline.dataset.dataset import find_dataset_file

    pairs = [(field, [names] if isinstance(names, str) else names) for field, names in (columns or {}).items()]
    request = ImportRequest(
        sources=as_paths_or_urls(sources),
        out=out,
        name=name,
        captions=captions,
        images=images,
        columns=[f"{field}={column}" for field, names in pairs for column in names],
        splits=splits,
        yes=True,
        options=options,
    )
    written = import_sources(request)
    return ImportedData(find_dataset_file(request.out), written)


@public_api
@describe_arguments(FeatureRequest)
def extract(
    dataset: StrPath,
    feature: str | None = None,
    *,
    out: StrPath | None = None,
    sets: ChangedSettings | None = None,
    like: StrPath | None = None,
    shards: PositiveInteger | None = None,
    options: ExtractOptions = ExtractOptions(),
) -> FeatureFile:
    """Extract a feature of images or captions into a cache for the trainers (``vse-extract``).

    If the extraction was interrupted, the same call continues it. If the cache is already complete, the call only opens it.

    Args:
        dataset: The data set's ``dataset.json``, or the object that [`vse.open_dataset`][] returned.
        sets: Settings of the preset to change, e.g. ``{"crop": 224}``.

    Raises:
        vse.UserError: if a preset, setting or image is wrong, or a package or weights are missing; the message names it

    Examples:
        ```python
        features = vse.extract("data/demo/dataset.json", "fc7")
        features[features.ids[:2]].shape
        ```
    """
    from vse.features.feature_job import extract_feature

    if (feature is None) == (like is None):
        raise UserError("the feature is named by its preset (feature) or by another cache (like): give one of the two")
    request = FeatureRequest(
        dataset=dataset,
        feature=feature or "",
        out=out,
        sets=settings_as_texts(sets),
        like=like,
        shards=shards,
        options=options.with_environment("device"),
    )
    return FeatureFile(extract_feature(request))


@public_api
@describe_arguments(EmbedRequest)
def embeddings_as_features(
    files: Paths, prefix: StrPath, *, captions: StrPath | None = None, force: bool = False
) -> tuple[FeatureFile, FeatureFile]:
    """Convert embeddings files to two feature caches, one for images and one for captions (``vse-embed``).

    Args:
        files: The embeddings files, one for each split of the data set.
        prefix: The start of the paths of the caches: ``<prefix>_images.h5`` and ``<prefix>_captions.h5``.
        captions: The data set's ``dataset.json``; None uses the path in the first embeddings file.

    Raises:
        vse.UserError: if the files belong to different models or data sets, hold scores of pairs, or lack images or captions
            of their splits

    Examples:
        ```python
        images, captions = vse.embeddings_as_features("runs/demo_vsepp/seed-0/test.h5", "features/demo_vsepp")
        images[images.ids[:2]].shape
        ```
    """
    from vse.training.use.embed import embed_runs

    paths = as_paths(files)
    if paths[0].is_dir():
        raise UserError(f"{paths[0]}: a folder; for a run, call vse.load(run).embed_as_features(prefix)")
    written = embed_runs(EmbedRequest(runs=paths, as_features=prefix, files=RunInputOptions(captions=captions)))
    return FeatureFile(written[0]), FeatureFile(written[1])
