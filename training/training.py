"""Train an experiment on a feature cache and write the run folder."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from vse.features.backbones.device import (
    OUT_OF_MEMORY_ADVICE,
    choose_precision,
    describe_processor,
    set_thread_count,
    wrap_memory_errors,
)
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.rows import TextUnit
from vse.features.exchange.embeddings import read_backbone
from vse.pipeline import __version__
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.languages import parse_languages
from vse.pipeline.errors import UserError, extra_install_command
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.files.writing import lock_for_writing, sha256_file, write_json
from vse.pipeline.presets.presets import list_setting_changes
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.options import TrainInputs, TrainOptions, TrainRequest
from vse.training.own_parts.check import check_own_parts
from vse.training.prepare import prepare_task
from vse.training.processes.group import ProcessGroup
from vse.training.processes.interruption import TrainingFailed
from vse.training.processes.launchers import find_launch, join_processes
from vse.training.run.folder import RunFolder, decide_start_or_resume
from vse.training.run.inputs import RunInputs, open_inputs
from vse.training.solvers.base import Progress, Solver

log = logging.getLogger(__name__)
_ACTIONS = ("nothing", "start", "resume")


def is_first_process() -> bool:
    """Return whether this process is the only one, or the first of the processes that a launcher started."""
    launch = find_launch(os.environ)
    return launch is None or launch.rank == 0


def train_experiment(request: TrainRequest) -> Path:
    """Run ``vse-train``: load the experiment preset with all changes, call :func:`train`, and return the run folder.

    The log lists the settings that the preset of the data set changes.
    """
    label, options = request.name, request.options
    if label is not None and not (label.strip() and label.isprintable()):
        raise UserError(f"--name {label!r}: a name must be one line of printable text")
    if not is_first_process():
        logging.getLogger("vse").setLevel(logging.WARNING)
    set_thread_count(options.threads)
    dataset, sets = open_cache(request.features).dataset, request.sets
    if request.languages is not None:
        sets = (*sets, f"train.languages=[{', '.join(parse_languages(request.languages))}]")
    config = load_experiment(request.experiment, dataset, sets)
    plain = load_experiment(request.experiment, None, sets)
    changes = list_setting_changes(plain.model_dump(), config.model_dump())
    if changes:
        log.info("data set preset %r changes %s", dataset, "; ".join(changes))
    with wrap_memory_errors(f"lower train.batch_size, or --set train.features_in_memory=false; {OUT_OF_MEMORY_ADVICE}"):
        return train(
            request.features,
            config.model_copy(update={"label": label}),
            seed=request.seed,
            out=request.out,
            inputs=request.inputs,
            options=options,
        )


def train(
    features: Path,
    experiment: ExperimentConfig,
    *,
    seed: int = 0,
    out: Path | None = None,
    inputs: TrainInputs = TrainInputs(),
    options: TrainOptions = TrainOptions(),
) -> Path:
    """Train an experiment on a feature cache and return the run folder.

    ``features`` : the feature cache of the images. It records the data set and the path of its ``dataset.json``.
    ``experiment`` : the settings of the experiment.
    ``seed`` : seed of the initial weights, of the order of the pairs and of random crops.
    ``out`` : the run folder; by default ``runs/<dataset>_<experiment>/seed-<seed>``.
    ``inputs`` : paths of input files that replace the default paths.
    ``options`` : the device, optional output files, and whether to resume or replace a run that is already in ``out``.
    """
    if experiment.solver.uses_loss and experiment.warmup.epochs >= experiment.train.epochs:
        log.warning(
            "all %d epochs are warm-up with the loss %r, so %r is never used (--set warmup.epochs=0 disables the warm-up)",
            experiment.train.epochs,
            experiment.warmup.loss,
            experiment.loss.name,
        )
    check_own_parts(experiment)
    cache = open_cache(features)
    dataset = load_dataset_file(inputs.captions or cache.dataset_file)
    folder = RunFolder(out or Path("runs", f"{dataset.name}_{experiment.name}", f"seed-{seed}"))
    encoder = experiment.model.caption_encoder
    if inputs.words is None and encoder is not None:
        inputs = inputs.model_copy(update={"words": encoder.word_vector_file()})
    texts: TextUnit = "phrases" if experiment.solver.reads_phrases else "captions"
    opened = open_inputs(cache, dataset, experiment, folder, seed, inputs, encoder, texts)
    experiment = _apply_input_features(experiment, opened)
    identity = opened.build_identity(seed)
    processes = join_processes(options.device, experiment.train.timeout_minutes)
    with ExitStack() as at_end:
        at_end.callback(processes.close)
        at_end.enter_context(processes.explain_failed_exchange())
        precision = experiment.train.precision
        experiment = experiment.with_precision(_agree_on_precision(precision, processes))

        def choose_folder_action() -> str:
            at_end.enter_context(lock_for_writing(folder.path, folder=True))
            base = () if opened.start_run is None else opened.start_run.output_files
            folder.check_output_folder(
                [path for path in (features, dataset.path, *vars(inputs).values(), *base) if path is not None]
            )
            return decide_start_or_resume(folder, experiment, identity, options, precision)

        action = _agree_on_action(processes, choose_folder_action)
        if action == "nothing":
            log.info("%s: this run is finished (add --overwrite to train it again)", folder.path)
            return folder.path

        def build_solver() -> tuple[Solver, Vocabulary]:
            task, vocabulary = prepare_task(experiment, opened, seed, processes, options.log_negatives)
            return experiment.solver.build(task), vocabulary

        solver, vocabulary, action, best_sha256 = _prepare_solver(folder, build_solver, action, options.overwrite, processes)
        record = {**identity, **opened.build_record(folder.path), **_build_run_record(experiment, solver, vocabulary, options)}
        extra_state: dict[str, Any] = {"identity": identity, "log_negatives": options.log_negatives}
        processes.broadcast(0)  # a barrier: no process writes to the folder before all processes have read from it
        if processes.is_first:
            if action == "start":
                folder.clear_and_write_initial_files(experiment, record)
            record["files"] = extra_state["files"] = folder.save_vocabulary_and_transformer(vocabulary, opened.transformer)
            write_json(folder.record_file, record)
            if action == "resume":
                _write_csv_files(folder, solver)
        try:
            best_sha256 = _run_epochs(folder, solver, extra_state, options.tensorboard, best_sha256)
        except TrainingFailed as failure:
            if processes.is_first:
                write_json(folder.record_file, {**record, "state": failure.state})
            raise
        if processes.is_first:
            _write_final_record(folder, record, solver, best_sha256)
    return folder.path


def _prepare_solver(
    folder: RunFolder,
    build_solver: Callable[[], tuple[Solver, Vocabulary]],
    action: str,
    overwrite: bool,
    processes: ProcessGroup,
) -> tuple[Solver, Vocabulary, str, str | None]:
    """Build the solver and, for a resume, restore the checkpoint.

    Returns the solver, the vocabulary, the action (``start`` or ``resume``), and the SHA-256 of the best weights so far (None
    for a start). If the checkpoint is not usable, raises UserError or, with ``overwrite``, starts from the beginning.
    """
    solver, vocabulary = build_solver()
    if action != "resume":
        return solver, vocabulary, action, None
    fault, best_sha256 = _restore_checkpoint(folder, solver, processes)
    if not processes.any(fault is not None):
        log.info("%s: continuing after epoch %d, step %d", folder.path, solver.progress.epoch, solver.progress.step)
        return solver, vocabulary, action, best_sha256
    refusal = fault or UserError(f"{folder.checkpoint_file}: another process cannot read this checkpoint")
    if not overwrite:
        raise refusal
    log.warning("%s. Training starts from the beginning", refusal)
    return *build_solver(), "start", None


def _agree_on_precision(requested: str, processes: ProcessGroup) -> str:
    """Return the precision of all processes. If ``auto`` is requested, it is bf16 if all devices support it, else fp32."""
    if requested != "auto" and not processes.is_first:
        return requested  # the first process checks that its device supports it
    chosen = choose_precision(processes.device, requested, "training", "train.precision")
    return "fp32" if requested == "auto" and processes.any(chosen == "fp32") else chosen


def _apply_input_features(experiment: ExperimentConfig, inputs: RunInputs) -> ExperimentConfig:
    """Return the experiment with the names of the features that the run reads. These names may differ from the preset.

    Raises UserError if the solver cannot read these features.
    """
    feature_names = _find_feature_names(experiment, inputs)
    for key, name in feature_names.items():
        if (preset := getattr(experiment, key)) != name:
            log.info("the preset %r sets %s to %r; this run reads %r", experiment.name, key, preset or "words", name)
    if inputs.caption_cache is None and not experiment.solver.accepts_words:
        raise UserError(
            f"solver: {experiment.solver.name} reads captions as vectors: name a caption feature (--set "
            "caption_feature=hglmm) or a cache of one"
        )
    experiment.solver.check_inputs(inputs.image_cache, inputs.caption_cache)
    return experiment.model_copy(
        update={**feature_names, "model": experiment.model.with_default_caption_encoder(inputs.caption_input_kind)}
    )


def _find_feature_names(experiment: ExperimentConfig, inputs: RunInputs) -> dict[str, str | None]:
    """Return the names of the features that the run reads, such as ``{"feature": "fc7", "caption_feature": None}``.

    The keys are settings of an experiment. None stands for captions as words or tokens.
    """
    backbone = read_backbone(inputs.image_cache)
    if experiment.backbone is not None and backbone is not None:
        return {"backbone": backbone.experiment}
    names = {
        "feature": inputs.image_cache.feature,
        "caption_feature": inputs.caption_cache.feature if inputs.caption_cache else None,
    }
    if inputs.truth_cache is not None:
        names |= {"truth_feature": inputs.truth_cache.feature}
    return names if experiment.backbone is None else {"backbone": None, **names}


def _agree_on_action(processes: ProcessGroup, decide: Callable[[], str]) -> str:
    """Call ``decide`` in the first process, and return its result in all processes. A UserError is raised in all, too."""
    refusal = None
    code = -1
    if processes.is_first:
        try:
            code = _ACTIONS.index(decide())
        except UserError as error:
            refusal = error
    code = processes.broadcast(code)
    if refusal is not None:
        raise refusal
    if code < 0:
        raise UserError("the first process reported an error; see its message")
    return _ACTIONS[code]


def _restore_checkpoint(folder: RunFolder, solver: Solver, processes: ProcessGroup) -> tuple[UserError | None, str | None]:
    """Restore the checkpoint, and return (None, SHA-256 of the best weights in the checkpoint).

    If the checkpoint is not usable, return (error, None).
    """
    try:
        state = folder.read_checkpoint()
        with wrap_read_errors(folder.checkpoint_file, "a checkpoint of this run; add --overwrite to train again"):
            TypeAdapter(Progress).validate_python({name: state[name] for name in vars(solver.progress)})
            solver.restore(state)
    except UserError as fault:
        return fault, None
    sha256 = state.get("best_sha256")
    validated = any("rsum" in row for row in solver.progress.rows)
    if processes.is_first and not folder.recover_best_weights(sha256) and validated:
        return UserError(f"{folder.best_weights_file}: not what the training wrote; add --overwrite to train again"), None
    return None, sha256


def _build_run_record(
    experiment: ExperimentConfig, solver: Solver, vocabulary: Vocabulary, options: TrainOptions
) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "state": "running",
        "n_words": len(vocabulary),
        "n_train_pairs": solver.n_pairs,
        "log_negatives": options.log_negatives,
        "versions": {"vse": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "processes": solver.processes.size,
        "device": str(solver.device),
        "processor": describe_processor(solver.device),
        "precision": experiment.train.precision,
        "made": current_provenance(),
    }


def _run_epochs(
    folder: RunFolder, solver: Solver, extra_state: Mapping[str, Any], tensorboard: bool, best_sha256: str | None
) -> str | None:
    """Train the remaining epochs, and return the SHA-256 of the best weights.

    ``extra_state`` : entries that every checkpoint contains besides the state of the solver.
    ``best_sha256`` : SHA-256 of the best weights so far; None if there are none yet.
    """
    first, patience = solver.processes.is_first, solver.patience
    events = _open_tensorboard_writer(folder, solver.progress.epoch) if tensorboard and first else None

    def save_checkpoint() -> None:
        if first:
            folder.save_checkpoint({**solver.state(), **extra_state, "best_sha256": best_sha256})

    def is_done() -> bool:
        return bool(solver.processes.broadcast(int(first and solver.progress.is_finished(solver.epochs, patience))))

    solver.processes.share_signals(solver.interruption)
    with solver.interruption.catch_signals():
        while not is_done():
            solver.run_epoch(save_checkpoint)
            if first:
                is_best = _is_best_epoch(solver)
                if is_best:
                    best_sha256 = folder.save_new_best_weights(solver.validation_weights())
                _save_and_log_epoch(folder, solver, save_checkpoint)
                if is_best:
                    folder.replace_best_weights()
            if events is not None:
                for name, value in solver.progress.rows[-1].items():
                    events.add_scalar(name, value, solver.progress.epoch)
                events.flush()
    if first and solver.progress.epoch < solver.epochs:
        log.info("stopped early: %d epochs without a better rsum", patience)
    return best_sha256


def _is_best_epoch(solver: Solver) -> bool:
    row = solver.progress.rows[-1]
    return "rsum" in row and solver.progress.best_row is row


def _save_and_log_epoch(folder: RunFolder, solver: Solver, save_checkpoint: Callable[[], None]) -> None:
    progress = solver.progress
    row = progress.rows[-1]
    _write_csv_files(folder, solver)
    save_checkpoint()
    validated = "not validated"
    if "rsum" in row:
        first = ", ".join(f"{name.removesuffix('_r1')} R@1 {row[name]:.1f}" for name in row if name.endswith("_r1"))
        validated = f"val rsum {row['rsum']:.1f} ({first})"
    best = ", best so far" if _is_best_epoch(solver) else ""
    log.info("epoch %d: %s%s", row["epoch"], ", ".join(filter(None, [solver.describe_epoch(row), validated])), best)


def _write_csv_files(folder: RunFolder, solver: Solver) -> None:
    if solver.progress.rows:
        folder.save_metrics(solver.progress.rows)
    if solver.hard_negatives:
        solver.hard_negatives.write_csv(folder.negatives_file)


def _open_tensorboard_writer(folder: RunFolder, epoch: int) -> Any:
    """Return a writer of TensorBoard events. TensorBoard then hides events of an earlier run for epochs after ``epoch``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(f"--tensorboard needs TensorBoard: {extra_install_command('tensorboard')}") from None
    return SummaryWriter(str(folder.path), purge_step=epoch + 1)


def _write_final_record(folder: RunFolder, record: dict[str, Any], solver: Solver, best_sha256: str | None) -> None:
    progress = solver.progress
    if not folder.has_best_weights(best_sha256):
        raise UserError(f"{folder.best_weights_file}: was changed during the training; add --overwrite to train again")
    written = [folder.best_weights_file, folder.metrics_file, *([folder.negatives_file] if solver.hard_negatives else [])]
    files = {**record["files"], **{file.name: sha256_file(file) for file in written}}
    timing: dict[str, Any] = {
        "epochs": progress.epoch,
        "best_epoch": progress.best_row["epoch"],
        "best_rsum": progress.best_row["rsum"],
        "train_seconds": round(sum(row["seconds"] for row in progress.rows), 1),
    }
    if (peak := _measure_peak_memory_mb()) is not None:
        timing["peak_memory_mb"] = peak
    learned = {name: round(value, 6) for name, value in solver.learned_loss_parameters().items()}
    if learned:
        log.info("learned values of the loss: %s", ", ".join(f"{name} {value:.4g}" for name, value in learned.items()))
        timing["learned"] = learned
    write_json(folder.record_file, {**record, "state": "finished", "files": files, **timing})


def _measure_peak_memory_mb() -> int | None:
    """Return the largest memory of this process so far in MB, or None on Windows."""
    try:
        import resource  # exists on Unix only
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux counts KB
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
