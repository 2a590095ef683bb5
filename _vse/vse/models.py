"""The model of the Python interface that is fitted to arrays in memory."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vse.arguments import ChangedSettings, Paths, StrPath, as_path, check_arguments, public_api, settings_as_texts
from vse.array_inputs import (
    ImageRows,
    ValidationData,
    VectorFunction,
    VectorsOrPaths,
    VectorsOrTexts,
    read_array_data,
    read_texts,
    read_validation,
)
from vse.data_files import N_DISPLAYED_ROWS, build_html_summary
from vse.encoding import DATA_FOLDER, EncodingModel, FittedRun, InputEncoder
from vse.features.exchange.embeddings import ARRAYS_DATASET_NAME, ArrayData, sample_validation_images, write_array_data
from vse.features.options import ExtractOptions, FeatureRequest
from vse.pipeline.dataset.photo_folder import QUERY_PHOTO_SUFFIXES
from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.option_types import NonNegativeInteger, PositiveInteger
from vse.pipeline.options import format_value
from vse.reports import SearchResults
from vse.training.options import TrainInputs, TrainOptions, TrainRequest

if TYPE_CHECKING:
    from vse.training.experiment import ExperimentConfig

_VALIDATION_SHARE = 0.1  # share of the images that are used for validation if the user passes no validation data


class Model(EncodingModel):
    """A model of images and captions that is fitted to arrays. It follows the conventions of scikit-learn.

    No file is written until you call ``save``.

    Attributes:
        frame (pandas.DataFrame): one row per epoch: learning rate, loss, recalls on the validation images, seconds
        json (dict[str, Any]): the record of the training: inputs, versions, best epoch
        settings (dict[str, Any]): all settings of the experiment
    """

    @check_arguments
    def __init__(
        self,
        experiment: str = "vsepp",
        *,
        sets: ChangedSettings | None = None,
        seed: NonNegativeInteger = 0,
        photo_features: VectorFunction | None = None,
        text_features: VectorFunction | None = None,
        options: TrainOptions = TrainOptions(),
    ) -> None:
        """Choose the experiment and its settings.

        Args:
            experiment: a preset such as ``cca``, or a YAML file
            sets: settings to change, e.g. ``{"train.epochs": 3}``
            seed: the seed of the initial weights, the order of pairs, and the sample of validation images
            photo_features: a function from a list of paths of photos to their vectors, (n, dim); with this function, the
                images that you pass to a method such as ``fit`` may be paths
            text_features: a function from a list of texts to their vectors, (n, dim), such as the method ``encode`` of
                sentence-transformers; without this function, the settings of the experiment determine how texts are read
            options: rarely used options: see [`vse.TrainOptions`][]
        """
        self.experiment, self.sets, self.seed = experiment, sets, seed
        self.photo_features, self.text_features, self.options = photo_features, text_features, options
        self._fitted_run: FittedRun | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name. ``deep`` is for scikit-learn, and has no effect."""
        return {name: getattr(self, name) for name in list(inspect.signature(type(self)).parameters)}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor, and return this object. Raises [`vse.UserError`][] if an argument is wrong."""
        vars(self).update(type(self)(**{**self.get_params(), **params}).get_params())
        return self

    @public_api
    def fit(
        self,
        images: VectorsOrPaths,
        captions: VectorsOrTexts,
        image_of_caption: ImageRows = None,
        *,
        validation: ValidationData = None,
        files: Paths | None = None,
    ) -> Self:
        """Fit the model to images and their captions, and return this object. For the arguments see [`vse.fit`][]."""
        experiment = self._load_experiment()
        data, paths = self._read_data(images, captions, image_of_caption)
        if files is not None:
            paths = read_texts("files", files)
            if len(paths) != len(data.images):
                raise UserError(f"files: {len(paths)} paths for {len(data.images)} images; one for each is needed")
        if validation is None:
            validation_rows = sample_validation_images(data, _VALIDATION_SHARE, self.seed)
        else:
            other = self._read_validation_data(data, *read_validation(validation))
            validation_rows = len(data.images) + np.arange(len(other.images))
            data = data.concatenate(other)
        with TemporaryDirectory(prefix="vse-") as name, self.permit_own_code(), _replace_paths_in_errors(Path(name)):
            folder = Path(name, "model")
            self._train(experiment, data, validation_rows, folder)
            device = self.options.with_environment().device
            self._fitted_run = FittedRun.read(folder, data, paths, device)
        return self

    @public_api
    def search(self, query: VectorsOrTexts, k: PositiveInteger = 10, *, by: str = "caption") -> SearchResults:
        """Return the best ``k`` images for a caption, or the best ``k`` captions for an image.

        All images or captions that were passed to ``fit`` are searched, including those of ``validation``. The ids of results
        are row indices: first the rows of the training arrays, then the rows of ``validation``.

        Args:
            query: a text, the path of a photo, or a vector (dim,)
            k: the number of results
            by: whether a query vector is the vector of a ``caption`` or of an ``image``; ignored for texts and paths

        Raises:
            vse.UserError: if the model is not fitted, or does not read such a query
        """
        if by not in ("caption", "image"):
            raise UserError(f"by={by!r}: a vector represents a 'caption' or an 'image'")
        is_text = isinstance(query, str | os.PathLike)
        if is_text:
            by = "image" if os.fspath(query).lower().endswith(QUERY_PHOTO_SUFFIXES) else "caption"
        with self.permit_own_code():
            encoded = self.encoder.encode_query(query, are_captions=by == "caption")
            hits = self._require_fitted_run().search(encoded, k, by == "image")
        return SearchResults(os.fspath(query) if is_text else f"vector of {by}", hits)

    @public_api
    def save(self, folder: StrPath, *, force: bool = False) -> Path:
        """Write the model to a folder that [`vse.load`][] opens, and return the folder.

        The folder becomes a run folder, with the images and captions of ``fit`` in the subfolder ``data``. A run that is
        already in the folder is replaced; ``force`` replaces files of any kind.
        """
        out = as_path(folder)
        self._require_fitted_run().write(out)
        return out

    @property
    def frame(self) -> pd.DataFrame:
        return self._require_fitted_run().frame

    @property
    def json(self) -> dict[str, Any]:
        return self._require_fitted_run().record

    @property
    def settings(self) -> dict[str, Any]:
        return self._require_fitted_run().settings

    @property
    def encoder(self) -> InputEncoder:
        return InputEncoder(self._require_fitted_run().array_encoder, self.photo_features, self.text_features)

    @property
    def expression(self) -> str:
        return f"vse.{self!r}"

    def permit_own_code(self) -> AbstractContextManager[None]:
        from vse.pipeline.presets.own_code import allow_own_code

        return allow_own_code(self.options.allow_code)

    def _require_fitted_run(self) -> FittedRun:
        if self._fitted_run is None:
            raise UserError(f"{self!r} is not fitted; call its method fit(images, captions, image_of_caption) first")
        return self._fitted_run

    def _read_data(self, images: Any, captions: Any, image_of_caption: Any) -> tuple[ArrayData, list[str] | None]:
        return read_array_data(images, captions, image_of_caption, self.photo_features, self.text_features)

    def _read_validation_data(self, data: ArrayData, images: Any, captions: Any, image_of_caption: Any) -> ArrayData:
        """Return the validation data. Raises UserError if their shapes or types do not fit the training data ``data``."""
        try:
            other = self._read_data(images, captions, image_of_caption)[0]
        except UserError as error:
            raise UserError(f"validation: {error}") from None
        for name in ("images", "captions"):
            shapes = [None if one is None else one.shape[1:] for one in (getattr(data, name), getattr(other, name))]
            if shapes[0] != shapes[1]:
                expected, found = ("texts" if shape is None else f"an array of rows {shape}" for shape in shapes)
                raise UserError(f"validation: {name}: {found}, but the training has {expected}")
        return other

    def _load_experiment(self) -> ExperimentConfig:
        """Load the experiment. Raises UserError if the experiment needs other inputs than arrays."""
        from vse.training.experiment import load_experiment

        with self.permit_own_code():
            experiment = load_experiment(self.experiment, None, settings_as_texts(self.sets))
        needs = {
            "starts from another run": experiment.start_from is not None,
            "reads embeddings of another run": experiment.backbone is not None,
            "reads the files of photos": experiment.images.source != "cache",
            "is trained on phrases": experiment.solver.reads_phrases,
        }
        for need, is_needed in needs.items():
            if is_needed:
                raise UserError(f"experiment={self.experiment!r}: {need}, which arrays do not have; train it with vse.train")
        return experiment

    def _train(self, experiment: ExperimentConfig, data: ArrayData, validation_rows: NDArray[np.int64], folder: Path) -> None:
        from vse.features.feature_job import extract_feature
        from vse.training.training import train_experiment

        options, feature = self.options.with_environment(), experiment.caption_feature
        images, captions = write_array_data(data, validation_rows, folder / DATA_FOLDER)
        if captions is None and feature is not None:
            captions = extract_feature(
                FeatureRequest(
                    dataset=folder / DATA_FOLDER / "dataset.json",
                    feature=feature,
                    out=images.with_name(f"{ARRAYS_DATASET_NAME}_{feature}.h5"),
                    options=ExtractOptions(device=options.device).with_environment(),
                )
            )
        if captions is None and not experiment.solver.accepts_words:
            raise UserError(
                f"captions: texts, but experiment={self.experiment!r} reads vectors; pass an array of vectors, give vse.Model "
                'the function text_features, or read TF-IDF vectors of the texts: sets={"caption_feature": "tfidf"}'
            )
        sets = [*settings_as_texts(self.sets), *(["eval_feature=null"] if experiment.eval_feature is not None else [])]
        train_experiment(
            TrainRequest(
                features=images,
                experiment=self.experiment,
                sets=sets,
                seed=self.seed,
                out=folder,
                inputs=TrainInputs(caption_features=captions).with_environment(),
                options=options,
            )
        )

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        changed = (f"{name}={format_value(value)}" for name, value in self.get_params().items() if value != defaults[name])
        return f"Model({', '.join(changed)})"

    def _repr_html_(self) -> str:
        if self._fitted_run is None:
            return build_html_summary(self, "not fitted")
        return build_html_summary(self, f"best epoch {self.json['best_epoch']}", self.frame.tail(N_DISPLAYED_ROWS))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError('a vse.Model cannot be pickled; call model.save("FOLDER"), and later vse.load("FOLDER")')


@public_api
def fit(
    images: VectorsOrPaths,
    captions: VectorsOrTexts,
    image_of_caption: ImageRows = None,
    *,
    experiment: str = "vsepp",
    validation: ValidationData = None,
    files: Paths | None = None,
    sets: ChangedSettings | None = None,
    seed: NonNegativeInteger = 0,
) -> Model:
    """Fit a model to arrays of images and captions. No file is written until you call the model's method ``save``.

    ``vse.fit(X, Y, i, experiment="cca")`` is short for ``vse.Model("cca").fit(X, Y, i)``. [`vse.Model`][] has further
    arguments.

    Args:
        images: the vectors of the images, (n_images, dim), from numpy, torch or pandas; or sets of vectors
            (n_images, n_regions, dim)
        captions: the vectors of the captions, (n_captions, dim), whose dim may differ from that of the images; or a list of
            texts. The model reads the words of texts, or computes the caption feature that the experiment names; a feature
            such as TF-IDF is first fitted to the texts
        image_of_caption: the row of each caption's image in ``images``, (n_captions,); None if there is one caption per image
        experiment: a preset such as ``cca``, or a YAML file
        validation: a tuple (images, captions, image_of_caption) on which the best epoch is chosen; None samples 10% of the
            images with ``seed``
        files: the paths of the photos, one for each image, for the display of search results
        sets: settings to change, e.g. ``{"train.epochs": 3}``
        seed: the seed of the initial weights, the order of pairs, and the sample of validation images

    Returns:
        Model: the fitted model

    Raises:
        vse.UserError: if an array is unsuitable; the message names the array and explains what to pass instead
        vse.Interrupted: if the training was stopped (Ctrl-C)

    Examples:
        ```python
        import numpy as np

        random = np.random.default_rng(0)
        X, Y = random.normal(size=(60, 16)), random.normal(size=(60, 8))
        model = vse.fit(X, Y, experiment="cca", sets={"model.dim": 4})
        model.encode_captions(Y[:2]).shape
        ```
    """
    model = Model(experiment, sets=sets, seed=seed)
    return model.fit(images, captions, image_of_caption, validation=validation, files=files)


@contextmanager
def _replace_paths_in_errors(folder: Path) -> Iterator[None]:
    """Replace paths of temporary files in errors of the caller's ``with`` block by argument names, such as ``images``."""
    data = folder / "model" / DATA_FOLDER
    names = {
        data / f"{ARRAYS_DATASET_NAME}_images.h5": "images",
        data / f"{ARRAYS_DATASET_NAME}_captions.h5": "captions",
        data / "dataset.json": "captions",
        folder / "model": "the model",
    }
    try:
        yield
    except Interrupted as stop:
        raise Interrupted("fit was stopped, and nothing of it is kept", stop.signal) from None
    except UserError as error:
        message = str(error)
        for path, name in names.items():
            message = message.replace(str(path), name)
        raise UserError(message) from error.__cause__
