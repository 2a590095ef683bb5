"""From a feature cache and an experiment to a run folder."""

from __future__ import annotations

import logging
import platform
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import vse
from vse.features.cache import FeatureCache, open_cache
from vse.features.cnn import recreate
from vse.features.reader import FeatureReader
from vse.pipeline.captions import Vocabulary
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_file, write_json
from vse.pipeline.presets import changed_fields
from vse.train.batches import Pairs, images_of
from vse.train.cnn import TrainableCnn
from vse.train.encode import pictures
from vse.train.images import CachedImages, EvaluationImages, TrainingImages
from vse.train.losses import loss_by_name
from vse.train.model import TwoBranchModel
from vse.train.negatives import HardNegatives
from vse.train.parallel import Processes, join_processes
from vse.train.run import RunFolder, relative_path
from vse.train.trainer import Split, Trainer

log = logging.getLogger(__name__)
_ACTIONS = ("nothing", "start", "resume")


@dataclass(frozen=True)
class Inputs:
    """What a run is made from."""

    cache: FeatureCache
    evaluated: FeatureCache
    dataset: Dataset
    base: RunFolder | None
    weights_dir: Path | None


def train(
    features: Path,
    experiment: ExperimentConfig,
    seed: int = 0,
    out: Path | None = None,
    captions: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    eval_features: Path | None = None,
    start_from: Path | None = None,
    weights_dir: Path | None = None,
    log_negatives: int = 0,
    tensorboard: bool = False,
) -> Path:
    """Train an experiment on a feature cache; returns the run folder.

    Parameters
    ----------
    features : the cache; it names the data set and where its captions lie
    experiment : every setting
    seed : of the initial weights, of the order of the pairs and of random crops
    out : the run folder, ``runs/<dataset>_<experiment>/seed-<seed>`` if None
    captions : another place of ``dataset.json``
    resume : continue an unfinished run of the same settings from where it was saved; start if there is none
    overwrite : replace a run of other settings, or an unfinished one that is not resumed
    device : ``auto`` takes a GPU if there is one
    eval_features : the cache for validation, if the experiment names another; beside ``features`` if None
    start_from : run folder of the experiment's ``start_from``; beside ``out``'s folder if None
    weights_dir : folder of weights that stand in for a download, where pictures go through a CNN
    log_negatives : how many of the hardest negatives of each epoch and direction go to ``negatives.csv``
    tensorboard : write events of every epoch, too
    """
    for name in (experiment.loss.name, experiment.warmup.loss):
        loss_by_name(name)
    cache = open_cache(features)
    dataset = load_dataset_file(captions or cache.captions)
    folder = RunFolder(out or Path("runs", f"{dataset.name}_{experiment.name}", f"seed-{seed}"))
    if cache.feature != experiment.feature:
        log.info(
            "experiment %r asks for the feature %r; this run reads %r", experiment.name, experiment.feature, cache.feature
        )
        experiment = experiment.model_copy(update={"feature": cache.feature})
    evaluated = _evaluated(cache, experiment, eval_features)
    base = _base(experiment, dataset.name, seed, folder, start_from)
    inputs = Inputs(cache, evaluated, dataset, base, weights_dir)
    identity = _identity(inputs, seed)
    processes = join_processes(device)
    try:
        action = _agreed(processes, lambda: _what_to_do(folder, experiment, identity, resume, overwrite))
        if action == "nothing":
            log.info("%s: this run is finished (--overwrite trains it again)", folder.path)
            return folder.path
        trainer, vocabulary = _prepare(experiment, inputs, seed, processes, log_negatives)
        record = _record(identity, experiment, inputs, folder, trainer, vocabulary)
        if action == "resume":
            trainer.restore(folder.checkpoint())
            log.info("%s: continues after epoch %d, step %d", folder.path, trainer.progress.epoch, trainer.progress.step)
        processes.told(0)  # nobody writes before all have read
        if processes.first:
            if action == "start":
                folder.start(experiment, vocabulary, record)
            write_json(folder.record_file, record)
        _run(folder, trainer, identity, tensorboard)
        if processes.first:
            _finish(folder, record, trainer)
    finally:
        processes.close()
    return folder.path


def _evaluated(cache: FeatureCache, experiment: ExperimentConfig, path: Path | None) -> FeatureCache:
    """The cache for validation and test."""
    if experiment.eval_feature is None and path is None:
        return cache
    beside = cache.path.with_name(f"{cache.dataset}_{experiment.eval_feature}.h5")
    if path is None and not beside.exists():
        raise UserError(
            f"{beside}: no such feature cache; {experiment.name} is validated on {experiment.eval_feature!r}: extract it, "
            "name its cache with --eval-features, or --set eval_feature=null to validate on the cache that it trains on"
        )
    found = open_cache(path or beside)
    if (found.dataset, found.dim) != (cache.dataset, cache.dim):
        raise UserError(
            f"{found.path} holds {found.dim} numbers per vector of {found.dataset!r}, "
            f"{cache.path} {cache.dim} of {cache.dataset!r}"
        )
    networks = [c.provenance.get("weights_sha256") for c in (found, cache)]
    if None not in networks and networks[0] != networks[1]:
        raise UserError(f"{found.path} and {cache.path} are of networks with different weights")
    return found


def _base(experiment: ExperimentConfig, dataset: str, seed: int, folder: RunFolder, path: Path | None) -> RunFolder | None:
    """The run whose weights this one starts from."""
    if experiment.start_from is None and path is None:
        return None
    base = RunFolder(path or folder.path.parent.parent / f"{dataset}_{experiment.start_from}" / f"seed-{seed}")
    if not base.best_file.is_file():
        raise UserError(
            f"{base.path}: no trained run to start from; {experiment.name} starts from {experiment.start_from!r}: train it "
            "first, or name its run folder with --start-from"
        )
    return base


def _identity(inputs: Inputs, seed: int) -> dict[str, Any]:
    """What a run was made from, beside its settings."""
    identity = {
        "dataset": inputs.dataset.name,
        "captions_sha256": sha256_file(inputs.dataset.path),
        "seed": seed,
        "feature": inputs.cache.feature,
        "feature_key": inputs.cache.key,
    }
    if inputs.evaluated is not inputs.cache:
        identity |= {"eval_feature_key": inputs.evaluated.key}
    if inputs.base is not None:
        identity |= {"start_from_sha256": sha256_file(inputs.base.best_file)}
    return identity


def _agreed(processes: Processes, decide: Callable[[], str]) -> str:
    """What the first process decides; the others end if it refuses."""
    refusal = None
    code = -1
    if processes.first:
        try:
            code = _ACTIONS.index(decide())
        except UserError as error:
            refusal = error
    code = processes.told(code)
    if refusal is not None:
        raise refusal
    if code < 0:
        raise UserError("the first process refused; see its message")
    return _ACTIONS[code]


def _what_to_do(
    folder: RunFolder, experiment: ExperimentConfig, identity: Mapping[str, Any], resume: bool, overwrite: bool
) -> str:
    """``start``, ``resume`` or ``nothing``; :class:`UserError` if that would destroy or mix up a run."""
    if not folder.config_file.is_file() or (overwrite and not resume):
        return "start"
    record = folder.record() if folder.record_file.is_file() else {}
    known = record or (folder.checkpoint().get("identity", {}) if folder.checkpoint_file.is_file() else identity)
    before = {**folder.experiment().content(), **{key: known.get(key) for key in identity}}
    changes = changed_fields(before, {**experiment.content(), **identity})
    if changes and not overwrite:
        raise UserError(
            f"{folder.path} holds a run of other settings ({'; '.join(changes[:4])}); give another --out, or --overwrite it"
        )
    if changes:
        return "start"
    if resume and folder.checkpoint_file.is_file():
        return "resume" if record.get("state") != "finished" else "nothing"
    if not folder.checkpoint_file.is_file():
        return "start"
    if record.get("state") == "finished":
        return "nothing"
    raise UserError(f"{folder.path} holds an unfinished run; continue it with --resume, or --overwrite it")


def _prepare(
    experiment: ExperimentConfig, inputs: Inputs, seed: int, processes: Processes, log_negatives: int
) -> tuple[Trainer, Vocabulary]:
    dataset, settings = inputs.dataset, experiment.train
    for cache in (inputs.cache, inputs.evaluated):
        if cache.dataset != dataset.name:
            raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
        is_bank = len(cache.row_shape) == 2 and str(cache.provenance.get("config", {}).get("crops", "")).endswith("_bank")
        if cache.kind != "image" or cache.offsets is not None or not (len(cache.row_shape) == 1 or is_bank):
            raise UserError(
                f"{cache.path} holds {cache.described()}; one vector per image, or a bank of them from crops, is needed"
            )
    train_images = images_of(dataset, ["train", "restval"] if settings.restval else ["train"], inputs.cache)
    if inputs.base is not None:
        vocabulary = inputs.base.vocabulary()
    else:
        tokens = (caption.tokens for image in train_images for caption in image.captions)
        vocabulary = Vocabulary.build(tokens, settings.min_count)
    pairs = Pairs(train_images, vocabulary)
    val = Pairs(images_of(dataset, ["val"], inputs.evaluated), vocabulary)
    if len(pairs) < 2:
        raise UserError(f"{dataset.path}: one training caption has no negatives; at least two are needed")
    seen, validated, cnn = _images(experiment, inputs, pairs, val, processes)
    torch.manual_seed(seed)
    model = TwoBranchModel(experiment.model, inputs.cache.dim, len(vocabulary), cnn).to(processes.device)
    if inputs.base is not None:
        _start_from(model, inputs.base)
    listing = HardNegatives(log_negatives, pairs.captions) if log_negatives else None
    return Trainer(experiment, pairs, seen, Split(val, validated), model, seed, processes, listing), vocabulary


def _images(
    experiment: ExperimentConfig, inputs: Inputs, pairs: Pairs, val: Pairs, processes: Processes
) -> tuple[TrainingImages, EvaluationImages, TrainableCnn | None]:
    """What the model reads of training and validation images, and the CNN if it is part of the model."""
    settings, device = experiment.images, processes.device
    cached = CachedImages(FeatureReader(inputs.evaluated, 0, mapped=False), val.image_ids, device)
    if settings.source == "cache":
        room = experiment.train.memory_gb if experiment.train.features_in_memory else 0
        return CachedImages(FeatureReader(inputs.cache, 0, mapped=False), pairs.image_ids, device, room), cached, None
    extractor = recreate(inputs.cache, inputs.weights_dir, str(device))
    if not settings.finetune:
        return pictures(extractor, inputs.dataset, pairs.images, settings, through=True), cached, None
    if settings.batch_norm == "train" and processes.size > 1:
        raise UserError("images.batch_norm: train takes one process; the statistics of each process would be its own")
    seen = pictures(extractor, inputs.dataset, pairs.images, settings)
    cnn = TrainableCnn(extractor, settings.batch_norm, settings.gradient_checkpointing, experiment.train.compile)
    return seen, pictures(extractor, inputs.dataset, val.images, settings), cnn


def _start_from(model: TwoBranchModel, base: RunFolder) -> None:
    """Load the weights of another run. A CNN that it did not train stays as it is."""
    weights = base.best_weights()
    own = model.state_dict()
    wrong = [name for name in weights if name not in own or own[name].shape != weights[name].shape]
    missing = [name for name in own if name not in weights and not name.startswith("cnn.")]
    if wrong or missing:
        raise UserError(
            f"{base.best_file}: weights of another model ({(wrong + missing)[0]} does not fit); start from a run with "
            "the same model settings and a feature of the same length"
        )
    model.load_state_dict(weights, strict=False)


def _record(
    identity: Mapping[str, Any],
    experiment: ExperimentConfig,
    inputs: Inputs,
    folder: RunFolder,
    trainer: Trainer,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    def found(cache: FeatureCache) -> dict[str, str]:
        return {"name": cache.feature, "key": cache.key, "path": relative_path(cache.path, folder.path)}

    record = {
        **identity,
        "experiment": experiment.name,
        "state": "running",
        "features": found(inputs.cache),
        "captions": relative_path(inputs.dataset.path, folder.path),
        "n_words": len(vocabulary),
        "n_train_pairs": len(trainer.pairs),
        "versions": {"vse": vse.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "processes": trainer.processes.size,
        "device": str(trainer.device),
    }
    if inputs.evaluated is not inputs.cache:
        record["eval_features"] = found(inputs.evaluated)
    if inputs.base is not None:
        record["start_from"] = relative_path(inputs.base.path, folder.path)
    return record


def _run(folder: RunFolder, trainer: Trainer, identity: Mapping[str, Any], tensorboard: bool) -> None:
    """Train the epochs that are left. The best weights are written before the checkpoint that counts their epoch."""
    settings, first = trainer.settings, trainer.processes.first
    events = _events(folder, trainer.progress.epoch) if tensorboard and first else None

    def save() -> None:
        if first:
            folder.save_checkpoint({**trainer.state(), "identity": dict(identity)})

    def done() -> bool:
        return bool(trainer.processes.told(int(first and trainer.progress.finished(settings.epochs, settings.early_stop))))

    with trainer.interruption.watched():
        while not done():
            trainer.run_epoch(save)
            if first:
                _save_epoch(folder, trainer, save)
            if events is not None:
                for name, value in trainer.progress.rows[-1].items():
                    events.add_scalar(name, value, trainer.progress.epoch)
                events.flush()
    if first and trainer.progress.epoch < settings.epochs:
        log.info("stopped early: %d epochs without a better rsum", settings.early_stop)


def _save_epoch(folder: RunFolder, trainer: Trainer, save: Callable[[], None]) -> None:
    progress = trainer.progress
    row = progress.rows[-1]
    if progress.best is row:
        folder.save_best(trainer.model.state_dict())
    folder.save_metrics(progress.rows)
    if trainer.listing:
        trainer.listing.write(folder.negatives_file)
    save()
    log.info(
        "epoch %d: loss %.3f, val rsum %.1f (i2t R@1 %.1f, t2i R@1 %.1f), %.0f pairs/s%s",
        *(row["epoch"], row["loss"], row["rsum"], row["i2t_r1"], row["t2i_r1"], row["pairs_per_s"]),
        ", best so far" if progress.best is row else "",
    )


def _events(folder: RunFolder, epoch: int) -> Any:
    """A writer of TensorBoard events; what an earlier process wrote of unfinished epochs is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard needs TensorBoard: pip install 'vse-pipeline[tensorboard]'") from None
    return SummaryWriter(str(folder.path), purge_step=epoch + 1)


def _finish(folder: RunFolder, record: dict[str, Any], trainer: Trainer) -> None:
    progress = trainer.progress
    timing = {
        "epochs": progress.epoch,
        "best_epoch": progress.best["epoch"],
        "best_rsum": progress.best["rsum"],
        "train_seconds": round(sum(row["seconds"] for row in progress.rows), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    write_json(folder.record_file, {**record, "state": "finished", **timing})
