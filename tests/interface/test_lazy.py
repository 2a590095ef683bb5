"""``import vse`` loads no library, and knows all its public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import vse


def python(code: str) -> str:
    """Return the output of a program in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_and_listing_it_loads_no_library() -> None:
    heavy = {"torch", "numpy", "pandas", "h5py", "click", "pydantic", "faiss", "matplotlib"}
    assert python(f"import sys, vse; dir(vse); vse.__all__; print(sorted({heavy} & sys.modules.keys()))") == "[]"


def test_opening_a_data_set_loads_no_torch(demo: Path) -> None:
    code = f"import sys, vse; print(len(vse.open_dataset({str(demo)!r})), 'torch' in sys.modules)"
    assert python(code) == "66 False"


def test_every_public_name_is_there_and_no_other() -> None:
    assert dir(vse) == sorted(vse.__all__)
    for name in vse.__all__:
        assert getattr(vse, name) is not None
    with pytest.raises(AttributeError, match="'vse' has no attribute 'trian'"):
        vse.trian  # noqa: B018
    assert list(inspect.signature(vse.train).parameters)[:3] == ["features", "experiment", "sets"]


@pytest.mark.nightly
@pytest.mark.parametrize("code", ["from vse import train; import vse", "import vse.training.kinds, vse"])
def test_train_is_a_function_whatever_was_imported_before(code: str) -> None:
    assert python(f"{code}; import types; print(type(vse.train) is types.FunctionType)") == "True"
