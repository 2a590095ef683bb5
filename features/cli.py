"""The command ``vse-extract``. Each subcommand imports its code when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import click

from vse.features.options import FeatureRequest, MergeRequest, VerifyRequest
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import FeatureSettings
from vse.pipeline.command import entry_point
from vse.pipeline.errors import UserError
from vse.pipeline.options import command
from vse.pipeline.presets.own_code import allow_named_code, is_code_name

_EXTRACTOR_OPTIONS = frozenset({"skip_bad", "weights_dir", "words"})  # options that only some extractors have
_SHARD_OPTIONS = frozenset({"shards", "shard", "like"})  # options without a meaning for the subcommand fit


class _ExtractorGroup(click.Group):
    """A group with a subcommand for each registered extractor. A user's own extractor is the subcommand ``FILE.py:NAME``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*EXTRACTORS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in EXTRACTORS:
            return super().get_command(ctx, cmd_name)
        if is_code_name(cmd_name):
            with allow_named_code([cmd_name]):
                return _build_extractor_command(cmd_name, EXTRACTORS[cmd_name])
        try:
            return _build_extractor_command(cmd_name, EXTRACTORS[cmd_name])
        except UserError as error:  # an invalid extractor must not break the other subcommands
            return _build_failing_command(cmd_name, error)


@click.group("vse-extract", cls=_ExtractorGroup)
def extract() -> None:
    """Extract the features of a data set into a cache. Models are trained on caches.

    A cache consists of shards, files of consecutive rows. Finished shards are kept, missing shards are extracted, and then all
    shards are merged to the cache.
    """


def _build_extractor_command(extractor: str, settings: type[FeatureSettings]) -> click.Command:
    class ExtractorCommand(click.Command):
        """A command whose help text ends with the settings of the extractor."""

        def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Settings of a preset, changed by --set KEY=VALUE"):
                fields = settings.model_fields.items()
                formatter.write_dl([(name, field.description) for name, field in fields if field.description], col_max=24)

    missing_options = _EXTRACTOR_OPTIONS.difference(settings.option_names)
    default = settings.default_preset or extractor

    @command(extractor, cls=ExtractorCommand, leave_out=missing_options, defaults={"feature": default}, text=settings.__doc__)
    def run(request: FeatureRequest) -> None:
        from vse.features.feature_job import extract_feature

        with allow_named_code([extractor]):
            click.echo(extract_feature(request, extractor))

    return run


def _build_failing_command(name: str, error: UserError) -> click.Command:
    """Return a command that raises ``error`` whatever its arguments are."""

    def fail() -> None:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, help=str(error), context_settings=any_arguments)


@command("fit", group=extract, leave_out=_SHARD_OPTIONS | (_EXTRACTOR_OPTIONS - {"words"}), defaults={"feature": ...})
def fit_command(request: FeatureRequest) -> None:
    """Fit the encoder of a caption feature on the training captions, and write it next to the cache OUT.

    After that, the shards of the cache can be extracted by parallel jobs.
    """
    from vse.features.feature_job import fit_feature

    click.echo(fit_feature(request))


@command("merge", group=extract)
def merge_command(request: MergeRequest) -> None:
    """Merge finished shards to a cache."""
    from vse.features import extraction
    from vse.features.cache.output_checks import build_cache_kind
    from vse.features.feature_job import choose_shard_count
    from vse.pipeline.dataset.dataset import load_dataset_file
    from vse.pipeline.files.outputs import check_output

    dataset, out = load_dataset_file(request.dataset), request.out
    check_output(out, build_cache_kind(out), [request.dataset])
    click.echo(extraction.merge_feature(request.dataset, out, request.shards or choose_shard_count(dataset, out)))


@command("verify", group=extract)
def verify_command(request: VerifyRequest) -> None:
    """Verify a cache: its counts, its ids and the hash of every shard.

    The images or captions from which the rows were extracted are hashed again, too, to find out whether they have changed.
    """
    from vse.features import extraction

    cache = extraction.verify_feature(request.cache_file, request.write)
    sources = "not checked" if request.no_sources else extraction.verify_inputs(cache)
    shards = f"{len(cache.shard_arrays)} shards"
    click.echo(f"{request.cache_file}: sound, {cache.describe()} in {shards}, sources {sources}, key {cache.key}")


main = entry_point(extract)
