"""A report of one result, or of two side by side: what was run, its metrics, and what it retrieves, with photos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from markupsafe import Markup

from vse.eval.defaults import PHRASE, REPORT_QUERIES
from vse.eval.files.results import Member, Result
from vse.eval.protocols.options import combination_line
from vse.eval.ranking.metrics import DIRECTIONS
from vse.eval.ranking.ranks import Ranks
from vse.eval.report.cards import Gallery, HardNegative, Photos, gallery, hardest_negatives
from vse.eval.report.charts import COLOURS, Curve, captions_each, chance_rsum, rank_histogram, training_curves
from vse.eval.report.drawings import BRACKETS, SAID, Attended, AttentionOfRun
from vse.eval.report.gallery import all_ranks
from vse.eval.report.metrics_section import ShownDifference, headline, paired_differences, sections
from vse.eval.report.pages import page_kind, write_page
from vse.eval.report.phrases import is_of_phrases, phrase_paired_differences, phrase_part
from vse.eval.report.report_inputs import ReportedResult, on_the_same_queries, read_reported
from vse.pipeline.command import describe_code
from vse.pipeline.dataset.columns import caption_counts
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output

_SETTINGS = {
    "backbone": "backbone",
    "feature": "feature",
    "model.similarity": "similarity",
    "model.dim": "dimensions",
    "loss.name": "loss",
    "loss.margin": "margin",
    "warmup.epochs": "warm-up epochs",
    "train.learning_rate": "learning rate",
    "train.batch_size": "batch size",
    "train.epochs": "epochs",
}


class Chart(NamedTuple):
    """A chart and what stands under it."""

    title: str
    svg: Markup


class DescribedResult(NamedTuple):
    """A result as the head of the report names it."""

    letter: str
    experiment: str
    file: str
    facts: Sequence[tuple[str, str]]
    config: str


def write_report(
    results: Sequence[Path],
    out: Path,
    data: Path | None = None,
    embeddings: Sequence[Path] = (),
    queries: int = REPORT_QUERIES,
    seed: int = 0,
    attention: AttentionOfRun | None = None,
) -> Path:
    """Write an HTML report of one result file, or of two on the same queries; returns ``out``.

    ``data`` (``dataset.json``) and ``embeddings`` (of the first seed, one file per result) say where these lie if not where
    the results say. What is not there is left out, and the report says so. The gallery shows so many ``queries`` in each
    direction; ``seed`` decides which of many alike. ``attention`` tells what the model of a run looked at, which is drawn.
    """
    if not 1 <= len(results) <= 2:
        raise UserError(f"a report shows one result, or two side by side, not {len(results)}")
    if embeddings and len(embeddings) != len(results):
        raise UserError(f"{len(embeddings)} files of embeddings for {len(results)} results; give one for each")
    if queries < 0:
        raise UserError(f"{queries} queries cannot be shown")
    kind = page_kind("report.html")
    check_output(out, kind, [*results, *embeddings, *([data] if data else [])])
    places: Sequence[Path | None] = embeddings or [None] * len(results)
    reported = [read_reported(path, place) for path, place in zip(results, places, strict=True)]
    check_output(out, kind, [file for one in reported for file in one.files])
    check_output(
        out, kind, [place for one in reported if one.captions for place in (one.captions, one.captions.parent / "images")]
    )
    if len(reported) == 2:
        reported[1] = on_the_same_queries(*reported)
    ranks = [all_ranks(one.run) for one in reported if one.run]
    missing = [*_missing(reported)]
    galleries: list[Gallery] = []
    epoch = 0
    negatives: dict[str, list[HardNegative]] = {}
    photos = _photos(reported, data, missing)
    phrases = None
    if is_of_phrases(reported):
        phrases = phrase_part(reported, photos.dataset if photos else None, queries, seed, missing)
    elif photos:
        runs = [one.run for one in reported if one.run]
        if len(runs) == len(reported) and queries:
            attended = [Attended(one, attention, missing) for one in reported]
            check_output(out, kind, [file for one in attended for file in one.inputs])
            galleries = [gallery(direction, runs, ranks, photos, queries, seed, attended) for direction in ("i2t", "t2i")]
        if len(reported) == 1 and reported[0].negatives is not None:
            epoch, negatives = hardest_negatives(reported[0].negatives, photos)
        missing += _unreadable(photos)
    paired: list[ShownDifference] = []
    if len(ranks) == 2 and reported[0].run:
        paired = paired_differences(reported[0].run.image_of_caption(), *ranks)
    elif phrases and len(reported) == 2:
        paired = phrase_paired_differences(reported)
    return write_page(
        out,
        "report.html",
        title=_title(reported),
        result=reported[0].result,
        seed=reported[0].result.seeds[0],
        described=[_described(one, "AB"[k] if len(reported) == 2 else "") for k, one in enumerate(reported)],
        colours=COLOURS,
        directions=DIRECTIONS,
        headline=headline(reported[0].result) if len(reported) == 1 else [],
        sections=sections([one.result for one in reported]),
        differences=paired,
        curves=_curves(reported, photos),
        training_notes=[*_training_notes(reported, photos)],
        histograms=_histograms(ranks, reported[0].result) if len(ranks) == len(reported) else [],
        galleries=galleries,
        phrases=phrases,
        n_words=max((one.n_words for one in galleries), default=0),
        said=SAID,
        brackets=BRACKETS,
        epoch=epoch,
        negatives=negatives,
        differing=_differing(reported),
        missing=missing,
    )


def _title(reported: Sequence[ReportedResult]) -> str:
    return f"{reported[0].result.dataset} {' and '.join(one.result.experiment for one in reported)}"


def _missing(reported: Sequence[ReportedResult]) -> Iterator[str]:
    for letter, one in zip("AB", reported, strict=False):
        for what in one.missing:
            yield what if len(reported) == 1 else f"{letter}: {what}"


def _photos(reported: Sequence[ReportedResult], data: Path | None, missing: list[str]) -> Photos | None:
    """The data set of the embeddings; or None, and why, if it is not at hand."""
    if not any(one.run or one.phrases for one in reported):
        return None
    places = [one.captions for one in reported if one.captions]
    path = data or next((path for path in places if path.is_file()), None)
    if path is None:
        where = "is not where the embeddings say" if places else "is not named by the embeddings"
        missing.append(f"dataset.json {where} (--data does): no photos and captions, so no gallery")
        return None
    photos = Photos(load_dataset_file(path))
    for one in reported:
        if one.run:
            photos.check(one.run)
    return photos


def _unreadable(photos: Photos) -> Iterator[str]:
    if not photos.dataset.has_image_files:
        yield "the data set has no photos, its features were imported: captions stand for them"
    if photos.unreadable:
        n = len(photos.unreadable)
        yield f"{n} photo{'s' if n > 1 else ''} could not be read, and a frame with the file's name stands there"


def _described(reported: ReportedResult, letter: str) -> DescribedResult:
    config = yaml.safe_dump(dict(reported.config), sort_keys=True, allow_unicode=True) if reported.config else ""
    return DescribedResult(letter, reported.result.experiment, reported.path.name, list(_facts(reported)), config)


def _facts(reported: ReportedResult) -> Iterator[tuple[str, str]]:
    """What was run, in a few lines; what is unknown is left out."""
    result, record = reported.result, reported.record
    yield "Data", f"{result.dataset}, split {result.split}: {result.n_images:,} images, {result.n_captions:,} captions"
    if result.trained_on:
        yield "Trained on", result.trained_on
    if result.unfinished:
        yield "Unfinished", f"the training did not finish ({', '.join(run['state'] for run in result.unfinished)})"
    if result.ensemble:
        yield "Members", ", ".join(map(_member, result.ensemble))
        if result.combination:
            yield "Combined", combination_line(result.combination)
    elif any(seed is not None for seed in result.seeds):
        named = ("not named" if seed is None else str(seed) for seed in result.seeds)
        yield "Seeds" if len(result.seeds) > 1 else "Seed", ", ".join(named)
    settings = flattened(reported.config)
    if settings.get("backbone"):  # its embeddings are read, and no feature
        settings.pop("feature", None)
    gradient = settings.get("solver", "gradient") == "gradient"
    keys = _SETTINGS if gradient else {"solver": "solver", "feature": "feature"}
    shown = [f"{label} {settings[key]}" for key, label in keys.items() if settings.get(key) not in (None, 0)]
    if shown:
        yield "Settings", ", ".join(shown)
    if reported.run:
        by_scores = "scores of each direction" if reported.run.directional else "scores of pairs"
        yield "Compared by", reported.run.similarity if reported.run.vectors is not None else by_scores
    features = _mapping(reported.provenance.get("features"))
    if features:
        yield "Features", ", ".join(f"{name} ({str(key)[:12]})" for name, key in features.items())
    if "best_epoch" in record:
        parts = [f"best epoch {record['best_epoch']} of {record.get('epochs', '?')}"]
        parts += [f"{record[key]:,.0f} {unit}" for key, unit in _MEASURES if isinstance(record.get(key), int | float)]
        parts += [f"on {record['device']}"] if "device" in record else []
        yield "Training", ", ".join(parts)
    versions = _mapping(reported.provenance.get("versions"))
    if versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield from _making(reported)
    mark = (result.sha256 or "")[:12]
    yield "Result file", f"{reported.path.name}{f' (sha256 {mark}…)' if mark else ''}"


def _making(reported: ReportedResult) -> Iterator[tuple[str, str]]:
    """The code, the date and the command of the training and of the evaluation."""
    for title, name in (("Trained by", "trained"), ("Evaluated by", "made")):
        made = _mapping(reported.provenance.get(name))
        parts = [describe_code(made.get("code")), made.get("date"), made.get("command")]
        if any(parts):
            yield title, ", ".join(str(part) for part in parts if part)


_MEASURES = (("train_seconds", "s"), ("peak_memory_mb", "MB at most"))


def _differing(reported: Sequence[ReportedResult]) -> list[tuple[str, str, str]]:
    """The settings in which two results differ."""
    if len(reported) < 2 or not all(each.config for each in reported):
        return []
    one, two = (flattened(each.config) for each in reported)
    names = [name for name in dict.fromkeys([*one, *two]) if name not in ("name", "rows") and one.get(name) != two.get(name)]
    return [(name, str(one.get(name, "–")), str(two.get(name, "–"))) for name in names]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names: ``{"loss.margin": 0.2}``."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        settings |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return settings


def _curves(reported: Sequence[ReportedResult], photos: Photos | None) -> list[Chart]:
    """Loss and validation rsum per epoch, or, of CCA, rsum per regularisation.

    Where the loss changes after a warm-up, and at which rsum chance is, there are lines.
    """
    warm_ups = [(series, epochs) for series, one in enumerate(reported) if (epochs := _warm_up(one))]
    charts = []
    for column, title in (("loss", "Training loss"), ("rsum", "Validation rsum")):
        for x, x_label in (("epoch", "epoch"), ("regularization", "regularisation")):
            curves = [
                curve
                for series, one in enumerate(reported)
                for table in one.curves
                if ("regularization" in table) == (x == "regularization") and (curve := _curve(series, table, x, column))
            ]
            if curves:
                label = title if x == "epoch" else f"{title} by {x_label}"
                marks = warm_ups if x == "epoch" else []
                chance = _validation_chance(reported[0], photos) if column == "rsum" else None
                log = x == "regularization"
                drawn = training_curves(label, x_label, column, curves, log=log, warm_ups=marks, chance=chance)
                charts.append(Chart(label, drawn))
    return charts


def _warm_up(reported: ReportedResult) -> int:
    """The last epoch before the loss changes; 0 if it never does."""
    settings = flattened(reported.config)
    epochs, last = settings.get("warmup.epochs"), max((len(table) for table in reported.curves), default=0)
    return epochs if isinstance(epochs, int) and 0 < epochs < last else 0


def _training_notes(reported: Sequence[ReportedResult], photos: Photos | None) -> Iterator[str]:
    """What the lines of chance and of a warm-up mean."""
    if _validation_chance(reported[0], photos) is not None:
        yield "The dotted line is chance on the validation split."
    for one in reported:
        if epochs := _warm_up(one):
            settings = flattened(one.config)
            before, after = (str(settings.get(key, "another")) for key in ("warmup.loss", "loss.name"))
            yield (
                f"Up to the dashed line, for {epochs} epoch{'s' * (epochs > 1)}, the loss of {one.result.experiment} is "
                f"{before} (warm-up), then {after}: the two sides do not compare."
            )


def _validation_chance(reported: ReportedResult, photos: Photos | None) -> float | None:
    """The rsum of a random order of the validation split; None if it is not at hand."""
    images = photos.dataset.splits.get("val", ()) if photos and PHRASE not in reported.result.protocols else ()
    first = flattened(reported.config).get("train.validate_images")
    images = images[:first] if isinstance(first, int) else images
    return chance_rsum(len(images), int(caption_counts(images).sum())) if images else None


def _curve(series: int, table: pd.DataFrame, x: str, y: str) -> Curve | None:
    if y not in table:
        return None
    numbers = table[[x, y]].apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).dropna()
    if numbers.empty:
        return None
    best = float(numbers[x].loc[numbers[y].idxmax()]) if y == "rsum" else None
    return Curve(series, numbers[x].tolist(), numbers[y].tolist(), best)


def _member(member: Member) -> str:
    return member.experiment if member.seed is None else f"{member.experiment} seed {member.seed}"


def _histograms(ranks: Sequence[Ranks], result: Result) -> list[Chart]:
    charts = []
    for direction, n_candidates in (("i2t", result.n_captions), ("t2i", result.n_images)):
        of_results = [getattr(one, direction) for one in ranks]
        n_right = captions_each(result.n_images, result.n_captions) if direction == "i2t" else 1
        chart = rank_histogram(f"Ranks of right answers, {DIRECTIONS[direction].title}", of_results, n_candidates, n_right)
        charts.append(Chart(f"{DIRECTIONS[direction].title}: {len(of_results[0]):,} queries among {n_candidates:,}", chart))
    return charts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
