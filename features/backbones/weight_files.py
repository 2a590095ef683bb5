"""Record the file from which the weights of a network are loaded, and find this file again by its SHA-256.

The search covers the folder of a packed model (a trained model with its encoders, to share), the folder of ``--weights-dir``,
and the download caches of torch and of the Hugging Face hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from vse.features.settings.base import WEIGHT_FILE_SUFFIXES
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import is_path_text
from vse.pipeline.files.writing import sha256_file

WEIGHTS_FILE_KEY = "weights_file"  # name of the provenance entry that a WeightsFile is stored in
_MAX_DEPTH = 4  # levels of subfolders that are searched, such as the two levels all-MiniLM-L6-v2/0_Transformer


@dataclass(frozen=True)
class WeightsFile:
    """The name, size and SHA-256 of a file of weights, as the provenance of a cache records them.

    name : name of the file; for a text encoder, the path in the encoder's folder, with slashes
    sha256, bytes : hash and size of the file
    """

    name: str
    sha256: str
    bytes: int

    @classmethod
    def describe(cls, file: Path, folder: Path | None = None) -> dict[str, Any]:
        """Return the name, hash and size of a file of weights as JSON.

        ``folder`` is the folder of a text encoder that contains the file; the name is then the path in this folder. None: the
        file is not part of such a folder.
        """
        name = file.name if folder is None else file.relative_to(folder).as_posix()
        return asdict(cls(name, sha256_file(file), file.stat().st_size))

    @classmethod
    def read(cls, provenance: Mapping[str, Any]) -> WeightsFile | None:
        """Return the file of weights that the provenance of a cache records; None if it records no valid one."""
        record = provenance.get(WEIGHTS_FILE_KEY)
        if not isinstance(record, Mapping):
            return None
        name, sha256, size = (record.get(key) for key in ("name", "sha256", "bytes"))
        is_valid = is_path_text(name) and isinstance(sha256, str) and type(size) is int
        return cls(str(name), str(sha256), int(size or 0)) if is_valid else None

    def find(self, folders: Sequence[Path | None]) -> Path | None:
        """Return a file with the same content in one of the folders or their subfolders; None if there is no such file."""
        suffix, n_parts = PurePosixPath(self.name).suffix, len(PurePosixPath(self.name).parts)
        for folder in folders:
            for file in _list_files(folder, suffix) if folder is not None else ():
                in_folder = n_parts == 1 or file.as_posix().endswith(f"/{self.name}")
                if in_folder and file.stat().st_size == self.bytes and sha256_file(file) == self.sha256:
                    return file
        return None

    def build_hint(self, model: str) -> str:
        """Return a sentence for the user: which file ``model`` needs, and where to put the file."""
        return (
            f"the weights of {model} are the file {self.name} with {self.bytes:,} bytes and the SHA-256 {self.sha256}; put it "
            "into a folder and name the folder with --weights-dir or VSE_WEIGHTS_DIR"
        )


def find_weights_setting(provenance: Mapping[str, Any], model_folder: Path | None, weights_dir: Path | None) -> dict[str, str]:
    """Return the setting ``{"weights": path}`` for the weights that computed a feature; {} if their file is not found.

    For the extractor ``text`` with a model of the Hugging Face hub, the path is the folder of the model.

    provenance : provenance of the feature's cache
    model_folder : folder of a packed model (a trained model with its encoders, to share), searched first; None without one
    weights_dir : folder of ``--weights-dir``
    """
    record, settings = WeightsFile.read(provenance), provenance.get("config", {})
    if record is None:  # an earlier version wrote the cache; the caller compares the hash of the weights
        place = str(provenance.get("weights", ""))
        moved = None if weights_dir is None or Path(place).is_file() else weights_dir / Path(place).name
        return {"weights": str(moved)} if place.endswith(WEIGHT_FILE_SUFFIXES) and moved and moved.is_file() else {}
    if not record.name.endswith(WEIGHT_FILE_SUFFIXES):
        return {}
    model, commit = str(settings.get("model")), provenance.get("commit")
    downloads = sorted(list_download_folders(), key=lambda folder: folder.name != commit)
    # The model's own folder comes first: in other folders, the same weights may have another tokenizer.
    own_folder = None if weights_dir is None else weights_dir / model.rpartition("/")[2]
    file = record.find([model_folder, own_folder, weights_dir, *downloads])
    if file is None:
        return {}
    is_folder = settings.get("extractor") == "text" and not model.startswith("open_clip/")
    return {"weights": str(file.parents[len(PurePosixPath(record.name).parts) - 1] if is_folder else file)}


def add_weights_hint(provenance: Mapping[str, Any], model: str, error: UserError) -> UserError:
    """Return an error about missing or wrong weights of ``model``, with a hint: the name and hash of the right file.

    If the cache's ``provenance`` lacks this name, or if ``error`` already states the hash, ``error`` is returned unchanged.
    """
    record = WeightsFile.read(provenance)
    return error if record is None or record.sha256 in str(error) else UserError(f"{error}; {record.build_hint(model)}")


def list_download_folders() -> list[Path]:
    """Return the folders to which torch and the Hugging Face hub download files."""
    try:
        from huggingface_hub import constants

        hub = Path(constants.HF_HUB_CACHE)
    except ImportError:
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return [Path(torch.hub.get_dir()) / "checkpoints", *sorted(hub.glob("models--*/snapshots/*"))]


def _list_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the files with this suffix in a folder and down to its fourth level of subfolders, except hidden subfolders."""
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
        for name in sorted(names):
            file = Path(parent, name)
            if file.suffix == suffix and file.is_file():
                yield file
