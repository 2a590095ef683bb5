"""The checker that every function of ``vse`` runs under in the tests: types and shapes must be as annotated."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source
from types import CodeType, ModuleType
from typing import Any, Self, get_args, get_type_hints, runtime_checkable
from unittest.mock import patch

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

_CONFIG = BeartypeConf(
    is_pep484_tower=True,  # an int serves as a float, as it does for mypy
    hint_overrides=FrozenDict({Self: Any}),  # jaxtyping decorates methods, not the classes that Self stands for
)
_BYTECODE = "checked" + "".join(filter(str.isalnum, jaxtyping.__version__))
_with_shapes = jaxtyping.jaxtyped
_AXES = jaxtyping.jaxtyped("context")  # a name of an axis is one size in it
CALLS = 10  # of a function, in each test: the first calls, whose shapes are checked. All calls would take a sixth more time
_test = 1


def install() -> None:
    """Check all that is imported from ``vse`` from now on.

    jaxtyping's own decorator binds the arguments of every call. Where no shape is annotated, types alone are checked, which
    takes a third of the time.
    """
    jaxtyping.jaxtyped = _jaxtyped  # what its import hook names in the modules
    hook = jaxtyping.install_import_hook(["vse"], "tests.checked.checked").hook
    sys.meta_path[sys.meta_path.index(hook)] = _Finder(hook)


def begin_test() -> None:
    """Check the shapes of the next calls of each function again."""
    global _test
    _test += 1


class CheckedLoader(SourceFileLoader):
    """Loads a module as jaxtyping's loader does, but leaves alone how the modules are loaded that it imports.

    jaxtyping's loader looks for bytecode under a name of its own, and until it has run the module, so does every other loader:
    torch and the like, which our modules import, were compiled again in every process.
    """

    def __init__(self, instrumenting: SourceFileLoader) -> None:
        super().__init__(instrumenting.name, instrumenting.path)
        self._instrumenting = instrumenting

    def get_code(self, fullname: str) -> CodeType:
        """The module's code with the checks."""
        with patch("importlib._bootstrap_external.cache_from_source", partial(cache_from_source, optimization=_BYTECODE)):
            return self._instrumenting.get_code(fullname)


class _Finder(MetaPathFinder):
    def __init__(self, instrumenting: MetaPathFinder) -> None:
        self._instrumenting = instrumenting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = self._instrumenting.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckedLoader(spec.loader)
        return spec


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked by beartype; of an argument that a protocol annotates, that it has the protocol's members.

    Not if an annotation cannot be resolved because its import is for type checkers alone.
    """
    try:
        annotations = get_type_hints(function).values()
    except NameError:
        if "TYPE_CHECKING" in function.__globals__:  # the name may be one that only a type checker imports
            return function
        annotations = ()
    for annotation in annotations:
        _check_protocols(annotation)
    return beartype(function, conf=_CONFIG)


def _jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    def wrapped(part: Any) -> Any:
        if is_dataclass(part) and isinstance(part, type):
            _resolve_inherited(part)
        if _names_shapes(part):
            return _with_shapes(part, typechecker=typechecker) if isinstance(part, type) else _with_axes(part)
        if not isinstance(part, type):
            inner = "<locals>" in part.__qualname__  # it would be wrapped again at each call of the outer one
            return part if inner else checked(part)
        if is_dataclass(part) and "__init__" in vars(part):
            part.__init__ = checked(part.__init__)  # type: ignore[method-assign]
        return part

    return wrapped


def _with_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function, and that an axis has one size in all its arguments and its result.

    jaxtyping's own decorator also binds the arguments to their names and checks them twice, for its messages.
    """
    inner = checked(function)
    counted, left = 0, 0  # the test in which the calls are counted, and the calls that are still to be checked in it

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted, left
        if counted != _test:
            counted, left = _test, CALLS
        if left == 0 or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        left -= 1
        with _AXES:
            return inner(*args, **kwargs)

    return call


def _resolve_inherited(part: type[Any]) -> None:
    """Put types in place of their names in a data class that has fields of one in another module, which knows the names."""
    if any(base.__module__ != part.__module__ for base in part.__mro__ if is_dataclass(base)):
        with suppress(NameError):
            hints = get_type_hints(part, include_extras=True)
            part.__init__.__annotations__ |= {name: hints[name] for name in part.__init__.__annotations__ if name in hints}
            for field in fields(part):
                field.type = hints[field.name]


def _names_shapes(part: Any) -> bool:
    """Whether an annotation of a function, or of a field of a class or its bases, is a type of jaxtyping, as ``Float`` is."""
    for owner in part.__mro__ if isinstance(part, type) else (part,):
        known = vars(sys.modules[owner.__module__])
        for annotation in getattr(owner, "__annotations__", {}).values():
            words = re.findall(r"\w+", annotation) if isinstance(annotation, str) else []
            if _is_shape(annotation) or any(_is_shape(known[word]) for word in words if word in known):
                return True
    return False


def _is_shape(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.startswith("jaxtyping") or any(_is_shape(inner) for inner in get_args(value))


def _check_protocols(annotation: Any) -> None:
    if getattr(annotation, "_is_protocol", False):
        runtime_checkable(annotation)
    for part in get_args(annotation):
        _check_protocols(part)
