"""Entry points of the commands: one clear line and exit code 2 for a user's mistake, log on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from vse.pipeline.errors import Interrupted, UserError

_HOW_TO_WAIT = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def entry_point(command: click.Command) -> Callable[..., None]:
    """Turn a click command into the function that the console script calls.

    Exit codes: 0 success, 2 bad input or usage, 1 (with a traceback) a failure of ours, 130 interrupted by Ctrl-C, 143 by
    SIGTERM where a command handles it.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        sleep_while_waiting()
        _log_to_stderr()
        try:
            code = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
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


def sleep_while_waiting() -> None:
    """Let OpenMP's threads sleep while they wait, unless the environment says how they shall wait.

    By default they spin, and on a machine with other work a thread that spins keeps the one that it waits for from its core
    (``benchmarks/waiting.py``). OpenMP reads this once, when torch is loaded.
    """
    if not os.environ.keys() & _HOW_TO_WAIT:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


class _Echo(logging.Handler):
    """Write log lines to the current standard error, which tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _log_to_stderr() -> None:
    log = logging.getLogger("vse")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _Echo) for handler in log.handlers):
        log.addHandler(_Echo())


def _fail(command: click.Command, message: str) -> None:
    click.echo(f"{command.name}: error: {' '.join(message.split())}", err=True)
    sys.exit(2)
