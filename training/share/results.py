"""The results of a run that a packed model reports: result files, or the evaluation of the run's own embeddings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vse.eval.files.embeddings import parse_provenance, read_embeddings
from vse.eval.files.results import Result, read_result
from vse.eval.protocols.evaluate import evaluate_files
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json
from vse.training.experiment import ExperimentConfig
from vse.training.run.folder import RunFolder

log = logging.getLogger(__name__)
_REPORTED_KEYS = ("dataset", "experiment", "split", "n_images", "n_captions", "seeds", "trained_on", "protocols", "bootstrap")


def collect_results(
    folder: RunFolder, experiment: ExperimentConfig, record: Mapping[str, Any], files: Sequence[Path]
) -> list[dict[str, Any]]:
    """Return the results of a run without details of single folds.

    The results are those in ``files``. Without files, the embeddings of the test split in the folder of the run are evaluated,
    if they exist. Raises UserError if a file is the result of another experiment or seed.
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
    """Return the results that :func:`collect_results` returned as objects."""
    return [Result.model_validate(content) for content in contents]


def _drop_folds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_folds(inner) for key, inner in value.items() if key != "per_fold"}
    return value
