"""Build the entry points of the commands, and describe the provenance of output files.

A user's mistake ends a command with one line on stderr and exit code 2. The log goes to stderr, too.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import click

from vse.pipeline import __version__
from vse.pipeline.cores import set_up_openmp
from vse.pipeline.errors import Interrupted, UserError, to_printable_line
from vse.pipeline.files.inputs import error_reason, find_nearest_path, is_path_text, report_changed_inputs
from vse.pipeline.presets.own_code import describe_own_error

_MAX_ERROR_LENGTH = 1500  # characters of an error message, a few lines of a terminal
_MAX_PATH_LENGTH = 300  # characters of a path that is compared with other paths
_recorded_command: ContextVar[str | None] = ContextVar("_recorded_command", default=None)


@contextmanager
def record_command(command: str) -> Iterator[None]:
    """Record ``command``, the text of a shell command or a Python call, in all files that are written in the block."""
    token = _recorded_command.set(command)
    try:
        yield
    finally:
        _recorded_command.reset(token)


def current_provenance() -> dict[str, Any]:
    """Return the provenance of a file that is written now: ``date`` (UTC), ``command`` and ``code`` (:func:`code_version`).

    ``command`` is the shell command or the call of the Python interface; None outside of both. Provenance differs between
    runs, so it must not be a part of a cache key.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": _recorded_command.get(),
        "code": dict(code_version()),
    }


@cache
def code_version(root: Path | None = None) -> dict[str, Any]:
    """Return the ``version`` of this package and, in a git checkout, the ``commit`` and whether files have ``changed`` since.

    ``root`` is the folder that contains the code; None stands for the running code.
    """
    root = Path(__file__).resolve().parents[1] if root is None else root
    version = {"version": __version__}
    top = _run_git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie in the repository of another project.
    if top is None or Path(top).resolve() != root.resolve():
        return version
    commit, status = _run_git(root, "rev-parse", "HEAD"), _run_git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return version
    return {**version, "commit": commit, "changed": bool(status)}


def format_code_version(version: object) -> str | None:
    """Return a code version as text, e.g. ``vse 0.1.0, commit 0123456789ab (changed)``; None if it is not valid."""
    if not isinstance(version, dict) or not isinstance(version.get("version"), str):
        return None
    commit = f", commit {str(version['commit'])[:12]}" if "commit" in version else ""
    return f"vse {version['version']}{commit}{' (changed)' if version.get('changed') else ''}"


def _run_git(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def entry_point(command: click.Command) -> Callable[..., None]:
    """Return the function that the console script of a click command calls, and add ``--version`` to the command.

    The exit code is 0 for success, 2 for bad input or usage, and 1 (with a traceback) for an error in this program. An error
    in a user's own code has the exit code 2, too. After Ctrl-C, the exit code is 130. After SIGTERM, it is 143 if the command
    handles this signal.
    """
    if not any(parameter.name == "version" for parameter in command.params):
        click.version_option(__version__, message="%(prog)s %(version)s")(command)

    def main(arguments: Sequence[str] | None = None) -> None:
        set_up_openmp(os.environ)
        _log_to_stderr()
        argument_list = list(sys.argv[1:] if arguments is None else arguments)
        try:
            with record_command(shlex.join([command.name or "", *argument_list])), explain_system_errors():
                code = command.main(args=argument_list, prog_name=command.name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a sub-command prints its help
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _exit_with_error(command, error.format_message())
        except UserError as error:
            _exit_with_error(command, f"{error}{_suggest_nearest_path(str(error))}")
        except Interrupted as stop:
            with suppress(OSError):  # Ctrl-C may also have ended the program that reads our output
                click.echo(f"{command.name}: {stop}", err=True)
            sys.exit(128 + stop.signal)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(130)
        except Exception as error:
            if (own_error := describe_own_error(error)) is None:
                raise
            _exit_with_error(command, own_error)
        sys.exit(code if isinstance(code, int) else 0)

    main.__doc__ = command.help
    return main


@contextmanager
def explain_system_errors() -> Iterator[None]:
    """Turn an operating-system error in the block, such as a full disk or too little memory, into a UserError.

    Any other error becomes a UserError if an input file changed while the file was read.
    """
    with report_changed_inputs():
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise UserError(": ".join(str(part) for part in (error.filename, error.strerror) if part)) from error
        except MemoryError as error:
            raise UserError(f"not enough memory ({error_reason(error)})") from error


class _StderrHandler(logging.Handler):
    """A log handler that looks up ``sys.stderr`` for each message, because tests replace ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(to_printable_line(self.format(record)), err=True)


def _suggest_nearest_path(message: str) -> str:
    """Return a hint with the most similar path for a message that begins with a missing path; otherwise an empty text."""
    text, colon, _ = message.partition(": ")
    text = re.sub(r":\d+$", "", text)  # the number of a line
    if not colon or len(text) > _MAX_PATH_LENGTH or not is_path_text(text) or "did you mean" in message:
        return ""
    nearest = find_nearest_path(Path(text))
    return "" if nearest in (None, Path(text)) else f"; did you mean {nearest}?"


def _log_to_stderr() -> None:
    log = logging.getLogger("vse")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in log.handlers):
        log.addHandler(_StderrHandler())


def _exit_with_error(command: click.Command, message: str) -> None:
    text = to_printable_line(message)
    if len(text) > _MAX_ERROR_LENGTH:
        text = f"{text[: _MAX_ERROR_LENGTH // 2]} ... {text[-_MAX_ERROR_LENGTH // 2 :]}"
    click.echo(f"{command.name}: error: {text}", err=True)
    sys.exit(2)
