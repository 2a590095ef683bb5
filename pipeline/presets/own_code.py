"""A user's own code, named by settings as ``my_loss.py:MyLoss`` or ``package.module:MyLoss``: when it runs, and which bytes.

Code runs if the command line names it by ``--set``, or if everything is allowed (``--allow-code``). What a file names, a
preset or the settings of a run, is else refused: to open a run that somebody sent must not run what is in it. A run keeps
copies of its code, and its settings their SHA-256, so that it is opened with these very bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, error_reason

_NAME = re.compile(r"(?P<place>[^:\n]+(?::\\[^:\n]*)?):(?P<member>[A-Za-z_]\w*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 12  # hexadecimal digits of a SHA-256 in names and messages


class CodeNotAllowed(UserError):
    """Code that is not run: nobody allowed it, or it is not what it was."""


@dataclass(frozen=True)
class OwnCode:
    """A class or function of a user's own and the file that has it.

    name : as settings have it
    member : the class or function
    file : where it was read
    source, sha256 : the bytes of that file
    """

    name: str
    member: Any
    file: Path
    source: bytes = field(repr=False)
    sha256: str

    @property
    def copy_name(self) -> str:
        """What a copy of the file is called in a run folder."""
        return code_copy_name(self.name, self.sha256)


@dataclass(frozen=True)
class _Rules:
    """What may run: everything, or what is ``named`` on a command line; ``copies`` is the folder of a run's own code."""

    everything: bool = False
    named: frozenset[str] = frozenset()
    copies: Path | None = None


_NOTHING = _Rules()
_RULES = ContextVar("_RULES", default=_NOTHING)
_RUN: dict[tuple[str, str], OwnCode] = {}  # what has been run in this process, by name and SHA-256


@contextmanager
def allow_own_code(allowed: bool = True) -> Iterator[None]:
    """In this block code runs that presets or runs name, as after ``--allow-code``."""
    with _changed(everything=_RULES.get().everything or allowed):
        yield


@contextmanager
def allow_named_code(values: Sequence[Any]) -> Iterator[None]:
    """In this block code runs that is named in these values, which a user gave on the command line."""
    with _changed(named=_RULES.get().named | frozenset(_names_in(values))):
        yield


@contextmanager
def use_code_of_run(copies: Path) -> Iterator[None]:
    """In this block the settings of a run are read, whose code lies in the folder ``copies``."""
    with _changed(copies=copies):
        yield


def is_code_name(name: object) -> bool:
    """Whether a name is that of a user's own code."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def code_copy_name(name: str, sha256: str) -> str:
    """What the copy of a file of code is called: the file's name and the beginning of its SHA-256."""
    return f"{Path(name.rpartition(':')[0]).name.removesuffix('.py')}-{sha256[:_SHOWN]}.py"


def hash_code_files(settings: object) -> dict[str, str]:
    """The SHA-256 of the files that settings name as code, as far as they are there; nothing is run."""
    places = {name: Path(name.rpartition(":")[0]) for name in _names_in(settings)}
    files = {name: place for name, place in places.items() if place.suffix == ".py" and place.is_file()}
    return {name: InputFile(file).sha256 for name, file in files.items()}


def load_code(name: str, sha256: str | None = None) -> OwnCode:
    """Run the file or module of ``name`` and take its class or function; it runs once in a process.

    A file is looked for from the working folder, a module where Python finds it; in the settings of a run it is the run's own
    copy, for which ``sha256`` must be known. :class:`CodeNotAllowed` if it may not run, or has another SHA-256 than the one
    given; :class:`UserError` if it is not there, cannot be run, or has no such class or function.
    """
    if sha256 is not None and (name, sha256) in _RUN:
        return _RUN[name, sha256]
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise CodeNotAllowed(f"{name}: {sha256!r} is no SHA-256")
    rules = _RULES.get()
    place, member = name.rpartition(":")[::2]
    if rules.copies is None and not (rules.everything or name in rules.named):
        raise CodeNotAllowed(
            f"{name} is code outside of the package: look at it, and allow it to run with --allow-code (what --set names runs)"
        )
    if rules.copies is not None:
        file = _copy(name, sha256, rules.copies, rules.everything)
    else:
        file = Path(place) if place.endswith(".py") else _module_file(name, place)
    opened = InputFile(file)
    source = opened.read()
    if sha256 not in (None, opened.sha256):
        raise CodeNotAllowed(
            f"{file}: has changed since: its SHA-256 is {opened.sha256[:_SHOWN]}..., and that of {name} was "
            f"{str(sha256)[:_SHOWN]}...; restore it, or train again"
        )
    key = name, opened.sha256
    if key not in _RUN:
        of_file = rules.copies is not None or place.endswith(".py")
        module = _executed(file, source, opened.sha256, place) if of_file else _imported(name, place)
        if not hasattr(module, member):
            raise UserError(f"{file}: has no class or function {member!r}")
        _RUN[key] = OwnCode(name, getattr(module, member), file, source, opened.sha256)
    return _RUN[key]


def _copy(name: str, sha256: str | None, copies: Path, allowed: bool) -> Path:
    """The copy of a run's code, if it may run."""
    if sha256 is None:
        raise CodeNotAllowed(f"{copies.parent}: its settings name {name}, but not the SHA-256 of that code; train again")
    file = copies / code_copy_name(name, sha256)
    if not allowed and (known := next((mine for of, mine in _RUN if of == name), None)):
        raise CodeNotAllowed(
            f"{name} has changed since {copies.parent} was made: its SHA-256 is {known[:_SHOWN]}..., that of the run "
            f"{sha256[:_SHOWN]}... ({file}); restore it, give another --out, or --overwrite the run"
        )
    if not allowed:
        raise CodeNotAllowed(
            f"{copies.parent} was made with code outside of the package, {name}: look at its copy, {file}, and allow "
            "it to run with --allow-code"
        )
    if not file.is_file():
        raise CodeNotAllowed(f"{file}: no such file, but this run uses that code ({name}); restore it, or train again")
    return file


def _module_file(name: str, module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except Exception as error:  # whatever the packages around it raise when they are imported
        raise UserError(f"{name}: {module} cannot be imported ({error_reason(error)})") from None
    if found is None or not found.has_location or not str(found.origin).endswith(".py"):
        raise UserError(f"{name}: no module {module} is installed, and a file's name ends with .py")
    return Path(str(found.origin))


def _imported(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UserError(f"{name}: {module} cannot be imported ({error_reason(error)})") from None


def _executed(file: Path, source: bytes, sha256: str, place: str) -> ModuleType:
    """A module made of these bytes; it is registered, so that the annotations of its classes can be resolved.

    The copy of a module of a package imports its neighbours where that package is installed.
    """
    module = ModuleType(f"vse_own_code_{sha256[:_SHOWN]}")
    module.__file__ = str(file)
    if not place.endswith(".py"):
        module.__package__ = place.rpartition(".")[0]
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        line = _line(error, str(file))
        raise UserError(f"{file}{line}: cannot be run ({type(error).__name__}: {error_reason(error)})") from None
    return module


def _line(error: Exception, file: str) -> str:
    """``:12``, the line of the file in which an error was raised, if it is known."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}" if error.lineno else ""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            number = trace.tb_lineno
        trace = trace.tb_next
    return f":{number}" if number else ""


@contextmanager
def _changed(**changes: Any) -> Iterator[None]:
    token = _RULES.set(replace(_RULES.get(), **changes))
    try:
        yield
    finally:
        _RULES.reset(token)


def _names_in(value: object) -> Iterator[str]:
    """All names of code in nested values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        if is_code_name(value):
            yield value
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _names_in(inner)
