"""Training and loading of models in the Python interface, and the class of a trained model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd

from vse.arguments import (
    ChangedSettings,
    StrPath,
    TextOrPath,
    as_path,
    check_arguments,
    describe_arguments,
    public_api,
    settings_as_texts,
)
from vse.data_files import N_DISPLAYED_ROWS, FeatureFile, PathWrapper, build_html_summary
from vse.encoding import EncodingModel, InputEncoder
from vse.pipeline.errors import UserError
from vse.pipeline.option_types import AllowedValues, FileOrFolderPath, NonNegativeInteger, PositiveInteger, Text, is_path
from vse.pipeline.options import Options
from vse.reports import SearchResults
from vse.split_embeddings import SplitEmbeddings, embeddings
from vse.training.options import (
    EmbedRequest,
    RunInputOptions,
    RunSearchOptions,
    SearchCommandRequest,
    TrainInputs,
    TrainOptions,
    TrainRequest,
)

if TYPE_CHECKING:
    from vse.training.use.search import LastSearcherCache


class SearchIndex(Options):
    """A FAISS index file for the method ``search`` of [`vse.TrainedModel`][]. The search builds the index if it is missing."""

    path: FileOrFolderPath
    """The file."""
    factory: Text | None = None
    """The type of the index to build, e.g. ``IVF1024,Flat``; None is ``Flat``."""
    parameters: Text = ""
    """Search parameters, e.g. ``nprobe=16``."""

    @check_arguments
    def __init__(self, path: StrPath, factory: str | None = None, parameters: str = "") -> None:
        super().__init__(path=path, factory=factory, parameters=parameters)


IndexOrPath = Annotated[
    SearchIndex | str | os.PathLike[str],
    AllowedValues(
        "a path or a vse.SearchIndex", lambda value: isinstance(value, SearchIndex) or is_path(value), may_be_path=True
    ),
]


class TrainedModel(EncodingModel, PathWrapper):
    """A trained model in the folder of a run, or in the folder of a packed model.

    The weights are loaded when a method first needs them, and stay in memory for further calls.

    Attributes:
        path (Path): the folder
        frame (pandas.DataFrame): one row per epoch, as in ``metrics.csv``: learning rate, loss, recalls on the validation
            split, seconds
        json (dict[str, Any]): the content of ``run.json``: the inputs, the state and the best epoch of the run
        settings (dict[str, Any]): all settings of the experiment, as in ``config.yaml``
    """

    def __init__(self, path: Path, inputs: RunInputOptions, device: str = "auto", allow_code: bool = False) -> None:
        super().__init__(path)
        from vse.training.run.packed import open_model_folder

        self._folder = open_model_folder(self.path)
        for name in () if self._folder.is_packed else ("run.json", "config.yaml"):
            if not (self.path / name).is_file():
                raise UserError(f"{self.path}: not a trained run, because it has no {name}; vse.train writes one")
        self._file_options, self._device, self._allow_code = inputs, device, allow_code

    @cached_property
    def json(self) -> dict[str, Any]:
        return self._folder.read_record()

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self._folder.read_settings_content()

    @cached_property
    def frame(self) -> pd.DataFrame:
        return pd.read_csv(BytesIO(self._folder.read_file_with_sha256(self._folder.metrics_file)[0]))

    @public_api
    @describe_arguments(SearchCommandRequest)
    def search(
        self,
        query: TextOrPath,
        k: PositiveInteger = 10,
        *,
        split: str | None = None,
        corpus: StrPath | None = None,
        index: IndexOrPath | None = None,
        rerank: PositiveInteger | None = None,
        html: StrPath | None = None,
        force: bool = False,
    ) -> SearchResults:
        """Return the best ``k`` images for a text, or the best captions for a photo (``vse-search``).

        The first search embeds the split. Further searches of the same split take milliseconds.

        Args:
            query: A text, or the path of a JPEG, PNG, WebP, GIF or BMP file.
            corpus: A folder of photos, or an embeddings file.
            index: A FAISS index file, or a [`vse.SearchIndex`][]. The search uses this index instead of embedding the split.

        Raises:
            vse.UserError: if the query has no word, if the photo cannot be read, or if an option does not apply to the model
        """
        from vse.training.use.search import search_run

        photos = None if corpus is None else self._find_photo_folder(as_path(corpus))
        request = RunSearchOptions(k=k, split=split, corpus=None if photos else corpus, rerank=rerank, html=html)
        if index is not None:
            index = index if isinstance(index, SearchIndex) else SearchIndex(index)
            changes = {"index": index.path, "index_type": index.factory, "index_parameters": index.parameters}
            request = request.model_copy(update=changes)
        text = os.fspath(query)
        given = as_path(query) if isinstance(query, os.PathLike) else text
        with self.permit_own_code():
            hits = search_run(self.path, given, request, self._choose_input_files(photos), self._device, self._searcher_cache)
        return SearchResults(text, hits)

    @public_api
    def find_phrase(
        self, phrase: str, image: StrPath, k: PositiveInteger = 10, *, html: StrPath | None = None, force: bool = False
    ) -> SearchResults:
        """Return the best ``k`` boxes for a phrase in a photo.

        If ``html`` is given, a page with the best box is written to this file; ``force`` replaces a file of any kind. Raises
        [`vse.UserError`][] if the feature cache has no regions of the photo, or if the model does not localise phrases.
        """
        from vse.training.use.localise import find_phrase

        photo, request = as_path(image), RunSearchOptions(k=k, html=html)
        with self.permit_own_code():
            hit = find_phrase(self.path, photo, phrase, request, self._file_options, self._device)
        return SearchResults(phrase, hit.select_best(k), photo)

    @public_api
    @describe_arguments(EmbedRequest)
    def embed(
        self,
        split: str | None = None,
        out: StrPath | None = None,
        *,
        allow_unfinished: bool = False,
        allow_leak: bool = False,
        sentences: bool = False,
        force: bool = False,
    ) -> SplitEmbeddings:
        """Embed the images and captions of a split into a file (``vse-embed``).

        Raises:
            vse.UserError: if the run did not finish, was trained on images of the split, or if its feature cache is missing
        """
        from vse.training.use.embed import embed_runs

        request = EmbedRequest(
            runs=[self.path],
            split=split,
            out=out,
            files=self._file_options,
            allow_unfinished=allow_unfinished,
            allow_leak=allow_leak,
            sentences=sentences,
            device=self._device,
        )
        with self.permit_own_code():
            (file,) = embed_runs(request)
        return embeddings(file)

    @public_api
    def embed_as_features(
        self, prefix: StrPath, *, allow_unfinished: bool = False, force: bool = False
    ) -> tuple[FeatureFile, FeatureFile]:
        """Embed all splits into two feature caches, ``<prefix>_images.h5`` and ``<prefix>_captions.h5``, and return them.

        ``allow_unfinished`` accepts a run whose training did not finish; ``force`` replaces files of any kind. Raises
        [`vse.UserError`][] if the model has no embeddings, or its feature cache is missing.
        """
        from vse.training.use.embed import embed_runs

        request = EmbedRequest(
            runs=[self.path],
            as_features=prefix,
            files=self._file_options,
            allow_unfinished=allow_unfinished,
            device=self._device,
        )
        with self.permit_own_code():
            written = embed_runs(request)
        return FeatureFile(written[0]), FeatureFile(written[1])

    @property
    def expression(self) -> str:
        """The Python expression that returned this object. Files that the object writes record this expression."""
        return f"vse.load({str(self.path)!r})"

    @staticmethod
    def _find_photo_folder(corpus: Path) -> Path | None:
        """Return ``corpus`` if it is a folder of photos; None if it is an embeddings file or a folder of arrays."""
        return corpus if corpus.is_dir() and not any(corpus.glob("*.npy")) else None

    def _choose_input_files(self, photos: Path | None) -> RunInputOptions:
        """Return the input files of a search: ``photos`` and the folder of weights; all input files if ``photos`` is None."""
        files = self._file_options
        return files if photos is None else RunInputOptions(images=photos, weights_dir=files.weights_dir)

    def permit_own_code(self) -> AbstractContextManager[None]:
        from vse.pipeline.presets.own_code import allow_own_code

        return allow_own_code(self._allow_code)

    @cached_property
    def _searcher_cache(self) -> LastSearcherCache:
        from vse.training.use.search import LastSearcherCache

        return LastSearcherCache()

    @cached_property
    def encoder(self) -> InputEncoder:
        from vse.training.use.arrays import ArrayEncoder
        from vse.training.use.model import QueryEncoder, load_opened_run
        from vse.training.use.open_run import open_run

        opened = open_run(self.path, self._file_options, self._device, allow_unfinished=True)
        split = next((name for name in ("test", *opened.dataset.splits) if name in opened.dataset.splits), None)
        trained = load_opened_run(opened, split, self._file_options)
        return InputEncoder(ArrayEncoder(trained, QueryEncoder(trained, split, self._file_options.weights_dir)))

    def _repr_html_(self) -> str:
        keys = ("dataset", "experiment", "seed", "state", "best_epoch")
        facts = ", ".join(f"{key.replace('_', ' ')} {self.json[key]}" for key in keys if key in self.json)
        return build_html_summary(self.path, facts, self.frame.tail(N_DISPLAYED_ROWS))


@public_api
@describe_arguments(TrainRequest)
def train(
    features: StrPath,
    experiment: str = "vsepp",
    *,
    sets: ChangedSettings | None = None,
    name: str | None = None,
    seed: NonNegativeInteger = 0,
    out: StrPath | None = None,
    inputs: TrainInputs = TrainInputs(),
    options: TrainOptions = TrainOptions(),
) -> TrainedModel:
    """Train an embedding of images and captions on a feature cache (``vse-train``).

    If the run is already finished, it is loaded and not trained again. An interrupted training saves its state.

    Args:
        sets: Settings to change, e.g. ``{"loss.margin": 0.1, "train.epochs": 3}``.

    Returns:
        TrainedModel: the model with the weights of its best epoch

    Raises:
        vse.UserError: if a setting, cache or run is wrong; for an unknown name, the message has the most similar valid name
        vse.Interrupted: if the training was stopped (Ctrl-C); ``vse.TrainOptions(resume=True)`` continues it

    Examples:
        ```python
        model = vse.train("features/demo_fc7.h5", "vsepp")
        model.frame[["epoch", "loss", "rsum"]]
        ```
    """
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.training.training import train_experiment

    inputs, options = inputs.with_environment(), options.with_environment()
    request = TrainRequest(
        features=features,
        experiment=experiment,
        sets=settings_as_texts(sets),
        name=name,
        seed=seed,
        out=out,
        inputs=inputs,
        options=options,
    )
    with allow_own_code(options.allow_code):
        folder = train_experiment(request)
    return TrainedModel(folder, RunInputOptions(weights_dir=inputs.weights_dir), options.device, options.allow_code)


@public_api
@describe_arguments(RunInputOptions, TrainOptions)
def load(
    run: StrPath,
    *,
    features: StrPath | None = None,
    captions: StrPath | None = None,
    caption_features: StrPath | None = None,
    weights_dir: StrPath | None = None,
    allow_code: bool = False,
    device: str | None = None,
    threads: PositiveInteger | None = None,
) -> TrainedModel:
    """Load a trained model from the folder of its run, or a packed model.

    Args:
        run: The folder of the run or of the packed model; ``hf://user/name`` downloads a packed model from the Hugging Face
            hub, and ``hf://user/name@revision`` takes one of its branches, tags or commits.

    Raises:
        vse.UserError: if the folder is neither a run nor a packed model, or if the model cannot be downloaded

    Examples:
        ```python
        model = vse.load("runs/demo_vsepp/seed-0")
        model.search("a red circle above a blue square", k=3).frame[["rank", "score", "file"]]
        ```
    """
    from vse.features.backbones.device import set_thread_count
    from vse.training.share.pack import fetch_model_folder

    set_thread_count(threads)
    files = RunInputOptions(
        features=features,
        captions=captions,
        caption_features=caption_features,
        weights_dir=as_path(weights_dir or os.environ.get("VSE_WEIGHTS_DIR") or None),
    )
    return TrainedModel(fetch_model_folder(as_path(run)), files, device or os.environ.get("VSE_DEVICE") or "auto", allow_code)
