"""Entry points of the commands: one clear line and exit code 2 for a user's mistake, log on stderr.

Where a file comes from: the code that made it, the command, and the date.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import click

from vse.pipeline import __version__
from vse.pipeline.cores import set_up_openmp
from vse.pipeline.errors import Interrupted, UserError, printable
from vse.pipeline.files.inputs import error_reason, report_changed_inputs
from vse.pipeline.files.outputs import allow_replacing_others

_command: ContextVar[str | None] = ContextVar("_command", default=None)


def record_arguments(name: str, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """In this block files say that they were made by this command."""
    return record_command(shlex.join([name, *arguments]))


@contextmanager
def record_command(command: str) -> Iterator[None]:
    """In this block files say that they were made by what is typed as ``command``, in a shell or in Python."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def current_provenance() -> dict[str, Any]:
    """What a file says of its making: ``date`` (UTC), ``command`` (None if Python code called a function that is not
    public), ``code``.

    It differs from one making to the next, so it is part of no key and of nothing that is compared.
    """
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": _command.get(), "code": dict(code_version())}


@cache
def code_version(root: Path | None = None) -> dict[str, Any]:
    """The ``version`` of this package and, in a checkout, its ``commit`` and whether files were ``changed`` since.

    ``root`` is the folder that holds the package's folders; by default the one that this file was imported from.
    """
    root = Path(__file__).resolve().parents[1] if root is None else root
    version = {"version": __version__}
    top = _git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie in the repository of something else.
    if top is None or Path(top).resolve() != root.resolve():
        return version
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return version
    return {**version, "commit": commit, "changed": bool(status)}


def describe_code(made_by: object) -> str | None:
    """``vse 0.1.0, commit 0123456789ab (changed)`` for a person; None if what a file says of its code is something else."""
    if not isinstance(made_by, dict) or not isinstance(made_by.get("version"), str):
        return None
    commit = f", commit {str(made_by['commit'])[:12]}" if "commit" in made_by else ""
    return f"vse {made_by['version']}{commit}{' (changed)' if made_by.get('changed') else ''}"


def _git(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_LONGEST = 1500  # characters of an error, a few lines of a terminal


class SeedType(click.types.IntParamType):
    """Numbers that every generator of random numbers takes as its seed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error if it is below 0 or beyond 64 bits."""
        seed: int = super().convert(value, param, ctx)
        if not 0 <= seed < 2**63:
            self.fail(f"{seed} is no seed: they are from 0 to 2^63 - 1", param, ctx)
        return seed


SEED = SeedType()

THREADS = click.option("--threads", type=click.IntRange(1), help="Processor cores to use.  [default: all it may use]")


def _allow_code(context: click.Context, _: click.Parameter, allowed: bool) -> None:
    if allowed:
        from vse.pipeline.presets.own_code import allow_own_code

        context.with_resource(allow_own_code())


ALLOW_CODE = click.option(
    "--allow-code",
    is_flag=True,
    envvar="VSE_ALLOW_CODE",
    expose_value=False,
    callback=_allow_code,
    help="Run code outside of the package that a run or a preset names. Look at it first.",
)


def _allow_replacing(context: click.Context, _: click.Parameter, allowed: bool) -> None:
    if allowed:
        context.with_resource(allow_replacing_others())


FORCE = click.option(
    "--force",
    is_flag=True,
    expose_value=False,
    callback=_allow_replacing,
    help="Replace files at the output's place that are of another kind. Inputs are never replaced.",
)


def entry_point(command: click.Command, may_spin: bool = True) -> Callable[..., None]:
    """Turn a click command into the function that the console script calls; ``may_spin``: see :mod:`vse.pipeline.cores`.

    Exit codes: 0 success, 2 bad input or usage, 1 (with a traceback) a failure of ours, 130 interrupted by Ctrl-C, 143 by
    SIGTERM where a command handles it. Every command has ``--version``.
    """
    if not any(parameter.name == "version" for parameter in command.params):
        click.version_option(__version__, message="%(prog)s %(version)s")(command)

    def main(arguments: Sequence[str] | None = None) -> None:
        set_up_openmp(os.environ, may_spin=may_spin)
        _log_to_stderr()
        given = list(sys.argv[1:] if arguments is None else arguments)
        try:
            with record_arguments(command.name or "", given), explain_system_errors():
                code = command.main(args=given, prog_name=command.name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a command, whose help is the answer
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(command, error.format_message())
        except UserError as error:
            _fail(command, str(error))
        except Interrupted as stop:
            with suppress(OSError):  # Ctrl-C may have ended the program that reads our output, too
                click.echo(f"{command.name}: {stop}", err=True)
            sys.exit(128 + stop.signal)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    main.__doc__ = command.help
    return main


@contextmanager
def explain_system_errors() -> Iterator[None]:
    """In this block a full disk, a missing permission, a long name or too little memory is a :class:`UserError`.

    So is any error after an input changed while it was read.
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


class _Echo(logging.Handler):
    """Write log lines to the current standard error, which tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(printable(self.format(record)), err=True)


def _log_to_stderr() -> None:
    log = logging.getLogger("vse")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _Echo) for handler in log.handlers):
        log.addHandler(_Echo())


def _fail(command: click.Command, message: str) -> None:
    text = printable(message)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    click.echo(f"{command.name}: error: {text}", err=True)
    sys.exit(2)
