"""The commands ``vse check`` and ``vse new`` for a user's own parts. Each imports its code when it runs."""

from __future__ import annotations

import click

from vse.pipeline.options import command
from vse.training.options import CheckRequest, NewRequest


@command("check")
def check_command(request: CheckRequest) -> None:
    """Try your own loss, similarity, encoder or extractor on a small batch.

    PART is a file and a name in it, such as my_loss.py:my_loss. vse-train and vse-extract try such a part, too, before they
    start.
    """
    from vse.pipeline.presets.own_code import allow_named_code
    from vse.training.own_parts.check import check_part

    with allow_named_code([request.part]):
        click.echo(f"{request.part}: this {check_part(request.part, request.sets)} is sound")


@command("new")
def new_command(request: NewRequest) -> None:
    """Write a commented template of a loss, a similarity or an extractor to FILE, and a test of it next to FILE."""
    from vse.training.own_parts.templates import write_template

    click.echo("\n".join(write_template(request.kind, request.file)))
