"""The functions of the Python interface that open, make and extract data.

They have the names, defaults and checks of the commands, and call the same plain functions.
"""

from __future__ import annotations

from vse.arguments import Columns, From0, From1, Paths, Sets, Share, StrPath, as_path, as_paths, as_sets, device_of, public
from vse.handles import ImportedData, OpenDataset, OpenFeatures
from vse.pipeline.errors import UserError


@public
def open_dataset(path: StrPath) -> OpenDataset:
    """Open a data set, ``dataset.json`` (docs/formats.md), and check it.

    Parameters
    ----------
    path
        the file

    Returns
    -------
    OpenDataset
        the data set, with a pandas frame of a row per caption

    Raises
    ------
    vse.UserError
        if an id comes twice, a caption is of no image, and the like; it names the image or caption

    Examples
    --------
    ```python
    data = vse.open_dataset("data/demo/dataset.json")
    data.frame[data.frame["split"] == "test"]["caption"]
    ```
    """
    return OpenDataset(as_path(path))


@public
def open_features(path: StrPath) -> OpenFeatures:
    """Open a feature cache, whose rows are then read by id from where they lie on the disk.

    Parameters
    ----------
    path
        the cache, e.g. ``features/demo_fc7.h5``

    Returns
    -------
    OpenFeatures
        ``features[ids]`` is an array (n, dim) in the order of the ids, ``features.tensor(ids)`` a float32 tensor; of regions a
        list of arrays (n_regions, dim), and a padded tensor (n, longest, dim) with ``features.mask(ids)``

    Raises
    ------
    vse.UserError
        if the cache or one of its shards is missing or damaged; when rows are read, if an id has none

    Examples
    --------
    ```python
    features = vse.open_features("features/demo_fc7.h5")
    features[vse.open_dataset("data/demo/dataset.json").image_ids("test")].shape
    ```
    """
    return OpenFeatures(as_path(path))


@public
def draw_demo(out: StrPath, images: From1 | None = None, seed: From0 = 0, *, force: bool = False) -> OpenDataset:
    """Draw the demo data set: scenes of simple shapes with five captions each (``vse-data demo``).

    Parameters
    ----------
    out
        folder to write, e.g. ``data/demo``
    images
        how many, all splits together; None is 5,500
    seed
        another one draws other scenes
    force
        replace another data set or other images in ``out``

    Raises
    ------
    vse.UserError
        if there are fewer than 6 images, or ``out`` holds another data set

    Examples
    --------
    ```python
    data = vse.draw_demo("data/shapes", images=110)
    data.splits
    ```
    """
    from vse.pipeline.demo import DEFAULT_IMAGES, create_demo

    return OpenDataset(create_demo(as_path(out), DEFAULT_IMAGES if images is None else images, seed))


@public
def import_data(
    sources: Paths,
    out: StrPath,
    *,
    name: str | None = None,
    format: str | None = None,  # noqa: A002  # as the option is called
    captions: StrPath | None = None,
    images: StrPath | None = None,
    out_features: StrPath = "features",
    key_until: str | None = None,
    columns: Columns | None = None,
    val: Share | None = None,
    test: Share | None = None,
    seed: From0 = 0,
    tokeniser: str | None = None,
    skip_bad: bool = False,
    quoting: str | None = None,
    force: bool = False,
) -> ImportedData:
    """Make a data set of your own photos or vectors (``vse-data import``).

    Parameters
    ----------
    sources
        the folder of photos or of vectors, or archives
    out
        folder to write, e.g. ``data/birds``
    name
        what the data set is called; by default as that folder
    format
        ``table``, ``webdataset``, ``clip-retrieval`` or ``hugging-face``; None is what it is
    captions
        the table, if it is no ``captions.*`` or ``metadata.*`` among the photos
    images
        folder of the photos of clip-retrieval's vectors; for tables, another folder that image paths may lead to
    out_features
        folder of the caches of vectors
    key_until
        where the key of a WebDataset member ends: ``first-dot``, as in WebDataset itself, or ``last-dot``; None is the first
    columns
        of a field (``file``, ``caption``, ``split`` or an id) the column, or columns, that it is read from
    val
        share of the images that is drawn for validation, where no splits are given; None is 0.1
    test
        share of the images that is drawn for the test, where no splits are given; None is 0.1
    seed
        another one draws other splits
    tokeniser
        what cuts captions into words: ``unicode_words``, ``letters_and_digits`` or ``nltk``
    skip_bad
        leave bad rows out, and list them in ``import.failures.jsonl``
    quoting
        ``minimal`` or ``none``, where quotation marks in a CSV file are text; None is ``minimal``
    force
        replace another data set or file in ``out``; inputs are never replaced

    Raises
    ------
    vse.UserError
        names the file and the row that cannot be taken

    Examples
    --------
    ```python
    birds = vse.import_data("birds/images", "data/birds", captions="birds/captions.csv")
    birds.dataset.splits
    ```
    """
    from vse.features.exchange.formats import ImportJob
    from vse.features.exchange.formats import import_data as import_sources
    from vse.pipeline.imports.rows import import_settings

    pairs = [(field, columns) for field, columns in (columns or {}).items()]
    given = [f"{field}={one}" for field, many in pairs for one in ([many] if isinstance(many, str) else many)]
    settings = import_settings(as_path(out), name, val, test, seed, tokeniser, skip_bad, given, quoting)
    job = ImportJob(as_paths(sources), settings, as_path(captions), as_path(images), as_path(out_features), key_until)
    return ImportedData(import_sources(job, format))


@public
def extract(
    dataset: StrPath,
    feature: str | None = None,
    *,
    out: StrPath | None = None,
    shards: From1 | None = None,
    like: StrPath | None = None,
    sets: Sets | None = None,
    skip_bad: bool = False,
    weights_dir: StrPath | None = None,
    words: StrPath | None = None,
    device: str | None = None,
    threads: From1 | None = None,
    force: bool = False,
) -> OpenFeatures:
    """Extract a feature of images or captions once, into a cache that the trainers read (``vse-extract``).

    What is finished is kept: the same call again goes on where it was interrupted, or opens the cache.

    Parameters
    ----------
    dataset
        the data set's ``dataset.json``, or an opened one
    feature
        a preset of ``config/features``, such as ``effnet`` or ``minilm``, or a YAML file
    out
        the cache to write; None is ``features/<dataset>_<feature>.h5``
    shards
        how many; None is as many as the preset of the data set says
    like
        a cache whose settings and weights are taken instead of those of ``feature``
    sets
        settings of the preset to change, e.g. ``{"crop": 224}``
    skip_bad
        leave unreadable images out, and list them beside the cache
    weights_dir
        folder of weights instead of downloads; None is ``$VSE_WEIGHTS_DIR``
    words
        file of word vectors, for features that are made of some; None is ``$VSE_WORDS``
    device
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; None is ``$VSE_DEVICE``, or ``auto``
    threads
        processor cores that torch may use from now on; None changes nothing
    force
        replace a file of another kind at ``out``; inputs are never replaced

    Returns
    -------
    OpenFeatures
        the opened cache

    Raises
    ------
    vse.UserError
        names the preset, setting or image that is wrong, or the package or weights that are missing

    Examples
    --------
    ```python
    features = vse.extract("data/demo/dataset.json", "fc7")
    features[features.ids[:2]].shape
    ```
    """
    from vse.features.feature_job import FeatureRequest, extract_feature

    if (feature is None) == (like is None):
        raise UserError("a feature is asked for by its preset (feature), or as that of another cache (like): give one of them")
    asked = FeatureRequest(
        as_path(dataset),
        feature or "",
        as_path(out),
        as_sets(sets),
        as_path(like),
        shards,
        skip_bad,
        as_path(weights_dir),
        as_path(words),
        device_of(device),
        threads,
    )
    return OpenFeatures(extract_feature(asked))
