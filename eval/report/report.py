"""The HTML report of one result, or of two results side by side: settings, metrics, training curves and a gallery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from markupsafe import Markup

from vse.eval.files.results import Result
from vse.eval.options import N_GALLERY_QUERIES, N_REPORT_QUERIES, PHRASE_PROTOCOL
from vse.eval.protocols.result_content import combination_line, compression_line, hubs_line, rerank_line
from vse.eval.ranking.metrics import DIRECTIONS, Ranks
from vse.eval.ranking.ranks import ranks_from_blocks
from vse.eval.ranking.statistics import captions_per_image, chance_rsum
from vse.eval.report.charts import (
    RESULT_COLOURS,
    Curve,
    draw_rank_histogram,
    draw_training_curves,
)
from vse.eval.report.drawings import ATTENTION_EXPLANATIONS, BRACKET_NOTE, AttentionOpener, AttentionReader
from vse.eval.report.gallery import Gallery, HardNegative, build_gallery, find_hardest_negatives
from vse.eval.report.pages import DatasetPhotos, page_output_kind, write_page
from vse.eval.report.phrases import are_phrase_results, build_phrase_section, compute_phrase_metric_differences
from vse.eval.report.report_inputs import ReportInput, align_queries, read_report_input
from vse.eval.report.sections import (
    AcceptedAnswer,
    ChoiceCard,
    ReportDifference,
    build_sections,
    compute_retrieval_differences,
    find_accepted_answers,
    sample_choices,
    select_headline_metrics,
)
from vse.pipeline.command import format_code_version
from vse.pipeline.dataset.columns import count_captions_per_image
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import OutputKind, check_output

_COST_UNITS = (("train_seconds", "s"), ("peak_memory_mb", "MB at most"))
_SETTING_LABELS = {
    "backbone": "backbone",
    "feature": "feature",
    "model.similarity.name": "similarity",
    "model.dim": "dimensions",
    "loss.name": "loss",
    "loss.margin": "margin",
    "warmup.epochs": "warm-up epochs",
    "train.learning_rate": "learning rate",
    "train.batch_size": "batch size",
    "train.epochs": "epochs",
}


class Chart(NamedTuple):
    """A chart and its title."""

    title: str
    svg: Markup


class ResultSummary(NamedTuple):
    """The facts about a result at the top of the report. ``letter`` is A or B if there are two results; blank for one."""

    letter: str
    experiment: str
    file_name: str
    facts: Sequence[tuple[str, str]]
    settings_yaml: str


def write_report(
    results: Sequence[Path],
    out: Path,
    data: Path | None = None,
    embeddings: Sequence[Path] = (),
    queries: int | None = None,
    seed: int = 0,
    open_attention: AttentionOpener | None = None,
    gallery: bool = False,
) -> Path:
    """Write an HTML report of one result file, or of two results on the same queries; return ``out``.

    Sections whose inputs are missing are left out, and the report names them.

    Parameters
    ----------
    results : one or two result files
    out : the report to write
    data : path of ``dataset.json``; None uses the path in the embeddings
    embeddings : the embeddings of the first seed, one file for each result; if empty, the paths in the results are used
    queries : number of queries to display for each direction; with ``gallery``, number in each of two groups of queries; None
        uses the defaults of ``vse-report``
    seed : seed for the sample of queries
    open_attention : function that opens a run, to draw the attention of its model on the photos; None draws no attention
    gallery : display two groups of queries; for one result, these are the best and the worst queries
    """
    if queries is None:
        queries = N_GALLERY_QUERIES if gallery else N_REPORT_QUERIES
    kind = page_output_kind("report.html")
    inputs = _read_inputs(results, out, kind, data, embeddings, queries)
    # A result of the protocol choices has no galleries, because its wrong captions are not candidates of a retrieval.
    has_choices = any(one.result.choices for one in inputs)
    ranks = [ranks_from_blocks(*one.embeddings.score_blocks()) for one in inputs if one.embeddings and not has_choices]
    letters = ["A", "B"] if len(inputs) == 2 else [""]
    labels = [f"{letter}: " if letter else "" for letter in letters]
    missing = [label + sentence for label, one in zip(labels, inputs, strict=True) for sentence in one.missing_sentences]
    photos = _load_dataset_photos(inputs, data, missing)
    galleries: list[Gallery] = []
    phrases, hardest = None, _HardestNegatives()
    accepted: list[AcceptedAnswer] = []
    choices: list[ChoiceCard] = []
    if are_phrase_results(inputs):
        phrases = build_phrase_section(inputs, photos.dataset if photos else None, queries, seed, missing)
    elif photos:
        runs = [one.embeddings for one in inputs if one.embeddings]
        if len(runs) == len(inputs) and queries and not has_choices:
            attention = [
                AttentionReader(one.result.experiment, one.run_folder, one.embeddings, open_attention, missing)
                for one in inputs
            ]
            check_output(out, kind, [file for one in attention for file in one.input_paths])
            galleries = [
                build_gallery(direction, runs, ranks, photos, queries, seed, attention, gallery)
                for direction in ("i2t", "t2i")
            ]
        if len(inputs) == 1:
            if inputs[0].negative_table is not None:
                hardest = _HardestNegatives(*find_hardest_negatives(inputs[0].negative_table, photos))
            accepted = find_accepted_answers(inputs[0], photos, missing)
            choices = sample_choices(inputs[0], photos, queries, seed, missing) if has_choices else []
        missing += _describe_missing_photos(photos)
    differences: list[ReportDifference] = []
    if len(ranks) == 2 and inputs[0].embeddings:
        differences = compute_retrieval_differences(inputs[0].embeddings.image_of_caption(), *ranks)
    elif phrases is not None and len(inputs) == 2:
        differences = compute_phrase_metric_differences(inputs)
    return write_page(
        out,
        "report.html",
        title=f"{inputs[0].result.dataset} {' and '.join(one.result.experiment for one in inputs)}",
        result=inputs[0].result,
        seed=inputs[0].result.seeds[0],
        summaries=[_build_summary(one, letter) for one, letter in zip(inputs, letters, strict=True)],
        colours=RESULT_COLOURS,
        directions=DIRECTIONS,
        headline=select_headline_metrics(inputs[0].result) if len(inputs) == 1 else [],
        sections=build_sections([one.result for one in inputs]),
        differences=differences,
        curves=_draw_curve_charts(inputs, photos),
        training_notes=[*_list_training_notes(inputs, photos)],
        histograms=_draw_rank_histograms(ranks, inputs[0].result) if len(ranks) == len(inputs) else [],
        galleries=galleries,
        phrases=phrases,
        n_words=max((one.max_words for one in galleries), default=0),
        explanations=ATTENTION_EXPLANATIONS,
        brackets=BRACKET_NOTE,
        accepted=accepted,
        choices=choices,
        hardest=hardest,
        differing_settings=_list_differing_settings(inputs),
        missing=missing,
    )


class _HardestNegatives(NamedTuple):
    """The wrong images and captions (negatives) with the highest loss in ``epoch``, the last recorded epoch.

    ``negatives`` has the keys ``image`` and ``caption``, the kinds of queries. Without records, it is
    empty, and ``epoch`` is 0.
    """

    epoch: int = 0
    negatives: Mapping[str, Sequence[HardNegative]] = MappingProxyType({})


def _read_inputs(
    results: Sequence[Path], out: Path, kind: OutputKind, data: Path | None, embeddings: Sequence[Path], queries: int
) -> list[ReportInput]:
    """Read the inputs of a report. Raises UserError if the inputs do not fit together, or if ``out`` is one of them.

    ``kind`` is the kind of file that ``out`` may replace. ``queries`` is only checked: it must not be negative.
    """
    if not 1 <= len(results) <= 2:
        raise UserError(f"a report displays one result, or two side by side, not {len(results)}")
    if embeddings and len(embeddings) != len(results):
        raise UserError(f"{len(embeddings)} files of embeddings for {len(results)} results; give one for each")
    if queries < 0:
        raise UserError(f"--queries {queries}: must be at least 0")
    check_output(out, kind, [*results, *embeddings, *([data] if data else [])])
    places: Sequence[Path | None] = embeddings or [None] * len(results)
    inputs = [read_report_input(path, place) for path, place in zip(results, places, strict=True)]
    check_output(out, kind, [file for one in inputs for file in one.readable_files])
    dataset_files = [one.dataset_file for one in inputs if one.dataset_file]
    check_output(out, kind, [place for file in dataset_files for place in (file, file.parent / "images")])
    if len(inputs) == 2:
        inputs[1] = align_queries(*inputs)
    return inputs


def _load_dataset_photos(inputs: Sequence[ReportInput], data: Path | None, missing: list[str]) -> DatasetPhotos | None:
    """Return the photos of the data set. If ``dataset.json`` is not found, add the reason to ``missing``, and return None."""
    if not any(one.embeddings or one.phrase_scores for one in inputs):
        return None
    places = [one.dataset_file for one in inputs if one.dataset_file]
    path = data or next((path for path in places if path.is_file()), None)
    if path is None:
        reason = "is not where the embeddings record it" if places else "is not named by the embeddings"
        missing.append(f"dataset.json {reason} (give --data): no photos and captions, so no gallery")
        return None
    photos = DatasetPhotos(load_dataset_file(path))
    for one in inputs:
        if one.embeddings:
            photos.check_embeddings(one.embeddings)
    return photos


def _describe_missing_photos(photos: DatasetPhotos) -> Iterator[str]:
    if not photos.dataset.has_image_files:
        yield "the data set has no photos, since its features were imported: captions are displayed in their place"
    if photos.unreadable_files:
        n = len(photos.unreadable_files)
        yield f"{n} photo{'s' if n > 1 else ''} could not be read; a frame with the file name is displayed instead"


def _build_summary(report_input: ReportInput, letter: str) -> ResultSummary:
    config = yaml.safe_dump(dict(report_input.config), sort_keys=True, allow_unicode=True) if report_input.config else ""
    return ResultSummary(
        letter, report_input.result.experiment, report_input.path.name, list(_list_result_facts(report_input)), config
    )


def _list_result_facts(report_input: ReportInput) -> Iterator[tuple[str, str]]:
    result = report_input.result
    yield "Data", f"{result.dataset}, split {result.split}: {result.n_images:,} images, {result.n_captions:,} captions"
    if result.language:
        yield "Language of the captions", result.language
    if result.correction:
        yield "Correction", result.evaluation_suffix.removeprefix(" + ")
    for entry in result.compression:
        yield "Compressed", compression_line(entry)
    for entry in result.rerank:
        yield "Search in two stages", rerank_line(entry)
    if result.trained_on:
        yield "Trained on", result.trained_on
    if result.unfinished:
        yield "Unfinished", f"the training did not finish ({', '.join(run['state'] for run in result.unfinished)})"
    if result.ensemble:
        names = (one.experiment if one.seed is None else f"{one.experiment} seed {one.seed}" for one in result.ensemble)
        yield "Members", ", ".join(names)
        if result.combination:
            yield "Combined", combination_line(result.combination)
    elif any(seed is not None for seed in result.seeds):
        seeds = list(
            dict.fromkeys("unknown" if seed is None else str(seed) for seed in result.seeds)
        )  # list the common seed of several folds once
        yield "Seeds" if len(seeds) > 1 else "Seed", ", ".join(seeds)
    if settings := _list_main_settings(report_input):
        yield "Settings", ", ".join(settings)
    if run := report_input.embeddings:
        by_scores = "scores of each direction" if run.has_directional_scores else "scores of pairs"
        yield "Compared by", run.similarity if run.vectors is not None else by_scores
    yield from _list_run_facts(report_input)
    for name in ("i2t", "t2i"):
        if name in result.hubness:
            yield f"Hubs, {DIRECTIONS[name].title}", hubs_line(result.hubness[name])
    sha256 = (result.sha256 or "")[:12]
    yield "Result file", f"{report_input.path.name}{f' (sha256 {sha256}…)' if sha256 else ''}"


def _list_main_settings(report_input: ReportInput) -> list[str]:
    settings = flatten_settings(report_input.config)
    if settings.get("backbone"):  # a run with a trainable backbone does not read the feature
        settings.pop("feature", None)
    gradient = settings.get("solver.name", "gradient") == "gradient"
    keys = _SETTING_LABELS if gradient else {"solver.name": "solver", "feature": "feature"}
    return [f"{label} {settings[key]}" for key, label in keys.items() if settings.get(key) not in (None, 0)]


def _list_run_facts(report_input: ReportInput) -> Iterator[tuple[str, str]]:
    record = report_input.run_record
    features = _mapping_or_empty(report_input.result_provenance.get("features"))
    if features:
        yield "Features", ", ".join(f"{name} ({str(key)[:12]})" for name, key in features.items())
    if "best_epoch" in record:
        parts = [f"best epoch {record['best_epoch']} of {record.get('epochs', '?')}"]
        parts += [f"{record[key]:,.0f} {unit}" for key, unit in _COST_UNITS if isinstance(record.get(key), int | float)]
        parts += [f"on {record['device']}"] if "device" in record else []
        yield "Training", ", ".join(parts)
    versions = _mapping_or_empty(report_input.result_provenance.get("versions"))
    if versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for title, name in (("Trained by", "trained"), ("Evaluated by", "made")):
        origin = _mapping_or_empty(report_input.result_provenance.get(name))
        known = [part for part in (format_code_version(origin.get("code")), origin.get("date"), origin.get("command")) if part]
        if known:
            yield title, ", ".join(map(str, known))


def _list_differing_settings(inputs: Sequence[ReportInput]) -> list[tuple[str, str, str]]:
    if len(inputs) < 2 or not all(each.config for each in inputs):
        return []
    one, two = (flatten_settings(each.config) for each in inputs)
    names = [name for name in dict.fromkeys([*one, *two]) if name not in ("name", "rows") and one.get(name) != two.get(name)]
    return [(name, str(one.get(name, "–")), str(two.get(name, "–"))) for name in names]


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict with dotted names, such as ``{"loss.margin": 0.2}``."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        settings |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return settings


def _draw_curve_charts(inputs: Sequence[ReportInput], photos: DatasetPhotos | None) -> list[Chart]:
    """Return charts of the training loss and the validation rsum by epoch; for CCA, a chart of rsum by regularisation."""
    warm_ups = [(series, epochs) for series, one in enumerate(inputs) if (epochs := _find_last_warm_up_epoch(one))]
    charts = []
    for column, title in (("loss", "Training loss"), ("rsum", "Validation rsum")):
        for x, x_label in (("epoch", "epoch"), ("regularization", "regularisation")):
            curves = [
                curve
                for series, one in enumerate(inputs)
                for table in one.curve_tables
                if ("regularization" in table) == (x == "regularization") and (curve := _build_curve(series, table, x, column))
            ]
            if curves:
                label = title if x == "epoch" else f"{title} by {x_label}"
                marks = warm_ups if x == "epoch" else []
                chance = _compute_chance_rsum(inputs[0], photos) if column == "rsum" else None
                log = x == "regularization"
                svg = draw_training_curves(label, x_label, column, curves, log=log, warm_ups=marks, chance=chance)
                charts.append(Chart(label, svg))
    return charts


def _find_last_warm_up_epoch(report_input: ReportInput) -> int:
    """Return the last epoch of the warm-up, after which the loss function changes; 0 if the loss function does not change."""
    settings = flatten_settings(report_input.config)
    epochs, last = settings.get("warmup.epochs"), max((len(table) for table in report_input.curve_tables), default=0)
    return epochs if isinstance(epochs, int) and 0 < epochs < last else 0


def _list_training_notes(inputs: Sequence[ReportInput], photos: DatasetPhotos | None) -> Iterator[str]:
    if _compute_chance_rsum(inputs[0], photos) is not None:
        yield "The dotted line is chance on the validation split."
    for one in inputs:
        if epochs := _find_last_warm_up_epoch(one):
            settings = flatten_settings(one.config)
            before, after = (str(settings.get(key, "another")) for key in ("warmup.loss", "loss.name"))
            yield (
                f"Up to the dashed line, for {epochs} epoch{'s' * (epochs > 1)}, the loss of {one.result.experiment} is "
                f"{before} (warm-up), then {after}: losses on the two sides cannot be compared."
            )


def _compute_chance_rsum(report_input: ReportInput, photos: DatasetPhotos | None) -> float | None:
    """Return the rsum of a random order of the validation split; None for phrase results, or if its images are unknown."""
    images = photos.dataset.splits.get("val", ()) if photos and PHRASE_PROTOCOL not in report_input.result.protocols else ()
    first = flatten_settings(report_input.config).get("train.validate_images")
    images = images[:first] if isinstance(first, int) else images
    return chance_rsum(len(images), int(count_captions_per_image(images).sum())) if images else None


def _build_curve(series: int, table: pd.DataFrame, x: str, y: str) -> Curve | None:
    if y not in table:
        return None
    numbers = table[[x, y]].apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).dropna()
    if numbers.empty:
        return None
    best = float(numbers[x].loc[numbers[y].idxmax()]) if y == "rsum" else None
    return Curve(series, numbers[x].tolist(), numbers[y].tolist(), best)


def _draw_rank_histograms(ranks: Sequence[Ranks], result: Result) -> list[Chart]:
    charts = []
    for direction, n_candidates in (("i2t", result.n_captions), ("t2i", result.n_images)):
        of_results = [getattr(one, direction) for one in ranks]
        n_right = captions_per_image(result.n_images, result.n_captions) if direction == "i2t" else 1
        chart = draw_rank_histogram(
            f"Ranks of right answers, {DIRECTIONS[direction].title}", of_results, n_candidates, n_right
        )
        charts.append(Chart(f"{DIRECTIONS[direction].title}: {len(of_results[0]):,} queries among {n_candidates:,}", chart))
    return charts


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
