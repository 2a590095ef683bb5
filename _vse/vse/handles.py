"""Files that the Python interface opens: a data set, a feature cache, a run."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import Allowed, StrPath, as_path, checked, is_integer
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.columns import caption_ids, image_ids
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_run_file
from vse.pipeline.files.writing import read_json
from vse.pipeline.presets.preset_files import read_yaml

if TYPE_CHECKING:
    from torch import Tensor


def _are_ids(value: object) -> bool:
    """Whether a value is a slice, an id, an array, whose type is checked where it is read, or a list of ids."""
    if isinstance(value, slice | np.ndarray | Iterator) or is_integer(value):
        return True
    return isinstance(value, Iterable) and all(isinstance(one, int | np.integer) for one in value)


RowIds = Annotated[
    int | np.integer[Any] | slice | Iterable[int] | NDArray[Any], Allowed("an id, a list of ids, or [:]", _are_ids)
]
RowId = Annotated[int | np.integer[Any], Allowed("an id", is_integer)]
_SHOWN = 5  # rows of a frame in a notebook


class OpenFile:
    """A file or folder that the interface opened or wrote; it can be given wherever its path can."""

    @checked
    def __init__(self, path: StrPath) -> None:
        self.path = as_path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"

    def _head(self, facts: str, frame: pd.DataFrame | None = None) -> str:
        """How a notebook shows the file: its path, facts of it, and the first rows of a frame."""
        rows = "" if frame is None else frame.head(_SHOWN).to_html()
        return f"<p><b>{html.escape(str(self.path))}</b>: {html.escape(facts)}</p>{rows}"


class OpenDataset(OpenFile):
    """A data set, ``dataset.json``: images, their captions and splits, checked.

    Attributes
    ----------
    path : Path
        the file
    name : str
        what the data set is called
    frame : pandas.DataFrame
        a row per caption: ``image_id``, ``caption_id``, ``split``, ``file`` (inside the folder of images), ``caption``
    images : pandas.DataFrame
        a row per image, those without a caption as well: ``image_id``, ``split``, ``file``, ``n_captions``, ``coco_id``
    splits : pandas.DataFrame
        a row per split: ``n_images``, ``n_captions``
    json : dict[str, Any]
        the content of the file
    """

    @checked
    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self._dataset: Dataset = load_dataset_file(self.path)
        self.name = self._dataset.name

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per caption."""
        rows = [(i.imgid, c.sentid, i.split, i.file, c.raw) for i in self._dataset.images for c in i.captions]
        return pd.DataFrame(rows, columns=["image_id", "caption_id", "split", "file", "caption"])

    @cached_property
    def images(self) -> pd.DataFrame:
        """A row per image."""
        rows = [(i.imgid, i.split, i.file, len(i.captions), i.cocoid) for i in self._dataset.images]
        frame = pd.DataFrame(rows, columns=["image_id", "split", "file", "n_captions", "coco_id"])
        return frame.astype({"coco_id": "Int64"})

    @cached_property
    def splits(self) -> pd.DataFrame:
        """A row per split."""
        counts = self.images.groupby("split", sort=False)["n_captions"].agg(["size", "sum"])
        return counts.set_axis(["n_images", "n_captions"], axis=1)

    @property
    def json(self) -> dict[str, Any]:
        """The content of the file."""
        content: dict[str, Any] = read_json(self.path)
        return content

    @checked
    def image_ids(self, split: str | None = None) -> NDArray[np.int64]:
        """Ids of the images (n_images,) of a split, or of all; [`vse.UserError`][] if there is no such split."""
        images = self._dataset.images if split is None else self._dataset.split(split)
        return image_ids(images)

    @checked
    def caption_ids(self, split: str | None = None) -> NDArray[np.int64]:
        """Ids of the captions (n_captions,) of a split, or of all; [`vse.UserError`][] if there is no such split."""
        images = self._dataset.images if split is None else self._dataset.split(split)
        return caption_ids(images)

    @checked
    def photo(self, image_id: RowId) -> Path:
        """The file of an image; [`vse.UserError`][] if the data set has no such image."""
        image = self._dataset.find_image(int(image_id))
        if image is None:
            raise UserError(f"{self.path}: has no image {image_id}")
        return self._dataset.image_path(image)

    def __len__(self) -> int:
        return len(self._dataset.images)

    def _repr_html_(self) -> str:
        return self._head(f"data set {self.name!r}, {len(self):,} images", self.splits) + self.frame.head(_SHOWN).to_html()


class OpenFeatures(OpenFile):
    """A feature cache: a row of numbers for each image or caption, read by id where they lie on the disk.

    ``features[ids]`` are the rows of some ids in their order: (n, dim), or (n, n_crops, dim) and (n, n_positions, dim) of
    banks of crops and of grids. Of a ``ragged`` cache, such as one of regions, it is a list of n arrays (n_regions, dim).
    ``features[7]`` is the row of one id, ``features[:]`` all rows. [`vse.UserError`][] names an id that the cache lacks.

    Attributes
    ----------
    path : Path
        the file
    dataset : str
        name of the data set
    feature : str
        name of the feature
    kind : str
        ``image`` or ``text``: whose ids they are
    ids : NDArray[int64]
        (n,) of the rows, in their order
    shape : tuple[int | None, ...]
        of all rows together: (n, dim), (n, n_crops, dim), or of a ragged cache (n, None, dim)
    ragged : bool
        whether rows have numbers of vectors of their own
    json : dict[str, Any]
        what the rows were made from: settings, weights, versions
    """

    @checked
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
        """What the rows were made from."""
        return dict(self._cache.provenance)

    @checked
    def __getitem__(self, ids: RowIds) -> NDArray[Any] | list[NDArray[Any]]:
        positions = self._positions(ids)
        if not self.ragged:
            rows: NDArray[Any] = self._reader.rows(positions)
            return rows[0] if _is_one(ids) else rows
        regions = self._reader.regions(positions)
        sets: list[NDArray[Any]] = [row[mask] for row, mask in zip(regions.features, regions.mask, strict=True)]
        return sets[0] if _is_one(ids) else sets

    @checked
    def tensor(self, ids: RowIds = slice(None)) -> Tensor:
        """The rows as a float32 tensor of torch; ragged ones are padded with zeros to (n, longest, dim)."""
        import torch

        positions = self._positions(ids)
        rows = self._reader.regions(positions).features if self.ragged else self._reader.rows(positions)
        tensor = torch.from_numpy(np.array(rows, np.float32))
        return tensor[0] if _is_one(ids) else tensor

    @checked
    def mask(self, ids: RowIds = slice(None)) -> Tensor:
        """Where a padded ``tensor`` has vectors: (n, longest) booleans; [`vse.UserError`][] if it is not ragged."""
        import torch

        counts = self.counts(ids)
        mask = torch.from_numpy(np.arange(counts.max(initial=0)) < counts[:, None])
        return mask[0] if _is_one(ids) else mask

    @checked
    def counts(self, ids: RowIds = slice(None)) -> NDArray[np.int64]:
        """How many vectors each row of a ragged cache has, (n,); [`vse.UserError`][] if it is not ragged."""
        positions = self._positions(ids)
        if self._cache.offsets is None:
            raise UserError(f"{self.path}: all its rows are {' x '.join(map(str, self._cache.row_shape))}, none is padded")
        return np.diff(self._cache.offsets)[positions]

    @checked
    def boxes(self, ids: RowIds = slice(None)) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Where the regions of each row lie: arrays (n_regions, 4) of x1, y1, x2, y2 in pixels of the original image."""
        of_cache = self._reader.boxes
        spans = (slice(*of_cache.offsets[position : position + 2]) for position in self._positions(ids))
        boxes = [np.asarray(of_cache.boxes[span], np.float32) for span in spans]
        return boxes[0] if _is_one(ids) else boxes

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, row_id: object) -> bool:
        return isinstance(row_id, int | np.integer) and bool(np.isin(row_id, self.ids))

    @cached_property
    def _reader(self) -> FeatureReader:
        return FeatureReader(self._cache, memory_gb=0)

    def _positions(self, ids: RowIds) -> NDArray[np.int64]:
        if isinstance(ids, slice):
            if ids != slice(None):
                raise UserError(
                    f"{self.path}: rows are read by their ids, and a slice is of places; take [:] or a list of ids"
                )
            return np.arange(len(self.ids))
        if isinstance(ids, int | np.integer):
            return self._reader.positions([int(ids)])
        wanted = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise UserError(f"{self.path}: ids are a list of whole numbers, not {wanted.dtype} of shape {wanted.shape}")
        return self._reader.positions(wanted.astype(np.int64))

    def _repr_html_(self) -> str:
        return self._head(f"{self._cache.describe()}; data set {self.dataset!r}, feature {self.feature!r}")


class Run(OpenFile):
    """A trained model: the folder of a run.

    Attributes
    ----------
    path : Path
        the folder
    frame : pandas.DataFrame
        a row per epoch, as in ``metrics.csv``: learning rate, loss, recalls on the validation split, seconds
    json : dict[str, Any]
        the record of the run, ``run.json``: what it was made from, its state, its best epoch
    settings : dict[str, Any]
        every setting of its experiment, as in ``config.yaml``
    """

    @checked
    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        for name in ("run.json", "config.yaml"):
            if not (self.path / name).is_file():
                raise UserError(f"{self.path}: no run, it has no {name}; vse.train returns one")

    @cached_property
    def json(self) -> dict[str, Any]:
        """The record of the run."""
        record: dict[str, Any] = read_json(self.path / "run.json")
        return record

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the experiment."""
        settings: dict[str, Any] = read_yaml(self.path / "config.yaml")
        return settings

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per epoch."""
        return pd.read_csv(BytesIO(read_run_file(self.path / "metrics.csv", self.json)[0]))

    def _repr_html_(self) -> str:
        record = self.json
        facts = {
            "data set": "dataset",
            "experiment": "experiment",
            "seed": "seed",
            "state": "state",
            "best epoch": "best_epoch",
        }
        said = ", ".join(f"{what} {record[key]}" for what, key in facts.items() if key in record)
        return self._head(said, self.frame.tail(_SHOWN))


class ImportedData:
    """What an import wrote.

    Attributes
    ----------
    dataset : OpenDataset
        the data set
    features : tuple[OpenFeatures, ...]
        the caches that came with it, such as the vectors of clip-retrieval; there may be none
    """

    def __init__(self, written: Sequence[Path]) -> None:
        self.dataset = OpenDataset(next(path for path in written if path.suffix == ".json"))
        self.features = tuple(OpenFeatures(path) for path in written if path.suffix != ".json")

    def __repr__(self) -> str:
        return f"ImportedData({self.dataset!r}, {list(self.features)!r})"

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in (self.dataset, *self.features))


def _is_one(ids: object) -> bool:
    """Whether that is a single id."""
    return isinstance(ids, int | np.integer)
