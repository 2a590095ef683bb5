"""Readers of the arrays and texts that a user passes to a model. Errors explain what to pass instead of a wrong value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.features.exchange.embeddings import ArrayData
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import AllowedValues, is_text
from vse.pipeline.options import format_value

# The functions of this module check these values, so that error messages can explain what to pass instead.
_ANY_VALUE = AllowedValues("an array", lambda value: True)
VectorsOrPaths = Annotated[Any, _ANY_VALUE]
VectorsOrTexts = Annotated[Any, _ANY_VALUE]
ImageRows = Annotated[Any, _ANY_VALUE]
ValidationData = Annotated[Any, _ANY_VALUE]
VectorFunction = Annotated[
    Callable[[list[str]], Any], AllowedValues("a function from a list of texts or paths to their vectors", callable)
]
_NON_VECTOR_TYPES = (str, bytes, os.PathLike, Mapping, set, frozenset, Iterator)


def to_numpy(array: Any) -> NDArray[Any]:
    """Return an array of numpy or torch, or nested lists, as an array of numpy."""
    if hasattr(array, "detach"):
        tensor = array.detach().cpu()
        array = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
    return np.asarray(array)


def are_texts(value: Any) -> bool:
    """Return whether a value is a text or path, or a list whose first item is a text or path."""
    first = next(iter(value), None) if _is_list(value) else value
    return isinstance(first, str | os.PathLike)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | pd.Series | pd.Index) or (isinstance(value, np.ndarray) and value.ndim == 1)


def read_vectors(argument: str, value: Any) -> NDArray[np.float32]:
    """Return vectors as a float32 array (n, dim), or sets of vectors as a float32 array (n, n_vectors, dim).

    ``value`` is an array of numpy or torch, a frame of pandas, a sparse matrix, a list of vectors, or nested lists. Raises
    UserError for any other value, and for numbers that are not finite. ``argument`` is the name of the argument for messages.
    """
    array = _to_array_of_numbers(argument, value)
    if array.ndim not in (2, 3):
        advice = {
            0: "an array of vectors is needed",
            1: "vectors have the shape (n, dim); pass numpy.stack(VECTORS) for a list of vectors, or VECTOR[None] for one",
        }.get(array.ndim, "vectors have the shape (n, dim); vse.extract computes vectors of photos")
        raise UserError(f"{argument}: an array of shape {array.shape}, but {advice}")
    if not array.size:
        raise UserError(f"{argument}: an empty array of shape {array.shape}; at least one vector is needed")
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(array, np.float32)
    finite = np.isfinite(vectors).reshape(len(vectors), -1).all(axis=1)
    if not finite.all():
        row = int(finite.argmin())
        raise UserError(
            f"{argument}: row {row} is not finite in float32 (NaN or infinite); leave such rows out, or pass "
            f"numpy.nan_to_num({argument})"
        )
    return vectors


def _to_array_of_numbers(argument: str, value: Any) -> NDArray[Any]:
    if are_texts(value):
        raise UserError(f"{argument}={format_value(value)}: {_explain_why_not_vectors(value)}")
    if value is None or isinstance(value, _NON_VECTOR_TYPES):
        hint = "; pass list(...) of it" if isinstance(value, Iterator) else ""
        raise UserError(f"{argument}={format_value(value)}: an array of vectors is needed{hint}")
    if isinstance(value, pd.DataFrame):
        others = [name for name, kind in value.dtypes.items() if kind.kind not in "biuf"]
        if others:
            raise UserError(
                f"{argument}: the column {others[0]!r} has no numbers; select the columns of the vector, frame[COLUMNS], or "
                "numpy.stack(frame[COLUMN]) if one column has the vectors"
            )
        return value.to_numpy(np.float64, na_value=np.nan)
    if hasattr(value, "toarray"):  # a sparse matrix of scipy
        value = value.toarray()
    try:
        rows = [to_numpy(row) for row in value] if _holds_arrays(value) else None
        array = to_numpy(value) if rows is None else np.stack(rows)
    except (ValueError, TypeError, RuntimeError):
        raise UserError(f"{argument}={format_value(value)}: the rows are not vectors of the same length") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{argument}={format_value(value)}: an array of real numbers is needed, not of {array.dtype}")
    return array


def _holds_arrays(value: Any) -> bool:
    """Return whether a value is a list of arrays or tensors, or a column of pandas whose cells are vectors."""
    if not _is_list(value) or not len(value):
        return False
    return hasattr(next(iter(value)), "shape") or str(getattr(value, "dtype", "")) == "object"


def _explain_why_not_vectors(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return "an array is needed, not a path; numpy.load reads a file of an array, and vse.train trains on a feature cache"
    return (
        "vectors are needed, not texts or paths; compute them first, or pass the function that does so to vse.Model: "
        "photo_features for photos, text_features for texts. vse.import_data and vse.extract read photos, too"
    )


def read_texts(argument: str, value: Any) -> list[str]:
    """Return texts or paths as a list of strings. Raises UserError if an item is empty or of another type."""
    if isinstance(value, str | os.PathLike):
        raise UserError(f"{argument}={format_value(value)}: a list is needed; pass [{format_value(value)}]")
    texts = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
    for row, text in enumerate(texts):
        if not is_text(text):
            raise UserError(f"{argument}: row {row} is {format_value(text)}, and not a text; leave such rows out")
        if not text.strip():
            raise UserError(f"{argument}: row {row} is empty; leave such rows out")
    return [str(text) for text in texts]


def read_image_rows(argument: str, value: Any, n_images: int, n_captions: int) -> NDArray[np.int64]:
    """Return for each caption the row of its image, (n_captions,).

    ``value`` has these rows as the user passed them. None stands for one caption per image, in the same order. ``argument`` is
    the name of the argument for messages. Raises UserError if there are not ``n_captions`` rows, or if a row is not from 0 to
    ``n_images - 1``.
    """
    if value is None:
        if n_captions == n_images:
            return np.arange(n_images)
        each, rest = divmod(n_captions, n_images)
        example = f", e.g. numpy.repeat(numpy.arange({n_images}), {each})" if not rest and each > 1 else ""
        raise UserError(
            f"{argument}=None: {n_captions} captions for {n_images} images; pass the row of each caption's image{example}"
        )
    try:
        rows = to_numpy(value)
    except (ValueError, TypeError, RuntimeError):
        rows = np.empty((0, 0))
    if rows.ndim != 1 or rows.dtype.kind not in "iuf" or not np.array_equal(rows, rows.astype(np.int64)):
        raise UserError(f"{argument}={format_value(value)}: one whole number for each caption is needed, the row of its image")
    if len(rows) != n_captions:
        raise UserError(f"{argument}: {len(rows)} numbers for {n_captions} captions; one for each caption is needed")
    rows = rows.astype(np.int64)
    outside = (rows < 0) | (rows >= n_images)
    if outside.any():
        raise UserError(
            f"{argument}: {rows[outside][0]} is not a row of the {n_images} images; if these are ids, pass "
            "pandas.Index(IDS_OF_IMAGES).get_indexer(IDS)"
        )
    return rows


def read_image_input(
    argument: str, value: Any, photo_features: Callable[[list[str]], Any] | None
) -> tuple[NDArray[np.float32], list[str] | None]:
    """Return the vectors of images, and the paths of their photos.

    If ``value`` has paths of photos, ``photo_features`` computes their vectors. If ``value`` has vectors, the returned paths
    are None. Raises UserError if ``value`` has paths, and ``photo_features`` is None.
    """
    if photo_features is None or not are_texts(value):
        return read_vectors(argument, value), None
    paths = read_texts(argument, value)
    return _compute_vectors("photo_features", photo_features, paths), paths


def read_caption_input(
    argument: str, value: Any, text_features: Callable[[list[str]], Any] | None
) -> tuple[NDArray[np.float32] | None, list[str] | None]:
    """Return the vectors and the texts of captions.

    If ``value`` has texts, ``text_features`` computes their vectors. If ``text_features`` is None, the returned vectors are
    None, too. If ``value`` has vectors, the returned texts are None.
    """
    if not are_texts(value):
        if _is_list(value) and len(value) and _is_list(first := next(iter(value))) and are_texts(first):
            raise UserError(
                f"{argument}: a list of lists; pass one list, [text for texts in {argument} for text in texts], and "
                f"image_of_caption=[row for row, texts in enumerate({argument}) for text in texts]"
            )
        return read_vectors(argument, value), None
    texts = read_texts(argument, value)
    return None if text_features is None else _compute_vectors("text_features", text_features, texts), texts


def _compute_vectors(name: str, compute: Callable[[list[str]], Any], inputs: Sequence[str]) -> NDArray[np.float32]:
    vectors = read_vectors(f"{name}(...)", compute(list(inputs)))
    if len(vectors) != len(inputs):
        raise UserError(f"{name}: returned {len(vectors)} vectors for {len(inputs)} inputs; one for each is needed")
    return vectors


def read_array_data(
    images: Any,
    captions: Any,
    image_of_caption: Any,
    photo_features: Callable[[list[str]], Any] | None = None,
    text_features: Callable[[list[str]], Any] | None = None,
) -> tuple[ArrayData, list[str] | None]:
    """Return images and captions as arrays, and the paths of the photos. The paths are None if ``images`` are vectors.

    ``image_of_caption`` has the row of each caption's image; None stands for one caption per image. ``photo_features`` and
    ``text_features`` compute the vectors of photos and texts.
    """
    image_vectors, paths = read_image_input("images", images, photo_features)
    caption_vectors, texts = read_caption_input("captions", captions, text_features)
    n_captions = len(texts if caption_vectors is None and texts is not None else caption_vectors)  # type: ignore[arg-type]
    rows = read_image_rows("image_of_caption", image_of_caption, len(image_vectors), n_captions)
    return ArrayData(image_vectors, caption_vectors, texts, rows), paths


def read_validation(value: Any) -> tuple[Any, Any, Any]:
    """Return the images, the captions and the image_of_caption in ``value``, the argument ``validation`` of a user.

    ``value`` is a tuple of 2 or 3 items. With 2 items, image_of_caption is None, for one caption per image.
    """
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise UserError(f"validation={format_value(value)}: a tuple (images, captions, image_of_caption) is needed")
    return value[0], value[1], value[2] if len(value) == 3 else None


def read_query_vectors(query: Any, is_set: bool) -> NDArray[np.float32]:
    """Return a query vector as an array (1, dim). With ``is_set``, return a set of vectors as an array (1, n_vectors, dim)."""
    if query is None or are_texts(query):
        raise UserError(f"query={format_value(query)}: a single text, path or vector is needed")
    vectors = read_vectors("query", [query])
    return vectors[0] if vectors.ndim == 3 and len(vectors[0]) == 1 and not is_set else vectors
