"""Calls of earlier versions of the Python interface, each with the call that replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vse.pipeline.errors import UserError

FUNCTIONS = {
    "embed": "vse.load(run).embed(split)",
    "search": "vse.load(run).search(query, k)",
    "compare": "vse.evaluate(a).compare(vse.evaluate(b))",
    "Run": "vse.load(run)",
    "EmbeddedSplit": "vse.embeddings(path)",
    "OpenDataset": "vse.open_dataset(path)",
    "OpenFeatures": "vse.open_features(path)",
}


def _as_options(call: str, options: str, names: str) -> dict[str, str]:
    """Return a dict from each argument in ``names`` to its new call. The new call passes it in an object of options.

    ``call`` is the function. ``options`` is a format string, such as ``options=vse.ExtractOptions({})``.
    """
    return {name: f"vse.{call}(..., {options.format(f'{name}=...')})" for name in names.split()}


def _same_call(call: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), call)


_ARRAYS = "vse.evaluate(vse.embeddings(images, captions, image_of_caption))"
ARGUMENTS = {
    "extract": _as_options("extract", "options=vse.ExtractOptions({})", "skip_bad weights_dir words device threads force"),
    "import_data": {
        **_as_options("import_data", "splits=vse.SplitShares({})", "val test seed"),
        **_as_options(
            "import_data", "options=vse.ImportOptions({})", "format key_until quoting tokeniser skip_bad out_features force"
        ),
    },
    "train": {
        **_as_options(
            "train",
            "inputs=vse.TrainInputs({})",
            "captions eval_features caption_features truth_features start_from weights_dir words",
        ),
        **_as_options(
            "train",
            "options=vse.TrainOptions({})",
            "log_negatives tensorboard resume overwrite force allow_code device threads",
        ),
    },
    "evaluate": {
        **_same_call(_ARRAYS, "images captions image_ids caption_ids caption_image_ids similarity name dataset split"),
        **_same_call("vse.evaluate(vse.pair_scores(scores, image_of_caption))", "scores"),
        **_same_call("vse.evaluate(files)", "files"),
        **_same_call("vse.evaluate(...).save(path)", "out"),
        **_same_call("vse.evaluate(...).save(path, force=True)", "force"),
        **_same_call("vse.evaluate(vse.Ensemble([a, b]))", "ensemble"),
        **_same_call("vse.evaluate(vse.Ensemble([a, b], experiment=...))", "experiment"),
        **_same_call("vse.evaluate(vse.Ensemble([a, b], alpha=...))", "alpha"),
        **_same_call("vse.evaluate(vse.Ensemble([a, b])).save_ensemble(path)", "save"),
        **_same_call("vse.evaluate(...).with_index(index, parameters)", "index index_parameters"),
        **_same_call("vse.evaluate(...).with_rerank(candidates)", "rerank"),
        **_same_call("vse.evaluate(...).per_query(path)", "per_query"),
        **_same_call("vse.evaluate(...).to_trec(folder, depth)", "trec trec_depth"),
        **_as_options("evaluate", "options=vse.EvaluateOptions({})", "cross_check cross_checked iou cxc unfinished device"),
    },
}


def replacing_call(function: str, argument: str) -> str | None:
    """Return the new call, as text, that replaces an argument of an earlier version; None if no earlier version had it."""
    return ARGUMENTS.get(function, {}).get(argument)


def former_function(name: str) -> Callable[..., Any]:
    """Return a function that raises a UserError with the call that replaces an earlier function or class."""

    def call(*_: Any, **__: Any) -> Any:
        raise UserError(f"vse.{name}(...) is now {FUNCTIONS[name]}")

    return call
