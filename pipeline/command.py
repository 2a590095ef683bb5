"""Entry points of the commands: one clear line and exit code 2 for a user's mistake, log on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

import vse
from vse.pipeline.cores import set_up_openmp
from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.input_files import changes_named, reason_of
from vse.pipeline.outputs import replacing_others
from vse.pipeline.plain_text import printable
from vse.pipeline.provenance import running

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
        from vse.pipeline.own_code import code_allowed

        context.with_resource(code_allowed())


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
        context.with_resource(replacing_others())


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
        click.version_option(vse.__version__, message="%(prog)s %(version)s")(command)

    def main(arguments: Sequence[str] | None = None) -> None:
        set_up_openmp(os.environ, may_spin=may_spin)
        _log_to_stderr()
        given = list(sys.argv[1:] if arguments is None else arguments)
        try:
            with running(command.name or "", given), one_line_errors():
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
def one_line_errors() -> Iterator[None]:
    """In this block a full disk, a missing permission, a long name or too little memory is a :class:`UserError`.

    So is any error after an input changed while it was read.
    """
    with changes_named():
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise UserError(": ".join(str(part) for part in (error.filename, error.strerror) if part)) from error
        except MemoryError as error:
            raise UserError(f"not enough memory ({reason_of(error)})") from error


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
