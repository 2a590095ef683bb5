"""``import vse`` loads no library, and knows all its public names."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vse

ROOT = Path(__file__).parents[2]


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


def test_every_public_name_is_there_and_is_imported_for_type_checkers() -> None:
    assert dir(vse) == sorted(vse.__all__)
    for name in vse.__all__:
        assert getattr(vse, name) is not None
    tree = ast.parse(Path(vse.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(map(str, imported)) == sorted(name for name in vse.__all__ if not name.startswith("__"))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vse' has no attribute 'trian'"):
        vse.trian  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import vse; print(vse.train.__call__.__name__)",
        "import vse.train.kinds, vse; print(vse.train.__call__.__name__)",
        "from vse import train; print(train.__call__.__name__)",
        "import vse; vse.evaluate; from vse.train.kinds import Kind; print(vse.train.__call__.__name__)",
    ],
)
def test_train_is_a_function_and_a_package_in_whatever_order_they_are_imported(code: str) -> None:
    assert python(code) == "__call__"


def test_train_has_the_signature_of_the_function() -> None:
    assert list(inspect.signature(vse.train).parameters)[:3] == ["features", "experiment", "sets"]


@pytest.mark.parametrize("name", [name for name in vse.__all__ if name.islower() and not name.startswith("__")])
def test_a_function_documents_every_argument_and_has_an_example(name: str) -> None:
    function = getattr(vse, name)
    function = function._function if inspect.ismodule(function) else function
    text = inspect.getdoc(function)
    parameters = re.findall(r"^    (\w+): ", text.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert parameters == list(inspect.signature(function).parameters)
    assert "Raises:\n" in text
    first, *code, last = text.partition("Examples:\n")[2].splitlines()
    assert (first.strip(), len(code), last.strip()) == ("```python", 2, "```")
