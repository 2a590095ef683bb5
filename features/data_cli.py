"""The subcommands of ``vse-data`` for feature caches. Each imports what it runs, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from vse.pipeline.cli import TOKENISER, data
from vse.pipeline.command import entry_point

_FILE = click.Path(path_type=Path)
_DATASET = click.option("--dataset", type=_FILE, required=True, help="The data set's dataset.json.")
_OUT = click.option("--out-features", type=_FILE, required=True, help="The cache to write, e.g. features/coco_butd.h5.")


@data.command("import-precomp")
@click.argument("folder", type=_FILE)
@click.option("--dataset", required=True, help="Name of the data set.")
@_OUT
@click.option("--out-data", type=_FILE, required=True, help="The dataset.json to write.")
@click.option("--captions-per-image", default=5, show_default=True, type=click.IntRange(1))
@click.option("--test", type=click.Choice(["test", "testall"]), help="Which one is the test split.  [default: testall]")
@TOKENISER
def import_precomp_command(
    folder: Path,
    dataset: str,
    out_features: Path,
    out_data: Path,
    captions_per_image: int,
    test: str | None,
    tokeniser: str | None,
) -> None:
    """Import <split>_ims.npy, <split>_caps.txt and <split>_ids.txt, the layout of VSE++ and SCAN."""
    from vse.features.precomp import import_precomp

    click.echo(import_precomp(folder, dataset, out_features, out_data, captions_per_image, test, tokeniser))


@data.command("export-precomp")
@click.argument("features", type=_FILE)
@click.option("--out", type=_FILE, required=True, help="Folder to write.")
@click.option("--captions", type=_FILE, help="The data set's dataset.json.  [default: the one the cache names]")
@click.option("--repeat", type=click.IntRange(1), help="Rows per image.  [default: as imported, else 1]")
def export_precomp_command(features: Path, out: Path, captions: Path | None, repeat: int | None) -> None:
    """Write a cache and its captions in the layout of VSE++ and SCAN."""
    from vse.features.precomp import export_precomp

    click.echo(export_precomp(features, out, captions, repeat))


@data.command("import-npy")
@click.argument("features", type=_FILE)
@_DATASET
@_OUT
@click.option("--ids", type=_FILE, help="Ids of the rows, .txt or .npy; a .npz file holds its own.")
@click.option("--kind", type=click.Choice(["image", "text"]), default="image", show_default=True, help="Whose ids they are.")
def import_npy_command(
    features: Path, dataset: Path, out_features: Path, ids: Path | None, kind: Literal["image", "text"]
) -> None:
    """Import a .npy file with ids, or a .npz file with the arrays features and ids."""
    from vse.features.imported import import_arrays

    click.echo(import_arrays(features, ids, dataset, out_features, kind))


@data.command("import-tsv")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@_DATASET
@_OUT
@click.option("--match", type=click.Choice(["cocoid", "imgid", "filename"]), help="What an image_id is.  [default: cocoid]")
def import_tsv_command(files: tuple[Path, ...], dataset: Path, out_features: Path, match: str | None) -> None:
    """Import regions from bottom-up-attention TSV files."""
    from vse.features.imported import import_tsv

    click.echo(import_tsv(files, dataset, out_features, match))


main = entry_point(data)
