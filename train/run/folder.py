"""A run directory: what a training leaves behind, and how it is found and read again.

``config.yaml`` (every setting), ``vocab.json``, ``metrics.csv``, ``best.safetensors``, ``last.ckpt`` (all that a
bit-exact resume needs) and ``run.json`` (features, versions, seed, timings, state); of a model that reads tokens
``tokenizer.json`` and ``transformer.json``; in ``code/`` copies of a user's own code that the settings name;
``negatives.csv`` and TensorBoard events if they were asked for. ``best.next.safetensors`` is there between the writing of new
best weights and of the checkpoint that counts their epoch.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch import Tensor

from vse.features.backbones.transformer import Transformer
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, error_reason, is_path, read_run_file, wrap_read_errors
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, text_kind
from vse.pipeline.files.writing import open_atomic, parse_json, read_json, sha256_file, write_bytes, write_json, write_text
from vse.pipeline.presets.own_code import CodeNotAllowed, use_code_of_run
from vse.pipeline.presets.parts import find_own_code
from vse.pipeline.presets.preset_files import read_yaml

_Schema = TypeVar("_Schema", bound=BaseModel)

_RECORD = json_kind("the record of a run", "features", "versions", "state")
_CONFIG = OutputKind("the settings of a run", lambda path: {"model", "loss", "train", "solver"} <= set(read_yaml(path)))
_CHECKPOINT = text_kind("a checkpoint of a run", "PK", within=2)


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
    def tokenizer_file(self) -> Path:
        """The tokenizer of a model that reads tokens."""
        return self.path / "tokenizer.json"

    @property
    def transformer_file(self) -> Path:
        """Of such a model, the name, the longest text and the configuration of its transformer."""
        return self.path / "transformer.json"

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
    def next_best_file(self) -> Path:
        """New best weights whose epoch no checkpoint counts yet."""
        return self.path / "best.next.safetensors"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "last.ckpt"

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    @property
    def code_folder(self) -> Path:
        """Copies of a user's own code that the settings name."""
        return self.path / "code"

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that a training writes, whether they are there or not."""
        texts = (self.vocabulary_file, self.tokenizer_file, self.transformer_file)
        weights = (self.best_file, self.next_best_file, self.checkpoint_file)
        return (self.config_file, *texts, self.metrics_file, self.negatives_file, *weights, self.record_file)

    def settings(self, schema: type[_Schema]) -> _Schema:
        """The settings that the run was made with.

        :class:`vse.pipeline.presets.own_code.CodeNotAllowed` if they name code that may not run, or is not what it was.
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
                f"{self.config_file}: not the settings of a run, or of another version of vse; --overwrite trains it again"
            ) from None

    def record(self) -> dict[str, Any]:
        """``run.json``."""
        record: dict[str, Any] = read_json(self.record_file)
        if not isinstance(record, dict):
            raise UserError(f"{self.record_file}: not the record of a run")
        caches = [
            record.get("features"),
            *(record[name] for name in ("eval_features", "caption_features", "truth_features") if name in record),
        ]
        places = [cache.get(key) if isinstance(cache, dict) else None for cache in caches for key in ("name", "key", "path")]
        fits = {
            "features": all(map(is_path, places)),
            "dataset": isinstance(record.get("dataset"), str),
            "seed": type(record.get("seed")) is int,
            "versions": isinstance(record.get("versions"), dict),
            "state": isinstance(record.get("state"), str),
        }
        for name, fit in fits.items():
            if not fit:
                raise UserError(f"{self.record_file}: not the record of a run, it lacks {name} or has others; train again")
        return record

    def content(self, file: Path) -> tuple[bytes, str]:
        """The bytes of one of the run's files, and their SHA-256, which is checked if ``run.json`` has it.

        :class:`UserError` if they are not those that the training wrote.
        """
        record = read_json(self.record_file) if self.record_file.is_file() else {}
        return read_run_file(file, record)

    def vocabulary(self) -> Vocabulary:
        return self.read_vocabulary()[0]

    def read_vocabulary(self) -> tuple[Vocabulary, str]:
        """The words, and the SHA-256 of the bytes that they were read from."""
        content, sha256 = self.content(self.vocabulary_file)
        return Vocabulary.from_json(self.vocabulary_file, parse_json(self.vocabulary_file, content)), sha256

    def read_transformer(self) -> Transformer:
        """The transformer of a model that reads tokens, without its weights, which are among the run's."""
        for file in (self.tokenizer_file, self.transformer_file):
            if not file.is_file():
                raise UserError(f"{file}: no such file, and this run reads captions with it; restore it, or train again")
        saved = parse_json(self.transformer_file, self.content(self.transformer_file)[0])
        tokenizer = self.content(self.tokenizer_file)[0]
        with wrap_read_errors(self.transformer_file, "the transformer of a run"):
            return Transformer(str(saved["name"]), dict(saved["config"]), tokenizer.decode(), saved["longest"])

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

    def check_out(self, inputs: Sequence[Path]) -> None:
        """Check that a training may write here; raises UserError if it would replace an input, or files of something else."""
        is_run = _RECORD.is_at(self.record_file) or _CONFIG.is_at(self.config_file) or _CHECKPOINT.is_at(self.checkpoint_file)
        kind = OutputKind("a file of a run", lambda _: is_run)
        for file in self.files:
            check_output(file, kind, inputs)

    def start(self, settings: BaseModel, record: Mapping[str, Any]) -> None:
        """Write what is known before training. Files of an earlier run go first."""
        events = self.path.glob("events.out.tfevents.*")
        codes = self.code_folder.glob("*-*.py")
        for old in (*(file for file in self.files if file != self.config_file), *events, *codes):
            old.unlink(missing_ok=True)
        for code in find_own_code(settings):
            write_bytes(self.code_folder / code.copy_name, code.source)
        write_text(self.config_file, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
        write_json(self.record_file, dict(record))

    def save_texts(self, vocabulary: Vocabulary, transformer: Transformer | None) -> dict[str, str]:
        """Write what texts are read with; returns the SHA-256 of each file that was written before training, by its name."""
        vocabulary.save(self.vocabulary_file)
        written = [self.config_file, self.vocabulary_file, *sorted(self.code_folder.glob("*-*.py"))]
        if transformer is not None:
            saved = {"name": transformer.name, "longest": transformer.longest, "config": dict(transformer.config)}
            write_text(self.tokenizer_file, transformer.tokenizer_json)
            written += [self.tokenizer_file, write_json(self.transformer_file, saved)]
        return {file.name: sha256_file(file) for file in written}

    def save_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``metrics.csv``, a row per epoch; what an epoch without validation lacks is blank."""
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=max((list(row) for row in rows), key=len), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.metrics_file, text.getvalue())

    def save_next_best(self, weights: Mapping[str, Tensor]) -> str:
        """Write new best weights beside the best ones; returns the SHA-256 of the file.

        :meth:`take_next_best` puts them in their place once a checkpoint counts their epoch. A process that is killed before
        that, or in between, leaves the weights of either checkpoint.
        """
        content = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in weights.items()})
        write_bytes(self.next_best_file, content)
        return hashlib.sha256(content).hexdigest()

    def take_next_best(self) -> None:
        """Replace the best weights by the new ones."""
        os.replace(self.next_best_file, self.best_file)

    def settle_best(self, sha256: str | None) -> bool:
        """Return whether the best weights are there that a checkpoint names, after moving them to their place.

        New ones of an epoch that it does not count are removed.
        """
        if sha256 is not None and self.next_best_file.is_file() and sha256_file(self.next_best_file) == sha256:
            self.take_next_best()
        self.next_best_file.unlink(missing_ok=True)
        return self.has_best(sha256)

    def has_best(self, sha256: str | None) -> bool:
        """Whether the weights are there, and are the file of this SHA-256, if it is known."""
        return self.best_file.is_file() and sha256 in (None, sha256_file(self.best_file))

    def best_weights(self) -> dict[str, Tensor]:
        """Weights of the epoch with the highest validation rsum."""
        return self.read_best()[0]

    def read_best(self) -> tuple[dict[str, Tensor], str]:
        """These weights, and the SHA-256 of the bytes that they were read from; :class:`UserError` if some are not finite."""
        if not self.best_file.is_file():
            raise UserError(f"{self.path}: no best.safetensors; the run has not finished an epoch")
        content, sha256 = self.content(self.best_file)
        with wrap_read_errors(self.best_file, "readable weights"):
            weights = safetensors.torch.load(content)
        bad = next((name for name, weight in weights.items() if not torch.isfinite(weight).all()), None)
        if bad is not None:
            raise UserError(f"{self.best_file}: the weights {bad} are not finite (NaN or infinite); train again")
        return weights, sha256

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a state, with the SHA-256 of its bytes in a line behind them."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        content = buffer.getbuffer()
        with open_atomic(self.checkpoint_file) as stream:
            stream.write(content)
            stream.write(_sum_line(content))

    def checkpoint(self) -> dict[str, Any]:
        """Load the last state that was saved; tensors and plain values alone are ever loaded.

        :class:`UserError` if its bytes are not those that were written.
        """
        content = InputFile(self.checkpoint_file).read()
        try:
            _check_sum(content)
            state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a file that is not a checkpoint
            reason = error_reason(error)
            raise UserError(
                f"{self.checkpoint_file}: not a readable checkpoint ({reason}); --overwrite trains again"
            ) from None
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise UserError(f"{self.checkpoint_file}: not a checkpoint of a run; --overwrite trains again")
        return state


def _sum_line(content: bytes | memoryview) -> bytes:
    return f"\nsha256 {hashlib.sha256(content).hexdigest()}\n".encode()


def _check_sum(content: bytes) -> None:
    """Check the bytes of a checkpoint; :class:`ValueError` if they changed since they were written.

    One without a SHA-256, from before there was one, has the checksums of its zip archive, which torch does not compare.
    """
    size = len(_sum_line(b""))
    saved, line = memoryview(content)[:-size], content[-size:]
    if line.startswith(b"\nsha256 "):
        if line != _sum_line(saved):
            raise ValueError("its bytes changed since they were written: their SHA-256 differs")
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"its bytes changed since they were written: the checksum of {bad} differs")


def relative_path(target: Path, folder: Path) -> str:
    """``target`` as seen from ``folder``, so that both can be moved together."""
    return Path(os.path.relpath(target, folder)).as_posix()
