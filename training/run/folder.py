"""The run folder: write and read the files of a training, and decide whether a training starts, resumes or does nothing."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch import Tensor

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureDescription, describe_feature
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, error_reason, is_path_text, read_run_file, wrap_read_errors
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, text_kind
from vse.pipeline.files.writing import open_atomic, parse_json, read_json, sha256_file, write_bytes, write_json, write_text
from vse.pipeline.presets.own_code import CodeNotAllowed, use_code_of_run
from vse.pipeline.presets.parts import find_own_code
from vse.pipeline.presets.preset_files import read_yaml
from vse.pipeline.presets.presets import list_setting_changes
from vse.pipeline.presets.schema import ExperimentOutline
from vse.training.options import TrainOptions

log = logging.getLogger(__name__)

_Schema = TypeVar("_Schema", bound=BaseModel)

_RECORD_KIND = json_kind("the record of a run", "features", "versions", "state")
_CONFIG_KIND = OutputKind("the settings of a run", lambda path: {"model", "loss", "train", "solver"} <= set(read_yaml(path)))
_CHECKPOINT_KIND = text_kind("a checkpoint of a run", "PK", within=2)


class RunFolder:
    """The paths and contents of the files of one run."""

    is_packed = False  # True for a packed model, which has no data set and no caches

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"  # every setting
        self.vocabulary_file = path / "vocab.json"
        self.tokenizer_file = path / "tokenizer.json"  # only for a model that reads tokens
        self.transformer_file = path / "transformer.json"  # for such a model: name, longest input and configuration
        self.metrics_file = path / "metrics.csv"
        self.negatives_file = path / "negatives.csv"
        self.best_weights_file = path / "best.safetensors"
        self.new_best_weights_file = path / "best.next.safetensors"  # new best weights, until the checkpoint is written
        self.checkpoint_file = path / "last.ckpt"  # the state for a bit-exact resume
        self.correction_file = path / "correction.safetensors"  # the correction of searches, see vse-embed --correct
        self.record_file = path / "run.json"  # features, versions, seed, timings, state
        self.code_folder = path / "code"  # copies of the user's own Python files that the settings name

    @property
    def output_files(self) -> tuple[Path, ...]:
        """All files that a training may write. Some of these files may not exist."""
        texts = (self.vocabulary_file, self.tokenizer_file, self.transformer_file)
        weights = (self.best_weights_file, self.new_best_weights_file, self.checkpoint_file, self.correction_file)
        return (self.config_file, *texts, self.metrics_file, self.negatives_file, *weights, self.record_file)

    def read_settings(self, schema: type[_Schema]) -> _Schema:
        """Return the settings of the run, validated by ``schema``.

        Raises UserError if there are no valid settings, or CodeNotAllowed if the settings name user code that has changed, or
        that is not allowed to run.
        """
        if not self.config_file.is_file():
            raise UserError(f"{self.path}: not a run folder (no config.yaml)")
        try:
            with use_code_of_run(self.code_folder):
                return schema.model_validate(read_yaml(self.config_file))
        except CodeNotAllowed:
            raise
        except (UserError, ValidationError):
            raise UserError(
                f"{self.config_file}: not the settings of a run of this version of vse; --overwrite trains again"
            ) from None

    def read_settings_content(self) -> dict[str, Any]:
        """Return the settings of the run as a dict, without validation."""
        content: dict[str, Any] = read_yaml(self.config_file)
        return content

    def read_record(self) -> dict[str, Any]:
        """Return the content of ``run.json``. Raises :class:`UserError` if an entry is missing or invalid."""
        record: dict[str, Any] = self._read_record_content()
        if not isinstance(record, dict):
            raise UserError(f"{self.record_file}: not the record of a run")
        optional = ("eval_features", "caption_features", "truth_features")
        caches = [record.get("features"), *(record[name] for name in optional if name in record)]
        cache_texts = [
            cache.get(key) if isinstance(cache, dict) else None for cache in caches for key in ("name", "key", "path")
        ]
        is_valid = {
            "features": all(map(is_path_text, cache_texts)),
            "dataset": isinstance(record.get("dataset"), str),
            "seed": type(record.get("seed")) is int,
            "versions": isinstance(record.get("versions"), dict),
            "state": isinstance(record.get("state"), str),
        }
        for name, valid in is_valid.items():
            if not valid:
                raise UserError(f"{self.record_file}: not the record of a run: {name} is missing or invalid; train again")
        return record

    def read_file_with_sha256(self, file: Path) -> tuple[bytes, str]:
        """Return the bytes of a file and their SHA-256. Raises UserError if ``run.json`` records another SHA-256."""
        record = read_json(self.record_file) if self.record_file.is_file() else {}
        return read_run_file(file, record)

    def read_vocabulary(self) -> Vocabulary:
        return self.read_vocabulary_with_sha256()[0]

    def read_vocabulary_with_sha256(self) -> tuple[Vocabulary, str]:
        """Return the vocabulary, and the SHA-256 of its file."""
        content, sha256 = self.read_file_with_sha256(self.vocabulary_file)
        return Vocabulary.from_json(self.vocabulary_file, parse_json(self.vocabulary_file, content)), sha256

    def read_transformer(self) -> Transformer:
        """Return the transformer of a model that reads tokens, without its weights. They are among the weights of the run."""
        for file in (self.tokenizer_file, self.transformer_file):
            if not file.is_file():
                raise UserError(f"{file}: no such file, but this run needs it to read captions; restore it, or train again")
        saved = parse_json(self.transformer_file, self.read_file_with_sha256(self.transformer_file)[0])
        tokenizer = self.read_file_with_sha256(self.tokenizer_file)[0]
        with wrap_read_errors(self.transformer_file, "the transformer of a run"):
            return Transformer(str(saved["name"]), dict(saved["config"]), tokenizer.decode(), saved["longest"])

    def read_eval_cache_record(self) -> dict[str, Any]:
        """Return the ``run.json`` entry of the image cache for validation and test, which may be the training cache."""
        record = self.read_record()
        eval_cache: dict[str, Any] = record.get("eval_features", record["features"])
        return eval_cache

    def image_cache_file(self) -> Path:
        return self.path / str(self.read_eval_cache_record()["path"])

    def caption_cache_file(self) -> Path | None:
        """Return the path of the caption cache, or None if the run reads captions as words or tokens."""
        cache = self.read_record().get("caption_features")
        return None if cache is None else self.path / str(cache["path"])

    def build_rowless_cache(self, record: Mapping[str, Any]) -> FeatureCache:
        """Return a cache object that describes a feature of the run but has no rows. The cache file need not exist.

        ``record`` is the value that ``run.json`` has for the feature, for example under the key ``features``. If an earlier
        version of vse wrote this value, it has no description of the feature, and the cache file must exist.
        """
        path = self.path / str(record["path"])
        if "description" not in record:
            return describe_feature(open_cache(path)).build_rowless_cache(path)
        with wrap_read_errors(self.record_file, "the record of a run"):
            return FeatureDescription.model_validate(record["description"]).build_rowless_cache(path)

    def _read_record_content(self) -> Any:
        return read_json(self.record_file)

    def check_output_folder(self, inputs: Sequence[Path]) -> None:
        """Raise UserError if a training in this folder would replace an input, or a file that no training wrote."""
        is_run = (
            _RECORD_KIND.recognises_file_at(self.record_file)
            or _CONFIG_KIND.recognises_file_at(self.config_file)
            or _CHECKPOINT_KIND.recognises_file_at(self.checkpoint_file)
        )
        kind = OutputKind("a file of a run", lambda _: is_run)
        for file in self.output_files:
            check_output(file, kind, inputs)

    def clear_and_write_initial_files(self, settings: BaseModel, record: Mapping[str, Any]) -> None:
        """Delete the files of an earlier run. Write the settings, copies of the user code that they name, and ``run.json``."""
        events = self.path.glob("events.out.tfevents.*")
        codes = self.code_folder.glob("*-*.py")
        for old in (*(file for file in self.output_files if file != self.config_file), *events, *codes):
            old.unlink(missing_ok=True)
        for code in find_own_code(settings):
            write_bytes(self.code_folder / code.copy_name, code.source)
        write_text(self.config_file, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
        write_json(self.record_file, dict(record))

    def save_vocabulary_and_transformer(self, vocabulary: Vocabulary, transformer: Transformer | None) -> dict[str, str]:
        """Write the vocabulary and, if there is a transformer, the files of the transformer.

        Returns the SHA-256 of these files, of the settings and of the copies of user code, as a dict by file name.
        """
        vocabulary.save(self.vocabulary_file)
        written = [self.config_file, self.vocabulary_file, *sorted(self.code_folder.glob("*-*.py"))]
        if transformer is not None:
            saved = {"name": transformer.name, "longest": transformer.max_length, "config": dict(transformer.config)}
            write_text(self.tokenizer_file, transformer.tokenizer_json)
            written += [self.tokenizer_file, write_json(self.transformer_file, saved)]
        return {file.name: sha256_file(file) for file in written}

    def save_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``metrics.csv``, one row for each epoch. Metrics of an epoch without validation are blank."""
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=max((list(row) for row in rows), key=len), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.metrics_file, text.getvalue())

    def save_new_best_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Write new best weights to a separate file, next to the old best weights, and return the SHA-256 of the new file.

        Call :meth:`replace_best_weights` after the checkpoint of the same epoch is written.
        """
        content = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in weights.items()})
        write_bytes(self.new_best_weights_file, content)
        return hashlib.sha256(content).hexdigest()

    def replace_best_weights(self) -> None:
        """Replace the file of the best weights by the new file that :meth:`save_new_best_weights` wrote."""
        os.replace(self.new_best_weights_file, self.best_weights_file)

    def recover_best_weights(self, sha256: str | None) -> bool:
        """Finish or undo an interrupted replacement of the best weights, and return whether ``best_weights_file`` is valid.

        ``sha256`` is the SHA-256 of the best weights that the last checkpoint records, or None if it records none. New best
        weights with this SHA-256 replace the old best weights. Other new best weights are deleted.
        """
        if sha256 is not None and self.new_best_weights_file.is_file() and sha256_file(self.new_best_weights_file) == sha256:
            self.replace_best_weights()
        self.new_best_weights_file.unlink(missing_ok=True)
        return self.has_best_weights(sha256)

    def has_best_weights(self, sha256: str | None) -> bool:
        """Return whether the file of the best weights exists and has this SHA-256. None accepts any SHA-256."""
        return self.best_weights_file.is_file() and sha256 in (None, sha256_file(self.best_weights_file))

    def read_best_weights(self) -> dict[str, Tensor]:
        return self.read_best_weights_with_sha256()[0]

    def read_best_weights_with_sha256(self) -> tuple[dict[str, Tensor], str]:
        """Return the best weights and the SHA-256 of their file. Raises UserError if weights are missing or not finite."""
        if not self.best_weights_file.is_file():
            raise UserError(f"{self.path}: no best.safetensors; the run has not finished an epoch")
        content, sha256 = self.read_file_with_sha256(self.best_weights_file)
        with wrap_read_errors(self.best_weights_file, "readable weights"):
            weights = safetensors.torch.load(content)
        bad = next((name for name, weight in weights.items() if not torch.isfinite(weight).all()), None)
        if bad is not None:
            raise UserError(f"{self.best_weights_file}: the weights {bad} are not finite (NaN or infinite); train again")
        return weights, sha256

    def read_last_weights_with_sha256(self) -> tuple[dict[str, Tensor], str]:
        """Return the weights after the last epoch, and the SHA-256 of the checkpoint that contains them.

        With the setting ``train.ema``, these are a moving average of the weights. Raises UserError if there is no readable
        checkpoint, or if the training stopped within an epoch.
        """
        if not self.checkpoint_file.is_file():
            raise UserError(f"{self.checkpoint_file}: no such file; it holds the weights of the last epoch, so train again")
        state = self.read_checkpoint()
        if state.get("step"):
            raise UserError(f"{self.path}: its training stopped within an epoch; continue it with vse-train --resume")
        averaged = state.get("averaged")
        weights: dict[str, Tensor] = state["model"] if averaged is None else averaged["weights"]
        return weights, sha256_file(self.checkpoint_file)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint: the bytes of the state, followed by a line with their SHA-256."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        content = buffer.getbuffer()
        with open_atomic(self.checkpoint_file) as stream:
            stream.write(content)
            stream.write(_build_hash_line(content))

    def read_checkpoint(self) -> dict[str, Any]:
        """Load the last checkpoint. Raises UserError if it is damaged, or has objects besides tensors and plain values."""
        content = InputFile(self.checkpoint_file).read()
        try:
            _check_hash(content)
            state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds of errors for a file that is not a checkpoint
            reason = error_reason(error)
            raise UserError(
                f"{self.checkpoint_file}: not a readable checkpoint ({reason}); --overwrite trains again"
            ) from None
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise UserError(f"{self.checkpoint_file}: not a checkpoint of a run; add --overwrite to train again")
        return state


def _build_hash_line(content: bytes | memoryview) -> bytes:
    return f"\nsha256 {hashlib.sha256(content).hexdigest()}\n".encode()


def _check_hash(content: bytes) -> None:
    """Raise ValueError if a checkpoint differs from the SHA-256 in its last line or, without this line, its zip checksums."""
    size = len(_build_hash_line(b""))
    saved, line = memoryview(content)[:-size], content[-size:]
    if line.startswith(b"\nsha256 "):
        if line != _build_hash_line(saved):
            raise ValueError("its bytes changed since they were written: their SHA-256 differs")
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"its bytes changed since they were written: the checksum of {damaged} differs")


def build_relative_path(target: Path, folder: Path) -> str:
    """Return the path of ``target`` relative to ``folder``. The path stays valid if both are moved together."""
    return Path(os.path.relpath(target, folder)).as_posix()


def decide_start_or_resume(
    folder: RunFolder,
    experiment: ExperimentOutline,
    identity: Mapping[str, Any],
    options: TrainOptions,
    precision: str,
) -> str:
    """Decide what a training does: ``start``, ``resume``, or ``nothing`` if the folder has the same run and it is finished.

    Raises UserError if the folder has a run with other settings or inputs, or an unfinished run, unless an option replaces or
    continues this run.

    ``identity`` : seed, cache keys and checksums of the inputs, see :meth:`vse.training.run.inputs.RunInputs.build_identity`.
    ``precision`` : requested precision; ``auto`` accepts a finished run of any precision.
    """

    def compare_with_existing_run() -> str:
        record = _read_existing_record(folder, options)
        saved = folder.read_checkpoint() if not record and folder.checkpoint_file.is_file() else {}
        old_identity, finished = record or saved.get("identity", identity), record.get("state") == "finished"
        before = {
            **folder.read_settings(type(experiment)).settings_affecting_weights(),
            **{key: old_identity.get(key) for key in identity},
        }
        read_run_file(folder.config_file, record or saved)
        after = {**experiment.settings_affecting_weights(), **identity}
        changes = list_setting_changes(before, after)
        if len(changes) == 1 and changes[0].startswith("train.precision: "):
            old, new = before["train"]["precision"], after["train"]["precision"]
            if precision == "auto" and finished:
                log.info("%s: this run was trained in %s by auto on its machine; here auto is %s", folder.path, old, new)
                return "nothing"
            raise UserError(
                f"{folder.path} holds a run with other settings: its precision is {old}, here it would be {new}; add "
                f"--set train.precision={old} to continue it, choose another --out, or add --overwrite"
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
        return compare_with_existing_run()
    except UserError as refusal:
        if not (options.resume and options.overwrite):
            raise
        log.warning("%s. Training starts from the beginning", refusal)
        return "start"


def _read_existing_record(folder: RunFolder, options: TrainOptions) -> dict[str, Any]:
    """Return the content of ``run.json``, or an empty dict if there is no such file.

    A damaged file also counts as missing if both ``--resume`` and ``--overwrite`` are given.
    """
    try:
        return folder.read_record() if folder.record_file.is_file() else {}
    except UserError as refusal:
        if not (options.resume and options.overwrite):
            raise
        log.warning("%s. The file is written again", refusal)
        return {}
