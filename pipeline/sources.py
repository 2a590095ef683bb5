"""Data sets that lie on the user's disk: from the files as they are published to ``data/<name>/dataset.json``."""

from __future__ import annotations

import os
from pathlib import Path

from vse.pipeline.config import DatasetConfig
from vse.pipeline.dataset import count_splits, load_dataset_file, missing_images
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_json


def folder_variable(name: str) -> str:
    """The environment variable that says where a data set's published files lie: ``VSE_F8K_DIR``."""
    return f"VSE_{name.upper()}_DIR"


def source_folder(name: str) -> Path:
    """Where a data set's published files lie: its environment variable, else ``data/<name>``."""
    return Path(os.environ.get(folder_variable(name)) or Path("data", name))


def source_files(config: DatasetConfig, source: Path) -> tuple[Path, Path]:
    """The annotation file and the images folder of ``config`` in ``source``.

    :class:`UserError` says what is missing, where it should lie and where a user gets it.
    """
    assert config.annotations is not None, "the demo has no source files"
    annotations, images = source / config.annotations, source / config.images
    missing = [str(path) for path, there in ((annotations, annotations.is_file()), (images, images.is_dir())) if not there]
    if missing:
        fetch = f"vse-data fetch {config.name} downloads what may be downloaded. " if config.files else ""
        raise UserError(
            f"data set {config.name!r}: {' and '.join(missing)} not found. Put {config.annotations} (the Karpathy split) and "
            f"the folder {config.images} (the pictures) into {source}, or say where they are with "
            f"--config {config.name}_dir=FOLDER (workflow) or --source FOLDER (vse-data prepare). "
            f"{fetch}{config.where}".strip()
        )
    return annotations, images


def prepare_dataset(config: DatasetConfig, source: Path, out: Path) -> Path:
    """Write ``out/dataset.json`` from the files in ``source``, with ``out/images`` a link to its pictures.

    Everything is checked before anything is written: the annotations, and that every picture is there.
    Returns the path of ``dataset.json``.
    """
    annotations, images = source_files(config, source)
    dataset = load_dataset_file(annotations)
    folder = out / "images"
    absent = [image.file for image in dataset.images if not (images / image.file).is_file()]
    if absent:
        raise UserError(f"{images}: {len(absent)} of {len(dataset.images)} pictures are missing, the first is {absent[0]}")
    if folder.resolve() != images.resolve():
        _link(folder, images.resolve())
    return write_json(out / "dataset.json", {**read_json(annotations), "dataset": config.name})


def check_dataset(path: Path) -> str:
    """Counts per split of a data set file; :class:`UserError` if it or one of its pictures is not sound."""
    dataset = load_dataset_file(path)
    absent = missing_images(dataset)
    if absent:
        raise UserError(f"{path}: {len(absent)} of {len(dataset.images)} pictures are missing, the first is {absent[0]}")
    return count_splits(dataset)


def _link(link: Path, target: Path) -> None:
    """Make ``link`` point to ``target``; an earlier link is replaced, a real folder is not touched."""
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is a folder of its own; move it away to use the pictures of {target}")
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)
