"""Evaluation and comparison of models in the Python interface."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd

from vse.arguments import Names, PositiveIntegers, StrPath, are_paths, as_path, check_arguments, describe_arguments, public_api
from vse.array_inputs import ImageRows, VectorsOrPaths, VectorsOrTexts, are_texts
from vse.encoding import EncodingModel, build_cosine_embeddings
from vse.eval.files.embeddings import write_embeddings
from vse.eval.files.results import COMPARISON_KIND, RESULT_KIND, UNSAVED_RESULT_PATH, Result, read_comparison
from vse.eval.options import AllEvaluateOptions, EvaluateOptions
from vse.eval.protocols.result_content import format_result_lines
from vse.eval.tables.significance import build_printed_significance_table, build_significance_table, format_difference_lines
from vse.eval.tables.summary import build_printed_summary, summarise_results
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json
from vse.pipeline.option_types import AllowedValues, NonNegativeInteger, PositiveInteger, Share, Text
from vse.pipeline.options import Options, format_value
from vse.reports import SavableResult, build_html_table, rebase_file_references
from vse.split_embeddings import SplitEmbeddings

_EMBEDDINGS_DESCRIPTION = "vse.embeddings(...), a path, or a list of these"
MemberEmbeddings = Annotated[
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    AllowedValues(_EMBEDDINGS_DESCRIPTION, are_paths, may_be_path=True),
]


class Ensemble(Options):
    """An ensemble for [`vse.evaluate`][], which averages the scores of the members."""

    members: MemberEmbeddings
    """The embeddings of all members; with several seeds, the embeddings of every seed of every member."""
    experiment: Text | None = None
    """The preset of the ensemble; None names the ensemble by its members."""
    alpha: Share | None = None
    """The share of the member that scores by phrases; None chooses it on the validation split."""

    @check_arguments
    def __init__(self, members: MemberEmbeddings, experiment: str | None = None, alpha: float | None = None) -> None:
        super().__init__(members=members, experiment=experiment, alpha=alpha)


_EVALUATION_INPUT_DESCRIPTION = f"{_EMBEDDINGS_DESCRIPTION}, a vse.Ensemble, or a fitted model with arrays"
EvaluationInput = Annotated[Any, AllowedValues(_EVALUATION_INPUT_DESCRIPTION, lambda value: True, may_be_path=True)]


@dataclass(frozen=True)
class EvaluationJob:
    """Embeddings to evaluate (files, or arrays in memory), with the protocols and the options of the evaluation."""

    embeddings: tuple[Path | SplitEmbeddings, ...]
    protocol: str | list[str]
    options: AllEvaluateOptions

    def evaluate(self, **changes: Any) -> dict[str, Any]:
        """Run the evaluation, and return the content of the result file. ``changes`` replace options of the job."""
        from vse.eval.protocols.evaluate import evaluate_arrays, evaluate_files
        from vse.eval.search.gpu import choose_faiss_device

        options, first = self._change_options(**changes), self.embeddings[0]
        choose_faiss_device(options.device)
        if len(self.embeddings) > 1 or isinstance(first, Path):
            with TemporaryDirectory() as folder, self._provide_embeddings_files(Path(folder)) as files:
                content = evaluate_files(files, None, self.protocol, options)
                return rebase_file_references(content, Path.cwd(), Path.cwd(), excluded=Path(folder))
        options.check_combinations()
        if options.iou is not None:
            raise UserError("iou: only files of phrase scores have boxes, arrays have not; leave iou out")
        return evaluate_arrays(first.name, first.embeddings, self.protocol, options)

    def with_options(self, **changes: Any) -> EvaluationJob:
        """Return this job with changed options."""
        return replace(self, options=self._change_options(**changes))

    def _change_options(self, **changes: Any) -> AllEvaluateOptions:
        return AllEvaluateOptions(**{**dict(self.options), **changes})

    @contextmanager
    def provide_model_files(self, folder: Path) -> Iterator[list[Path]]:
        """Yield the embeddings files of the model, one for each seed.

        For an ensemble, or for embeddings in arrays, the files are written to ``folder``.
        """
        if self.options.ensemble:
            self.evaluate(save=folder / "ensemble.h5", bootstrap=0, cross_check=False)
            yield sorted(folder.glob("ensemble*.h5"))
            return
        with self._provide_embeddings_files(folder) as files:
            yield files

    @contextmanager
    def _provide_embeddings_files(self, folder: Path) -> Iterator[list[Path]]:
        """Yield a list with an embeddings file for each item of ``embeddings``. Arrays are first written to ``folder``.

        In errors about the written files, the name of the model replaces the path.
        """
        arrays = {folder / f"{k}.h5": one for k, one in enumerate(self.embeddings) if isinstance(one, SplitEmbeddings)}
        for path, one in arrays.items():
            write_embeddings(path, one.embeddings)
        try:
            yield [folder / f"{k}.h5" if isinstance(one, SplitEmbeddings) else one for k, one in enumerate(self.embeddings)]
        except UserError as error:
            message = str(error)
            for path, one in arrays.items():
                message = message.replace(str(path), one.name)
            raise UserError(message) from None


class Evaluation(SavableResult):
    """The metrics of a model on a split. ``print`` displays one line per protocol.

    Attributes:
        metrics (dict[str, Any]): the metrics by protocol and direction, e.g. ``metrics["1k"]["i2t"]["r1"]`` and
            ``metrics["1k"]["rsum"]``; with several seeds each metric has ``mean`` and ``std``
        frame (pandas.DataFrame): one row per protocol, as in ``vse-table summary``, with ``rsum`` and columns such as
            ``i2t_r1``; ``i2t_r1_low`` and ``i2t_r1_high`` are the 95% interval of ``i2t_r1``, and ``i2t_r1_std`` is the
            standard deviation over several seeds
        json (dict[str, Any]): the content of the result file (docs/formats.md)
        path (Path | None): the result file; None if the evaluation was not saved
    """

    _output_kind = RESULT_KIND

    def __init__(self, job: EvaluationJob) -> None:
        super().__init__(job.evaluate(), [source for source in job.embeddings if isinstance(source, Path)])
        absolute = (source.absolute() if isinstance(source, Path) else source for source in job.embeddings)
        self._job = replace(job, embeddings=tuple(absolute))
        self._result = Result.model_validate(self.json)

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.json["protocols"])

    @cached_property
    def frame(self) -> pd.DataFrame:
        return summarise_results([(UNSAVED_RESULT_PATH, self._result)])

    @public_api
    def per_query(self, path: StrPath | None = None, *, force: bool = False) -> pd.DataFrame:
        """Return one row per query: its rank, and its best right and best wrong result (docs/formats.md).

        If ``path`` (.csv or .parquet) is given, the rows are also written to this file; ``force`` replaces a file of any kind.
        Raises [`vse.UserError`][] if the model localises phrases.
        """
        with TemporaryDirectory() as folder:
            out = Path(folder, "queries.csv") if path is None else as_path(path)
            self._write_extra_files(per_query=out)
            # The engine named python reads floats exactly.
            frame = pd.read_parquet(out) if out.suffix == ".parquet" else pd.read_csv(out, engine="python")
        return frame.astype({"seed": "Int64", "wrong_id": "Int64"})

    @public_api
    def to_trec(self, folder: StrPath, depth: NonNegativeInteger | None = None, *, force: bool = False) -> Path:
        """Write run and qrels files of both directions for trec_eval, ranx or ir_measures; return the folder.

        A run file has the best ``depth`` results of each query: None stands for 1,000, and 0 for all results. ``force``
        replaces files of any kind. Raises [`vse.UserError`][] if the model localises phrases.
        """
        out = as_path(folder)
        self._write_extra_files(trec=out, trec_depth=depth)
        return out

    @public_api
    def with_index(self, index: str, parameters: str = "") -> Evaluation:
        """Return this evaluation together with the recalls of a FAISS index, e.g. ``IVF1024,Flat`` with ``nprobe=16``.

        The index is compared with the exact search. Raises [`vse.UserError`][] if the index cannot be built, or if the model
        has scores of pairs in place of embeddings.
        """
        return self._with_options(index=index, index_parameters=parameters)

    @public_api
    def with_rerank(self, candidates: PositiveIntegers) -> Evaluation:
        """Return this evaluation together with the metrics of two-stage searches.

        A two-stage search finds candidates by the vectors of images and captions, and only the candidates are scored exactly.
        For each number in ``candidates``, a search with this number of candidates per query is measured. Raises
        [`vse.UserError`][] if the embeddings have no vectors for the first stage.
        """
        return self._with_options(rerank=candidates)

    @public_api
    def with_language(self, language: str) -> Evaluation:
        """Return the evaluation of the captions in one language, e.g. ``de``.

        Only images with captions in all languages of the embeddings are evaluated. Raises [`vse.UserError`][] if the
        embeddings have no captions in this language.
        """
        return self._with_options(language=language)

    @public_api
    def save_ensemble(self, path: StrPath, *, force: bool = False) -> Path:
        """Write the embeddings or scores of an ensemble to the HDF5 file ``path``, and return ``path``.

        With several seeds, there is a file ``<name>-<seed>.h5`` for each seed instead. ``force`` replaces files of any kind.
        Raises [`vse.UserError`][] if this is not the evaluation of an ensemble.
        """
        self._write_extra_files(save=as_path(path))
        return as_path(path)

    @public_api
    def compare(self, other: Evaluation, *, bootstrap: PositiveInteger | None = None) -> ModelComparison:
        """Test the difference of each metric between this model and another model on the same queries.

        ``bootstrap`` is the number of bootstrap samples; None stands for 10,000. Raises [`vse.UserError`][] if the two models
        were evaluated on different queries or by different protocols.
        """
        ours, theirs = self._job, other._job
        if (ours.protocol, ours.options.iou) != (theirs.protocol, theirs.options.iou):
            raise UserError(f"other: evaluated by the protocol {theirs.protocol!r}, and this result by {ours.protocol!r}")
        with TemporaryDirectory() as name:
            folder = Path(name)
            with ours.provide_model_files(folder / "a") as own, theirs.provide_model_files(folder / "b") as others:
                return ModelComparison([*own, *others], folder, ours.with_options(bootstrap=bootstrap))

    def _write_extra_files(self, **changes: Any) -> None:
        """Evaluate again with the options ``changes``, which name further files to write, such as ``save`` for embeddings."""
        left_out = {"bootstrap": 0, "cross_check": False, "index": None, "index_parameters": "", "rerank": ()}
        self._job.evaluate(**left_out, **changes)

    def _with_options(self, **changes: Any) -> Evaluation:
        return Evaluation(self._job.with_options(**changes))

    def __repr__(self) -> str:
        return "\n".join(format_result_lines(self._result))

    def _repr_html_(self) -> str:
        return build_html_table(build_printed_summary(self.frame))


class ModelComparison(SavableResult):
    """The differences of two models on the same queries, metric by metric. ``print`` displays one line per protocol.

    Attributes:
        frame (pandas.DataFrame): one row per protocol and metric: the values of both models, their ``difference``, its 95%
            interval ``low`` and ``high``, and its p-value ``p``
        json (dict[str, Any]): the content of the comparison file (docs/formats.md)
        path (Path | None): the comparison file; None if the comparison was not saved
    """

    _output_kind = COMPARISON_KIND

    def __init__(self, files: Sequence[Path], folder: Path, job: EvaluationJob) -> None:
        from vse.eval.protocols.compare import compare_files
        from vse.eval.search.gpu import choose_faiss_device

        choose_faiss_device(job.options.device)
        out = compare_files(files, folder / "comparison.json", job.protocol, job.options)
        super().__init__(rebase_file_references(read_json(out), folder, Path.cwd(), excluded=folder), files)
        self.frame = build_significance_table([out])
        self._difference_lines = format_difference_lines(read_comparison(out))

    def __repr__(self) -> str:
        return "\n".join(self._difference_lines)

    def _repr_html_(self) -> str:
        return build_html_table(build_printed_significance_table(self.frame))


def _list_embeddings_inputs(embeddings: Any) -> tuple[Path | SplitEmbeddings, ...]:
    listed = [embeddings] if isinstance(embeddings, str | os.PathLike) else list(embeddings)
    if not listed:
        raise UserError("embeddings=[]: no file is given")
    return tuple(one if isinstance(one, SplitEmbeddings) and one.path is None else as_path(one) for one in listed)


def _read_protocol(second_argument: Any) -> str | Sequence[str]:
    """Return the protocol, the second argument in a call ``vse.evaluate(embeddings, protocol)`` of an earlier version.

    Raises UserError if the argument is an array, because a call with embeddings has no images.
    """
    if not are_texts(second_argument):
        raise UserError(f"images={format_value(second_argument)}: the first argument has embeddings already; leave images out")
    names: str | Sequence[str] = second_argument
    return names


def _embed_inputs(first: Any, images: Any, captions: Any, image_of_caption: Any) -> SplitEmbeddings:
    """Return the embeddings of the images and captions in the arguments of :func:`evaluate`.

    In a call ``evaluate(model, X, Y, i)``, ``first`` is the model. A call ``evaluate(X, Y, i)`` shifts the arguments:
    ``first`` has the images X, ``images`` the captions Y, and ``captions`` the rows i of the images. Omitted ones are None.
    """
    model = first if isinstance(first, EncodingModel) else None
    if first is not None and model is None and images is None:
        images = first
    elif first is not None and model is None:
        if captions is not None and image_of_caption is not None:
            raise UserError("embeddings: four arrays are given; call vse.evaluate(images, captions, image_of_caption)")
        images, captions, image_of_caption = first, images, captions if image_of_caption is None else image_of_caption
    if images is None or captions is None:
        call = "vse.evaluate(images, captions, image_of_caption)" if model is None else "vse.evaluate(model, images, captions)"
        raise UserError(f"embeddings={format_value(first)}: {_EVALUATION_INPUT_DESCRIPTION} is needed; for arrays call {call}")
    if model is None:
        return build_cosine_embeddings(images, captions, image_of_caption)
    with model.permit_own_code():
        return model.encoder.embed(images, captions, image_of_caption)


@public_api
@describe_arguments(AllEvaluateOptions)
def evaluate(
    embeddings: EvaluationInput = None,
    images: VectorsOrPaths = None,
    captions: VectorsOrTexts = None,
    image_of_caption: ImageRows = None,
    *,
    protocol: Names = "auto",
    k: PositiveIntegers = (),
    bootstrap: NonNegativeInteger | None = None,
    options: EvaluateOptions = EvaluateOptions(),
) -> Evaluation:
    """Compute the metrics of a model, such as R@K, median rank and rsum, with 95% intervals (``vse-eval``).

    There are three forms of a call. Let X be the images, Y the captions, and i the row of each caption's image in X.
    ``vse.evaluate(embeddings)`` evaluates embeddings in a file or in memory. ``vse.evaluate(model, X, Y, i)`` encodes X and Y
    with a model. ``vse.evaluate(X, Y, i)`` compares the vectors in X and Y by their cosines. The results of all three forms
    can be compared with each other if the queries are the same.

    Args:
        embeddings: The embeddings or scores of one model: an object from [`vse.embeddings`][], or a path. A list has one item
            for each seed. A [`vse.Ensemble`][] averages the scores of its members. A fitted [`vse.Model`][] or a
            [`vse.TrainedModel`][] encodes ``images`` and ``captions``.
        images: The vectors of the images, as in [`vse.fit`][]; or the paths of photos, if the model reads photos.
        captions: The vectors of the captions, or texts if the model reads texts.
        image_of_caption: The row of each caption's image in ``images``; None if there is one caption per image.
        protocol: One or several of ``auto``, ``full``, ``1k``, ``sentence``, ``sentence-1k``, ``cxc`` and ``eccv``
            (docs/evaluation.md).
        options: Rarely used options: see [`vse.EvaluateOptions`][].

    Returns:
        Evaluation: the metrics; its methods save them, compare them, and write the results of each query

    Raises:
        vse.UserError: if embeddings are missing, duplicate, not finite or of different lengths, or if options contradict each
            other

    Examples:
        ```python
        result = vse.evaluate("runs/demo_vsepp/seed-0/test.h5").save("results/demo_vsepp.json")
        result.frame[["protocol", "i2t_r1", "t2i_r1", "rsum"]]
        ```
    """
    ensemble = embeddings if isinstance(embeddings, Ensemble) else None
    if ensemble is not None or (are_paths(embeddings) and not isinstance(embeddings, EncodingModel)):
        if images is not None:  # a call of an earlier version: the second argument is the protocol
            protocol = _read_protocol(images)
        sources = _list_embeddings_inputs(embeddings if ensemble is None else ensemble.members)
    else:
        sources = (_embed_inputs(embeddings, images, captions, image_of_caption),)
    all_options = AllEvaluateOptions(
        **dict(options.with_environment()),
        bootstrap=bootstrap,
        k=k,
        ensemble=ensemble is not None,
        experiment=ensemble.experiment if ensemble else None,
        alpha=ensemble.alpha if ensemble else None,
    )
    names = protocol if isinstance(protocol, str) else list(protocol)
    return Evaluation(EvaluationJob(sources, names, all_options))
