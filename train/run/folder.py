"""A run directory: what a training leaves behind, and how it is found and read again.

``config.yaml`` (every setting), ``vocab.json``, ``metrics.csv``, ``best.safetensors``, ``last.ckpt`` (all that a
bit-exact resume needs) and ``run.json`` (features, versions, seed, timings, state); ``negatives.csv`` and TensorBoard events
if they were asked for.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch import Tensor

from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_bytes, write_json, write_text
from vse.pipeline.input_files import check_input, is_path, reading, reason_of
from vse.pipeline.preset_files import read_yaml
from vse.pipeline.vocabulary import Vocabulary

_Schema = TypeVar("_Schema", bound=BaseModel)


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def vocabulary_file(self) -> Path:
        return self.path / "vocab.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def negatives_file(self) -> Path:
        return self.path / "negatives.csv"

    @property
    def best_file(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "last.ckpt"

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    def settings(self, schema: type[_Schema]) -> _Schema:
        """The settings that the run was made with."""
        if not self.config_file.is_file():
            raise UserError(f"{self.path}: not a run folder (no config.yaml)")
        try:
            return schema.model_validate(read_yaml(self.config_file))
        except (UserError, ValidationError):
            raise UserError(
                f"{self.config_file}: not the settings of a run, or of another version of vse; --overwrite trains it again"
            ) from None

    def record(self) -> dict[str, Any]:
        """``run.json``."""
        record: dict[str, Any] = read_json(self.record_file)
        if not isinstance(record, dict):
            raise UserError(f"{self.record_file}: not the record of a run")
        caches = [record.get("features"), *(record[name] for name in ("eval_features", "caption_features") if name in record)]
        places = [cache.get(key) if isinstance(cache, dict) else None for cache in caches for key in ("name", "key", "path")]
        fits = {
            "features": all(map(is_path, places)),
            "seed": type(record.get("seed")) is int,
            "versions": isinstance(record.get("versions"), dict),
            "state": isinstance(record.get("state"), str),
        }
        for name, fit in fits.items():
            if not fit:
                raise UserError(f"{self.record_file}: not the record of a run, it lacks {name} or has others; train again")
        return record

    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.vocabulary_file)

    def evaluated(self) -> dict[str, Any]:
        """Name, key and place of the cache that the run is validated and tested with."""
        record = self.record()
        evaluated: dict[str, Any] = record.get("eval_features", record["features"])
        return evaluated

    def feature_file(self) -> Path:
        """That cache, found from where the run lies."""
        return self.path / str(self.evaluated()["path"])

    def caption_feature_file(self) -> Path | None:
        """The cache of captions, if the run reads one instead of words."""
        cache = self.record().get("caption_features")
        return None if cache is None else self.path / str(cache["path"])

    def start(self, settings: BaseModel, vocabulary: Vocabulary, record: Mapping[str, Any]) -> None:
        """Write what is known before training. Files of an earlier run go first."""
        events = self.path.glob("events.out.tfevents.*")
        for old in (self.record_file, self.checkpoint_file, self.best_file, self.metrics_file, self.negatives_file, *events):
            old.unlink(missing_ok=True)
        write_text(self.config_file, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
        vocabulary.save(self.vocabulary_file)
        write_json(self.record_file, dict(record))

    def save_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``metrics.csv``, a row per epoch; what an epoch without validation lacks is blank."""
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=max((list(row) for row in rows), key=len), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.metrics_file, text.getvalue())

    def save_best(self, weights: Mapping[str, Tensor]) -> None:
        write_bytes(self.best_file, safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in weights.items()}))

    def best_weights(self) -> dict[str, Tensor]:
        """Weights of the epoch with the highest validation rsum."""
        if not self.best_file.is_file():
            raise UserError(f"{self.path}: no best.safetensors; the run has not finished an epoch")
        with reading(self.best_file, "readable weights"):
            return safetensors.torch.load_file(self.best_file)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_bytes(self.checkpoint_file, buffer.getbuffer())

    def checkpoint(self) -> dict[str, Any]:
        """The last state that was saved; tensors and plain values alone are ever loaded."""
        check_input(self.checkpoint_file)
        try:
            state: dict[str, Any] = torch.load(self.checkpoint_file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a file that is not a checkpoint
            reason = reason_of(error)
            raise UserError(
                f"{self.checkpoint_file}: not a readable checkpoint ({reason}); --overwrite trains again"
            ) from None
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise UserError(f"{self.checkpoint_file}: not a checkpoint of a run; --overwrite trains again")
        return state


def relative_path(target: Path, folder: Path) -> str:
    """``target`` as seen from ``folder``, so that both can be moved together."""
    return Path(os.path.relpath(target, folder)).as_posix()
