"""The functions of the Python interface that open, make, train and embed; the others are in ``interface_use``.

They have the names, defaults and checks of the commands, and call the same plain functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, overload

from vse.calls import as_path, as_paths, as_sets, device_of, in_range, public, threads_of, weights_dir_of, whole
from vse.opened import EmbeddedSplit, ImportedData, OpenDataset, OpenFeatures, Run
from vse.pipeline.errors import UserError

StrPath = str | os.PathLike[str]
Sets = Mapping[str, object] | Sequence[str]


@public
def open_dataset(path: StrPath) -> OpenDataset:
    """Open a data set, ``dataset.json`` (docs/formats.md), and check it.

    Parameters
    ----------
    path : the file

    Returns
    -------
    The data set, with a pandas frame of a row per caption

    Raises
    ------
    vse.UserError : if an id comes twice, a caption is of no image, and the like; it names the image or caption

    Examples
    --------
    data = vse.open_dataset("data/demo/dataset.json")
    data.frame[data.frame["split"] == "test"]["caption"]
    """
    return OpenDataset(as_path(path))


@public
def open_features(path: StrPath) -> OpenFeatures:
    """Open a feature cache, whose rows are then read by id from where they lie on the disk.

    Parameters
    ----------
    path : the cache, e.g. ``features/demo_fc7.h5``

    Returns
    -------
    The cache: ``features[ids]`` is an array (n, dim) in the order of the ids, ``features.tensor(ids)`` a float32 tensor; of
    regions a list of arrays (n_regions, dim), and a padded tensor (n, longest, dim) with ``features.mask(ids)``

    Raises
    ------
    vse.UserError : if the cache or one of its shards is missing or damaged; when rows are read, if an id has none

    Examples
    --------
    features = vse.open_features("features/demo_fc7.h5")
    features[vse.open_dataset("data/demo/dataset.json").image_ids("test")].shape
    """
    return OpenFeatures(as_path(path))


@public
def draw_demo(out: StrPath, images: int | None = None, seed: int = 0) -> OpenDataset:
    """Draw the demo data set: scenes of simple shapes with five captions each (``vse-data demo``).

    Parameters
    ----------
    out : folder to write, e.g. ``data/demo``
    images : how many, all splits together; None is 5,500
    seed : another one draws other scenes

    Raises
    ------
    vse.UserError : if there are fewer than 6 images, or ``out`` holds another data set

    Examples
    --------
    data = vse.draw_demo("data/shapes", images=110)
    data.splits
    """
    from vse.pipeline.demo import DEFAULT_IMAGES, make_demo

    return OpenDataset(make_demo(as_path(out), DEFAULT_IMAGES if images is None else images, whole("seed", seed, 0)))


@public
def import_data(
    sources: StrPath | Sequence[StrPath],
    out: StrPath,
    *,
    name: str | None = None,
    format: str | None = None,  # noqa: A002  # as the option is called
    captions: StrPath | None = None,
    images: StrPath | None = None,
    out_features: StrPath = "features",
    columns: Mapping[str, str | Sequence[str]] | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int = 0,
    tokeniser: str | None = None,
    skip_bad: bool = False,
) -> ImportedData:
    """Make a data set of your own photos or vectors (``vse-data import``).

    Parameters
    ----------
    sources : the folder of photos or of vectors, or archives
    out : folder to write, e.g. ``data/birds``
    name : what the data set is called; by default as that folder
    format : ``table``, ``webdataset``, ``clip-retrieval`` or ``hugging-face``; None is what it is
    captions : the table, if it is no ``captions.*`` or ``metadata.*`` among the photos
    images : folder of the photos of clip-retrieval's vectors
    out_features : folder of the caches of vectors
    columns : of a field (``file``, ``caption``, ``split`` or an id) the column, or columns, that it is read from
    val, test, seed : shares of the images that are drawn for these splits where none are given; None is 0.1
    tokeniser : what cuts captions into words: ``unicode_words``, ``letters_and_digits`` or ``nltk``
    skip_bad : leave bad rows out, and list them in ``import.failures.jsonl``

    Raises
    ------
    vse.UserError : names the file and the row that cannot be taken

    Examples
    --------
    birds = vse.import_data("birds/images", "data/birds", captions="birds/captions.csv")
    birds.dataset.splits
    """
    from vse.features.import_formats import Import
    from vse.features.import_formats import import_data as import_sources
    from vse.pipeline.imported_rows import import_settings

    pairs = [(field, columns) for field, columns in (columns or {}).items()]
    given = [f"{field}={one}" for field, many in pairs for one in ([many] if isinstance(many, str) else many)]
    val, test = in_range("val", val, 0, 1), in_range("test", test, 0, 1)
    settings = import_settings(as_path(out), name, val, test, whole("seed", seed, 0), tokeniser, skip_bad, given)
    job = Import(as_paths(sources), settings, as_path(captions), as_path(images), as_path(out_features))
    return ImportedData(import_sources(job, format))


@public
def extract(
    dataset: StrPath,
    feature: str | None = None,
    *,
    out: StrPath | None = None,
    shards: int | None = None,
    like: StrPath | None = None,
    sets: Sets | None = None,
    skip_bad: bool = False,
    weights_dir: StrPath | None = None,
    words: StrPath | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> OpenFeatures:
    """Extract a feature of images or captions once, into a cache that the trainers read (``vse-extract``).

    What is finished is kept: the same call again goes on where it was interrupted, or opens the cache.

    Parameters
    ----------
    dataset : the data set's ``dataset.json``, or an opened one
    feature : a preset of ``config/features``, such as ``effnet`` or ``minilm``, or a YAML file
    out : the cache to write; None is ``features/<dataset>_<feature>.h5``
    shards : how many; None is as many as the preset of the data set says
    like : a cache whose settings and weights are taken instead of those of ``feature``
    sets : settings of the preset to change, e.g. ``{"crop": 224}``
    skip_bad : leave unreadable images out, and list them beside the cache
    weights_dir : folder of weights instead of downloads; None is ``$VSE_WEIGHTS_DIR``
    words : file of word vectors, for features that are made of some; None is ``$VSE_WORDS``
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; None is ``$VSE_DEVICE``, or ``auto``
    threads : processor cores that torch may use from now on; None changes nothing

    Returns
    -------
    The opened cache

    Raises
    ------
    vse.UserError : names the preset, setting or image that is wrong, or the package or weights that are missing

    Examples
    --------
    features = vse.extract("data/demo/dataset.json", "fc7")
    features[features.ids[:2]].shape
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
        None if shards is None else whole("shards", shards, 1),
        skip_bad,
        as_path(weights_dir),
        as_path(words),
        device_of(device),
        threads_of(threads),
    )
    return OpenFeatures(extract_feature(asked))


@public
def train(
    features: StrPath,
    experiment: str = "vsepp",
    *,
    sets: Sets | None = None,
    name: str | None = None,
    seed: int = 0,
    out: StrPath | None = None,
    captions: StrPath | None = None,
    eval_features: StrPath | None = None,
    caption_features: StrPath | None = None,
    truth_features: StrPath | None = None,
    start_from: StrPath | None = None,
    weights_dir: StrPath | None = None,
    words: StrPath | None = None,
    log_negatives: int = 0,
    tensorboard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: int | None = None,
) -> Run:
    """Train an embedding of images and captions on a feature cache (``vse-train``).

    A run that is finished is not trained again, but opened. If the training is interrupted, it saves where it is.

    Parameters
    ----------
    features : the feature cache of images, or an opened one
    experiment : a preset (docs/experiments.md), or a YAML file; by default VSE++ with the paper's settings
    sets : settings to change, e.g. ``{"loss.margin": 0.1, "train.epochs": 3}``
    name : what tables call this run; None is the experiment and what ``sets`` changed
    seed : of the first weights and of the order of pairs
    out : the run folder; None is ``runs/<dataset>_<experiment>/seed-<seed>``
    captions : the data set's ``dataset.json``; None is the one that the cache names
    eval_features, caption_features, truth_features : caches for validation, of captions, and of ground-truth regions; None are
        the experiment's, beside ``features``
    start_from : run to take weights from; None is the experiment's, of the same seed
    weights_dir : folder of CNN weights, where photos are read; None is ``$VSE_WEIGHTS_DIR``
    words : file of word vectors that word embeddings start from; None is the experiment's
    log_negatives : how many of the hardest negatives of each epoch and direction are listed
    tensorboard : write TensorBoard events as well
    resume : continue an unfinished run where it was saved
    overwrite : replace a run of other settings
    allow_code : run code of your own that a preset or ``start_from`` names; what ``sets`` names runs in any case
    device, threads : as of :func:`vse.extract`

    Raises
    ------
    vse.UserError : names the setting, cache or run that is wrong, with the nearest name that would be right
    vse.Interrupted : if it was stopped (Ctrl-C); ``resume=True`` goes on

    Examples
    --------
    run = vse.train("features/demo_fc7.h5", "vsepp")
    run.frame[["epoch", "loss", "rsum"]]
    """
    from vse.pipeline.own_code import code_allowed
    from vse.train.named_experiment import train_experiment
    from vse.train.run.inputs import InputPaths
    from vse.train.training import Existing, Extras

    places = (captions, eval_features, caption_features, start_from, weights_dir_of(weights_dir), words, truth_features)
    with code_allowed(allow_code):
        folder = train_experiment(
            as_path(features),
            experiment,
            as_sets(sets),
            name,
            seed=whole("seed", seed, 0),
            out=as_path(out),
            device=device_of(device),
            threads=threads_of(threads),
            inputs=InputPaths(*map(as_path, places)),
            existing=Existing(resume, overwrite),
            extras=Extras(whole("log_negatives", log_negatives, 0), tensorboard),
        )
    return Run(folder)


@overload
def embed(
    run: StrPath | Sequence[StrPath],
    split: str | None = None,
    *,
    out: StrPath | None = None,
    as_features: None = None,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    unfinished: bool = False,
    allow_leak: bool = False,
    sentences: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: int | None = None,
) -> EmbeddedSplit: ...
@overload
def embed(
    run: StrPath | Sequence[StrPath],
    split: None = None,
    *,
    out: None = None,
    as_features: StrPath,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    unfinished: bool = False,
    allow_leak: bool = False,
    sentences: Literal[False] = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: int | None = None,
) -> tuple[OpenFeatures, OpenFeatures]: ...
@public
def embed(
    run: StrPath | Sequence[StrPath],
    split: str | None = None,
    *,
    out: StrPath | None = None,
    as_features: StrPath | None = None,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    unfinished: bool = False,
    allow_leak: bool = False,
    sentences: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: int | None = None,
) -> EmbeddedSplit | tuple[OpenFeatures, OpenFeatures]:
    """Embed the images and captions of a split with the best weights of a run (``vse-embed``).

    Parameters
    ----------
    run : the run; with ``as_features`` also embeddings files of any program, one for each split
    split : ``test`` if None
    out : the file to write; None is ``<split>.h5`` in the run, of another data set ``<dataset>_<split>.h5``
    as_features : write the embeddings of all splits as the caches ``<as_features>_images.h5`` and ``_captions.h5`` instead
    features : the cache, if it was moved, or one of another data set by the same extractor
    captions, caption_features : ``dataset.json`` and the cache of captions, if they were moved
    weights_dir : folder of a text encoder, for another data set; None is ``$VSE_WEIGHTS_DIR``
    unfinished : embed a run whose training did not finish, too
    allow_leak : embed images that the run was trained on, too
    sentences : of a run that localises phrases, how all captions score all images by their phrases
    allow_code : run the code of its maker's own that the run names; look at it first
    device, threads : as of :func:`vse.extract`

    Returns
    -------
    The embeddings: ``images`` (n_images, dim) and ``captions`` (n_captions, dim), their ids, and the file as ``path``; with
    ``as_features`` the two caches

    Raises
    ------
    vse.UserError : if the run did not finish, was trained on images of the split, or its cache is not there

    Examples
    --------
    embedded = vse.embed("runs/demo_vsepp/seed-0")
    embedded.images @ embedded.captions[0]
    """
    from vse.features.hardware import use_threads
    from vse.pipeline.own_code import code_allowed
    from vse.train.use.asked_of_run import embed_runs
    from vse.train.use.opened_run import RunPlaces

    use_threads(threads_of(threads))
    places = RunPlaces(*map(as_path, (features, captions, caption_features, weights_dir_of(weights_dir))))
    to, written_to = as_path(as_features), as_path(out)
    with code_allowed(allow_code):
        written = embed_runs(
            as_paths(run), split, written_to, to, places, device_of(device), unfinished, allow_leak, sentences
        )
    if to is None:
        return EmbeddedSplit(written[0])
    return OpenFeatures(written[0]), OpenFeatures(written[1])
