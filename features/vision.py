"""torchvision, imported without torch's compiler, which takes longer to import than torch itself.

``torchvision.ops.roi_align`` imports it for one question, asked where algorithms must be deterministic on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

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
