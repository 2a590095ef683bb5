"""Import torchvision without torch's compiler, which takes longer to import than torch itself.

``torchvision.ops.roi_align`` imports the function ``is_compile_supported`` from the compiler. It calls that function only
where deterministic algorithms are required on a GPU. Here a stand-in module provides the function and imports the compiler
when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER_MODULE = "torch._dynamo.utils"


def _is_compile_supported(device: str) -> bool:
    """Import torch's compiler and return whether it supports this device."""
    supported: bool = import_module(_COMPILER_MODULE).is_compile_supported(device)
    return supported


@contextmanager
def replace_compiler() -> Iterator[None]:
    """Replace the compiler's module by the stand-in within this block, unless the compiler is already imported."""
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


with replace_compiler():
    import torchvision as torchvision
