"""The checker that every function of ``vse`` runs under in the tests: types and shapes must be as annotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, get_args, runtime_checkable

from beartype import BeartypeConf, FrozenDict, beartype

_CONFIG = BeartypeConf(
    is_pep484_tower=True,  # an int serves as a float, as it does for mypy
    hint_overrides=FrozenDict({Self: Any}),  # jaxtyping decorates methods, not the classes that Self stands for
)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked by beartype; of an argument that a protocol annotates, that it has the protocol's members."""
    for annotation in function.__annotations__.values():
        _check_protocols(annotation)
    return beartype(function, conf=_CONFIG)


def _check_protocols(annotation: Any) -> None:
    if getattr(annotation, "_is_protocol", False):
        runtime_checkable(annotation)
    for part in get_args(annotation):
        _check_protocols(part)
