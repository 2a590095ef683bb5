"""Data sets on the user's disk: from the published files to ``data/<name>/dataset.json``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.chunker import with_noun_phrases
from vse.pipeline.config import DatasetConfig
from vse.pipeline.dataset import Dataset, count_splits, load_dataset_file, missing_images
from vse.pipeline.entities_dataset import ENTITIES_SPLITS, SIMILAR, entities_content, with_phrases
from vse.pipeline.errors import UserError
from vse.pipeline.files import clear_temporaries, read_json, write_json
from vse.pipeline.input_files import is_name
from vse.pipeline.locks import PLACE, only_writer
from vse.pipeline.outputs import OutputKind, check_out, json_object
from vse.pipeline.presets import load_dataset
from vse.pipeline.progress import progress_bar
from vse.pipeline.tokenisers import tokeniser_named


def published_dataset(name: str) -> DatasetConfig:
    """The preset of a data set that others published; :class:`UserError` if it is one that is drawn."""
    config = load_dataset(name)
    if not config.published:
        how = f"draw it with: vse-data demo --out data/{name}" if config.n_images else f"vse-data import writes data/{name}"
        raise UserError(f"{name!r} has no published files; {how}")
    return config


def folder_variable(name: str) -> str:
    """The environment variable that names the folder of a data set's published files, e.g. ``VSE_F8K_DIR``."""
    return f"VSE_{name.upper()}_DIR"


def source_folder(name: str) -> Path:
    """The folder of a data set's published files: its environment variable, else ``data/<name>``."""
    return Path(os.environ.get(folder_variable(name)) or Path("data", name))


def source_files(config: DatasetConfig, source: Path) -> tuple[list[Path], Path]:
    """The annotations of ``config`` in ``source``, files and folders, and the images folder.

    :class:`UserError` says what is missing, where to put it and how to get it.
    """
    annotations, images = annotation_paths(config, source), source / config.images
    missing = [str(path) for path in annotations if not path.exists()] + [str(images)] * (not images.is_dir())
    if missing:
        fetch = f"vse-data fetch {config.name} downloads what may be downloaded. " if config.files else ""
        karpathy = [f"{config.annotations} (the Karpathy split)"] if config.annotations else []
        entities = [] if config.entities is None else ["the files of Flickr30K Entities"]
        raise UserError(
            f"data set {config.name!r}: {' and '.join(missing)} not found. Put {', '.join([*karpathy, *entities])} and "
            f"the folder {config.images} (the images) into {source}, or name their folder with "
            f"--config {config.name}_dir=FOLDER (workflow) or --source FOLDER (vse-data prepare). "
            f"{fetch}{config.where}".strip()
        )
    return annotations, images


def annotation_paths(config: DatasetConfig, source: Path) -> list[Path]:
    """Where a data set's annotations have to be: a file of the Karpathy splits, files of Flickr30K Entities, or both."""
    paths = [] if config.annotations is None else [source / config.annotations]
    if config.entities is not None:
        lists = [] if config.annotations else [f"{split}.txt" for split in ENTITIES_SPLITS]
        paths += [source / config.entities / name for name in ("Annotations", "Sentences", *lists)]
    return paths


def prepare_dataset(config: DatasetConfig, source: Path, out: Path) -> Path:
    """Write ``out/dataset.json`` from the files in ``source``, with ``out/images`` a link to its images.

    Everything is checked before anything is written: the annotations, and that every image file exists.
    Returns the path of ``dataset.json``.
    """
    annotations, images = source_files(config, source)
    check_dataset_out(out, config.name, annotations)
    if config.entities is None:
        content = _karpathy(annotations[0], images)
    elif config.annotations is None:
        content = entities_content(source / config.entities, images)
    else:
        content = with_phrases(_karpathy(annotations[0], images), source / config.entities, images)
    if config.tokeniser is not None:
        content = cut_again(content, config.tokeniser, f"data set {config.name!r}")
    return write_dataset({**content, "dataset": config.name}, out, images, annotations)


def cut_again(content: dict[str, Any], tokeniser: str, where: str) -> dict[str, Any]:
    """The content of a checked ``dataset.json`` with every caption cut into words by a tokeniser, which is recorded.

    :class:`UserError` if a caption marks phrases, which are spans of the tokens that it has, or has no word.
    """
    cut, images = tokeniser_named(tokeniser, where), []
    for image in progress_bar(content["images"], desc="cut captions", unit="image"):
        sentences = [{**sentence, "tokens": cut(sentence["raw"])} for sentence in image.get("sentences", ())]
        for sentence in sentences:
            if not sentence["tokens"] or sentence.get("phrases"):
                why = "marks phrases in the tokens that it has" if sentence.get("phrases") else "has no word"
                raise UserError(f"{where}: tokeniser {tokeniser}: caption {sentence['sentid']} {why}")
        images.append({**image, "sentences": sentences})
    return {**content, "tokeniser": tokeniser, "images": images}


def _karpathy(file: Path, images: Path) -> dict[str, Any]:
    """The content of a file of the Karpathy splits, all of whose images are there."""
    dataset = load_dataset_file(file)
    absent = [image.file for image in dataset.images if not (images / image.file).is_file()]
    if absent:
        raise UserError(f"{images}: {len(absent)} of {len(dataset.images)} image files are missing, the first is {absent[0]}")
    content: dict[str, Any] = read_json(file)
    return content


def add_phrases(
    dataset_file: Path,
    entities: Path | None,
    out: Path,
    name: str | None = None,
    similar: float = SIMILAR,
    chunker: str | None = None,
) -> Path:
    """Write ``out/dataset.json``, a data set with phrases in its captions, and link its images beside it.

    The phrases are those of Flickr30K Entities, in whose folder ``entities`` ``Annotations`` and ``Sentences`` lie (what is
    joined, :func:`with_phrases` of :mod:`vse.pipeline.entities_dataset` says), or those of a ``chunker``, a spaCy pipeline
    (see :func:`vse.pipeline.chunker.with_noun_phrases`). Ids, splits and captions stay. The data set is called as ``out`` is,
    unless it has a ``name``. Returns the path of ``dataset.json``.
    """
    check_dataset(dataset_file)
    name = name or out.resolve().name
    if not is_name(name):
        raise UserError(f"{name!r} cannot be the name of a data set, which becomes a part of file names; give another --name")
    inputs = [dataset_file, *([] if entities is None else [entities])]
    check_dataset_out(out, name, inputs)
    content = read_json(dataset_file)
    images = dataset_file.parent / "images" if content.get("pictures", True) else None
    if entities is not None:
        content = with_phrases(content, entities, images, similar)
    elif chunker is not None:
        content = with_noun_phrases(content, chunker)
    return write_dataset({**content, "dataset": name}, out, images, inputs)


def check_dataset_out(out: Path, name: str, inputs: Iterable[Path] = ()) -> None:
    """Check before any work that ``out`` may be written as the folder of the data set ``name``; raises UserError if not."""
    kind = OutputKind(f"the data set {name!r}", lambda path: _is_dataset(json_object(path), name))
    check_out(out / "dataset.json", kind, inputs)


def _is_dataset(content: Mapping[str, Any], name: str) -> bool:
    return content.get("dataset") == name and isinstance(content.get("images"), list)


def write_dataset(content: dict[str, Any], out: Path, images: Path | None, inputs: list[Path]) -> Path:
    """Write ``out/dataset.json``, and ``out/images`` as a link to a folder of images; returns the path of the file."""
    folder = out / "images"
    check_dataset_out(out, content["dataset"], inputs)
    with only_writer(out, folder=True):
        clear_temporaries(out)
        if images is not None and folder.resolve() != images.resolve():
            link_images(folder, images.resolve())
        return write_json(out / "dataset.json", content)


def check_dataset(path: Path) -> str:
    """Counts per split of a data set file; :class:`UserError` if it is not valid or an image file is missing."""
    return count_splits(checked_dataset(path))


def checked_dataset(path: Path) -> Dataset:
    """A valid data set all of whose image files are there."""
    dataset = load_dataset_file(path)
    absent = missing_images(dataset)
    if absent:
        raise UserError(f"{path}: {len(absent)} of {len(dataset.images)} image files are missing, the first is {absent[0]}")
    return dataset


def link_images(link: Path, target: Path) -> None:
    """Make ``link`` a symbolic link to ``target``; an earlier link is replaced, a real folder is refused."""
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is a folder, not a link; move it away to use the images of {target}")
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{PLACE}-{os.getpid()}.link.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)
