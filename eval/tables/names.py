"""What tables say of a result beside its metrics: method, features, where the run lies, which settings were changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vse.eval.files.results import Result, changed_settings_of, changes_suffix
from vse.pipeline.presets import is_experiment, load_plan

ABOUT = ("method", "feature", "run", "settings")


def described(path: Path, result: Result) -> dict[str, str]:
    """The columns ``experiment``, ``method``, ``feature``, ``run`` and ``settings`` of the result in the file ``path``."""
    return {
        "experiment": result.shown_name,
        "method": method_of(result),
        "feature": _features(result),
        "run": _runs(path, result),
        "settings": "; ".join(changed_settings_of(result.provenance)),
    }


def method_of(result: Result) -> str:
    """The method as papers call it, e.g. ``VSE++ (1C)``: the preset's title, with the settings that were changed.

    A name given by ``vse-train --name`` stands for both; without a title it is the name of the experiment.
    """
    config = result.provenance.get("config")
    config = config if isinstance(config, Mapping) else {}
    title = config.get("title")
    if not title and is_experiment(result.experiment):
        title = load_plan(result.experiment).title
    return result.shown_name if config.get("label") or not title else f"{title}{changes_suffix(result.provenance)}"


def _features(result: Result) -> str:
    """The backbone whose embeddings are read, or the features of images and, if they are not read as words, of captions."""
    config = result.provenance.get("config")
    config = config if isinstance(config, Mapping) else {}
    asked = [config.get(key) for key in (["backbone"] if config.get("backbone") else ["feature", "caption_feature"])]
    names = [name for name in asked if isinstance(name, str)]
    there = result.provenance.get("features")
    return " + ".join(names or (map(str, there) if isinstance(there, Mapping) else []))


def _runs(path: Path, result: Result) -> str:
    """The folders of the embeddings, as seen from here or, if the result does not name them, nothing."""
    files = result.provenance.get("embeddings")
    named = [one.get("file") for one in files if isinstance(one, Mapping)] if isinstance(files, list) else []
    folders = [os.path.normpath(path.parent / Path(file).parent) for file in named if isinstance(file, str)]
    return " ".join(dict.fromkeys(folders))
