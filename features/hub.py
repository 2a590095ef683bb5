"""Models of the Hugging Face hub: a folder of the user's, or a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vse.features.extractors.libraries import Library
from vse.pipeline.errors import UserError

HUB = Library("the library of the Hugging Face hub", "huggingface_hub", "huggingface_hub", "text")


def local_folder(model: str, weights_dir: Path | None) -> Path | None:
    """The folder in ``weights_dir`` that has the last part of a model's name and stands in for a download; None if none is."""
    folder = None if weights_dir is None else weights_dir / model.rstrip("/").rpartition("/")[2]
    return folder if folder is not None and folder.is_dir() else None


def download(model: str, files: Sequence[str], revision: str | None = None) -> Path:
    """The folder of a model that the hub's library downloads, or has downloaded before; ``files`` are patterns of names.

    :class:`UserError` says why it cannot, and what a user can do without the hub.
    """
    hub = HUB.load(model)
    try:
        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # of the hub's client, of what it calls, or of the network
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        at = f" at {revision}" if revision else ""
        raise UserError(
            f"cannot get {model}{at} from the Hugging Face hub ({reason.rstrip('.')}); put its files (config.json, "
            f"model.safetensors, tokenizer.json, ...) into a folder {model.rpartition('/')[2]} and name the folder around it "
            "with --weights-dir"
        ) from None
