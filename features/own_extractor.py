"""Try a user's own extractor on three small images or captions before an extraction."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vse.features.cache.rows import ExtractorInput, FeatureRows
from vse.features.settings.base import ExtractionArguments, Extractor, FeatureSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import explain_own_errors

EXTRACTOR_FORM = (
    "an extractor of images has two methods. `prepare(self, image, image_id)` takes an RGB image of Pillow. "
    "`compute_vectors(self, batch)` takes a list of results of `prepare` and returns a list of the same length, such as "
    "`[ImageVectors(vector) for vector in batch]` with a NumPy vector each (vse new extractor FILE.py writes an example)"
)
_SIZES = ((48, 32), (32, 48), (40, 40))


def check_extractor(settings: FeatureSettings, arguments: ExtractionArguments) -> Extractor:
    """Extract three small images twice, alone and together, and return the extractor. Only images are tried.

    Raises UserError if the extractor does not return one finite vector, or one matrix of vectors, of the same length for
    each image, or if the vectors of an image depend on the batch or on chance.
    """
    with explain_own_errors(settings.extractor_name(), EXTRACTOR_FORM):
        extractor = settings.build_extractor(arguments)
    if not isinstance(extractor, Extractor):
        found = type(extractor).__name__
        raise UserError(f"{settings.extractor_name()}: build_extractor returns {found}, not an Extractor; {EXTRACTOR_FORM}")
    if settings.kind != "image":
        return extractor
    with tempfile.TemporaryDirectory() as folder:
        items = [_save_photograph(Path(folder), k, size) for k, size in enumerate(_SIZES)]
        together = _extract(settings, extractor, items)
        for k, item in enumerate(items):
            alone = np.asarray(_extract(settings, extractor, [item]).features)
            same = np.asarray(together.features)[k : k + 1] if together.offsets is None else _select_set(together, k)
            if alone.shape != same.shape or not np.allclose(alone, same, rtol=1e-2, atol=1e-3):
                raise _refuse(settings, "the vectors of an image change with the batch, or from call to call")
    return extractor


def _save_photograph(folder: Path, k: int, size: tuple[int, int]) -> ExtractorInput:
    path = folder / f"photograph-{k}.png"
    pixels = np.random.default_rng(k).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return ExtractorInput(id=k, path=path)


def _extract(settings: FeatureSettings, extractor: Extractor, items: list[ExtractorInput]) -> FeatureRows:
    with explain_own_errors(settings.extractor_name(), EXTRACTOR_FORM):
        rows = extractor.extract(items)
    n_rows = len(rows.features) if rows.offsets is None else len(rows.offsets) - 1
    if n_rows != len(items):
        raise _refuse(settings, f"compute_vectors returns {n_rows} results for {len(items)} images")
    n_axes = rows.features.ndim - 1 + (rows.offsets is not None)
    if n_axes != (1 if settings.row_kind == "vectors" else 2):
        found = {1: "one vector", 2: "several vectors"}.get(n_axes, f"an array of {n_axes} axes")
        raise _refuse(settings, f"it returns {found} for each image, and row_kind of its settings is {settings.row_kind!r}")
    features = np.asarray(rows.features)
    if not features.size:
        raise _refuse(settings, "its vectors are empty")
    if not np.isfinite(features.astype(np.float64)).all():
        raise _refuse(settings, f"a number is not finite as {rows.features.dtype}; scale the vectors or set dtype=float32")
    return replace(rows, features=features)


def _select_set(rows: FeatureRows, k: int) -> NDArray[np.generic]:
    assert rows.offsets is not None
    return np.asarray(rows.features)[rows.offsets[k] : rows.offsets[k + 1]]


def _refuse(settings: FeatureSettings, fault: str) -> UserError:
    return UserError(f"{settings.extractor_name()}, tried on {len(_SIZES)} images: {fault}; {EXTRACTOR_FORM}")
