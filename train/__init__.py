"""Training: encoders, similarities, losses, batches, solvers, and the use of trained models.

Calling the package calls the function ``vse.train`` of the Python interface (docs/python.md).
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

if __name__ != "vse.train":
    raise ImportError(f"import this package as vse.train, not {__name__}: two copies would not share classes")


class _CallablePackage(ModuleType):
    """A package that can be called like the public function of the same name.

    Python binds the package to that name when it is imported, so the package must also act as the function.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    @property
    def _function(self) -> Any:
        return importlib.import_module("vse.runs").train

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


sys.modules[__name__].__class__ = _CallablePackage
