"""The page ``docs/experiments.md``, made from the files of presets: ``python -m tests.docs.experiments`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "experiments.md"
INTRODUCTION = """\
# Experiments

This page lists all experiments of `vse`, with a section for each file of `config/experiments/`. An experiment is a *preset*, a
list of settings with a name. The command `vse-train --experiment NAME` trains one of them. [Training](training.md) explains
the settings, losses and models. [Add an experiment](howto/experiment.md) shows how to write your own.

| column | meaning |
|---|---|
| experiment | the name of the preset |
| what it is | a description of the preset. `vse-train --help` prints it, too |
| extends | another preset, whose settings it has, except those that it changes; or the members of an ensemble |
| rows | the rows of [published tables](tables.md) that it reproduces. `ace 1.3` is row 3 of Table 1 in the paper on ACE |

An *ensemble* averages the scores of other experiments, its members. It is not trained itself, and `vse-train --help` does not
list it. The workflow trains the members ([Ensembles](evaluation.md#ensembles)).

Many names have one of these parts:

| part of a name | meaning |
|---|---|
| `effnet` | images are vectors of EfficientNet-Lite0, a small CNN for laptops; these experiments reproduce no row of a paper |
| `resnet` | images are vectors of ResNet152 instead of VGG19 |
| `bottom_up` | images are published regions of bottom-up attention |
| `minilm`, `tfidf`, `mean_vector` | captions are vectors of this [feature](features.md); `minilm` is a small text encoder |
| `10c`, `rc` | a vector is the mean over ten crops (10C), or belongs to a random crop (RC), instead of one centre crop (1C) |
| `ft` | the CNN is fine-tuned (FT) |
| `rv` | training also reads `restval` (rV), the part of COCO's validation images that is in no other split |
"""


def written() -> str:
    """The page as the files of presets have it."""
    return "\n".join([INTRODUCTION, *(_family(path) for path in sorted((ROOT / "config" / "experiments").glob("*.yaml")))])


def _family(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("presets:")[0].splitlines())
    lines = [f"## {path.name}", "", comment.strip(), "", "| experiment | what it is | extends | rows |", "|---|---|---|---|"]
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
