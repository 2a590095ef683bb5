"""Encoders, similarities, losses, batches, the trainer, and the embedding of a split.

Called, the package is the function ``vse.train`` of the Python interface (docs/python.md).
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

if __name__ != "vse.train":
    raise ImportError(f"import this package as vse.train, not {__name__}: two copies would not share classes")


class _Called(ModuleType):
    """A package whose name is that of a public function, too: where Python sets one, it must serve as the other."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    @property
    def _function(self) -> Any:
        return importlib.import_module("vse.runs").train

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


sys.modules[__name__].__class__ = _Called
