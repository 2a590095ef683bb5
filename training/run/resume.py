"""Decide whether a run that already exists in a folder is kept, resumed or trained from the beginning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_run_file
from vse.pipeline.presets.presets import list_setting_changes
from vse.pipeline.presets.schema import ExperimentOutline
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder

log = logging.getLogger(__name__)


def choose_action(
    folder: RunFolder,
    experiment: ExperimentOutline,
    identity: Mapping[str, Any],
    options: TrainOptions,
    precision: str,
) -> str:
    """Return ``start``, ``resume``, or ``nothing`` if the folder holds the finished run.

    Raises :class:`UserError` if the training would replace another run without permission, or continue a run with other
    settings or inputs.

    ``identity`` : seed, keys and checksums of the inputs, see :meth:`vse.training.run.inputs.RunInputs.identity`.
    ``precision`` : requested precision; ``auto`` accepts a finished run of any precision.
    """

    def compare() -> str:
        record = _read_existing_record(folder, options)
        saved = folder.read_checkpoint() if not record and folder.checkpoint_file.is_file() else {}
        old_identity, finished = record or saved.get("identity", identity), record.get("state") == "finished"
        before = {
            **folder.read_settings(type(experiment)).weight_settings(),
            **{key: old_identity.get(key) for key in identity},
        }
        read_run_file(folder.config_file, record or saved)
        after = {**experiment.weight_settings(), **identity}
        changes = list_setting_changes(before, after)
        if len(changes) == 1 and changes[0].startswith("train.precision: "):
            own, here = before["train"]["precision"], after["train"]["precision"]
            if precision == "auto" and finished:
                log.info("%s: this run was trained in %s by auto on its machine; here auto is %s", folder.path, own, here)
                return "nothing"
            raise UserError(
                f"{folder.path} holds a run with other settings: its precision is {own}, here it would be {here}; add "
                f"--set train.precision={own} to continue it, choose another --out, or add --overwrite"
            )
        if changes:
            message = f"{folder.path} holds a run with other settings ({'; '.join(changes[:4])})"
            if not options.overwrite:
                raise UserError(f"{message}; choose another --out, or add --overwrite")
            log.warning("%s. Training starts from the beginning", message)
            return "start"
        if not folder.checkpoint_file.is_file():
            if options.resume:
                log.warning("%s: the run ended before its first checkpoint. Training starts from the beginning", folder.path)
            return "start"
        if finished:
            return "nothing"
        if not options.resume:
            raise UserError(f"{folder.path} holds an unfinished run; continue it with --resume, or add --overwrite")
        listed = (record or saved).get("log_negatives", options.log_negatives)
        if listed != options.log_negatives:
            raise UserError(
                f"{folder.path} holds an unfinished run with --log-negatives {listed}, not {options.log_negatives}; continue "
                f"it with --resume --log-negatives {listed}, or add --overwrite"
            )
        return "resume"

    if not folder.config_file.is_file() or (options.overwrite and not options.resume):
        return "start"
    try:
        return compare()
    except UserError as refusal:
        if not (options.resume and options.overwrite):
            raise
        log.warning("%s. Training starts from the beginning", refusal)
        return "start"


def _read_existing_record(folder: RunFolder, options: TrainOptions) -> dict[str, Any]:
    """Return the content of ``run.json``, or an empty dict if the file is missing, or is damaged and may be replaced."""
    try:
        return folder.read_record() if folder.record_file.is_file() else {}
    except UserError as refusal:
        if not (options.resume and options.overwrite):
            raise
        log.warning("%s. The file is written again", refusal)
        return {}
