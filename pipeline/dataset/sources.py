"""Data sets on the user's disk: from the published files to ``data/<name>/dataset.json``.

A data set of photos that nobody has described, to be searched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.captions import tokeniser_named
from vse.pipeline.dataset.dataset import Dataset, count_splits, load_dataset_file, missing_images
from vse.pipeline.dataset.entities_dataset import ENTITIES_SPLITS, SIMILAR, entities_content, with_phrases
from vse.pipeline.dataset.phrases import with_noun_phrases
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import is_name
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_others, read_json_object
from vse.pipeline.files.writing import MACHINE_ID, clear_temporaries, lock_for_writing, read_json, write_json
from vse.pipeline.presets.presets import load_dataset
from vse.pipeline.presets.schema import DatasetConfig
from vse.pipeline.progress import progress_bar


def published_dataset(name: str) -> DatasetConfig:
    """The preset of a data set that others published; :class:`UserError` if it is one that is drawn."""
    config = load_dataset(name)
    if not config.is_published:
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

    The phrases come from Flickr30K Entities, whose folder ``entities`` holds ``Annotations`` and ``Sentences``, or from a
    ``chunker``, a spaCy pipeline (see :func:`vse.pipeline.dataset.phrases.with_noun_phrases`). How captions of Entities are
    joined is described in :func:`vse.pipeline.dataset.entities_dataset.with_phrases`. Ids, splits and captions stay. The data
    set gets ``name``, or the name of the folder ``out``. Returns the path of ``dataset.json``.
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
    kind = OutputKind(f"the data set {name!r}", lambda path: _is_dataset(read_json_object(path), name))
    check_output(out / "dataset.json", kind, inputs)


def _is_dataset(content: Mapping[str, Any], name: str) -> bool:
    return content.get("dataset") == name and isinstance(content.get("images"), list)


def write_dataset(content: dict[str, Any], out: Path, images: Path | None, inputs: list[Path]) -> Path:
    """Write ``out/dataset.json``, and ``out/images`` as a link to a folder of images; returns the path of the file."""
    folder = out / "images"
    check_dataset_out(out, content["dataset"], inputs)
    with lock_for_writing(out, folder=True):
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
    temporary = link.with_name(f".{link.name}.{MACHINE_ID}-{os.getpid()}.link.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)


SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def make_album(photos: Path, out: Path, name: str | None = None) -> Path:
    """Write ``out/dataset.json`` of all JPEG, PNG and WebP files in a folder and the folders in it, in the split ``test``.

    They have no captions. ``out/images`` becomes a link to the folder. The data set is called as ``out`` is, unless it has a
    ``name``. Numbers are given in the order of the files' names, so a photo that is added changes those after it. Returns
    the path of ``dataset.json``.
    """
    if not photos.is_dir():
        raise UserError(f"{photos}: no such folder of photos")
    files = sorted(
        path.relative_to(photos) for path in photos.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise UserError(f"{photos}: no JPEG, PNG or WebP file in it")
    name, file = name or out.resolve().name, out / "dataset.json"
    entries = [
        {
            "imgid": imgid,
            **({} if path.parent == Path() else {"filepath": path.parent.as_posix()}),
            "filename": path.name,
            "split": "test",
            "sentences": [],
        }
        for imgid, path in enumerate(files)
    ]
    check_dataset_out(out, name)
    if file.exists() and not may_replace_others():
        earlier = read_json(file)
        captioned = not isinstance(earlier, dict) or any(image.get("sentences") for image in earlier.get("images", []))
        if captioned or earlier.get("dataset") != name:
            raise UserError(f"{file}: describes another data set, which is not replaced; give another --out")
    with lock_for_writing(out, folder=True):
        clear_temporaries(out)
        if (out / "images").resolve() != photos.resolve():
            link_images(out / "images", photos.resolve())
        return write_json(file, {"dataset": name, "images": entries})
