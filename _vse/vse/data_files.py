"""Files of data in the Python interface: data sets, feature caches, and the files that an import wrote."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import StrPath, as_path, check_arguments, is_integer
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.columns import caption_ids, image_ids
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.preparation import read_dataset_content
from vse.pipeline.errors import UserError
from vse.pipeline.files.photo_archives import find_archived_photo
from vse.pipeline.option_types import AllowedValues

if TYPE_CHECKING:
    from torch import Tensor


def _is_id_selection(value: object) -> bool:
    if isinstance(value, slice | np.ndarray | Iterator) or is_integer(value):
        return True
    return isinstance(value, Iterable) and all(isinstance(one, int | np.integer) for one in value)


IdSelection = Annotated[
    int | np.integer[Any] | slice | Iterable[int] | NDArray[Any],
    AllowedValues("an id, a list of ids, or [:]", _is_id_selection),
]
SingleId = Annotated[int | np.integer[Any], AllowedValues("an id", is_integer)]
N_DISPLAYED_ROWS = 5  # rows of a frame that a notebook displays


class PathWrapper:
    """A file or folder that the interface opened or wrote. Functions accept this object in place of its path."""

    @check_arguments
    def __init__(self, path: StrPath) -> None:
        self.path = as_path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"


class SavableObject:
    """An object that can be saved to a file. After that, functions accept this object in place of the file's path."""

    path: Path | None = None

    def __fspath__(self) -> str:
        if self.path is None:
            raise UserError(f'{type(self).__name__} was not saved to a file; call its method save("PATH") first')
        return str(self.path)


def build_html_summary(title: object, facts: str, frame: pd.DataFrame | None = None) -> str:
    """Return the HTML by which a notebook displays an object: a title, some facts, and the first rows of a frame."""
    rows = "" if frame is None else frame.head(N_DISPLAYED_ROWS).to_html()
    return f"<p><b>{html.escape(str(title))}</b>: {html.escape(facts)}</p>{rows}"


class DatasetFile(PathWrapper):
    """A data set in a file ``dataset.json``: images, their captions and their splits.

    Attributes:
        path (Path): the file
        name (str): the name of the data set
        frame (pandas.DataFrame): one row per caption: ``image_id``, ``caption_id``, ``split``, ``file`` (relative to the
            folder of images), ``caption``
        images (pandas.DataFrame): one row per image, also for images without a caption: ``image_id``, ``split``, ``file``,
            ``n_captions``, ``coco_id`` (the id in MS-COCO)
        splits (pandas.DataFrame): one row per split: ``n_images``, ``n_captions``
        json (dict[str, Any]): the content of the file
    """

    @check_arguments
    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self._dataset: Dataset = load_dataset_file(self.path)
        self.name = self._dataset.name

    @cached_property
    def frame(self) -> pd.DataFrame:
        rows = [(i.imgid, c.sentid, i.split, i.file, c.raw) for i in self._dataset.images for c in i.captions]
        return pd.DataFrame(rows, columns=["image_id", "caption_id", "split", "file", "caption"])

    @cached_property
    def images(self) -> pd.DataFrame:
        rows = [(i.imgid, i.split, i.file, len(i.captions), i.cocoid) for i in self._dataset.images]
        frame = pd.DataFrame(rows, columns=["image_id", "split", "file", "n_captions", "coco_id"])
        return frame.astype({"coco_id": "Int64"})

    @cached_property
    def splits(self) -> pd.DataFrame:
        counts = self.images.groupby("split", sort=False)["n_captions"].agg(["size", "sum"])
        return counts.set_axis(["n_images", "n_captions"], axis=1)

    @property
    def json(self) -> dict[str, Any]:
        return read_dataset_content(self.path)

    @check_arguments
    def image_ids(self, split: str | None = None) -> NDArray[np.int64]:
        """Return the ids of the images of a split, or of all images, (n_images,).

        Raises [`vse.UserError`][] if there is no such split.
        """
        images = self._dataset.images if split is None else self._dataset.split(split)
        return image_ids(images)

    @check_arguments
    def caption_ids(self, split: str | None = None) -> NDArray[np.int64]:
        """Return the ids of the captions of a split, or of all captions, (n_captions,).

        Raises [`vse.UserError`][] if there is no such split.
        """
        images = self._dataset.images if split is None else self._dataset.split(split)
        return caption_ids(images)

    @check_arguments
    def photo(self, image_id: SingleId) -> Path:
        """Return the path of an image file.

        Raises [`vse.UserError`][] if the data set has no such image, or if the image is in an archive and has no file.
        """
        image = self._dataset.find_image(int(image_id))
        if image is None:
            raise UserError(f"{self.path}: has no image {image_id}")
        path = self._dataset.image_path(image)
        if (archived := find_archived_photo(path)) is not None and not path.is_file():
            raise UserError(
                f"{self.path}: image {image_id} has no file; it is member {archived.member!r} of {archived.archive.location}"
            )
        return path

    def __len__(self) -> int:
        return len(self._dataset.images)

    def _repr_html_(self) -> str:
        head = build_html_summary(self.path, f"data set {self.name!r}, {len(self):,} images", self.splits)
        return head + self.frame.head(N_DISPLAYED_ROWS).to_html()


class FeatureFile(PathWrapper):
    """A feature cache, with one row of numbers for each image or caption. Rows are read from the disk by their ids.

    ``features[ids]`` returns the rows of some ids in the order of the ids: an array (n, dim). If a cache has several crops of
    each image, the array is (n, n_crops, dim). If it has a vector for each position of a CNN's feature map, the array is (n,
    n_positions, dim). In a ``ragged`` cache, such as a cache of regions, rows differ in their number of vectors, and
    ``features[ids]`` is a list of n arrays (n_regions, dim). ``features[7]`` is the row of the id 7. ``features[:]`` returns
    all rows. An id that is not in the cache raises [`vse.UserError`][].

    Attributes:
        path (Path): the file
        dataset (str): the name of the data set
        feature (str): the name of the feature
        kind (str): ``image`` for ids of images, ``text`` for ids of captions
        ids (NDArray[int64]): the ids of the rows, (n,), in the order of the rows
        shape (tuple[int | None, ...]): the shape of all rows together: (n, dim), (n, n_crops, dim), or (n, None, dim) for a
            ragged cache
        ragged (bool): whether rows differ in their number of vectors
        json (dict[str, Any]): the provenance of the rows: settings, weights, versions
    """

    @check_arguments
    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self._cache: FeatureCache = open_cache(self.path)
        self.dataset, self.feature, self.kind = self._cache.dataset, self._cache.feature, self._cache.kind
        self.ids: NDArray[np.int64] = self._cache.ids
        self.dtype = self._cache.dtype
        self.ragged = self._cache.offsets is not None
        each = (None, *self._cache.row_shape) if self.ragged else self._cache.row_shape
        self.shape: tuple[int | None, ...] = (len(self.ids), *each)

    @property
    def json(self) -> dict[str, Any]:
        return dict(self._cache.provenance)

    @check_arguments
    def __getitem__(self, ids: IdSelection) -> NDArray[Any] | list[NDArray[Any]]:
        positions = self._find_rows(ids)
        if not self.ragged:
            rows: NDArray[Any] = self._reader.read_rows(positions)
            return rows[0] if _is_single_id(ids) else rows
        regions = self._reader.read_padded_regions(positions)
        ragged: list[NDArray[Any]] = [row[mask] for row, mask in zip(regions.features, regions.mask, strict=True)]
        return ragged[0] if _is_single_id(ids) else ragged

    @check_arguments
    def tensor(self, ids: IdSelection = slice(None)) -> Tensor:
        """Return rows as a float32 tensor of torch. Rows of a ragged cache are padded with zeros to (n, longest row, dim)."""
        import torch

        positions = self._find_rows(ids)
        rows = self._reader.read_padded_regions(positions).features if self.ragged else self._reader.read_rows(positions)
        tensor = torch.from_numpy(np.array(rows, np.float32))
        return tensor[0] if _is_single_id(ids) else tensor

    @check_arguments
    def mask(self, ids: IdSelection = slice(None)) -> Tensor:
        """Return a mask (n, longest row) for the result of ``tensor``: True for vectors, False for padding.

        Raises [`vse.UserError`][] if the cache is not ragged.
        """
        import torch

        counts = self.counts(ids)
        mask = torch.from_numpy(np.arange(counts.max(initial=0)) < counts[:, None])
        return mask[0] if _is_single_id(ids) else mask

    @check_arguments
    def counts(self, ids: IdSelection = slice(None)) -> NDArray[np.int64]:
        """Return the number of vectors in each row, (n,), such as the number of regions of each image.

        Raises [`vse.UserError`][] if the cache is not ragged.
        """
        positions = self._find_rows(ids)
        if self._cache.offsets is None:
            shape = " x ".join(map(str, self._cache.row_shape))
            raise UserError(f"{self.path}: not ragged: every row has the shape {shape}, so no row is padded")
        return np.diff(self._cache.offsets)[positions]

    @check_arguments
    def boxes(self, ids: IdSelection = slice(None)) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Return the boxes of the regions of each row.

        Each array (n_regions, 4) has x1, y1, x2, y2 in pixels of the original image. Raises [`vse.UserError`][] if the cache
        has no boxes.
        """
        cached = self._reader.region_boxes
        spans = (slice(*cached.offsets[position : position + 2]) for position in self._find_rows(ids))
        boxes = [np.asarray(cached.boxes[span], np.float32) for span in spans]
        return boxes[0] if _is_single_id(ids) else boxes

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, row_id: object) -> bool:
        return isinstance(row_id, int | np.integer) and bool(np.isin(row_id, self.ids))

    @cached_property
    def _reader(self) -> FeatureReader:
        return FeatureReader(self._cache, memory_gb=0)

    def _find_rows(self, ids: IdSelection) -> NDArray[np.int64]:
        if isinstance(ids, slice):
            if ids != slice(None):
                raise UserError(
                    f"{self.path}: ids: rows are selected by ids, and a slice selects positions; take [:] or a list of ids"
                )
            return np.arange(len(self.ids))
        if isinstance(ids, int | np.integer):
            return self._reader.find_rows([int(ids)])
        wanted = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise UserError(f"{self.path}: ids must be a list of whole numbers, not {wanted.dtype} of shape {wanted.shape}")
        return self._reader.find_rows(wanted.astype(np.int64))

    def _repr_html_(self) -> str:
        return build_html_summary(self.path, f"{self._cache.describe()}; data set {self.dataset!r}, feature {self.feature!r}")


class ImportedData:
    """The files that an import wrote.

    Attributes:
        dataset (DatasetFile): the data set
        features (tuple[FeatureFile, ...]): the caches of imported vectors, for example those of clip-retrieval; empty if only
            photos were imported
    """

    def __init__(self, dataset: Path, written_files: Sequence[Path]) -> None:
        self.dataset = DatasetFile(dataset)
        self.features = tuple(FeatureFile(path) for path in written_files if path.suffix == ".h5")

    def __repr__(self) -> str:
        return f"ImportedData({self.dataset!r}, {list(self.features)!r})"

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in (self.dataset, *self.features))


def _is_single_id(ids: object) -> bool:
    return isinstance(ids, int | np.integer)
