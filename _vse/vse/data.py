"""The functions of the Python interface that open, generate and import data, and extract features."""

from __future__ import annotations

from vse.arguments import (
    Columns,
    From0,
    From1,
    Paths,
    Sets,
    Share,
    StrPath,
    as_path,
    as_paths,
    as_sets,
    default_device,
    option_class,
    public,
)
from vse.data_files import DatasetFile, FeatureFile, ImportedData
from vse.pipeline.errors import UserError


@option_class
class SplitShares:
    """The shares of images in the splits that [`vse.import_data`][] samples, if the imported data have no splits.

    Attributes:
        val (float | None): the share of the images for validation; None is 0.1
        test (float | None): the share of the images for the test; None is 0.1
        seed (int): the seed of the sample
    """

    val: Share | None = None
    test: Share | None = None
    seed: From0 = 0


@option_class
class ImportOptions:
    """Rarely used options of [`vse.import_data`][].

    Attributes:
        format (str | None): ``table``, ``webdataset``, ``clip-retrieval`` or ``hugging-face``; None detects the format
        key_until (str | None): where the key of a WebDataset member ends: ``last-dot``, or None for ``first-dot``, as in
            WebDataset itself
        quoting (str | None): ``minimal``, or ``none`` if quotation marks in a CSV file are part of the text; None is
            ``minimal``
        tokeniser (str | None): the tokeniser that splits captions into words: ``unicode_words``, ``letters_and_digits`` or
            ``nltk``
        skip_bad (bool): leave bad rows out, and list them in ``import.failures.jsonl``
        out_features (str | os.PathLike[str]): the folder to which caches of imported vectors are written
        force (bool): replace another data set or file in ``out``; inputs are never replaced
    """

    format: str | None = None
    key_until: str | None = None
    quoting: str | None = None
    tokeniser: str | None = None
    skip_bad: bool = False
    out_features: StrPath = "features"
    force: bool = False


@option_class
class ExtractOptions:
    """Rarely used options of [`vse.extract`][].

    Attributes:
        skip_bad (bool): leave unreadable images out, and list them next to the cache
        weights_dir (str | os.PathLike[str] | None): a folder of weights to use instead of downloads; None is
            ``$VSE_WEIGHTS_DIR``
        words (str | os.PathLike[str] | None): a file of word vectors, for features that need one; None is ``$VSE_WORDS``
        device (str | None): ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; None is ``$VSE_DEVICE``, or ``auto``
        threads (int | None): the number of processor cores that torch may use from now on; None changes nothing
        force (bool): replace a file of another kind at ``out``; inputs are never replaced
    """

    skip_bad: bool = False
    weights_dir: StrPath | None = None
    words: StrPath | None = None
    device: str | None = None
    threads: From1 | None = None
    force: bool = False


@public
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


@public
def open_features(path: StrPath) -> FeatureFile:
    """Open a feature cache.

    Args:
        path: the cache, e.g. ``features/demo_fc7.h5``

    Returns:
        FeatureFile: the cache; ``features[ids]`` reads the rows of some ids from the disk

    Raises:
        vse.UserError: if the cache or one of its shards is missing or damaged; when rows are read, if an id is not in the
            cache

    Examples:
        ```python
        features = vse.open_features("features/demo_fc7.h5")
        features[vse.open_dataset("data/demo/dataset.json").image_ids("test")].shape
        ```
    """
    return FeatureFile(as_path(path))


@public
def draw_demo(out: StrPath, images: From1 | None = None, seed: From0 = 0, *, force: bool = False) -> DatasetFile:
    """Draw the images of the demo data set and write their captions (``vse-data demo``).

    Each image is a scene of simple shapes with five captions.

    Args:
        out: the folder to write, e.g. ``data/demo``
        images: the number of images in all splits together; None is 5,500
        seed: the seed of the scenes
        force: replace another data set or other images in ``out``

    Raises:
        vse.UserError: if ``images`` is below 6, or ``out`` holds another data set

    Examples:
        ```python
        data = vse.draw_demo("data/shapes", images=110)
        data.splits
        ```
    """
    from vse.pipeline.demo import DEFAULT_IMAGES, create_demo

    return DatasetFile(create_demo(as_path(out), DEFAULT_IMAGES if images is None else images, seed))


@public
def import_data(
    sources: Paths,
    out: StrPath,
    *,
    name: str | None = None,
    captions: StrPath | None = None,
    images: StrPath | None = None,
    columns: Columns | None = None,
    splits: SplitShares = SplitShares(),
    options: ImportOptions = ImportOptions(),
) -> ImportedData:
    """Create a data set from your own photos or vectors (``vse-data import``).

    Args:
        sources: the folder of photos or of vectors, or archives
        out: the folder to write, e.g. ``data/birds``
        name: the name of the data set; None is the name of ``out``
        captions: the table of captions; None is ``captions.*`` or ``metadata.*`` among the photos
        images: the folder of photos for vectors of clip-retrieval; for tables, a further folder in which image paths may lie
        columns: maps a field (``file``, ``caption``, ``split`` or an id) to the name of its column, or to several names
        splits: the shares of validation and test, where the data have no splits
        options: rarely used options, see [`vse.ImportOptions`][]

    Raises:
        vse.UserError: if a file or a row cannot be read; the message names it

    Examples:
        ```python
        birds = vse.import_data("birds/images", "data/birds", captions="birds/captions.csv")
        birds.dataset.splits
        ```
    """
    from vse.features.exchange.formats import ImportJob
    from vse.features.exchange.formats import import_data as import_sources
    from vse.pipeline.imports.rows import build_import_settings

    pairs = [(field, [names] if isinstance(names, str) else names) for field, names in (columns or {}).items()]
    column_options = [f"{field}={column}" for field, names in pairs for column in names]
    settings = build_import_settings(
        as_path(out),
        name,
        splits.val,
        splits.test,
        splits.seed,
        options.tokeniser,
        options.skip_bad,
        column_options,
        options.quoting,
    )
    out_features = as_path(options.out_features)
    job = ImportJob(as_paths(sources), settings, as_path(captions), as_path(images), out_features, options.key_until)
    return ImportedData(import_sources(job, options.format))


@public
def extract(
    dataset: StrPath,
    feature: str | None = None,
    *,
    out: StrPath | None = None,
    sets: Sets | None = None,
    like: StrPath | None = None,
    shards: From1 | None = None,
    options: ExtractOptions = ExtractOptions(),
) -> FeatureFile:
    """Extract a feature of images or captions into a cache for the trainers (``vse-extract``).

    If the extraction was interrupted, the same call continues it. If the cache is finished, the call opens it.

    Args:
        dataset: the data set's ``dataset.json``, or the object that [`vse.open_dataset`][] returned
        feature: a preset of ``config/features``, such as ``effnet`` or ``minilm``, or a YAML file
        out: the cache to write; None is ``features/<dataset>_<feature>.h5``
        sets: changes settings of the preset, e.g. ``{"crop": 224}``
        like: a cache whose settings and weights are used, instead of those of ``feature``
        shards: the number of shards; None is the number in the preset of the data set
        options: rarely used options, see [`vse.ExtractOptions`][]

    Raises:
        vse.UserError: if a preset, setting or image is wrong, or a package or weights are missing; the message names it

    Examples:
        ```python
        features = vse.extract("data/demo/dataset.json", "fc7")
        features[features.ids[:2]].shape
        ```
    """
    from vse.features.feature_job import FeatureRequest, extract_feature

    if (feature is None) == (like is None):
        raise UserError("the feature is named by its preset (feature) or by another cache (like): give one of the two")
    request = FeatureRequest(
        as_path(dataset),
        feature or "",
        as_path(out),
        as_sets(sets),
        as_path(like),
        shards,
        options.skip_bad,
        as_path(options.weights_dir),
        as_path(options.words),
        default_device(options.device),
        options.threads,
    )
    return FeatureFile(extract_feature(request))
