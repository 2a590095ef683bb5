"""The commands ``vse model pack`` and ``vse model push``. Each imports its code when it runs."""

from __future__ import annotations

import click

from vse.pipeline.options import command
from vse.training.options import PackRequest, PushRequest


@click.group("model")
def model_group() -> None:
    """Pack a trained model into a folder that needs no data, and publish the folder."""


@command("pack", group=model_group)
def pack_command(request: PackRequest) -> None:
    """Write the model of RUN to the folder OUT, which vse.load, vse-search and vse-serve open without data set and caches.

    The folder has the layout of Hugging Face: weights, settings, vocabulary, and a model card, README.md. The networks that
    compute features are named with their hashes, or added by --with-backbone.
    """
    from vse.training.share.pack import pack

    click.echo(pack(request.run, request.out, request.options))


@command("push", group=model_group)
def push_command(request: PushRequest) -> None:
    """Upload a packed model to the Hugging Face hub as the repository NAME, such as user/name.

    The token is that of hf auth login, or HF_TOKEN. HF_ENDPOINT is the address of another hub.
    """
    from vse.training.share.hub import push_model

    click.echo(push_model(request.folder, request.name, request.private))
