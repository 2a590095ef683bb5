"""The functions of the Python interface that train a model, embed with it and search with it."""

from __future__ import annotations

import os
from typing import Literal, overload

from vse.arguments import (
    From0,
    From1,
    Paths,
    Query,
    Sets,
    StrPath,
    as_path,
    as_paths,
    as_sets,
    device_of,
    public,
    weights_dir_of,
)
from vse.embedded_split import EmbeddedSplit
from vse.handles import OpenFeatures, Run
from vse.results import SearchResults


@public
def train(
    features: StrPath,
    experiment: str = "vsepp",
    *,
    sets: Sets | None = None,
    name: str | None = None,
    seed: From0 = 0,
    out: StrPath | None = None,
    captions: StrPath | None = None,
    eval_features: StrPath | None = None,
    caption_features: StrPath | None = None,
    truth_features: StrPath | None = None,
    start_from: StrPath | None = None,
    weights_dir: StrPath | None = None,
    words: StrPath | None = None,
    log_negatives: From0 = 0,
    tensorboard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> Run:
    """Train an embedding of images and captions on a feature cache (``vse-train``).

    A run that is finished is not trained again, but opened. If the training is interrupted, it saves where it is.

    Parameters
    ----------
    features
        the feature cache of images, or an opened one
    experiment
        a preset (docs/experiments.md), or a YAML file; by default VSE++ with the paper's settings
    sets
        settings to change, e.g. ``{"loss.margin": 0.1, "train.epochs": 3}``
    name
        what tables call this run; None is the experiment and what ``sets`` changed
    seed
        of the first weights and of the order of pairs
    out
        the run folder; None is ``runs/<dataset>_<experiment>/seed-<seed>``
    captions
        the data set's ``dataset.json``; None is the one that the cache names
    eval_features
        cache for validation; None is the experiment's, beside ``features``
    caption_features
        cache of captions; None is the experiment's
    truth_features
        cache of ground-truth regions; None is the experiment's
    start_from
        run to take weights from; None is the experiment's, of the same seed
    weights_dir
        folder of CNN weights, where photos are read; None is ``$VSE_WEIGHTS_DIR``
    words
        file of word vectors that word embeddings start from; None is the experiment's
    log_negatives
        how many of the hardest negatives of each epoch and direction are listed
    tensorboard
        write TensorBoard events as well
    resume
        continue an unfinished run where it was saved
    overwrite
        replace a run of other settings
    force
        replace files in ``out`` that no training wrote; inputs are never replaced
    allow_code
        run code of your own that a preset or ``start_from`` names; what ``sets`` names runs in any case
    device
        as of [`vse.extract`][]
    threads
        as of [`vse.extract`][]

    Raises
    ------
    vse.UserError
        names the setting, cache or run that is wrong, with the nearest name that would be right
    vse.Interrupted
        if it was stopped (Ctrl-C); ``resume=True`` goes on

    Examples
    --------
    ```python
    run = vse.train("features/demo_fc7.h5", "vsepp")
    run.frame[["epoch", "loss", "rsum"]]
    ```
    """
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.train.named_experiment import train_experiment
    from vse.train.run.inputs import InputPaths
    from vse.train.run.resume import Existing, Extras

    places = (captions, eval_features, caption_features, start_from, weights_dir_of(weights_dir), words, truth_features)
    with allow_own_code(allow_code):
        folder = train_experiment(
            as_path(features),
            experiment,
            as_sets(sets),
            name,
            seed=seed,
            out=as_path(out),
            device=device_of(device),
            threads=threads,
            inputs=InputPaths(*map(as_path, places)),
            existing=Existing(resume, overwrite),
            extras=Extras(log_negatives, tensorboard),
        )
    return Run(folder)


@overload
def embed(
    run: Paths,
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
    force: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> EmbeddedSplit: ...
@overload
def embed(
    run: Paths,
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
    force: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> tuple[OpenFeatures, OpenFeatures]: ...
@public
def embed(
    run: Paths,
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
    force: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> EmbeddedSplit | tuple[OpenFeatures, OpenFeatures]:
    """Embed the images and captions of a split with the best weights of a run (``vse-embed``).

    Parameters
    ----------
    run
        the run; with ``as_features`` also embeddings files of any program, one for each split
    split
        ``test`` if None
    out
        the file to write; None is ``<split>.h5`` in the run, of another data set ``<dataset>_<split>.h5``
    as_features
        write the embeddings of all splits as the caches ``<as_features>_images.h5`` and ``_captions.h5`` instead
    features
        the cache, if it was moved, or one of another data set by the same extractor
    captions
        ``dataset.json``, if it was moved
    caption_features
        the cache of captions, if it was moved
    weights_dir
        folder of a text encoder, for another data set; None is ``$VSE_WEIGHTS_DIR``
    unfinished
        embed a run whose training did not finish, too
    allow_leak
        embed images that the run was trained on, too
    sentences
        of a run that localises phrases, how all captions score all images by their phrases
    force
        replace a file of another kind at ``out``; inputs are never replaced
    allow_code
        run the code of its maker's own that the run names; look at it first
    device
        as of [`vse.extract`][]
    threads
        as of [`vse.extract`][]

    Returns
    -------
    EmbeddedSplit | tuple[OpenFeatures, OpenFeatures]
        ``images`` (n_images, dim) and ``captions`` (n_captions, dim), their ids, and the file as ``path``; with
        ``as_features`` the two caches

    Raises
    ------
    vse.UserError
        if the run did not finish, was trained on images of the split, or its cache is not there

    Examples
    --------
    ```python
    embedded = vse.embed("runs/demo_vsepp/seed-0")
    embedded.images @ embedded.captions[0]
    ```
    """
    from vse.features.backbones.device import use_threads
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.train.use.embed import embed_runs
    from vse.train.use.trained_run import RunPlaces

    use_threads(threads)
    places = RunPlaces(*map(as_path, (features, captions, caption_features, weights_dir_of(weights_dir))))
    to, written_to = as_path(as_features), as_path(out)
    with allow_own_code(allow_code):
        written = embed_runs(
            as_paths(run), split, written_to, to, places, device_of(device), unfinished, allow_leak, sentences
        )
    if to is None:
        return EmbeddedSplit(written[0])
    return OpenFeatures(written[0]), OpenFeatures(written[1])


@public
def search(
    run: StrPath,
    query: Query,
    k: From1 = 10,
    *,
    split: str | None = None,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    corpus: StrPath | None = None,
    index: StrPath | None = None,
    index_type: str | None = None,
    index_parameters: str = "",
    rerank: From1 | None = None,
    image: StrPath | None = None,
    html: StrPath | None = None,
    force: bool = False,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> SearchResults:
    """Search a split with a run: a text finds images, a photo finds captions (``vse-search``).

    Parameters
    ----------
    run
        the run
    query
        a text, or the path of a JPEG, PNG or WebP file
    k
        how many results
    split
        ``test`` if None
    features
        the cache, if it was moved, or one of your album by the same extractor
    captions
        as of [`vse.embed`][]
    caption_features
        as of [`vse.embed`][]
    weights_dir
        as of [`vse.embed`][]
    corpus
        embeddings by this run to search, instead of embedding the split
    index
        FAISS index file: built the first time, then read instead of embedding the split. What such a search opened stays in
        memory until another run or split is searched, or one of its files changes, so that the next query takes milliseconds
    index_type
        which index to build, e.g. ``IVF1024,Flat``
    index_parameters
        how far to look in it, e.g. ``nprobe=16``
    rerank
        score only so many candidates by pooled vectors, of a model that scores every pair
    image
        a photo of ``features`` in which to find ``query``, a phrase, with a run that localises phrases
    html
        write a report with photos as well
    force
        replace files of another kind at ``index`` or ``html``; inputs are never replaced
    allow_code
        as of [`vse.embed`][]
    device
        as of [`vse.extract`][]
    threads
        as of [`vse.extract`][]

    Raises
    ------
    vse.UserError
        if the query has no word, the photo cannot be read, or an option does not suit the run

    Examples
    --------
    ```python
    hits = vse.search("runs/demo_vsepp/seed-0", "a red circle above a blue square", k=3)
    hits.frame[["rank", "score", "file"]]
    ```
    """
    from vse.features.backbones.device import use_threads
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.train.use.search import AskedSearch, find_phrase, search_run
    from vse.train.use.trained_run import RunPlaces

    use_threads(threads)
    places = RunPlaces(*map(as_path, (features, captions, caption_features, weights_dir_of(weights_dir))))
    asked = AskedSearch(
        k,
        split,
        as_path(corpus),
        as_path(index),
        index_type,
        index_parameters,
        rerank,
        as_path(html),
    )
    text, photo = os.fspath(query), as_path(image)
    given = as_path(query) if isinstance(query, os.PathLike) else text
    with allow_own_code(allow_code):
        if photo is not None:
            return SearchResults(text, find_phrase(as_path(run), photo, text, asked, places, device_of(device)).best(k), photo)
        return SearchResults(text, search_run(as_path(run), given, asked, places, device_of(device)))
