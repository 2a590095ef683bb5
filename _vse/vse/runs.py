"""The functions of the Python interface that train a run, load the model of a run, and write embeddings as features."""

from __future__ import annotations

from vse.arguments import Paths, Sets, StrPath, as_path, as_paths, as_sets, default_device, default_weights_dir, public
from vse.data_files import FeatureFile
from vse.pipeline.errors import UserError
from vse.pipeline.options import From0, From1
from vse.train.options import EmbedRequest, RunFiles, TrainInputs, TrainOptions, TrainRequest
from vse.trained_models import TrainedModel


@public
def train(
    features: StrPath,
    experiment: str = "vsepp",
    *,
    sets: Sets | None = None,
    name: str | None = None,
    seed: From0 = 0,
    out: StrPath | None = None,
    inputs: TrainInputs = TrainInputs(),
    options: TrainOptions = TrainOptions(),
) -> TrainedModel:
    """Train an embedding of images and captions on a feature cache (``vse-train``).

    If the run is finished, it is loaded and not trained again. An interrupted training saves its state.

    Args:
        features: the feature cache of images, or the object that [`vse.extract`][] returned
        experiment: a preset (docs/experiments.md), or a YAML file; by default VSE++ with the paper's settings
        sets: changes settings, e.g. ``{"loss.margin": 0.1, "train.epochs": 3}``
        name: the name of this run in tables; None is the experiment with the changes in ``sets``
        seed: the seed of the initial weights and of the order of pairs
        out: the run folder; None is ``runs/<dataset>_<experiment>/seed-<seed>``
        inputs: further files that the training reads, see [`vse.TrainInputs`][]
        options: rarely used options, see [`vse.TrainOptions`][]

    Returns:
        TrainedModel: the model with the weights of its best epoch

    Raises:
        vse.UserError: if a setting, cache or run is wrong; the message names it and the most similar valid name
        vse.Interrupted: if the training was stopped (Ctrl-C); ``vse.TrainOptions(resume=True)`` continues it

    Examples:
        ```python
        model = vse.train("features/demo_fc7.h5", "vsepp")
        model.frame[["epoch", "loss", "rsum"]]
        ```
    """
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.train.named_experiment import train_experiment

    inputs, options = inputs.with_environment(), options.with_environment()
    request = TrainRequest(
        features=features,
        experiment=experiment,
        sets=as_sets(sets),
        name=name,
        seed=seed,
        out=out,
        inputs=inputs,
        options=options,
    )
    with allow_own_code(options.allow_code):
        folder = train_experiment(request)
    return TrainedModel(folder, RunFiles(weights_dir=inputs.weights_dir), options.device, options.allow_code)


@public
def load(
    run: StrPath,
    *,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    allow_code: bool = False,
    device: str | None = None,
    threads: From1 | None = None,
) -> TrainedModel:
    """Load a trained model from the folder of its run.

    Args:
        run: the folder of the run
        features: the feature cache, if it was moved, or the cache of another data set by the same extractor
        captions: the file ``dataset.json``, if it was moved
        caption_features: the cache of captions, if it was moved
        weights_dir: a folder of weights of the networks that read new photos and texts; None is ``$VSE_WEIGHTS_DIR``
        allow_code: run the own code of the run's author; read it first
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; None is ``$VSE_DEVICE``, or ``auto``
        threads: the number of processor cores that torch may use from now on; None changes nothing

    Raises:
        vse.UserError: if the folder is not a run

    Examples:
        ```python
        model = vse.load("runs/demo_vsepp/seed-0")
        model.search("a red circle above a blue square", k=3).frame[["rank", "score", "file"]]
        ```
    """
    from vse.features.backbones.device import use_threads

    use_threads(threads)
    files = RunFiles(
        features=features,
        captions=captions,
        caption_features=caption_features,
        weights_dir=default_weights_dir(weights_dir),
    )
    return TrainedModel(as_path(run), files, default_device(device), allow_code)


@public
def embeddings_as_features(
    files: Paths, prefix: StrPath, *, captions: StrPath | None = None, force: bool = False
) -> tuple[FeatureFile, FeatureFile]:
    """Write embeddings files of any program as two feature caches, of images and of captions (``vse-embed``).

    Args:
        files: the embeddings files, one for each split of the data set
        prefix: the start of the names of the caches: ``<prefix>_images.h5`` and ``<prefix>_captions.h5``
        captions: the data set's ``dataset.json``; None is the file that the first embeddings file names
        force: replace files of another kind; inputs are never replaced

    Raises:
        vse.UserError: if the files belong to different models or data sets, hold scores, or lack images or captions of their
            splits

    Examples:
        ```python
        images, captions = vse.embeddings_as_features("runs/demo_vsepp/seed-0/test.h5", "features/demo_vsepp")
        images[images.ids[:2]].shape
        ```
    """
    from vse.train.use.embed import embed_runs

    paths = as_paths(files)
    if paths[0].is_dir():
        raise UserError(f"{paths[0]}: a folder; for a run, call vse.load(run).embed_as_features(prefix)")
    written = embed_runs(EmbedRequest(runs=paths, as_features=prefix, files=RunFiles(captions=captions)))
    return FeatureFile(written[0]), FeatureFile(written[1])
