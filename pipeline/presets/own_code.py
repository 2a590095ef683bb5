"""Run a user's own classes and functions, which settings name as ``my_loss.py:MyLoss`` or ``package.module:MyLoss``.

Code is allowed if ``--set`` on the command line names it, or if all code is allowed (``--allow-code``). Other code is
rejected, even if a preset or a run names it, so that another person's run cannot execute code. The folder of a run has copies
of the code files, and the settings of the run have the SHA-256 of each copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, error_reason

_CODE_NAME_PATTERN = re.compile(r"(?P<location>[^:\n]+(?::\\[^:\n]*)?):(?P<member>[A-Za-z_]\w*)")
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
_N_SHOWN_DIGITS = 12  # hexadecimal digits of a SHA-256 in names and messages


class CodeNotAllowed(UserError):
    """Raised for code that must not run: the user has not allowed the code, or the file has changed."""


@dataclass(frozen=True)
class UserCode:
    """A class or function that a user wrote, and the file that defines it.

    name : the name in settings, e.g. ``my_loss.py:MyLoss``
    class_or_function : the class or function
    file : the file that was read
    source, sha256 : the content and the SHA-256 of the file
    """

    name: str
    class_or_function: Any
    file: Path
    source: bytes = field(repr=False)
    sha256: str

    @property
    def copy_name(self) -> str:
        """The name of the copy of the file in a run folder."""
        return build_copy_name(self.name, self.sha256)


@dataclass(frozen=True)
class _CodeRules:
    """The rules about which code may run.

    allows_all_code : whether any code may run
    forbids_all_code : whether no code may run, even if other rules allow it
    allowed_names : names such as ``my_loss.py:MyLoss`` on the command line; this code may run
    copies_folder : while a run is opened, the folder with the run's copies of code files; otherwise None
    """

    allows_all_code: bool = False
    forbids_all_code: bool = False
    allowed_names: frozenset[str] = frozenset()
    copies_folder: Path | None = None


_NOTHING_ALLOWED = _CodeRules()
_CODE_RULES = ContextVar("_CODE_RULES", default=_NOTHING_ALLOWED)
_LOADED_CODE: dict[tuple[str, str], UserCode] = {}  # code that this process has run, by name and SHA-256


@contextmanager
def allow_own_code(allowed: bool = True) -> Iterator[None]:
    """Allow all users' own code during the ``with`` block, as ``--allow-code`` does. ``allowed=False`` changes nothing."""
    with _change_rules(allows_all_code=_CODE_RULES.get().allows_all_code or allowed):
        yield


@contextmanager
def forbid_own_code() -> Iterator[None]:
    """Refuse to run any user's own code during the ``with`` block, even if ``--allow-code`` is given."""
    with _change_rules(forbids_all_code=True):
        yield


@contextmanager
def allow_named_code(values: Sequence[Any]) -> Iterator[None]:
    """Allow the users' code that ``values`` (settings from the command line) name, during the ``with`` block."""
    with _change_rules(allowed_names=_CODE_RULES.get().allowed_names | frozenset(_iterate_own_code_names(values))):
        yield


@contextmanager
def use_code_of_run(copies_folder: Path) -> Iterator[None]:
    """Load users' own code from ``copies_folder``, the copies of a training run, during the ``with`` block."""
    with _change_rules(copies_folder=copies_folder):
        yield


def is_code_name(name: object) -> bool:
    """Return whether ``name`` is a text like ``my_loss.py:MyLoss`` or ``package.module:MyLoss``, as users name their code."""
    return isinstance(name, str) and _CODE_NAME_PATTERN.fullmatch(name) is not None


def build_copy_name(name: str, sha256: str) -> str:
    """Return the name of the copy of a code file in a run folder: the file name and the first digits of the SHA-256."""
    return f"{Path(name.rpartition(':')[0]).name.removesuffix('.py')}-{sha256[:_N_SHOWN_DIGITS]}.py"


@contextmanager
def explain_own_code_errors(name: str, expected: str) -> Iterator[None]:
    """Turn an exception in the ``with`` block into a UserError. The block calls the user's class or function ``name``.

    The message has the line of the user's file that failed. The message ends with ``expected``, a description of correct code
    with an example.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        description = describe_own_code_error(error)
        if description is None:  # the package failed on what the user's code returned
            description = f"{name} does not fit ({type(error).__name__}: {error_reason(error)})"
        raise UserError(f"{description}; {expected}") from error


def describe_own_code_error(error: Exception) -> str | None:
    """Return one line about an exception in a user's own code: the user's calls, the line that failed and the reason.

    Returns None if no file of a user's own code is in the traceback. Calls inside the package or other libraries are left
    out.
    """
    sources = {str(code.file): code.source for code in _LOADED_CODE.values()}
    calls = [call for call in traceback.extract_tb(error.__traceback__) if call.filename in sources]
    if not calls:
        return None
    *outer, last = calls
    lines = sources[last.filename].decode(errors="replace").splitlines()
    line = lines[last.lineno - 1].strip() if last.lineno and last.lineno <= len(lines) else ""
    callers = "".join(f", called in {call.name} at {call.filename}:{call.lineno}" for call in reversed(outer))
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    reason = f"{type(error).__name__}: {error_reason(error)}"
    return f"{last.filename}:{last.lineno}: {last.name} fails at `{line}` ({reason}){callers}{notes}"


def hash_code_files(settings: object) -> dict[str, str]:
    """Return the SHA-256 of each file of users' own code that settings name, by a name such as ``my_loss.py:MyLoss``.

    Missing files and installed modules are left out. No code is run.
    """
    locations = {name: Path(name.rpartition(":")[0]) for name in _iterate_own_code_names(settings)}
    files = {name: location for name, location in locations.items() if location.suffix == ".py" and location.is_file()}
    return {name: InputFile(file).sha256 for name, file in files.items()}


def load_code(name: str, sha256: str | None = None) -> UserCode:
    """Return the class or function ``name``, such as ``my_loss.py:MyLoss``. A process runs the file or module once.

    The path of a file is relative to the working folder. A module is found on Python's search path. In a ``with`` block of
    :func:`use_code_of_run`, the copy in the run folder is run instead. ``sha256`` must then be given. Raises CodeNotAllowed if
    the code may not run or has another SHA-256 than ``sha256``. Raises UserError if the file is missing, fails, or lacks the
    class or function.
    """
    if _CODE_RULES.get().forbids_all_code:
        raise CodeNotAllowed(f"{name} is code outside of the package, and must not run here")
    if sha256 is not None and (name, sha256) in _LOADED_CODE:
        return _LOADED_CODE[name, sha256]
    if sha256 is not None and not _SHA256_PATTERN.fullmatch(sha256):
        raise CodeNotAllowed(f"{name}: {sha256!r} is not a SHA-256")
    rules = _CODE_RULES.get()
    location, member = name.rpartition(":")[::2]
    if rules.copies_folder is None and not (rules.allows_all_code or name in rules.allowed_names):
        raise CodeNotAllowed(
            f"{name} is code outside of the package: look at it, and allow it to run with --allow-code (or name it by --set)"
        )
    if rules.copies_folder is not None:
        file = _find_code_copy(name, sha256, rules.copies_folder, rules.allows_all_code)
    else:
        file = Path(location) if location.endswith(".py") else _find_module_file(name, location)
    code_file = InputFile(file)
    source = code_file.read()
    if sha256 not in (None, code_file.sha256):
        raise CodeNotAllowed(
            f"{file}: has changed since: its SHA-256 is {code_file.sha256[:_N_SHOWN_DIGITS]}..., and that of {name} was "
            f"{str(sha256)[:_N_SHOWN_DIGITS]}...; restore it, or train again"
        )
    key = name, code_file.sha256
    if key not in _LOADED_CODE:
        is_file = rules.copies_folder is not None or location.endswith(".py")
        module = _execute_source(file, source, code_file.sha256, location) if is_file else _import_module(name, location)
        if not hasattr(module, member):
            raise UserError(f"{file}: has no class or function {member!r}")
        _LOADED_CODE[key] = UserCode(name, getattr(module, member), file, source, code_file.sha256)
    return _LOADED_CODE[key]


def _find_code_copy(name: str, sha256: str | None, copies_folder: Path, allowed: bool) -> Path:
    if sha256 is None:
        raise CodeNotAllowed(
            f"{copies_folder.parent}: its settings name {name}, but not the SHA-256 of that code; train again"
        )
    file = copies_folder / build_copy_name(name, sha256)
    if not allowed and (known := next((loaded for code, loaded in _LOADED_CODE if code == name), None)):
        raise CodeNotAllowed(
            f"{name} has changed since {copies_folder.parent} was made: its SHA-256 is {known[:_N_SHOWN_DIGITS]}..., that of "
            f"the run {sha256[:_N_SHOWN_DIGITS]}... ({file}); restore it, give another --out, or --overwrite the run"
        )
    if not allowed:
        raise CodeNotAllowed(
            f"{copies_folder.parent} was made with code outside of the package, {name}: look at its copy, {file}, and allow "
            "it to run with --allow-code"
        )
    if not file.is_file():
        raise CodeNotAllowed(f"{file}: no such file, but this run uses that code ({name}); restore it, or train again")
    return file


def _find_module_file(name: str, module: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # importing the parent packages can raise anything
        raise UserError(f"{name}: {module} cannot be imported ({error_reason(error)})") from None
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        raise UserError(f"{name}: no module {module} is installed (the name of a file would end with .py)")
    return Path(str(spec.origin))


def _import_module(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UserError(f"{name}: {module} cannot be imported ({error_reason(error)})") from None


def _execute_source(file: Path, source: bytes, sha256: str, location: str) -> ModuleType:
    """Execute source code as a new module, registered in ``sys.modules`` to resolve annotations, and return the module.

    ``location`` is the path of the original file or the name of a module. Relative imports in a module load its package.
    """
    module = ModuleType(f"vse_own_code_{sha256[:_N_SHOWN_DIGITS]}")
    module.__file__ = str(file)
    if not location.endswith(".py"):
        module.__package__ = location.rpartition(".")[0]
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        line = _format_error_line(error, str(file))
        raise UserError(f"{file}{line}: cannot be run ({type(error).__name__}: {error_reason(error)})") from None
    return module


def _format_error_line(error: Exception, file: str) -> str:
    """Return the line of ``file`` that raised an error, as ``:12``; an empty text for an unknown line."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}" if error.lineno else ""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


@contextmanager
def _change_rules(**changes: Any) -> Iterator[None]:
    token = _CODE_RULES.set(replace(_CODE_RULES.get(), **changes))
    try:
        yield
    finally:
        _CODE_RULES.reset(token)


def _iterate_own_code_names(settings: object) -> Iterator[str]:
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, str):
        if is_code_name(settings):
            yield settings
    elif isinstance(settings, Sequence):
        for inner in settings:
            yield from _iterate_own_code_names(inner)
