"""A packed model: a folder in the layout of Hugging Face with all files of a trained model, but without data and caches.

``vse model pack`` writes the folder (:mod:`vse.training.share.pack`, ``docs/formats.md``). The folder can be used like a run
folder. No code in the folder is executed: weights are safetensors, and settings that name a user's own code are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureDescription
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, error_reason, wrap_read_errors
from vse.pipeline.files.writing import read_json
from vse.pipeline.presets.own_code import CodeNotAllowed, forbid_own_code
from vse.training.run.folder import RunFolder

_Schema = TypeVar("_Schema", bound=BaseModel)
CONFIG_FILE_NAME = "config.json"
WEIGHTS_FILE_NAME = "model.safetensors"
CARD_FILE_NAME = "README.md"
PREPROCESSING_FILE_NAME = "preprocessor_config.json"
IMAGE_NETWORK_FILE_NAME = "image_network.safetensors"
TEXT_NETWORK_NAME = "text_network"  # name of a folder, or of a file of OpenCLIP without its suffix


class PackedConfig(BaseModel):
    """The content of ``config.json``.

    ``settings`` : settings of the experiment.
    ``run`` : record of the run, as in ``run.json`` but without paths of files on the author's machine.
    ``results`` : results of the run, as in result files.
    ``licence`` : licence of the model; None if the author has not stated a licence.
    ``files`` : SHA-256 of all files except ``config.json`` and the model card, by path in the folder.
    """

    model_config = ConfigDict(frozen=True)
    model_type: Literal["vse"] = "vse"
    version: Literal[1] = 1
    settings: dict[str, Any]
    run: dict[str, Any]
    results: list[dict[str, Any]] = []
    licence: str | None = None
    files: dict[str, str]


def is_packed(folder: Path) -> bool:
    """Return whether a folder is a packed model."""
    with suppress(UserError):
        content = read_json(folder / CONFIG_FILE_NAME)
        return isinstance(content, dict) and content.get("model_type") == "vse"
    return False


def open_model_folder(path: Path) -> RunFolder:
    """Return the packed model in a folder, or the run if the folder is not a packed model."""
    return PackedFolder(path) if is_packed(path) else RunFolder(path)


class PackedFolder(RunFolder):
    """The paths and contents of the files of a packed model."""

    is_packed = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config_file = self.record_file = path / CONFIG_FILE_NAME
        self.best_weights_file = path / WEIGHTS_FILE_NAME

    @cached_property
    def config(self) -> PackedConfig:
        """The content of ``config.json``. Raises UserError if the content is not valid."""
        try:
            return PackedConfig.model_validate(read_json(self.config_file))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{self.config_file}: not a model of this version of vse ({place}: {first['msg']})") from None

    @property
    def output_files(self) -> tuple[Path, ...]:
        """All files in the folder."""
        return tuple(sorted(file for file in self.path.rglob("*") if file.is_file()))

    def read_settings(self, schema: type[_Schema]) -> _Schema:
        """Return the settings of the model. Raises UserError if the settings are not valid, or name a user's own code."""
        try:
            with forbid_own_code():
                return schema.model_validate(self.config.settings)
        except CodeNotAllowed:
            raise UserError(f"{self.config_file}: its settings name code, and code of a packed model is never run") from None
        except (UserError, ValidationError) as error:
            reason = error_reason(error).splitlines()[0]
            raise UserError(f"{self.config_file}: not the settings of a model of this version of vse ({reason})") from None

    def read_settings_content(self) -> dict[str, Any]:
        return self.config.settings

    def read_file_with_sha256(self, file: Path) -> tuple[bytes, str]:
        """Return the bytes of a file and their SHA-256. Raises UserError if ``config.json`` records another SHA-256."""
        source = InputFile(file)
        content, name = source.read(), file.relative_to(self.path).as_posix()
        if name != CONFIG_FILE_NAME and self.config.files.get(name) != source.sha256:
            raise UserError(f"{file}: its SHA-256 is not the one in {CONFIG_FILE_NAME}; get the model again")
        return content, source.sha256

    def build_rowless_cache(self, record: Mapping[str, Any]) -> FeatureCache:
        with wrap_read_errors(self.config_file, "the settings of a packed model"):
            description = FeatureDescription.model_validate(record["description"])
            if "backbone" in description.provenance:
                raise ValueError("its features are embeddings of another model")
        return description.build_rowless_cache(self.config_file, self.path)

    def _read_record_content(self) -> Any:
        return self.config.run
