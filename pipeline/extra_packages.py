"""Packages that are extras of this one: imported when they are needed, and one clear line if one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vse.pipeline.errors import UserError


def extra_package(module: str, what: str, extra: str) -> Any:
    """The module; :class:`UserError` says that ``what`` needs it, and which extra of this package installs it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs the package {package}: pip install 'vse-pipeline[{extra}]'") from None
