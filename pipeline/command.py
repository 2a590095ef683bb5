"""Entry points of the commands: one clear line and exit code 2 for a user's mistake, log on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.input_files import reason_of
from vse.pipeline.plain_text import printable

_LONGEST = 1500  # characters of an error, a few lines of a terminal


def entry_point(command: click.Command) -> Callable[..., None]:
    """Turn a click command into the function that the console script calls.

    Exit codes: 0 success, 2 bad input or usage, 1 (with a traceback) a failure of ours, 130 interrupted by Ctrl-C, 143 by
    SIGTERM where a command handles it.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        _log_to_stderr()
        try:
            code = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a command, whose help is the answer
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(command, error.format_message())
        except UserError as error:
            _fail(command, str(error))
        except OSError as error:  # a full disk, a missing permission, a name that is too long
            if error.errno is None:
                raise
            _fail(command, ": ".join(str(part) for part in (error.filename, error.strerror) if part))
        except MemoryError as error:
            _fail(command, f"not enough memory ({reason_of(error)})")
        except Interrupted as stop:
            with suppress(OSError):  # Ctrl-C may have ended the program that reads our output, too
                click.echo(f"{command.name}: {stop}", err=True)
            sys.exit(128 + stop.signal)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    main.__doc__ = command.help
    return main


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
