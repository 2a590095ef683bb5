"""Facts about the training of a model, a comparison of the facts of two models, and the names of models in tables.

All facts come from the provenance in a result file: the features, settings and versions of the training run. Without
provenance, the settings are ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel


class DifferingFact(BaseModel):
    """A fact in which two models, a and b, differ, such as ``train.epochs``. ``a`` and ``b`` are the values of the models."""

    name: str
    a: str
    b: str


_CHANGED_SETTING_PATTERN = re.compile(r"([^:]+): .* -> (.*)", re.DOTALL)


def display_name(experiment: str, provenance: Mapping[str, Any]) -> str:
    """Return the name of a model in tables: the name in ``vse-train --name``, or the experiment with its changed settings.

    For example, ``vsepp[margin=0.1]`` is a run of the experiment ``vsepp`` with another margin. A change of the features is
    not displayed.
    """
    config = provenance.get("config")
    label = config.get("label") if isinstance(config, Mapping) else None
    return str(label) if label else experiment + format_changes_suffix(provenance)


def format_changes_suffix(provenance: Mapping[str, Any]) -> str:
    """Return the settings of a run that differ from its preset, as a text such as ``[margin=0.1]``; empty if none differ."""
    changes = [match.groups() for text in list_changed_settings(provenance) if (match := _CHANGED_SETTING_PATTERN.match(text))]
    named = {key: value for key, value in changes if not key.endswith(("feature", "code_sha256"))}
    last = [key.rpartition(".")[2] for key in named]
    names = [name if last.count(name) == 1 else key for key, name in zip(named, last, strict=True)]
    return f"[{', '.join(f'{name}={value}' for name, value in zip(names, named.values(), strict=True))}]" if names else ""


def list_changed_settings(provenance: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run that differ from its preset, as texts such as ``loss.margin: 0.2 -> 0.1``."""
    recorded = provenance.get("changed_settings")
    return [text for text in recorded if isinstance(text, str)] if isinstance(recorded, list) else []


# Settings that two models may differ in: names and lists of experiments, and settings that affect only speed or memory.
_IGNORED_SETTINGS = {
    *("name", "about", "title", "label", "rows", "seeds", "protocols", "ensemble_of", "images.workers"),
    *("train.precision", "train.features_in_memory", "train.memory_gb", "train.save_minutes"),
    "train.timeout_minutes",
}
_UNKNOWN = "unknown"
_N_KEY_CHARACTERS = 8


def build_training_card(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return facts about a training run as texts, such as its features and epochs, from its recorded provenance.

    ``selection`` is the rule that selected the best epoch. ``training_s`` is the duration of the training in seconds.
    ``processor`` is the CPU or GPU. ``changes`` lists the settings that differ from the preset. A fact that is not recorded
    is ``unknown``.
    """
    training = _get_mapping(provenance, "training")
    train = _get_mapping(_get_mapping(provenance, "config"), "train")
    return {
        "features": ", ".join(f"{name} {key}" for name, key in _shorten_feature_keys(provenance).items()) or _UNKNOWN,
        "epochs": _describe_epochs(training, train, provenance.get("best_epoch")),
        "selection": _format_fact(training.get("selection", _describe_checkpoint_selection(train))),
        "training_s": _format_fact(_get_mapping(provenance, "cost").get("train_s")),
        "processor": _format_fact(training.get("processor")),
        "precision": _format_fact(training.get("precision", train.get("precision"))),
        "changes": "; ".join(list_changed_settings(provenance)),
    }


def list_differing_facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[DifferingFact]:
    """Return the facts in which two models differ, such as a setting, the features, the processor or the precision.

    ``a`` and ``b`` are the provenances of the models: their recorded features, settings and versions. Settings that only name
    the experiment, or affect only speed or memory, are left out. If a model lacks a fact, its value is ``-``.
    """
    first, second = (dict(_list_facts(provenance)) for provenance in (a, b))
    names = [*first, *(name for name in second if name not in first)]
    facts = (DifferingFact(name=name, a=first.get(name, "-"), b=second.get(name, "-")) for name in names)
    return [fact for fact in facts if fact.a != fact.b]


def _list_facts(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    config = provenance.get("config")
    if not isinstance(config, Mapping) or not config:
        yield "settings", _UNKNOWN
        return
    for name, key in _shorten_feature_keys(provenance).items():
        yield f"features.{name}", key
    training = _get_mapping(provenance, "training")
    yield from (
        (name, _format_fact(training[name])) for name in ("processor", "precision", "noise", "selection") if name in training
    )
    yield from ((name, value) for name, value in _flatten_settings(config) if name not in _IGNORED_SETTINGS)


def _shorten_feature_keys(provenance: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(key)[:_N_KEY_CHARACTERS] for name, key in _get_mapping(provenance, "features").items()}


def _describe_epochs(training: Mapping[str, Any], train: Mapping[str, Any], best: object) -> str:
    if training.get("epochs", 0) is None:
        return "closed form"
    epochs = training.get("epochs", train.get("epochs"))
    return _UNKNOWN if epochs is None else f"{epochs}" + ("" if best is None else f"; the best is {best}")


def _describe_checkpoint_selection(train: Mapping[str, Any]) -> str:
    if not train:
        return _UNKNOWN
    images = train.get("validate_images")
    return "highest rsum on the validation split" + (f", {images} images" if images else "")


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _format_fact(value)


def _get_mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def _format_fact(value: object) -> str:
    return _UNKNOWN if value is None else str(value)
