"""The page ``docs/experiments.md``, made from the files of presets: ``python -m tests.docs.experiments`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "experiments.md"
INTRODUCTION = """\
# Experiments

This page lists all experiments of `vse`. `vse-train --features CACHE --experiment NAME` trains one of them, and
[Training](training.md) explains their settings. [Add an experiment](howto/experiment.md) shows how to write your own.
The sections are the files of `config/experiments/`. Names that end in `_effnet` are small experiments for a laptop.

| column | meaning |
|---|---|
| experiment | the name |
| what it is | one sentence, which `vse-train --help` prints too |
| extends | the experiment from which it takes all settings that it does not change |
| rows | the rows of [published tables](tables.md) that it reproduces. `vsepp 1.6` is row 1.6 of the VSE++ paper |

| term | meaning |
|---|---|
| VGG19 FC7 | image vectors: the output of VGG19's layer fc7 |
| pooled ResNet152, pooled EfficientNet-Lite0 | image vectors: the CNN's last feature map, averaged over its positions |
| 1C, 10C | vectors of one centre crop; their mean over ten crops |
| RC, crop bank | random crops; a cache with the vectors of ten random crops of each image |
| rV | trained on COCO's split restval, too |
| FT | the CNN is fine-tuned |
| HGLMM, GMM, TF-IDF, mean word vectors, MiniLM | caption vectors ([Features](features.md)) |
| hinge, head, negative, direction | explained in [Training](training.md) |
| ensemble | averages the scores of other experiments, and is [not trained itself](evaluation.md#ensembles) |
"""


def written() -> str:
    """The page as the files of presets have it."""
    paths = (ROOT / "config" / "experiments").glob("*.yaml")
    ordered = sorted(paths, key=lambda path: (not path.name.startswith("vsepp"), path.name))
    return "\n".join([INTRODUCTION, *map(_family, ordered)])


def _family(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("presets:")[0].splitlines())
    linked = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", comment.strip())
    lines = [f"## {path.name}", "", linked, "", "| experiment | what it is | extends | rows |", "|---|---|---|---|"]
    return "\n".join([*lines, *_rows(yaml.safe_load(text)["presets"]), ""])


def _rows(presets: dict[str, dict[str, object]]) -> Iterator[str]:
    for name, settings in presets.items():
        base, rows, members = settings.get("extends"), settings.get("rows", []), settings.get("ensemble_of", [])
        assert isinstance(rows, list)
        assert isinstance(members, list)
        named = " and ".join(f"`{member}`" for member in members)
        made_of = f"ensemble of {'the seeds of ' if len(members) == 1 else ''}{named}" if members else ""
        yield f"| `{name}` | {settings['about']} | {f'`{base}`' if base else made_of} | {', '.join(rows)} |"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
