"""The libraries of pretrained networks (torchvision, timm and others), imported only when they are needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from vse.pipeline.errors import UserError, extra_install_command

_COMPILER_MODULE = "torch._dynamo.utils"


@dataclass(frozen=True)
class OptionalLibrary:
    """An optional library, such as timm.

    name : name in messages
    module_name : name of the module to import
    distribution : name of the package on PyPI
    extra : extra (optional group of dependencies) of this package that installs the library
    """

    name: str
    module_name: str
    distribution: str
    extra: str

    def load(self, model_name: str) -> Any:
        """Import and return the module.

        Raises UserError, which names ``model_name`` and the missing extra, if the library is not installed.
        """
        import_torchvision()  # these libraries import torchvision, too
        try:
            return import_module(self.module_name)
        except ImportError:
            raise self._missing_error(model_name) from None

    def find_version(self, model_name: str) -> str:
        """Return the installed version. Raises UserError, which names ``model_name``, if the library is not installed."""
        self.load(model_name)
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            raise self._missing_error(model_name) from None

    def _missing_error(self, model_name: str) -> UserError:
        return UserError(f"model {model_name} needs {self.name}: {extra_install_command(self.extra)}")


OPTIONAL_LIBRARIES = {
    "timm": OptionalLibrary("timm", "timm", "timm", "timm"),
    "sentence_transformers": OptionalLibrary(
        "sentence-transformers", "sentence_transformers", "sentence-transformers", "text"
    ),
    "open_clip": OptionalLibrary("OpenCLIP", "open_clip", "open_clip_torch", "openclip"),
}


def import_torchvision() -> Any:
    """Import and return torchvision, without torch's compiler, whose import takes longer than torch's own import.

    ``torchvision.ops.roi_align`` imports a function from the compiler, but calls it only for deterministic algorithms on a
    GPU. Here a stand-in module provides this function, and imports the compiler only when the function is called.
    """
    with replace_compiler():
        return import_module("torchvision")


def _is_compile_supported(device: str) -> bool:
    supported: bool = import_module(_COMPILER_MODULE).is_compile_supported(device)
    return supported


@contextmanager
def replace_compiler() -> Iterator[None]:
    """Replace torch's compiler by a small stand-in in the caller's ``with`` block, unless the compiler is already imported."""
    if _COMPILER_MODULE in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(_COMPILER_MODULE)
    stand_in.is_compile_supported = _is_compile_supported
    sys.modules[_COMPILER_MODULE] = stand_in
    try:
        yield
    finally:
        del sys.modules[_COMPILER_MODULE]
