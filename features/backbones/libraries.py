"""Libraries of networks that are extras of this package: what they are called where, and one clear line if one is missing.

torchvision, imported without torch's compiler, which takes longer to import than torch itself.

``torchvision.ops.roi_align`` imports it for one question, asked where algorithms must be deterministic on a GPU.

The hash by which weights and fitted encoders are known.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vse.pipeline.errors import UserError

_ASKED = "torch._dynamo.utils"


def _is_compile_supported(device: str) -> bool:
    """The answer of torch's compiler, which is imported now."""
    supported: bool = import_module(_ASKED).is_compile_supported(device)
    return supported


@contextmanager
def compiler_stands_by() -> Iterator[None]:
    """In this block an import of the one function that torchvision takes from the compiler imports no compiler."""
    if _ASKED in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(_ASKED)
    stand_in.is_compile_supported = _is_compile_supported
    sys.modules[_ASKED] = stand_in
    try:
        yield
    finally:
        del sys.modules[_ASKED]


with compiler_stands_by():
    import torchvision as torchvision


@dataclass(frozen=True)
class Library:
    """A library by its name, its module, its distribution, and the extra of this package that installs it."""

    name: str
    module: str
    distribution: str
    extra: str

    def load(self, model: str) -> Any:
        """The module; :class:`UserError` says what to install for ``model`` if it is not there."""
        from vse.features.backbones import libraries as vision  # noqa: F401  which they import, too

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


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors, on any device: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
