"""What torchvision asks torch's compiler is answered by it, though torchvision was imported without."""

from __future__ import annotations

import sys

import pytest
from torch._dynamo.utils import is_compile_supported

from vse.features.vision import replace_compiler, torchvision


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_question_is_answered_by_the_compiler(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    with replace_compiler():
        from torch._dynamo.utils import is_compile_supported as asked
    assert "torch._dynamo.utils" not in sys.modules
    monkeypatch.undo()
    assert asked(device) == is_compile_supported(device)


def test_the_library_is_all_there() -> None:
    assert torchvision.ops.roi_align.__module__ == "torchvision.ops.roi_align"
    assert "squeezenet1_1" in torchvision.models.list_models()
