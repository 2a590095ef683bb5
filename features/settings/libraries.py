"""Libraries of networks that are extras of this package: what they are called where, and one clear line if one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from vse.pipeline.errors import UserError


@dataclass(frozen=True)
class Library:
    """A library by its name, its module, its distribution, and the extra of this package that installs it."""

    name: str
    module: str
    distribution: str
    extra: str

    def load(self, model: str) -> Any:
        """The module; :class:`UserError` says what to install for ``model`` if it is not there."""
        from vse.features import vision  # noqa: F401  which they import, too

        try:
            return import_module(self.module)
        except ImportError:
            raise self._missing(model) from None

    def version(self, model: str) -> str:
        """The version that is installed; :class:`UserError` as :meth:`load`."""
        self.load(model)
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            raise self._missing(model) from None

    def _missing(self, model: str) -> UserError:
        return UserError(f"model {model} needs {self.name}: pip install 'vse-pipeline[{self.extra}]'")


LIBRARIES = {
    "timm": Library("timm", "timm", "timm", "timm"),
    "sentence_transformers": Library("sentence-transformers", "sentence_transformers", "sentence-transformers", "text"),
    "open_clip": Library("OpenCLIP", "open_clip", "open_clip_torch", "openclip"),
}
