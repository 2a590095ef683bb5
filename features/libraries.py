"""Optional libraries with pretrained networks, imported when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from vse.pipeline.errors import UserError, extra_install_command


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
        from vse.features import torchvision_import  # noqa: F401  these libraries import torchvision, too

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
