"""Baselines for image-caption retrieval: a feature cache, small trainers and exact evaluators.

What is listed in ``__all__`` is the public Python interface (docs/python.md). It is imported when it is first used, so that
``import vse`` itself costs nothing.
"""

# The sub-packages are links to the folders at the root of the repository. An editable install puts the folder above this one
# on the path, so that Python, editors and type checkers all see an ordinary package. A wheel holds copies.

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vse.pipeline import __version__

if TYPE_CHECKING:
    from vse.embedded_split import EmbeddedSplit as EmbeddedSplit
    from vse.handles import ImportedData as ImportedData
    from vse.handles import OpenDataset as OpenDataset
    from vse.handles import OpenFeatures as OpenFeatures
    from vse.handles import Run as Run
    from vse.interface import embed as embed
    from vse.interface import search as search
    from vse.interface import train as train
    from vse.interface_data import draw_demo as draw_demo
    from vse.interface_data import extract as extract
    from vse.interface_data import import_data as import_data
    from vse.interface_data import open_dataset as open_dataset
    from vse.interface_data import open_features as open_features
    from vse.interface_eval import compare as compare
    from vse.interface_eval import evaluate as evaluate
    from vse.interface_eval import report as report
    from vse.interface_eval import table as table
    from vse.pipeline.errors import Interrupted as Interrupted
    from vse.pipeline.errors import UserError as UserError
    from vse.results import Evaluation as Evaluation
    from vse.results import HtmlReport as HtmlReport
    from vse.results import ModelComparison as ModelComparison
    from vse.results import SearchResults as SearchResults
    from vse.results import ShownTable as ShownTable


_PUBLIC = {
    "vse.interface_data": ("open_dataset", "open_features", "draw_demo", "import_data", "extract"),
    "vse.interface": ("train", "embed", "search"),
    "vse.interface_eval": ("evaluate", "compare", "report", "table"),
    "vse.handles": ("OpenDataset", "OpenFeatures", "Run", "ImportedData"),
    "vse.embedded_split": ("EmbeddedSplit",),
    "vse.results": ("Evaluation", "ModelComparison", "SearchResults", "HtmlReport", "ShownTable"),
    "vse.pipeline.errors": ("UserError", "Interrupted"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "train":  # also a package, which Python sets here when it is imported; it can be called
        return import_module("vse.train")
    if name not in _MODULES:
        raise AttributeError(f"module 'vse' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
