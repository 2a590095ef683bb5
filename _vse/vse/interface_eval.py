"""The functions of the Python interface that evaluate and compare models, or vectors of another program, and show results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vse.arguments import (
    Array,
    From0,
    ListFrom1,
    ListOfPaths,
    Names,
    Paths,
    Share,
    StrPath,
    as_path,
    as_paths,
    device_of,
    public,
)
from vse.eval.defaults import BOOTSTRAP_SAMPLES, COMPARISON_SAMPLES, CROSS_CHECK_QUERIES, REPORT_QUERIES
from vse.pipeline.errors import UserError
from vse.results import Evaluation, HtmlReport, ModelComparison, ShownTable

if TYPE_CHECKING:
    from vse.eval.files.embeddings import Embeddings

_NO_FILE = Path("result.json")  # where an evaluation would be written, for the paths in it


@public
def evaluate(
    files: Paths | None = None,
    *,
    images: Array | None = None,
    captions: Array | None = None,
    scores: Array | None = None,
    image_ids: Array | None = None,
    caption_ids: Array | None = None,
    caption_image_ids: Array | None = None,
    similarity: str = "cosine",
    name: str = "arrays",
    dataset: str = "arrays",
    split: str = "test",
    out: StrPath | None = None,
    protocol: Names = "auto",
    bootstrap: From0 | None = None,
    cross_check: bool = True,
    cross_checked: From0 = CROSS_CHECK_QUERIES,
    k: ListFrom1 = (),
    iou: Share | None = None,
    cxc: StrPath | None = None,
    ensemble: bool = False,
    experiment: str | None = None,
    alpha: Share | None = None,
    save: StrPath | None = None,
    index: str | None = None,
    index_parameters: str = "",
    rerank: ListFrom1 = (),
    per_query: StrPath | None = None,
    trec: StrPath | None = None,
    trec_depth: From0 | None = None,
    unfinished: bool = False,
    force: bool = False,
    device: str | None = None,
) -> Evaluation:
    """R@K, Med r, mean r, rsum and more of embeddings or scores, with 95% intervals (``vse-eval``).

    They lie in files, or are given as arrays (of numpy or torch), which may come from any program.

    Parameters
    ----------
    files
        embeddings files or folders of arrays (docs/formats.md) of one model, one for each seed
    images
        (n_images, dim), compared with ``captions`` by ``similarity``
    captions
        (n_captions, dim)
    scores
        (n_images, n_captions), of all pairs, instead
    image_ids
        (n_images,) whole numbers; None counts from 0
    caption_ids
        (n_captions,) whole numbers; None counts from 0
    caption_image_ids
        (n_captions,), of each caption the id of its image
    similarity
        ``cosine``, the inner product, which does not divide by lengths, or ``order``
    name
        what the result calls the model of the arrays
    dataset
        what it calls their data set
    split
        and their split
    out
        the result file to write (JSON); None writes none
    protocol
        one or several of ``auto``, ``full``, ``1k``, ``sentence``, ``sentence-1k``, ``cxc`` and ``eccv`` (docs/evaluation.md)
    bootstrap
        samples of the images for the intervals, 0 for none; None is 1,000
    cross_check
        compare the ranks with a search by FAISS
    cross_checked
        of how many queries of each direction of a protocol, drawn at random; 0 for all
    k
        further K of R@K, beside 1, 5 and 10
    iou
        of phrase scores, from which IoU with its truth on a candidate box is right; None is 0.5
    cxc
        folder of the pairs that Crisscrossed Captions judged
    ensemble
        the files are members, whose scores are averaged
    experiment
        preset of an ensemble
    alpha
        share of phrases in an ensemble
    save
        file for the embeddings of an ensemble
    index
        a FAISS index to try, e.g. ``IVF1024,Flat``
    index_parameters
        how far to look in it, e.g. ``nprobe=16``
    rerank
        numbers of candidates to re-rank, to see what is lost
    per_query
        file (.csv or .parquet) for what each query got
    trec
        folder for run and qrels files
    trec_depth
        how many answers these have
    unfinished
        evaluate runs whose training did not finish, too
    force
        replace a file of another kind at an output's place; inputs are never replaced
    device
        where FAISS searches, as of [`vse.extract`][]

    Raises
    ------
    vse.UserError
        names what is missing, duplicate, of another length or not finite, and options that do not go together

    Examples
    --------
    ```python
    result = vse.evaluate("runs/demo_vsepp/seed-0/test.h5", out="results/demo_vsepp.json")
    result.frame[["protocol", "i2t_r1", "t2i_r1", "rsum"]]
    ```
    """
    from vse.eval.protocols.evaluate import evaluated_run
    from vse.eval.protocols.options import EvaluationOptions
    from vse.eval.protocols.phrase_evaluation import evaluate_files
    from vse.eval.search.gpu import use_device
    from vse.pipeline.files.writing import write_json

    arrays = {
        **{"images": images, "captions": captions, "scores": scores},
        **{"image_ids": image_ids, "caption_ids": caption_ids, "caption_image_ids": caption_image_ids},
    }
    given = {which: _array(array) for which, array in arrays.items() if array is not None}
    if (files is None) == (not given):
        raise UserError("what is evaluated are files, or arrays (images and captions, or scores): give one of them")
    asked = EvaluationOptions(
        cross_check=cross_check,
        cross_checked=cross_checked,
        bootstrap=BOOTSTRAP_SAMPLES if bootstrap is None else bootstrap,
        unfinished=unfinished,
        ks=k,
        cxc=as_path(cxc),
        together=ensemble,
        experiment=experiment,
        alpha=alpha,
        save=as_path(save),
        index=index,
        index_parameters=index_parameters,
        rerank=rerank,
        per_query=as_path(per_query),
        trec=as_path(trec),
        trec_depth=trec_depth,
    )
    asked.check()
    written = as_path(out)
    use_device(device_of(device))
    if files is not None:
        return Evaluation(evaluate_files(as_paths(files), written, protocol, asked, iou), written)
    if iou is not None:
        raise UserError("iou is of phrase scores, which are read from files")
    run = _of_arrays(name, given, {"dataset": dataset, "split": split, "similarity": similarity, "experiment": name})
    content = evaluated_run(name, run, written or _NO_FILE, protocol, asked)
    if written is not None:
        write_json(written, content)
    return Evaluation(content, written)


@public
def compare(
    files: ListOfPaths,
    *,
    out: StrPath | None = None,
    protocol: Names = "auto",
    bootstrap: From0 | None = None,
    cross_check: bool = True,
    cross_checked: From0 = CROSS_CHECK_QUERIES,
    iou: Share | None = None,
    unfinished: bool = False,
    force: bool = False,
    device: str | None = None,
) -> ModelComparison:
    """Test the difference of each metric of two models on the same queries (``vse-eval --compare``).

    Parameters
    ----------
    files
        embeddings of the two models, or as many seeds of each
    out
        the comparison file to write; None is ``results/<dataset>_<a>_vs_<b>.json``
    protocol
        as of [`vse.evaluate`][]
    bootstrap
        samples of the images; None is 10,000
    cross_check
        as of [`vse.evaluate`][]
    cross_checked
        as of [`vse.evaluate`][]
    iou
        as of [`vse.evaluate`][]
    unfinished
        as of [`vse.evaluate`][]
    force
        as of [`vse.evaluate`][]
    device
        as of [`vse.evaluate`][]

    Raises
    ------
    vse.UserError
        if the files are of different queries, or of other than two models

    Examples
    --------
    ```python
    difference = vse.compare(["runs/demo_vsepp/seed-0/test.h5", "runs/demo_vse0/seed-0/test.h5"])
    difference.frame[["protocol", "difference", "low", "high", "p"]]
    ```
    """
    from vse.eval.search.gpu import use_device
    from vse.eval.tables.significance import compare_files

    use_device(device_of(device))
    samples = COMPARISON_SAMPLES if bootstrap is None else bootstrap
    written = compare_files(as_paths(files), as_path(out), protocol, cross_check, samples, unfinished, iou, cross_checked)
    return ModelComparison(written)


@public
def report(
    results: Paths,
    out: StrPath,
    *,
    data: StrPath | None = None,
    embeddings: Paths = (),
    queries: From0 = REPORT_QUERIES,
    seed: From0 = 0,
    force: bool = False,
    allow_code: bool = False,
) -> HtmlReport:
    """Report a result, or two side by side, as one HTML file: metrics, curves, what queries retrieve (``vse-report``).

    Parameters
    ----------
    results
        one or two result files, or evaluations that were written to files
    out
        the report to write
    data
        ``dataset.json``, if it does not lie where the embeddings say
    embeddings
        of the first seed, if they do not lie where the result says; one for each result
    queries
        how many are shown in each direction
    seed
        decides which of many similar queries are shown
    force
        as of [`vse.evaluate`][]
    allow_code
        as of [`vse.embed`][], of a model that attends

    Raises
    ------
    vse.UserError
        if a result was edited, or the embeddings are not those that it was made from

    Examples
    --------
    ```python
    page = vse.report("results/demo_vsepp.json", "report.html")
    page
    ```
    """
    from vse.eval.report.report import write_report
    from vse.pipeline.presets.own_code import allow_own_code
    from vse.train.use.attention import attention_of_run

    given = [] if isinstance(embeddings, Sequence) and not embeddings else as_paths(embeddings)
    with allow_own_code(allow_code):
        return HtmlReport(write_report(as_paths(results), as_path(out), as_path(data), given, queries, seed, attention_of_run))


@public
def table(
    name: str,
    results: Paths = (),
    *,
    dataset: str | None = None,
    cost: str | None = None,
    out: StrPath | None = None,
    force: bool = False,
) -> ShownTable:
    """Make a table of result files (``vse-table``).

    Parameters
    ----------
    name
        ``summary``, a row per result and protocol; ``ladder``, a row per result with its cost; ``significance``, a row per
        metric of comparisons; or a published table, such as ``vsepp_3``, with our metrics beside the printed ones
    results
        result files, or evaluations and comparisons that were written to files
    dataset
        of a published table, take our results on this data set
    cost
        of a ladder, the cost against which rsum is weighed; None is ``total_s``
    out
        the table to write, .csv or .tex, of a ladder also its picture, .svg or .png; None writes none
    force
        as of [`vse.evaluate`][]

    Raises
    ------
    vse.UserError
        if there is no such table, or a result was edited

    Examples
    --------
    ```python
    rows = vse.table("summary", ["results/demo_vsepp.json", "results/demo_vse0.json"])
    print(rows.latex)
    ```
    """
    from vse.eval.tables import table_kind
    from vse.eval.tables.table import TableRequest

    paths = [] if isinstance(results, Sequence) and not results else as_paths(results)
    written = as_path(out)
    return ShownTable(table_kind(name).build(TableRequest(paths, dataset, cost), written), written)


def _array(given: Any) -> NDArray[Any]:
    """An array of numpy or torch, on whatever device, or what numpy makes one of."""
    if hasattr(given, "detach"):
        tensor = given.detach().cpu()
        given = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
    return np.asarray(given)


def _of_arrays(name: str, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Embeddings:
    """Embeddings from arrays, checked as those of a file are; ids that are not given are counted from 0."""
    from vse.eval.files.embeddings import build_embeddings

    for which, array in arrays.items():
        axes = 1 if which.endswith("_ids") else 2
        if array.ndim != axes:
            raise UserError(f"{which}: an array of {axes} axes is needed, not of shape {array.shape}")
    if "caption_image_ids" not in arrays:
        raise UserError("caption_image_ids are needed: of each caption the id of its image")
    of_images, of_captions = ("scores", "scores") if "scores" in arrays else ("images", "captions")
    n_images = len(arrays.get(of_images, ()))
    n_captions = arrays["scores"].shape[1] if "scores" in arrays else len(arrays.get("captions", ()))
    rows = {"image_ids": (n_images, of_images), "caption_ids": (n_captions, of_captions)}
    for which, (n, origin) in {**rows, "caption_image_ids": rows["caption_ids"]}.items():
        if n and which in arrays and len(arrays[which]) != n:
            raise UserError(f"{which}: {len(arrays[which])} ids for {n} {which.split('_')[0]}s in {origin}")
    counted: dict[str, NDArray[Any]] = dict(arrays)
    counted.setdefault("image_ids", np.arange(n_images))
    counted.setdefault("caption_ids", np.arange(len(arrays["caption_image_ids"])))
    scored = {"similarity": "scores"} if "scores" in arrays else {}
    return build_embeddings(Path(name), counted, {**attributes, **scored})
