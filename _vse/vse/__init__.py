"""Baselines for image-caption retrieval: a feature cache, small trainers and exact evaluators.

Each public name (``__all__``, docs/python.md) is imported when it is first used: ``import vse`` loads no large library.
"""

# The sub-packages are links to folders at the root of the repository. An editable install puts the parent of this folder on
# the path, so that Python, editors and type checkers find an ordinary package. A wheel has copies of the sub-packages.

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vse.pipeline import __version__

if TYPE_CHECKING:
    from vse.data import draw_demo as draw_demo
    from vse.data import embeddings_as_features as embeddings_as_features
    from vse.data import extract as extract
    from vse.data import import_data as import_data
    from vse.data import open_dataset as open_dataset
    from vse.data import open_features as open_features
    from vse.data_files import DatasetFile as DatasetFile
    from vse.data_files import FeatureFile as FeatureFile
    from vse.data_files import ImportedData as ImportedData
    from vse.eval.options import EvaluateOptions as EvaluateOptions
    from vse.evaluation import Ensemble as Ensemble
    from vse.evaluation import Evaluation as Evaluation
    from vse.evaluation import ModelComparison as ModelComparison
    from vse.evaluation import evaluate as evaluate
    from vse.features.options import ExtractOptions as ExtractOptions
    from vse.features.options import ImportOptions as ImportOptions
    from vse.features.options import SplitShares as SplitShares
    from vse.models import Model as Model
    from vse.models import fit as fit
    from vse.pipeline.errors import Interrupted as Interrupted
    from vse.pipeline.errors import UserError as UserError
    from vse.reports import HtmlReport as HtmlReport
    from vse.reports import ResultTable as ResultTable
    from vse.reports import SearchResults as SearchResults
    from vse.reports import report as report
    from vse.reports import table as table
    from vse.runs import SearchIndex as SearchIndex
    from vse.runs import TrainedModel as TrainedModel
    from vse.runs import load as load
    from vse.runs import train as train
    from vse.split_embeddings import SplitEmbeddings as SplitEmbeddings
    from vse.split_embeddings import SplitName as SplitName
    from vse.split_embeddings import embeddings as embeddings
    from vse.split_embeddings import pair_scores as pair_scores
    from vse.training.options import TrainInputs as TrainInputs
    from vse.training.options import TrainOptions as TrainOptions


_NAMES_BY_MODULE = {
    "vse.data": ("open_dataset", "open_features", "draw_demo", "import_data", "extract", "embeddings_as_features"),
    "vse.features.options": ("SplitShares", "ImportOptions", "ExtractOptions"),
    "vse.runs": ("train", "load", "TrainedModel", "SearchIndex"),
    "vse.models": ("fit", "Model"),
    "vse.training.options": ("TrainInputs", "TrainOptions"),
    "vse.split_embeddings": ("embeddings", "pair_scores", "SplitName", "SplitEmbeddings"),
    "vse.evaluation": ("evaluate", "Ensemble", "Evaluation", "ModelComparison"),
    "vse.eval.options": ("EvaluateOptions",),
    "vse.reports": ("report", "table", "SearchResults", "HtmlReport", "ResultTable"),
    "vse.data_files": ("DatasetFile", "FeatureFile", "ImportedData"),
    "vse.pipeline.errors": ("UserError", "Interrupted"),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = [*_MODULE_BY_NAME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        value = globals()[name] = getattr(import_module(_MODULE_BY_NAME[name]), name)
        return value
    if not name.startswith("_"):
        former_calls = import_module("vse.former_calls")
        if name in former_calls.NEW_CALLS_BY_FUNCTION:
            return former_calls.build_refusing_function(name)
    raise AttributeError(f"module 'vse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
