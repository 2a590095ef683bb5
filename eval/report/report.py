"""A page of one result, or of two side by side: what was run, its figures, and what it retrieves, in pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from markupsafe import Markup

from vse.eval.ranking.metrics import DIRECTIONS
from vse.eval.ranking.ranks import Ranks
from vse.eval.report.cards import Gallery, Negative, Pictures, gallery, hardest_negatives
from vse.eval.report.charts import COLOURS, Curve, rank_histogram, training_curves
from vse.eval.report.gallery import all_ranks
from vse.eval.report.html_page import write_page
from vse.eval.report.reported import Reported, on_the_same_queries, read_reported
from vse.eval.report.result_metrics import headline, paired_differences, sections
from vse.pipeline.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out

QUERIES = 12
_SETTINGS = {
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


class Described(NamedTuple):
    """A result as the head of the page names it."""

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
    queries: int = QUERIES,
    seed: int = 0,
) -> Path:
    """Write a page of one result file, or of two on the same queries; returns ``out``.

    ``data`` (``dataset.json``) and ``embeddings`` (of the first seed, one file per result) say where these lie if not where
    the results say. What is not there is left out, and the page says so. ``queries`` are shown each direction, in the gallery;
    which of many like them, ``seed`` decides.
    """
    if not 1 <= len(results) <= 2:
        raise UserError(f"a report shows one result, or two side by side, not {len(results)}")
    if embeddings and len(embeddings) != len(results):
        raise UserError(f"{len(embeddings)} files of embeddings for {len(results)} results; give one for each")
    if queries < 0:
        raise UserError(f"{queries} queries cannot be shown")
    check_out(out, [*results, *embeddings, *([data] if data else [])])
    places: Sequence[Path | None] = embeddings or [None] * len(results)
    found = [read_reported(path, place) for path, place in zip(results, places, strict=True)]
    if len(found) == 2:
        found[1] = on_the_same_queries(*found)
    ranks = [all_ranks(one.run) for one in found if one.run]
    missing = [*_missing(found)]
    galleries: list[Gallery] = []
    epoch = 0
    negatives: dict[str, list[Negative]] = {}
    pictures = _pictures(found, data, missing)
    if pictures:
        runs = [one.run for one in found if one.run]
        if len(runs) == len(found) and queries:
            galleries = [gallery(direction, runs, ranks, pictures, queries, seed) for direction in ("i2t", "t2i")]
        if len(found) == 1 and found[0].negatives is not None:
            epoch, negatives = hardest_negatives(found[0].negatives, pictures)
        missing += _unreadable(pictures)
    return write_page(
        out,
        "report.html",
        title=_title(found),
        result=found[0].result,
        described=[_described(one, "AB"[k] if len(found) == 2 else "") for k, one in enumerate(found)],
        colours=COLOURS,
        directions=DIRECTIONS,
        headline=headline(found[0].result) if len(found) == 1 else [],
        sections=sections([one.result for one in found]),
        differences=paired_differences(found[0].run.image_of_caption(), *ranks) if len(ranks) == 2 and found[0].run else [],
        curves=_curves(found),
        histograms=_histograms(ranks, found[0].result) if len(ranks) == len(found) else [],
        galleries=galleries,
        epoch=epoch,
        negatives=negatives,
        differing=_differing(found),
        missing=missing,
    )


def _title(found: Sequence[Reported]) -> str:
    return f"{found[0].result['dataset']} {' and '.join(str(one.result['experiment']) for one in found)}"


def _missing(found: Sequence[Reported]) -> Iterator[str]:
    for letter, one in zip("AB", found, strict=False):
        for what in one.missing:
            yield what if len(found) == 1 else f"{letter}: {what}"


def _pictures(found: Sequence[Reported], data: Path | None, missing: list[str]) -> Pictures | None:
    """The data set of the embeddings; or None, and why, if it is not at hand."""
    runs = [one.run for one in found if one.run]
    if not runs:
        return None
    noted = [one.captions for one in found if one.captions]
    path = data or next((path for path in noted if path.is_file()), None)
    if path is None:
        where = "is not where the embeddings say" if noted else "is not named by the embeddings"
        missing.append(f"dataset.json {where} (--data does): no pictures and captions, so no gallery")
        return None
    pictures = Pictures(load_dataset_file(path))
    for run in runs:
        pictures.check(run)
    return pictures


def _unreadable(pictures: Pictures) -> Iterator[str]:
    if not pictures.dataset.pictures:
        yield "the data set has no pictures, its features were imported: captions stand for them"
    if pictures.unreadable:
        n = len(pictures.unreadable)
        yield f"{n} picture{'s' if n > 1 else ''} could not be read, and a frame with the file's name stands there"


def _described(found: Reported, letter: str) -> Described:
    config = yaml.safe_dump(dict(found.config), sort_keys=True, allow_unicode=True) if found.config else ""
    return Described(letter, str(found.result["experiment"]), found.path.name, list(_facts(found)), config)


def _facts(found: Reported) -> Iterator[tuple[str, str]]:
    """What was run, in a few lines; what was not noted is left out."""
    result, record = found.result, found.record
    counts = f"{result['n_images']:,} images, {result['n_captions']:,} captions"
    yield "Data", f"{result['dataset']}, split {result['split']}: {counts}"
    if "ensemble" in result:
        yield "Members", ", ".join(f"{member['experiment']} seed {member['seed']}" for member in result["ensemble"])
    else:
        yield "Seeds" if len(result["seeds"]) > 1 else "Seed", ", ".join(map(str, result["seeds"]))
    settings = flattened(found.config)
    gradient = settings.get("solver", "gradient") == "gradient"
    keys = _SETTINGS if gradient else {"solver": "solver", "feature": "feature"}
    named = [f"{label} {settings[key]}" for key, label in keys.items() if settings.get(key) not in (None, 0)]
    if named:
        yield "Settings", ", ".join(named)
    if found.run:
        yield "Compared by", "scores of pairs" if found.run.scores is not None else str(found.run.similarity)
    features = _mapping(found.provenance.get("features"))
    if features:
        yield "Features", ", ".join(f"{name} ({str(key)[:12]})" for name, key in features.items())
    if "best_epoch" in record:
        parts = [f"best epoch {record['best_epoch']} of {record.get('epochs', '?')}"]
        parts += [f"{record[key]:,.0f} {unit}" for key, unit in _MEASURES if isinstance(record.get(key), int | float)]
        parts += [f"on {record['device']}"] if "device" in record else []
        yield "Training", ", ".join(parts)
    versions = _mapping(found.provenance.get("versions"))
    if versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    mark = str(found.result.get("sha256", ""))[:12]
    yield "Result file", f"{found.path.name}{f' (sha256 {mark}…)' if mark else ''}"


_MEASURES = (("train_seconds", "s"), ("peak_memory_mb", "MB at most"))


def _differing(found: Sequence[Reported]) -> list[tuple[str, str, str]]:
    """The settings in which two results differ."""
    if len(found) < 2 or not all(each.config for each in found):
        return []
    one, two = (flattened(each.config) for each in found)
    names = [name for name in dict.fromkeys([*one, *two]) if name not in ("name", "rows") and one.get(name) != two.get(name)]
    return [(name, str(one.get(name, "–")), str(two.get(name, "–"))) for name in names]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names: ``{"loss.margin": 0.2}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _curves(found: Sequence[Reported]) -> list[Chart]:
    """Loss and validation rsum per epoch, or, of CCA, rsum per regularisation."""
    charts = []
    for column, title in (("loss", "Training loss"), ("rsum", "Validation rsum")):
        for x, x_label in (("epoch", "epoch"), ("regularization", "regularisation")):
            curves = [
                curve
                for series, one in enumerate(found)
                for table in one.curves
                if ("regularization" in table) == (x == "regularization") and (curve := _curve(series, table, x, column))
            ]
            if curves:
                label = title if x == "epoch" else f"{title} by {x_label}"
                charts.append(Chart(label, training_curves(label, x_label, column, curves, log=x == "regularization")))
    return charts


def _curve(series: int, table: pd.DataFrame, x: str, y: str) -> Curve | None:
    if y not in table:
        return None
    numbers = table[[x, y]].apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).dropna()
    if numbers.empty:
        return None
    best = float(numbers[x].loc[numbers[y].idxmax()]) if y == "rsum" else None
    return Curve(series, numbers[x].tolist(), numbers[y].tolist(), best)


def _histograms(ranks: Sequence[Ranks], result: Mapping[str, Any]) -> list[Chart]:
    charts = []
    for direction, n_candidates in (("i2t", result["n_captions"]), ("t2i", result["n_images"])):
        found = [getattr(one, direction) for one in ranks]
        chart = rank_histogram(f"Ranks of right answers, {DIRECTIONS[direction]}", found, n_candidates)
        charts.append(Chart(f"{DIRECTIONS[direction]}: {len(found[0]):,} queries among {n_candidates:,}", chart))
    return charts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
