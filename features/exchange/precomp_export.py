"""Export a cache and its captions in the layout of VSE++ and SCAN (see :mod:`vse.features.exchange.precomp`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.data_checks import check_data
from vse.features.exchange.precomp import SPLITS, CaptionFile
from vse.pipeline.dataset.dataset import Image, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.files.outputs import OutputKind, check_output, read_first_bytes
from vse.pipeline.files.writing import open_atomic, read_json, write_bytes


def export_precomp(features: Path, out: Path, captions: Path | None = None, repeats: int | None = None) -> Path:
    """Write a cache and its captions in the layout; returns the folder ``out``.

    An imported data set is exported byte for byte as it was (docs/formats.md lists the exceptions). Other data sets are
    written with one row per image, LF as the line end, and ids. Raises UserError if the layout cannot hold the data set.

    Parameters
    ----------
    captions : the ``dataset.json``; by default that to which the cache refers
    repeats : rows per image; by default as imported, else 1
    """
    cache = open_cache(features)
    if cache.kind != "image":
        raise UserError(f"{features}: {cache.kind} features; the layout holds features of images")
    path = captions or cache.captions
    dataset = load_dataset_file(path)
    check_data(cache, dataset)
    layouts: Mapping[str, Any] = read_json(path).get("precomp", {})
    with wrap_read_errors(path, "a data set with a valid entry 'precomp'"):
        _check_layouts(layouts)
    reader = FeatureReader(cache)
    texts: dict[Path, bytes] = {}
    arrays: dict[Path, tuple[Sequence[Image], int]] = {}
    for split, images in dataset.splits.items():
        layout = layouts.get(split, {"name": "dev" if split == "val" else split})
        name, times = layout["name"], repeats or layout.get("repeats", 1)
        text = CaptionFile(
            captions=tuple(caption.raw for image in images for caption in image.captions),
            bom=layout.get("bom", False),
            newline=layout.get("newline", "\n"),
            final_newline=layout.get("ends", True),
        )
        _check_split(path, images, times, text)
        arrays[out / f"{name}_ims.npy"] = images, times
        texts[out / f"{name}_caps.txt"] = text.to_bytes()
        if layout.get("ids", True):
            id_times = times if repeats else layout.get("ids_repeats", times)
            lines = [str(image.imgid) for image in images for _ in range(id_times)]
            newline, final_newline = layout.get("ids_text") or ("\n", True)
            texts[out / f"{name}_ids.txt"] = (newline.join(lines) + newline * final_newline).encode()
    for file in (*texts, *arrays):
        # A text must have exactly these bytes, an array must begin with its header and first rows.
        start = texts[file] if file in texts else b"".join(islice(_array_parts(reader, *arrays[file]), 2))
        kind = OutputKind("the same export", partial(_begins_with, start, complete=file in texts))
        check_output(file, kind, [path, cache.path])
    for file, content in texts.items():
        write_bytes(file, content)
    for file, (images, times) in arrays.items():
        with open_atomic(file) as stream:  # not a memory map: on a full disk, writing to it ends the process with a bus error
            stream.writelines(_array_parts(reader, images, times))
    return out


def _begins_with(start: bytes, path: Path, complete: bool) -> bool:
    """Return whether a file begins with these bytes or, if ``complete``, consists of them."""
    return read_first_bytes(path, len(start) + complete) == start


def _check_layouts(layouts: Mapping[str, Any]) -> None:
    """Check the entry ``precomp`` of ``dataset.json``, whose names become file names. Raises ValueError."""
    for split, layout in layouts.items():
        newline, final_newline = layout.get("ids_text") or ("\n", True)
        newlines = {newline, layout.get("newline", "\n")}
        flags = [final_newline, *(layout.get(name, True) for name in ("bom", "ends", "ids"))]
        times = layout.get("repeats", 1)
        is_split = isinstance(layout["name"], str) and SPLITS.get(layout["name"]) == split
        if (
            not is_split
            or not newlines <= {"\n", "\r\n"}
            or {type(flag) for flag in flags} != {bool}
            or type(times) is not int
        ):
            raise ValueError(f"the layout of split {split!r} is not valid")


def _check_split(path: Path, images: Sequence[Image], times: int, text: CaptionFile) -> None:
    """Check that the layout can hold a split. Raises UserError."""
    counts = {len(image.captions) for image in images}
    if len(counts) > 1:
        raise UserError(
            f"{path}: images have {min(counts)} to {max(counts)} captions; the layout needs the same number for each image"
        )
    if times not in (1, *counts):
        raise UserError(f"--repeat {times}: an image has {counts.pop()} captions, so --repeat must be 1 or that number")
    multiline = next((caption for caption in text.captions if "\n" in caption), None)
    if multiline is not None:
        raise UserError(f"{path}: the caption {multiline!r} contains a line feed; the layout needs one line per caption")


def _array_parts(reader: FeatureReader, images: Sequence[Image], times: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a ``.npy`` file of the images' features: first its header, then blocks of rows."""
    cache = reader.cache
    positions = reader.positions(image.imgid for image in images)
    shape: tuple[int, ...] = cache.row_shape
    if cache.offsets is not None:
        counts = np.unique(np.diff(cache.offsets)[positions])
        if len(counts) > 1:
            raise UserError(
                f"{cache.path}: images have {counts[0]} to {counts[-1]} regions; the layout needs equally many for each image"
            )
        shape = (int(counts[0]), *shape)
    header = {"descr": np.lib.format.dtype_to_descr(cache.dtype), "fortran_order": False}
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(stream, {**header, "shape": (len(positions) * times, *shape)})
    yield stream.getvalue()
    for k in range(0, len(positions), 512):
        block = positions[k : k + 512]
        values = reader.rows(block) if cache.offsets is None else reader.regions(block).features
        yield np.ascontiguousarray(np.repeat(values, times, axis=0)).data.cast("B")
