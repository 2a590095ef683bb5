"""Calls of earlier versions of the Python interface, each with the call that replaces the earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vse.pipeline.errors import UserError

NEW_CALLS_BY_FUNCTION = {
    "embed": "vse.load(run).embed(split)",
    "search": "vse.load(run).search(query, k)",
    "compare": "vse.evaluate(a).compare(vse.evaluate(b))",
    "Run": "vse.load(run)",
    "EmbeddedSplit": "vse.embeddings(path)",
    "OpenDataset": "vse.open_dataset(path)",
    "OpenFeatures": "vse.open_features(path)",
}


def _map_arguments_to_options(function: str, options: str, names: str) -> dict[str, str]:
    """Return a dict from each argument in ``names`` to the text of the new call of ``function`` with this argument.

    The new call passes the argument in an object. ``options`` is a format string for this object, such as
    ``options=vse.ExtractOptions({})``. Blanks separate the ``names``.
    """
    return {name: f"vse.{function}(..., {options.format(f'{name}=...')})" for name in names.split()}


def _map_arguments_to_call(new_call: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), new_call)


_CALL_WITH_ARRAYS = "vse.evaluate(vse.embeddings(images, captions, image_of_caption))"
NEW_CALLS_BY_ARGUMENT = {
    "extract": _map_arguments_to_options(
        "extract", "options=vse.ExtractOptions({})", "skip_bad weights_dir words device threads force"
    ),
    "import_data": {
        **_map_arguments_to_options("import_data", "splits=vse.SplitShares({})", "val test seed"),
        **_map_arguments_to_options(
            "import_data", "options=vse.ImportOptions({})", "format key_until quoting tokeniser skip_bad out_features force"
        ),
    },
    "train": {
        **_map_arguments_to_options(
            "train",
            "inputs=vse.TrainInputs({})",
            "captions eval_features caption_features truth_features start_from weights_dir words",
        ),
        **_map_arguments_to_options(
            "train",
            "options=vse.TrainOptions({})",
            "log_negatives tensorboard resume overwrite force allow_code device threads",
        ),
    },
    "evaluate": {
        **_map_arguments_to_call(_CALL_WITH_ARRAYS, "image_ids caption_ids caption_image_ids similarity name dataset split"),
        **_map_arguments_to_call("vse.evaluate(vse.pair_scores(scores, image_of_caption))", "scores"),
        **_map_arguments_to_call("vse.evaluate(files)", "files"),
        **_map_arguments_to_call("vse.evaluate(...).save(path)", "out"),
        **_map_arguments_to_call("vse.evaluate(...).save(path, force=True)", "force"),
        **_map_arguments_to_call("vse.evaluate(vse.Ensemble([a, b]))", "ensemble"),
        **_map_arguments_to_call("vse.evaluate(vse.Ensemble([a, b], experiment=...))", "experiment"),
        **_map_arguments_to_call("vse.evaluate(vse.Ensemble([a, b], alpha=...))", "alpha"),
        **_map_arguments_to_call("vse.evaluate(vse.Ensemble([a, b])).save_ensemble(path)", "save"),
        **_map_arguments_to_call("vse.evaluate(...).with_index(index, parameters)", "index index_parameters"),
        **_map_arguments_to_call("vse.evaluate(...).with_rerank(candidates)", "rerank"),
        **_map_arguments_to_call("vse.evaluate(...).per_query(path)", "per_query"),
        **_map_arguments_to_call("vse.evaluate(...).to_trec(folder, depth)", "trec trec_depth"),
        **_map_arguments_to_call("vse.evaluate(..., options=vse.EvaluateOptions(allow_unfinished=...))", "unfinished"),
        **_map_arguments_to_options("evaluate", "options=vse.EvaluateOptions({})", "cross_check cross_checked iou cxc device"),
    },
}


def find_new_call(function: str, argument: str) -> str | None:
    """Return the text of the call that replaces a former argument of ``function``; None for any other argument."""
    return NEW_CALLS_BY_ARGUMENT.get(function, {}).get(argument)


def build_refusing_function(name: str) -> Callable[..., Any]:
    """Return a function that replaces a function or class of an earlier version. It raises a UserError with the new call."""

    def raise_error_with_new_call(*_: Any, **__: Any) -> Any:
        raise UserError(f"vse.{name}(...) is now {NEW_CALLS_BY_FUNCTION[name]}")

    return raise_error_with_new_call
