"""Data sets on the user's disk: from the published files to ``data/<name>/dataset.json``."""

from __future__ import annotations

import os
from pathlib import Path

from vse.pipeline.config import DatasetConfig
from vse.pipeline.dataset import count_splits, load_dataset_file, missing_images
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out, clear_temporaries, read_json, write_json
from vse.pipeline.locks import PLACE, only_writer
from vse.pipeline.presets import load_dataset


def published_dataset(name: str) -> DatasetConfig:
    """The preset of a data set that others published; :class:`UserError` if it is one that is drawn."""
    config = load_dataset(name)
    if config.annotations is None:
        raise UserError(f"{name!r} has no published files; draw it with: vse-data demo --out data/{name}")
    return config


def folder_variable(name: str) -> str:
    """The environment variable that names the folder of a data set's published files, e.g. ``VSE_F8K_DIR``."""
    return f"VSE_{name.upper()}_DIR"


def source_folder(name: str) -> Path:
    """The folder of a data set's published files: its environment variable, else ``data/<name>``."""
    return Path(os.environ.get(folder_variable(name)) or Path("data", name))


def source_files(config: DatasetConfig, source: Path) -> tuple[Path, Path]:
    """The annotation file and the images folder of ``config`` in ``source``.

    :class:`UserError` says what is missing, where to put it and how to get it.
    """
    assert config.annotations is not None, "the demo has no source files"
    annotations, images = source / config.annotations, source / config.images
    missing = [str(path) for path, there in ((annotations, annotations.is_file()), (images, images.is_dir())) if not there]
    if missing:
        fetch = f"vse-data fetch {config.name} downloads what may be downloaded. " if config.files else ""
        raise UserError(
            f"data set {config.name!r}: {' and '.join(missing)} not found. Put {config.annotations} (the Karpathy split) and "
            f"the folder {config.images} (the images) into {source}, or name their folder with "
            f"--config {config.name}_dir=FOLDER (workflow) or --source FOLDER (vse-data prepare). "
            f"{fetch}{config.where}".strip()
        )
    return annotations, images


def prepare_dataset(config: DatasetConfig, source: Path, out: Path) -> Path:
    """Write ``out/dataset.json`` from the files in ``source``, with ``out/images`` a link to its images.

    Everything is checked before anything is written: the annotations, and that every image file exists.
    Returns the path of ``dataset.json``.
    """
    annotations, images = source_files(config, source)
    dataset = load_dataset_file(annotations)
    folder = out / "images"
    absent = [image.file for image in dataset.images if not (images / image.file).is_file()]
    if absent:
        raise UserError(f"{images}: {len(absent)} of {len(dataset.images)} image files are missing, the first is {absent[0]}")
    check_out(out / "dataset.json", [annotations])
    with only_writer(out, folder=True):
        clear_temporaries(out)
        if folder.resolve() != images.resolve():
            link_images(folder, images.resolve())
        return write_json(out / "dataset.json", {**read_json(annotations), "dataset": config.name})


def check_dataset(path: Path) -> str:
    """Counts per split of a data set file; :class:`UserError` if it is not valid or an image file is missing."""
    dataset = load_dataset_file(path)
    absent = missing_images(dataset)
    if absent:
        raise UserError(f"{path}: {len(absent)} of {len(dataset.images)} image files are missing, the first is {absent[0]}")
    return count_splits(dataset)


def link_images(link: Path, target: Path) -> None:
    """Make ``link`` a symbolic link to ``target``; an earlier link is replaced, a real folder is refused."""
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is a folder, not a link; move it away to use the images of {target}")
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{PLACE}-{os.getpid()}.link.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)
