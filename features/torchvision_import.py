"""Import torchvision without torch's compiler, whose import takes longer than torch's own import.

``torchvision.ops.roi_align`` imports a function from the compiler, but calls it only for deterministic algorithms on a GPU. A
stand-in module provides the function here. The function imports the compiler when it is called.
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
    supported: bool = import_module(_COMPILER_MODULE).is_compile_supported(device)
    return supported


@contextmanager
def replace_compiler() -> Iterator[None]:
    """Replace the compiler's module by a stand-in within this block, unless the compiler is already imported."""
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
