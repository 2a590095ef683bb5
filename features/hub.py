"""Models of the Hugging Face hub: a folder of the user's, or a download."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.features.extractors.libraries import Library
from vse.pipeline.errors import UserError

_COMMIT = re.compile("[0-9a-f]{40}")
HUB = Library("the library of the Hugging Face hub", "huggingface_hub", "huggingface_hub", "text")


def local_folder(model: str, weights_dir: Path | None) -> Path | None:
    """The folder in ``weights_dir`` that has the last part of a model's name and stands in for a download; None if none is."""
    folder = None if weights_dir is None else weights_dir / model.rstrip("/").rpartition("/")[2]
    return folder if folder is not None and folder.is_dir() else None


@dataclass(frozen=True)
class Download:
    """The folder of a model from the hub at one commit, by its hash of 40 hexadecimal digits."""

    folder: Path
    commit: str


def download(model: str, files: Sequence[str], revision: str | None = None, advice: str | None = None) -> Download:
    """Download the files of a model at one commit, or return those of an earlier download.

    ``files`` are patterns of names. A branch, a tag or no ``revision`` is resolved to a commit before the first file is
    downloaded, so that all files are of this commit. Raises UserError, with ``advice`` on what a user can do without the
    hub, if it cannot be reached or if its library returns a folder that is not of one commit.
    """
    hub = HUB.load(model)
    try:
        folder = Path(hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
        if not _COMMIT.fullmatch(folder.name):
            raise ValueError(f"{folder} is not the folder of a commit")
        return Download(folder, folder.name)
    except Exception as error:  # of the hub's client, of what it calls, or of the network
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        at = f" at {revision}" if revision else ""
        otherwise = advice or (
            f"put its files (config.json, model.safetensors, tokenizer.json, ...) into a folder {model.rpartition('/')[2]} "
            "and name the folder around it with --weights-dir"
        )
        raise UserError(f"cannot get {model}{at} from the Hugging Face hub ({reason.rstrip('.')}); {otherwise}") from None


def download_file(model: str, names: Sequence[str], revision: str | None, advice: str) -> tuple[Path, str]:
    """Download the first of some files that a model has; return it and the hash of its commit.

    Raises UserError as :func:`download` does, also if the model has none of the files.
    """
    for name in names:  # one after the other, since the last ones are large and rarely needed
        found = download(model, [name], revision, advice)
        if (found.folder / name).is_file():
            return found.folder / name, found.commit
        revision = found.commit
    raise UserError(f"cannot get {' or '.join(names)} of {model} from the Hugging Face hub; {advice}")
