"""A loss from a plain function of a user's own, whose further parameters are its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, get_type_hints

from jaxtyping import Bool, Float, Int
from pydantic import create_model
from torch import Tensor

from vse.pipeline.errors import UserError
from vse.train.losses.base import Loss
from vse.train.losses.ranking import RankingLoss

_GIVEN = ("scores", "positives", "negatives")


class OwnFunction(RankingLoss):
    """The function of a user's own as the cost of one direction."""

    function: ClassVar[Callable[..., Tensor]]
    passed: ClassVar[tuple[str, ...]]

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        settings = {name: getattr(self, name) for name in self.passed}
        return type(self).function(scores, positives, negatives, **settings)


def loss_of_function(function: Callable[..., Any]) -> type[Loss]:
    """The loss whose :meth:`RankingLoss.cost` is ``function(scores, positives, negatives, ...)``.

    Each further parameter is a setting: one of every loss, such as ``margin``, or a new one with the default that it has.
    :class:`UserError` if the function cannot be called so.
    """
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}" if inspect.isfunction(function) else "code"
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    further = parameters[len(_GIVEN) :]
    if len(parameters) < len(_GIVEN) or any(one.kind not in plain for one in further):
        raise UserError(f"{place}: a loss is a function of {', '.join(_GIVEN)} and of settings by name")
    fields: dict[str, Any] = {}
    for one in further:
        if one.default is not inspect.Parameter.empty:
            fields[one.name] = (_type_of(function, one), one.default)
        elif one.name not in Loss.model_fields:
            raise UserError(f"{place}: the setting {one.name!r} of this loss needs a default")
    made = create_model(function.__name__, __base__=OwnFunction, __module__=function.__module__, **fields)
    made.__doc__ = function.__doc__ or OwnFunction.__doc__
    made.function, made.passed = function, tuple(one.name for one in further)
    return made


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type of a setting: what the function says, else that of its default."""
    kind = get_type_hints(function).get(parameter.name, type(parameter.default))
    return float if kind is int and isinstance(parameter.default, float) else kind
