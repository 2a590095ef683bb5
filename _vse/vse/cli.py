"""The command ``vse``, whose sub-commands are all commands of the package, grouped by task.

``vse train`` is the same as ``vse-train``. A sub-command is imported when it is needed.
"""

from __future__ import annotations

import click

from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.presets.parts import import_object

# For each task, the names of sub-commands and the click commands that they run.
COMMANDS_BY_TASK = {
    "Start": {
        "quickstart": "vse.quickstart:quickstart_command",
        "doctor": "vse.doctor:doctor_command",
    },
    "Prepare data and features": {
        "data": "vse.features.data_cli:data_group",
        "extract": "vse.features.cli:extract",
    },
    "Train": {
        "train": "vse.training.cli:train_command",
        "embed": "vse.training.cli:embed_command",
    },
    "Write your own parts": {
        "new": "vse.training.cli:new_command",
        "check": "vse.training.cli:check_command",
    },
    "Evaluate": {
        "eval": "vse.eval.cli:eval_command",
        "table": "vse.eval.cli:table_command",
        "report": "vse.training.cli:report_command",
    },
    "Search": {
        "search": "vse.training.cli:search_command",
        "serve": "vse.training.serve.cli:serve_command",
    },
    "Share": {
        "model": "vse.training.cli:model_group",
    },
}
_COMMANDS = {name: place for commands in COMMANDS_BY_TASK.values() for name, place in commands.items()}
_SUMMARY_LENGTH = 90  # characters of a command's summary in the help


class _TaskGroup(click.Group):
    """A group that imports its commands by their places in ``COMMANDS_BY_TASK``, and lists them by task."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_object(_COMMANDS[cmd_name]) if cmd_name in _COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for task, places in COMMANDS_BY_TASK.items():
            commands = {name: import_object(place) for name, place in places.items()}
            with formatter.section(task):
                formatter.write_dl([(name, one.get_short_help_str(_SUMMARY_LENGTH)) for name, one in commands.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise UserError(f"no command {args[0]!r}{did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group("vse", cls=_TaskGroup)
def vse_group() -> None:
    """Retrieve images by captions, and captions by images: prepare data, train models, evaluate and search.

    Most commands have a name of their own, too: vse-train is the same as vse train.
    """


main = entry_point(vse_group)
