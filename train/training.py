"""From a feature cache and an experiment to a run folder."""

from __future__ import annotations

import logging
import platform
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import vse
from vse.features.cnn_extractor import rebuild_extractor
from vse.features.reader import FeatureReader
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files import write_json
from vse.pipeline.presets import changed_fields
from vse.pipeline.vocabulary import Vocabulary
from vse.train.data.captions import CachedCaptions, Captions, Words
from vse.train.data.images import CachedImages, EvaluationImages, TrainingImages, pictures
from vse.train.data.pairs import Pairs, Split, images_of
from vse.train.data.samplers import check_sampler
from vse.train.losses import PAIR_LOSSES, check_loss
from vse.train.models.build import TwoBranchModel
from vse.train.models.encoders import Branch
from vse.train.models.trainable_cnn import TrainableCnn
from vse.train.run.folder import RunFolder
from vse.train.run.inputs import Inputs, open_dataset, open_inputs
from vse.train.run.processes import Processes, join_processes
from vse.train.solvers.adam import Trainer
from vse.train.solvers.base import Solver
from vse.train.solvers.cca import Cca
from vse.train.solvers.negatives import HardNegatives

log = logging.getLogger(__name__)
_ACTIONS = ("nothing", "start", "resume")


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
    caption_features: Path | None = None,
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
    caption_features : the cache of captions, if they are not read as words; the experiment's, beside ``features``, if None
    """
    for name in (experiment.loss.name, experiment.warmup.loss):
        check_loss(name)
    check_sampler(experiment.train.sampling)
    if experiment.solver == "gradient" and experiment.warmup.epochs >= experiment.train.epochs:
        log.warning(
            "all %d epochs are warm-up with the loss %r, and %r is never used (--set warmup.epochs=0 changes that)",
            experiment.train.epochs,
            experiment.warmup.loss,
            experiment.loss.name,
        )
    cache, dataset = open_dataset(features, captions)
    folder = RunFolder(out or Path("runs", f"{dataset.name}_{experiment.name}", f"seed-{seed}"))
    inputs = open_inputs(
        cache,
        dataset,
        experiment,
        folder,
        seed,
        eval_features=eval_features,
        caption_features=caption_features,
        start_from=start_from,
        weights_dir=weights_dir,
    )
    experiment = _reading(experiment, inputs)
    identity = inputs.identity(seed)
    processes = join_processes(device)
    try:
        action = _agreed(processes, lambda: _what_to_do(folder, experiment, identity, resume, overwrite))
        if action == "nothing":
            log.info("%s: this run is finished (--overwrite trains it again)", folder.path)
            return folder.path
        solver, vocabulary = _prepare(experiment, inputs, seed, processes, log_negatives)
        record = {**identity, **inputs.record(folder.path), **_record(experiment, solver, vocabulary)}
        if action == "resume":
            solver.restore(folder.checkpoint())
            log.info("%s: continues after epoch %d, step %d", folder.path, solver.progress.epoch, solver.progress.step)
        processes.broadcast(0)  # nobody writes before all have read
        if processes.first:
            if action == "start":
                folder.start(experiment, vocabulary, record)
            write_json(folder.record_file, record)
        _run(folder, solver, identity, tensorboard)
        if processes.first:
            _finish(folder, record, solver)
    finally:
        processes.close()
    return folder.path


def _reading(experiment: ExperimentConfig, inputs: Inputs) -> ExperimentConfig:
    """The experiment with the features that it really reads, which may be others than its preset asks for."""
    read = {"feature": inputs.cache.feature, "caption_feature": inputs.captions.feature if inputs.captions else None}
    for key, name in read.items():
        if (asked := getattr(experiment, key)) != name:
            log.info("experiment %r asks for %s %r; this run reads %r", experiment.name, key, asked or "words", name)
    if experiment.solver == "cca" and inputs.captions is None:
        raise UserError(
            "CCA reads captions as vectors: name a caption feature (--set caption_feature=hglmm) or a cache of one"
        )
    return experiment.model_copy(update=read)


def _agreed(processes: Processes, decide: Callable[[], str]) -> str:
    """What the first process decides; the others end if it refuses."""
    refusal = None
    code = -1
    if processes.first:
        try:
            code = _ACTIONS.index(decide())
        except UserError as error:
            refusal = error
    code = processes.broadcast(code)
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
) -> tuple[Solver, Vocabulary]:
    dataset, settings = inputs.dataset, experiment.train
    train_images = images_of(dataset, ["train", "restval"] if settings.restval else ["train"], inputs.cache)
    pairs, val = Pairs(train_images), Pairs(images_of(dataset, ["val"], inputs.evaluated))
    if len(pairs) < 2:
        raise UserError(f"{dataset.path}: one training caption has no negatives; at least two are needed")
    if inputs.base is not None:
        vocabulary = inputs.base.vocabulary()
    else:
        vocabulary = Vocabulary.build((caption.tokens for caption in pairs.captions), settings.min_count)
    seen, validated, cnn = _images(experiment, inputs, pairs, val, processes)
    room = _room(experiment) - (seen.gb_kept if isinstance(seen, CachedImages) else 0)
    sentences = _sentences(inputs, pairs, vocabulary, processes, room)
    split = Split(val, validated, _sentences(inputs, val, vocabulary, processes, 0))
    torch.manual_seed(seed)
    caption_dim = None if inputs.captions is None else inputs.captions.dim
    model = TwoBranchModel(experiment.model, inputs.cache.dim, len(vocabulary), cnn, caption_dim).to(processes.device)
    if inputs.base is not None:
        _start_from(model, inputs.base)
    how = experiment.solver if experiment.solver == "cca" else experiment.loss.name
    if log_negatives and how in ("cca", *PAIR_LOSSES):
        raise UserError(f"--log-negatives lists what a ranking loss finds hardest; {how} ranks nothing")
    if experiment.solver == "cca":
        assert isinstance(seen, CachedImages)
        assert isinstance(sentences, CachedCaptions)
        return Cca(experiment, Split(pairs, seen, sentences), split, model, processes), vocabulary
    encoders = (model.image_encoder, model.caption_encoder)
    if processes.size > 1 and any(isinstance(encoder, Branch) and encoder.batch_norm is not None for encoder in encoders):
        raise UserError("batch normalisation in branches takes one process; the statistics of each process would be its own")
    listing = HardNegatives(log_negatives, pairs.captions) if log_negatives else None
    return Trainer(experiment, pairs, seen, sentences, split, model, seed, processes, listing), vocabulary


def _room(experiment: ExperimentConfig) -> float:
    """Memory for training features, in units of 1e9 bytes."""
    return experiment.train.memory_gb if experiment.train.features_in_memory else 0


def _sentences(inputs: Inputs, pairs: Pairs, vocabulary: Vocabulary, processes: Processes, memory_gb: float) -> Captions:
    """What the model reads of captions."""
    if inputs.captions is None:
        return Words(pairs.captions, vocabulary, processes.device)
    reader = FeatureReader(inputs.captions, 0, mapped=False)
    return CachedCaptions(reader, pairs.caption_ids, processes.device, memory_gb)


def _images(
    experiment: ExperimentConfig, inputs: Inputs, pairs: Pairs, val: Pairs, processes: Processes
) -> tuple[TrainingImages, EvaluationImages, TrainableCnn | None]:
    """What the model reads of training and validation images, and the CNN if it is part of the model."""
    settings, device = experiment.images, processes.device
    cached = CachedImages(FeatureReader(inputs.evaluated, 0, mapped=False), val.image_ids, device)
    if settings.source == "cache":
        reader = FeatureReader(inputs.cache, 0, mapped=False)
        return CachedImages(reader, pairs.image_ids, device, _room(experiment)), cached, None
    extractor = rebuild_extractor(inputs.cache, inputs.weights_dir, str(device))
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


def _record(experiment: ExperimentConfig, solver: Solver, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "state": "running",
        "n_words": len(vocabulary),
        "n_train_pairs": len(solver.pairs),
        "versions": {"vse": vse.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "processes": solver.processes.size,
        "device": str(solver.device),
    }


def _run(folder: RunFolder, solver: Solver, identity: Mapping[str, Any], tensorboard: bool) -> None:
    """Train the epochs that are left. The best weights are written before the checkpoint that counts their epoch."""
    first, patience = solver.processes.first, solver.patience
    events = _events(folder, solver.progress.epoch) if tensorboard and first else None

    def save() -> None:
        if first:
            folder.save_checkpoint({**solver.state(), "identity": dict(identity)})

    def done() -> bool:
        return bool(solver.processes.broadcast(int(first and solver.progress.finished(solver.epochs, patience))))

    with solver.interruption.watched():
        while not done():
            solver.run_epoch(save)
            if first:
                _save_epoch(folder, solver, save)
            if events is not None:
                for name, value in solver.progress.rows[-1].items():
                    events.add_scalar(name, value, solver.progress.epoch)
                events.flush()
    if first and solver.progress.epoch < solver.epochs:
        log.info("stopped early: %d epochs without a better rsum", patience)


def _save_epoch(folder: RunFolder, solver: Solver, save: Callable[[], None]) -> None:
    progress = solver.progress
    row = progress.rows[-1]
    if progress.best is row:
        folder.save_best(solver.model.state_dict())
    folder.save_metrics(progress.rows)
    if solver.listing:
        solver.listing.write(folder.negatives_file)
    save()
    log.info(
        "epoch %d: %s, val rsum %.1f (i2t R@1 %.1f, t2i R@1 %.1f)%s",
        *(row["epoch"], solver.described(row), row["rsum"], row["i2t_r1"], row["t2i_r1"]),
        ", best so far" if progress.best is row else "",
    )


def _events(folder: RunFolder, epoch: int) -> Any:
    """A writer of TensorBoard events; what an earlier process wrote of unfinished epochs is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard needs TensorBoard: pip install 'vse-pipeline[tensorboard]'") from None
    return SummaryWriter(str(folder.path), purge_step=epoch + 1)


def _finish(folder: RunFolder, record: dict[str, Any], solver: Solver) -> None:
    progress = solver.progress
    timing = {
        "epochs": progress.epoch,
        "best_epoch": progress.best["epoch"],
        "best_rsum": progress.best["rsum"],
        "train_seconds": round(sum(row["seconds"] for row in progress.rows), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    write_json(folder.record_file, {**record, "state": "finished", **timing})
