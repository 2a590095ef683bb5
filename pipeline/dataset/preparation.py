"""Write ``data/<name>/dataset.json``: from published files, from another data set, or from a folder of photos.

The functions that write a data set create the symbolic link ``images``, next to ``dataset.json``, to the folder of images.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.dataset import Dataset, describe_splits, load_dataset_file, read_dataset_head
from vse.pipeline.dataset.images import convert_image_to_entry
from vse.pipeline.dataset.photo_folder import PHOTO_SPLIT, list_photos
from vse.pipeline.dataset.published_datasets import (
    ENTITIES_SPLITS,
    MIN_CAPTION_SIMILARITY,
    build_entities_content,
    build_multilingual_content,
    mark_entities_phrases,
)
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.images import BadImage, check_image_exists
from vse.pipeline.files.inputs import is_valid_name
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_other_kinds, read_first_bytes, read_json_object
from vse.pipeline.files.writing import MACHINE_ID, lock_for_writing, open_atomic, read_json, remove_temporary_files
from vse.pipeline.presets.presets import load_dataset_preset
from vse.pipeline.presets.schema import DatasetConfig
from vse.pipeline.progress import progress_bar

_CHUNKER_BATCH_SIZE = 1000  # captions that spaCy parses at once
_IMAGES_PER_WRITE = 1000
_MAX_HEAD_BYTES = 2**16  # bytes of dataset.json in front of its images
log = logging.getLogger(__name__)


def load_published_preset(name: str) -> DatasetConfig:
    """Load the preset of a published data set. Raises UserError if the data set has no published files."""
    config = load_dataset_preset(name)
    if not config.is_published:
        how = f"draw it with: vse-data demo --out data/{name}" if config.n_images else f"vse-data import writes data/{name}"
        raise UserError(f"{name!r} has no published files; {how}")
    return config


def source_folder_variable(name: str) -> str:
    """Return the name of the environment variable for the folder of published files, e.g. ``VSE_F8K_DIR``."""
    return f"VSE_{name.upper()}_DIR"


def find_source_folder(name: str) -> Path:
    """Return the folder of a data set's published files: ``$VSE_<NAME>_DIR``, or else ``data/<name>``."""
    return Path(os.environ.get(source_folder_variable(name)) or Path("data", name))


def find_source_files(config: DatasetConfig, source: Path) -> tuple[list[Path], Path]:
    """Return the paths of the annotations (files and folders) and of the folder of images of a data set in ``source``.

    Raises UserError if a path does not exist; the message explains how to get the missing files and where to put them.
    """
    annotations, images = list_annotation_paths(config, source), source / config.images
    missing = [str(path) for path in annotations if not path.exists()] + [str(images)] * (not images.is_dir())
    if missing:
        fetch = f"vse-data fetch {config.name} downloads what may be downloaded. " if config.files else ""
        kind = "the Karpathy split" if config.layout == "karpathy" else "the captions"
        karpathy = [f"{config.annotations} ({kind})"] if config.annotations else []
        entities = [] if config.entities is None else ["the files of Flickr30K Entities"]
        raise UserError(
            f"data set {config.name!r}: {' and '.join(missing)} not found. Put {', '.join([*karpathy, *entities])} and "
            f"the folder {config.images} (the images) into {source}, or name their folder with "
            f"--config {config.name}_dir=FOLDER (workflow) or --source FOLDER (vse-data prepare). "
            f"{fetch}{config.where}".strip()
        )
    return annotations, images


def list_annotation_paths(config: DatasetConfig, source: Path) -> list[Path]:
    """Return the paths of a data set's annotations in ``source``: captions, files of Flickr30K Entities, or both."""
    paths = [] if config.annotations is None else [source / config.annotations]
    if config.entities is not None:
        lists = [] if config.annotations else [f"{split}.txt" for split in ENTITIES_SPLITS]
        paths += [source / config.entities / name for name in ("Annotations", "Sentences", *lists)]
    return paths


def prepare_dataset(config: DatasetConfig, source: Path, out: Path) -> Path:
    """Write ``out/dataset.json`` from the published files in ``source``, and link ``out/images``.

    Annotations and image files are checked first. Returns the path of ``dataset.json``.
    """
    annotations, images = find_source_files(config, source)
    check_dataset_output(out, config.name, annotations)
    if config.layout != "karpathy":
        content = build_multilingual_content(config.layout, annotations[0], images)
    elif config.entities is None:
        content = _read_karpathy_split(annotations[0], images)
    elif config.annotations is None:
        content = build_entities_content(source / config.entities, images)
    else:
        content = mark_entities_phrases(_read_karpathy_split(annotations[0], images), source / config.entities, images)
    if config.tokeniser is not None:
        content = retokenise(content, config.tokeniser, f"data set {config.name!r}")
    return write_json_dataset({**content, "dataset": config.name}, out, images, annotations)


def retokenise(content: dict[str, Any], tokeniser: str, where: str) -> dict[str, Any]:
    """Return the content of a checked ``dataset.json`` with its captions split by another tokeniser.

    Raises UserError if a caption has no token, or if a caption has phrases, because phrases are spans of the old tokens. The
    message begins with ``where``.
    """
    tokenise, images = find_tokeniser(tokeniser, where), []
    for image in progress_bar(content["images"], desc="tokenise captions", unit="image"):
        sentences = [{**sentence, "tokens": tokenise(sentence["raw"])} for sentence in image.get("sentences", ())]
        for sentence in sentences:
            if not sentence["tokens"] or sentence.get("phrases"):
                why = "has phrases (spans of its old tokens)" if sentence.get("phrases") else "has no token"
                raise UserError(f"{where}: tokeniser {tokeniser}: caption {sentence['sentid']} {why}")
        images.append({**image, "sentences": sentences})
    return {**content, "tokeniser": tokeniser, "images": images}


def _read_karpathy_split(file: Path, images: Path) -> dict[str, Any]:
    dataset = load_dataset_file(file)
    missing = [image.file for image in dataset.images if not (images / image.file).is_file()]
    if missing:
        raise UserError(
            f"{images}: {len(missing)} of {len(dataset.images)} image files are missing, the first is {missing[0]}"
        )
    content: dict[str, Any] = read_json(file)
    return content


def add_phrases(
    dataset_file: Path,
    entities: Path | None,
    out: Path,
    name: str | None = None,
    min_similarity: float = MIN_CAPTION_SIMILARITY,
    chunker: str | None = None,
) -> Path:
    """Write a copy of a data set, with phrases marked in its captions, to ``out/dataset.json``, and link ``out/images``.

    The phrases come from the folder ``entities`` of Flickr30K Entities
    (:func:`~vse.pipeline.dataset.published_datasets.mark_entities_phrases`), or from the spaCy pipeline ``chunker``. Captions
    match if the share of equal words is at least ``min_similarity``. The copy is called ``name``, or like the folder ``out``.
    It uses the caches of image features of the original data set. Returns the path of ``dataset.json``.
    """
    dataset = load_and_check_dataset(dataset_file)
    name = name or out.resolve().name
    check_dataset_name(name)
    inputs = [dataset_file, *([] if entities is None else [entities])]
    check_dataset_output(out, name, inputs)
    content = read_dataset_content(dataset_file)
    images = dataset_file.parent / "images" if content.get("pictures", True) else None
    if entities is not None:
        content = mark_entities_phrases(content, entities, images, min_similarity)
    elif chunker is not None:
        content = mark_noun_phrases(content, chunker)
    own = {"parent": dataset.parent or dataset.name} if name != dataset.name else {}
    return write_json_dataset({**content, "dataset": name, **own}, out, images, inputs)


def mark_noun_phrases(content: dict[str, Any], pipeline: str) -> dict[str, Any]:
    """Return the content of a checked ``dataset.json`` with noun phrases instead of earlier phrases.

    ``pipeline`` is an installed spaCy package, such as ``en_core_web_sm``, or a folder. The phrases are the noun chunks that
    spaCy finds, except pronouns: *a black dog* and *the snow* in *a black dog in the snow*. Raises UserError if spaCy or the
    pipeline is not installed, or if the pipeline lacks a tagger or parser.
    """
    nlp = _load_chunker(pipeline)
    doc_type = import_extra("spacy.tokens", "--chunker", "chunker").Doc
    sentences = [dict(sentence) for entry in content["images"] for sentence in entry.get("sentences", ())]
    tokenise = find_tokeniser(content.get("tokeniser", DEFAULT_TOKENISER), "dataset.json")
    texts = [sentence["tokens"] if "tokens" in sentence else tokenise(sentence["raw"]) for sentence in sentences]
    docs = nlp.pipe((doc_type(nlp.vocab, words=words) for words in texts), batch_size=_CHUNKER_BATCH_SIZE)
    n_phrases = n_without = 0
    parsed = progress_bar(docs, desc="noun phrases", total=len(texts), unit="caption")
    for sentence, doc in zip(sentences, parsed, strict=True):
        spans = [(chunk.start, chunk.end) for chunk in doc.noun_chunks if chunk.root.pos_ != "PRON"]
        sentence["phrases"] = [{"first_token": start, "n_tokens": stop - start} for start, stop in spans]
        n_phrases += len(spans)
        n_without += not spans
    log.info("%d noun phrases in %d captions by %s; %d captions have none", n_phrases, len(texts), pipeline, n_without)
    rest = iter(sentences)
    images = [{**entry, "sentences": [next(rest) for _ in entry.get("sentences", ())]} for entry in content["images"]]
    return {**content, "images": images}


def _load_chunker(pipeline: str) -> Any:
    spacy = import_extra("spacy", "--chunker", "chunker")
    try:
        nlp = spacy.load(pipeline)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{pipeline}: spaCy cannot load this pipeline ({reason}); install one with python -m spacy download en_core_web_sm"
        ) from None
    parsed = next(iter(nlp.pipe(["a dog in the snow"])))
    if not parsed.has_annotation("DEP") or not parsed.has_annotation("POS") or parsed.vocab.get_noun_chunks is None:
        raise UserError(f"{pipeline}: finds no noun phrases; the spaCy pipeline needs a tagger and a parser")
    return nlp


def check_dataset_name(name: str) -> None:
    """Raise UserError if ``name`` cannot be the name of a data set."""
    if not is_valid_name(name):
        raise UserError(f"{name!r} cannot be the name of a data set, which becomes a part of file names; give another --name")


def check_dataset_output(out: Path, name: str, inputs: Iterable[Path] = ()) -> None:
    """Raise UserError if ``out/dataset.json`` is one of ``inputs`` or, without ``--force``, another data set than ``name``."""

    def is_dataset(path: Path) -> bool:
        head, has_images, _ = read_first_bytes(path, _MAX_HEAD_BYTES).partition(b', "images": [')
        if has_images:  # written by this program: a large file need not be read
            return bool(json.loads(head + b"}").get("dataset") == name)
        content = read_json_object(path)
        return content.get("dataset") == name and isinstance(content.get("images"), list)

    check_output(out / "dataset.json", OutputKind(f"the data set {name!r}", is_dataset), inputs)


def write_json_dataset(
    content: dict[str, Any], out: Path, images: Path | None, inputs: list[Path], may_replace: bool = True
) -> Path:
    """Write ``out/dataset.json``, create the link ``out/images`` to the folder ``images``, and return the path of the file.

    If ``images`` is None, no link is created. A file that already has this content, in whatever JSON layout, is left as it
    is. The data set was built from the files ``inputs``. Raises UserError if ``out/dataset.json`` is one of them. Unless
    ``may_replace`` is true, also raises UserError if it has other content.
    """
    folder, path = out / "images", out / "dataset.json"
    check_dataset_output(out, content["dataset"], inputs)
    with lock_for_writing(out, folder=True):
        has_content = _has_equal_content(path, content)
        if not has_content and path.exists() and not may_replace:
            raise UserError(f"{path} already exists with other content; move it away, or give another --out or --force")
        remove_temporary_files(out)
        if images is not None and folder.resolve() != images.resolve():
            link_images(folder, images.resolve())
        return path if has_content else write_dataset_file(path, content)


def write_dataset_file(path: Path, content: dict[str, Any]) -> Path:
    """Write the content of a ``dataset.json`` atomically, with a line for each image; return ``path``."""
    with open_atomic(path) as stream:
        for part in _encode_json_pieces(content):
            stream.write(part)
    return path


def _has_equal_content(path: Path, content: dict[str, Any]) -> bool:
    """Return whether a ``dataset.json`` exists and has this content. The file is parsed only if its bytes differ."""
    if not path.exists():
        return False
    with path.open("rb") as stream:
        if all(stream.read(len(part)) == part for part in _encode_json_pieces(content)) and not stream.read(1):
            return True
    try:
        return bool(read_json(path) == {**content, "images": list(content["images"])})
    except UserError:  # a damaged file
        return False


def _encode_json_pieces(content: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of ``dataset.json`` in pieces: first all keys but ``images``, then the images, one per line."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    head = encode({key: value for key, value in content.items() if key != "images"})
    yield f'{head[:-1]}, "images": ['.encode()
    entries = iter(content["images"])
    separator = ""
    while part := list(islice(entries, _IMAGES_PER_WRITE)):
        lines = ",\n".join(map(encode, part))
        yield f"{separator}\n{lines}".encode()
        separator = ","
    yield b"\n]}\n"


def read_dataset_content(dataset_file: Path) -> dict[str, Any]:
    """Return the content of a ``dataset.json``. The content of a ``dataset.parquet`` is returned in the same layout."""
    if dataset_file.suffix != ".parquet":
        content: dict[str, Any] = read_json(dataset_file)
        return content
    images = load_dataset_file(dataset_file).images
    return {**read_dataset_head(dataset_file), "images": list(map(convert_image_to_entry, images))}


def check_and_describe_dataset(path: Path) -> str:
    """Return the counts of each split as text. Raises UserError if the data set is invalid or an image file is missing."""
    return describe_splits(load_and_check_dataset(path))


def load_and_check_dataset(path: Path) -> Dataset:
    """Load a data set. Raises UserError if the data set is invalid or an image file is missing."""
    dataset = load_dataset_file(path)
    missing = list_image_file_errors(dataset)
    if missing:
        raise UserError(f"{path}: {len(missing)} of {len(dataset.images)} image files are missing, the first is {missing[0]}")
    return dataset


def list_image_file_errors(dataset: Dataset) -> list[BadImage]:
    """Return an error for each image file that is missing, or whose archive is missing or has changed since the import.

    The list is empty for a data set that consists of features, without image files.
    """
    missing = []
    for image in dataset.images if dataset.has_image_files else ():
        try:
            check_image_exists(dataset.image_path(image))
        except BadImage as error:
            missing.append(error)
    return missing


def link_images(link: Path, target: Path) -> None:
    """Create the symbolic link ``link`` to ``target``, or replace an earlier link.

    Raises UserError if ``link`` is not a link, such as a real folder.
    """
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is a folder, not a link; move it away to use the images of {target}")
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{MACHINE_ID}-{os.getpid()}.link.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)


def create_album(photos: Path, out: Path, name: str | None = None, tokeniser: str | None = None) -> Path:
    """Write ``out/dataset.json`` for a folder of photos without captions, and link the folder to ``out/images``.

    All JPEG, PNG and WebP files in the folder and its subfolders become images of the split ``test``. Ids follow the order of
    the file names, so a new photo changes the ids of later ones. The data set is called ``name``, or like the folder ``out``.
    ``tokeniser`` splits queries into words. If it is None, a search uses the tokeniser of the trained model. Returns the path
    of ``dataset.json``.
    """
    if tokeniser is not None:
        find_tokeniser(tokeniser, "--tokeniser")
    files = list_photos(photos)
    name, file = name or out.resolve().name, out / "dataset.json"
    entries = [
        {
            "imgid": imgid,
            **({} if path.parent == Path() else {"filepath": path.parent.as_posix()}),
            "filename": path.name,
            "split": PHOTO_SPLIT,
            "sentences": [],
        }
        for imgid, path in enumerate(files)
    ]
    check_dataset_output(out, name)
    if file.exists() and not may_replace_other_kinds():
        earlier = read_json(file)
        captioned = not isinstance(earlier, dict) or any(image.get("sentences") for image in earlier.get("images", []))
        if captioned or earlier.get("dataset") != name:
            raise UserError(f"{file}: describes another data set and is not replaced; give another --out")
    with lock_for_writing(out, folder=True):
        remove_temporary_files(out)
        if (out / "images").resolve() != photos.resolve():
            link_images(out / "images", photos.resolve())
        return write_dataset_file(
            file, {"dataset": name, **({"tokeniser": tokeniser} if tokeniser else {}), "images": entries}
        )
