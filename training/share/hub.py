"""Upload packed models to the Hugging Face hub, and download them."""

from __future__ import annotations

import re
from pathlib import Path

from vse.features.backbones.model_folder import download_model
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.inputs import error_reason
from vse.training.run.packed import CARD_FILE_NAME, CONFIG_FILE_NAME, PackedFolder, is_packed

_HUB_SCHEME = "hf:"  # ``Path("hf://user/name")`` has this first part
_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILE_PATTERNS = (CARD_FILE_NAME, "*.json", "*.safetensors", "metrics.csv", "text_network/*")


def find_model(place: Path) -> Path:
    """Return the folder of a model: ``place`` itself, or the download of ``hf://user/name`` or ``hf://user/name@revision``.

    Raises UserError if the hub is out of reach, or if the repository is not a packed model.
    """
    if place.parts[:1] != (_HUB_SCHEME,):
        return place
    address = "/".join(place.parts[1:])
    found = _NAME_PATTERN.fullmatch(address)
    if found is None:
        raise UserError(f"hf://{address}: not the name of a model; write hf://user/name or hf://user/name@revision")
    advice = "check the name, or get the folder by other means and name the folder itself"
    folder = download_model(found["name"], _FILE_PATTERNS, found["revision"], advice).folder
    if not is_packed(folder):
        raise UserError(f"hf://{address}: not a model that vse model pack wrote")
    return folder


def push_model(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a packed model as the repository ``user/name``, and return the address of the commit.

    Raises UserError if a file has changed since the model was packed, or if the hub refuses the upload.
    """
    if not is_packed(folder):
        raise UserError(f"{folder}: not a packed model; vse model pack RUN FOLDER writes one")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is None:
        raise UserError(f"{repository}: not the name of a repository; write user/name")
    packed = PackedFolder(folder)
    for name in packed.config.files:
        packed.read_file_with_sha256(folder / name)
    hub = import_extra("huggingface_hub", "vse model push", "text")
    files = [CONFIG_FILE_NAME, CARD_FILE_NAME, *packed.config.files]
    try:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        uploads = [hub.CommitOperationAdd(name, str(folder / name)) for name in files if (folder / name).is_file()]
        commit = api.create_commit(repository, uploads, commit_message="Upload a model packed by vse")
    except Exception as error:  # the hub's client and the network raise many kinds
        raise UserError(
            f"cannot upload {folder} to {repository} ({error_reason(error)}); log in with hf auth login, or set HF_TOKEN to a "
            "token that may write"
        ) from None
    return str(commit.commit_url)
