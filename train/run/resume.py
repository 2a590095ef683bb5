"""Decide what becomes of a run that is in a folder already: it is kept, resumed or trained from the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_run_file
from vse.pipeline.presets.presets import list_changes
from vse.pipeline.presets.schema import ExperimentPlan
from vse.train.run.folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Existing:
    """What becomes of a run that is in the folder already.

    resume : continue an unfinished run of the same settings from where it was saved; start if there is none
    overwrite : replace a run of other settings, or an unfinished one that is not resumed
    """

    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Extras:
    """What a run writes beside its usual files.

    log_negatives : how many of the hardest negatives of each epoch and direction go to ``negatives.csv``
    tensorboard : write events of every epoch
    """

    log_negatives: int = 0
    tensorboard: bool = False


def action_on(
    folder: RunFolder,
    experiment: ExperimentPlan,
    identity: Mapping[str, Any],
    existing: Existing,
    extras: Extras,
    asked: str,
) -> str:
    """Return ``start``, ``resume`` or ``nothing``; :class:`UserError` if that would destroy or mix up a run."""
    if not folder.config_file.is_file() or (existing.overwrite and not existing.resume):
        return "start"
    try:
        return _compared(folder, experiment, identity, existing, extras, asked)
    except UserError as refusal:
        if not (existing.resume and existing.overwrite):
            raise
        log.warning("%s. It trains from the start", refusal)
        return "start"


def _compared(
    folder: RunFolder,
    experiment: ExperimentPlan,
    identity: Mapping[str, Any],
    existing: Existing,
    extras: Extras,
    asked: str,
) -> str:
    """What to do with the run in a folder; :class:`UserError` if it cannot be read, too.

    A finished run is kept in its precision if that of the request, ``asked``, is ``auto``.
    """
    record = _existing_record(folder, existing)
    saved = folder.checkpoint() if not record and folder.checkpoint_file.is_file() else {}
    known = record or saved.get("identity", identity)
    before = {**folder.settings(type(experiment)).content(), **{key: known.get(key) for key in identity}}
    read_run_file(folder.config_file, record or saved)
    after = {**experiment.content(), **identity}
    changes = list_changes(before, after)
    if len(changes) == 1 and changes[0].startswith("train.precision: "):
        own, here = before["train"]["precision"], after["train"]["precision"]
        if asked == "auto" and record.get("state") == "finished":
            log.info("%s: was trained in %s, which auto is on another machine; here it is %s", folder.path, own, here)
            return "nothing"
        raise UserError(
            f"{folder.path} holds a run of other settings: its steps are in {own}, here they would be in {here}; add "
            f"--set train.precision={own} to go on with it, give another --out, or --overwrite it"
        )
    if changes and not existing.overwrite:
        raise UserError(
            f"{folder.path} holds a run of other settings ({'; '.join(changes[:4])}); give another --out, or --overwrite it"
        )
    if changes:
        log.warning("%s holds a run of other settings (%s). It trains from the start", folder.path, "; ".join(changes[:4]))
        return "start"
    if existing.resume and folder.checkpoint_file.is_file():
        if record.get("state") == "finished":
            return "nothing"
        listed = (record or saved).get("log_negatives", extras.log_negatives)
        if listed != extras.log_negatives:
            raise UserError(
                f"{folder.path} holds an unfinished run with --log-negatives {listed}, not {extras.log_negatives}; continue "
                f"it with --resume --log-negatives {listed}, or --overwrite it"
            )
        return "resume"
    if not folder.checkpoint_file.is_file():
        return "start"
    if record.get("state") == "finished":
        return "nothing"
    raise UserError(f"{folder.path} holds an unfinished run; continue it with --resume, or --overwrite it")


def _existing_record(folder: RunFolder, existing: Existing) -> dict[str, Any]:
    """``run.json`` if it is there; one that cannot be read does not cost the checkpoint of a run that may be overwritten."""
    try:
        return folder.record() if folder.record_file.is_file() else {}
    except UserError as refusal:
        if not (existing.resume and existing.overwrite):
            raise
        log.warning("%s. It is written again", refusal)
        return {}
