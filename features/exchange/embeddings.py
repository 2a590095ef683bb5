"""Write vectors from memory as caches on which a model can be trained.

The vectors are a user's arrays, or embeddings of images and captions by a trained model, here called the *backbone*.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.rows import CacheIdentity, FeatureKind, FeatureRows, Ids, list_row_ids
from vse.features.cache.shards import (
    check_cache_output,
    parse_feature_name,
    shard_path,
    shard_slice,
    shards_folder,
    write_shard,
)
from vse.features.exchange.arrays import MAX_SHARD_BYTES, hash_rows, write_imported_cache
from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.preparation import write_json_dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import is_path_text
from vse.pipeline.files.writing import lock_for_writing, sha256_json

KIND_PLURALS: dict[FeatureKind, str] = {"image": "images", "text": "captions"}  # used in file names and messages


@dataclass(frozen=True)
class Backbone:
    """The model whose embeddings a cache holds.

    sha256 : hash of the model's weights; for embeddings by another program, a hash of the files with all embeddings
    experiment : name of the model's experiment
    more_provenance : further entries of the cache's provenance, e.g. the seed of the model
    run_folder : run folder of the model; None if another program trained the model
    """

    sha256: str
    experiment: str
    more_provenance: Mapping[str, Any] = field(default_factory=dict)
    run_folder: Path | None = None


def build_cache_paths(out: Path) -> dict[FeatureKind, Path]:
    """Return the paths of a model's caches of images and captions. Raises UserError if ``out`` ends in ``.h5``.

    The paths for ``features/demo_vsepp-0`` are ``features/demo_vsepp-0_images.h5`` and ``features/demo_vsepp-0_captions.h5``.
    """
    if out.suffix == ".h5":
        raise UserError(f"{out}: is the beginning of the names of two caches, so leave .h5 out")
    return {kind: out.with_name(f"{out.name}_{plural}.h5") for kind, plural in KIND_PLURALS.items()}


def captions_cache_path(images_cache: Path) -> Path:
    """Return the path of a model's cache of captions, given the path of its cache of images."""
    return images_cache.with_name(f"{images_cache.name.removesuffix('_images.h5')}_captions.h5")


def read_backbone(cache: FeatureCache) -> Backbone | None:
    """Return the model whose embeddings a cache holds; None for other features."""
    details, sha256, run = (cache.provenance.get(name) for name in ("backbone", "backbone_sha256", "backbone_run"))
    if not isinstance(details, dict) or not isinstance(sha256, str):
        return None
    run_folder = cache.path.parent / str(run) if is_path_text(run) else None
    return Backbone(sha256, str(details.get("experiment")), details, run_folder)


def write_embeddings_cache(
    out: Path,
    dataset: Dataset,
    kind: FeatureKind,
    backbone: Backbone,
    ids: Ids,
    read_vectors: Callable[[Ids], NDArray[np.float32]],
    skipped: Mapping[int, str],
) -> Path:
    """Write the embeddings of images or of captions as a cache of float32 vectors; return ``out``.

    An existing cache of the same data set and feature is replaced.

    ids : (n,) ids of the images or captions of the data set, in the order of ``dataset.json``
    read_vectors : function that returns the embeddings (m, dim) of m ids
    skipped : for each id without an embedding, the reason why it has none
    """
    content = {
        "backbone": {"experiment": backbone.experiment, **backbone.more_provenance},
        "backbone_sha256": backbone.sha256,
        "requested_ids_sha256": sha256_json(ids.tolist()),
        "extractor_version": 1,
    }
    identity = CacheIdentity(dataset.name, parse_feature_name(out, dataset.name), kind, content)
    notes = (
        {}
        if backbone.run_folder is None
        else {"backbone_run": Path(os.path.relpath(backbone.run_folder, out.parent)).as_posix()}
    )
    embedded = np.asarray([i for i in ids.tolist() if i not in skipped], np.int64)
    n_shards = min(len(ids), max(1, -(-len(embedded) * read_vectors(embedded[:1]).nbytes // MAX_SHARD_BYTES)))
    check_cache_output(out, dataset.name, identity.feature, [dataset.path])
    with lock_for_writing(out):
        out.unlink(missing_ok=True)
        for old_file in shards_folder(out).glob("shard-*"):
            old_file.unlink()
        for index in range(n_shards):
            shard_ids = ids[shard_slice(len(ids), index, n_shards)]
            present = np.asarray([i for i in shard_ids.tolist() if i not in skipped], np.int64)
            left_out = [{"id": i, "path": "", "reason": skipped[i]} for i in shard_ids.tolist() if i in skipped]
            features = read_vectors(present)
            hashes = hash_rows(features) if len(features) else np.empty((0, 32), np.uint8)
            rows = FeatureRows(present, features, hashes, skipped=left_out)
            write_shard(shard_path(out, index, n_shards), identity, rows, notes)
        return open_cache(merge_shards(out, n_shards, dataset.path, ids, dataset=dataset)).path


ARRAYS_DATASET_NAME = "arrays"  # the name of the data set
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ArrayData:
    """Images as vectors, and their captions as vectors, as texts, or both. Row indices serve as ids.

    images : (n_images, dim), or sets of vectors (n_images, n_regions, dim)
    captions : (n_captions, dim), or sets of vectors; None if the captions are only texts
    texts : n_captions texts; None if the captions are only vectors
    image_of_caption : (n_captions,) index of each caption's image in ``images``
    """

    images: Vectors
    captions: Vectors | None
    texts: Sequence[str] | None
    image_of_caption: NDArray[np.int64]

    def concatenate(self, other: ArrayData) -> ArrayData:
        """Return the images and captions of ``self``, then those of ``other``. The same fields must be None in both."""
        return ArrayData(
            images=np.concatenate([self.images, other.images]),
            captions=_concatenate_optional(self.captions, other.captions),
            texts=None if self.texts is None or other.texts is None else [*self.texts, *other.texts],
            image_of_caption=np.concatenate([self.image_of_caption, other.image_of_caption + len(self.images)]),
        )


def _concatenate_optional(first: Vectors | None, second: Vectors | None) -> Vectors | None:
    return None if first is None or second is None else np.concatenate([first, second])


def sample_validation_images(data: ArrayData, share: float, seed: int) -> Ids:
    """Return the indices of a random share of the images that have captions, but at least one index.

    Raises UserError if fewer than two images have captions: at least one image is needed for training.
    """
    captioned = np.unique(data.image_of_caption)
    if len(captioned) < 2:
        raise UserError(f"images: {len(captioned)} image with captions; at least 2 are needed, because one is for validation")
    n_validation = max(1, round(share * len(captioned)))
    return np.sort(np.random.default_rng(seed).choice(captioned, n_validation, replace=False))


def write_array_data(data: ArrayData, validation: Ids, folder: Path) -> tuple[Path, Path | None]:
    """Write a data set and the caches of its vectors to ``folder``. Return the caches of images and of captions.

    ``validation`` holds the indices of the images for validation; all other images are training images. The second result is
    None if the captions are only texts. If the captions are only vectors, each gets a text with its index, such as
    ``caption 17``.
    """
    dataset = load_dataset_file(_write_dataset(data, validation, folder))
    captions = None if data.captions is None else _write_cache(data.captions, dataset, "text", folder)
    return _write_cache(data.images, dataset, "image", folder), captions


def _write_dataset(data: ArrayData, validation: Ids, folder: Path) -> Path:
    tokenise = find_tokeniser(IMPORT_TOKENISER, "captions")
    sentences: list[list[dict[str, object]]] = [[] for _ in data.images]
    for row, image in enumerate(data.image_of_caption.tolist()):
        text = f"caption {row}" if data.texts is None else data.texts[row]
        tokens = tokenise(text)
        if not tokens:
            raise UserError(f"captions: row {row} is {text!r:.60}, which has no word; leave it out")
        sentences[image].append({"sentid": row, "imgid": image, "raw": text, "tokens": tokens})
    is_validation = np.isin(np.arange(len(data.images)), validation).tolist()
    images = [
        {"imgid": row, "filename": str(row), "split": "val" if is_validation[row] else "train", "sentences": listed}
        for row, listed in enumerate(sentences)
    ]
    content = {"dataset": ARRAYS_DATASET_NAME, "tokeniser": IMPORT_TOKENISER, "pictures": False, "images": images}
    return write_json_dataset(content, folder, None, [])


def _write_cache(vectors: Vectors, dataset: Dataset, kind: FeatureKind, folder: Path) -> Path:
    ids = list_row_ids(dataset, kind)

    def read_rows(row_slice: slice) -> FeatureRows:
        values = vectors[ids[row_slice]]
        return FeatureRows(ids[row_slice], values, hash_rows(values))

    layout = {"layout": ARRAYS_DATASET_NAME, "array_sha256": hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest()}
    out = folder / f"{ARRAYS_DATASET_NAME}_{'images' if kind == 'image' else 'captions'}.h5"
    return write_imported_cache(out, dataset, kind, layout, [], ids, read_rows, vectors[:1].nbytes)
