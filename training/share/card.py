"""Build the model card of a packed model, ``README.md``: data, metrics, licence, limits, and how to load the model.

The metrics come from result files, or from an evaluation of the embeddings in the run folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vse.eval import DEFAULT_KS
from vse.eval.files.embeddings import parse_provenance, read_embeddings
from vse.eval.files.results import ProtocolMetrics, Result, drop_repeated_protocols, mean_and_std, read_result
from vse.eval.protocols.evaluate import evaluate_files
from vse.eval.ranking.metrics import DIRECTIONS
from vse.eval.tables.table import metric_cell
from vse.features.backbones.weight_files import WeightsFile
from vse.features.cache.reader import FeatureDescription
from vse.pipeline.command import format_code_version
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json
from vse.training.experiment import ExperimentConfig
from vse.training.run.folder import RunFolder
from vse.training.run.packed import PackedConfig

log = logging.getLogger(__name__)

_REPORTED_KEYS = ("dataset", "experiment", "split", "n_images", "n_captions", "seeds", "trained_on", "protocols", "bootstrap")


def collect_results(
    folder: RunFolder, experiment: ExperimentConfig, record: Mapping[str, Any], files: Sequence[Path]
) -> list[dict[str, Any]]:
    """Return the results of a run as dicts, without the metrics of single folds.

    The results are read from ``files``. Without files, the embeddings of the test split in the run folder are
    evaluated, if this training wrote them. Raises UserError if a file is the result of another experiment or seed.
    """
    for file in files:
        result, seed = read_result(file), record["seed"]
        if result.experiment != experiment.name or seed not in result.seeds:
            raise UserError(
                f"{file}: is a result of {result.experiment}, seeds {result.seeds}; {folder.path} is {experiment.name}, seed "
                f"{seed}"
            )
    contents = [read_json(file) for file in files]
    embeddings = folder.path / "test.h5"
    if not files and embeddings.is_file():
        if parse_provenance(read_embeddings(embeddings)).get("trained") == record.get("made"):
            contents = [evaluate_files([embeddings], None)]
        else:
            log.warning("%s: was not written by this training; vse-embed writes it again", embeddings)
    if not contents:
        log.warning("the model card has no metrics of a test split; run vse-embed %s before, or add --result", folder.path)
    return [{key: _drop_folds(content[key]) for key in _REPORTED_KEYS if key in content} for content in contents]


def parse_results(contents: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Convert results of a run from dicts, as :func:`collect_results` returns them, to Result objects."""
    return [Result.model_validate(content) for content in contents]


def _drop_folds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_folds(inner) for key, inner in value.items() if key != "per_fold"}
    return value


_METRIC_TITLES = {**{f"r{k}": f"R@{k}" for k in DEFAULT_KS}, "medr": "Med r"}
_TAGS = ["image-text-retrieval", "visual-semantic-embedding", "vse"]
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)  # values are not escaped, because the card is Markdown


def render_card(
    name: str, experiment: ExperimentConfig, config: PackedConfig, features: Mapping[str, FeatureDescription], notes: str
) -> str:
    """Return the text of the model card.

    ``experiment`` : settings of the packed run.
    ``config`` : content of ``config.json`` of the packed model.
    ``name`` : name of the model, for the title and the commands.
    ``features`` : description of each feature, by its key in ``run.json``, such as ``caption_features``.
    ``notes`` : text of the author, in Markdown.
    """
    results, captions = parse_results(config.results), features.get("caption_features")
    return _ENVIRONMENT.get_template("model_card.md.jinja").render(
        header=yaml.safe_dump(_build_header(name, config, results), sort_keys=False, allow_unicode=True).strip(),
        name=name,
        title=experiment.title or experiment.name,
        experiment=experiment,
        record=config.run,
        code=format_code_version(config.run.get("made", {}).get("code")) or f"vse {config.run['versions'].get('vse')}",
        images=_describe_feature(features["features"]),
        captions=None if captions is None else _describe_feature(captions),
        reads_photos=features["features"].provenance.get("config", {}).get("extractor") == "cnn",
        captions_are_read=captions is None or "config" in captions.provenance,
        image_dim=features["features"].row_shape[-1],
        caption_dim=None if captions is None else captions.row_shape[-1],
        is_finetuned=experiment.images.finetune,
        results=[(result, list(_list_metric_rows(result))) for result in results],
        metric_titles=list(_METRIC_TITLES.values()),
        licence=config.licence,
        notes=notes.strip(),
    )


def _build_header(name: str, config: PackedConfig, results: list[Result]) -> dict[str, Any]:
    """Return the metadata of the card for the Hugging Face hub."""
    entries = [
        {
            "task": {"type": "image-text-retrieval", "name": f"image-text retrieval, protocol {protocol}"},
            "dataset": {"type": result.dataset, "name": f"{result.dataset}, {result.split}", "split": result.split},
            "metrics": [
                {
                    "type": f"{direction}_{metric}",
                    "name": f"{DIRECTIONS[direction].title}, {_METRIC_TITLES[metric]}",
                    "value": value,
                }
                for direction in metrics.directions
                for metric in _METRIC_TITLES
                if math.isfinite(value := mean_and_std(metrics.metric(f"{direction}_{metric}"))[0])
            ],
        }
        for result in results
        for protocol, metrics in result.protocols.items()
    ]
    return {
        "library_name": "vse",
        **({} if config.licence is None else {"license": config.licence}),
        "tags": _TAGS,
        **({"model-index": [{"name": name, "results": entries}]} if entries else {}),
    }


def _list_metric_rows(result: Result) -> Iterator[list[str]]:
    """Yield a row for each protocol and direction: protocol, direction, and each metric with its confidence interval."""
    for name, protocol in drop_repeated_protocols(result.protocols, result.n_images).items():
        for direction in protocol.directions:
            yield [
                name,
                DIRECTIONS[direction].title,
                *(_format_metric(protocol, f"{direction}_{one}") for one in _METRIC_TITLES),
            ]


def _format_metric(protocol: ProtocolMetrics, metric: str) -> str:
    value, deviation = mean_and_std(protocol.metric(metric))
    interval = protocol.interval(metric)
    text = metric_cell(value, 1, deviation) or "–"
    return text if interval is None else f"{text} ({interval[0]:.1f} to {interval[1]:.1f})"


def _describe_feature(feature: FeatureDescription) -> dict[str, Any]:
    """Return the fields of a feature in the card: its name, its network, and the hash and the file of the weights."""
    settings = feature.provenance.get("config", {})
    return {
        "name": feature.feature,
        "extractor": settings.get("extractor"),
        "network": settings.get("model"),
        "sha256": feature.provenance.get("weights_sha256"),
        "file": WeightsFile.read(feature.provenance),
        "is_imported": "imported" in feature.provenance,
    }
