"""Registries of the classes from which experiments and features are built: losses, encoders, extractors and so on.

Such a class is called a *part*. It has settings, and the code that uses them. Each part has a file and one line in a registry.
The settings of an experiment choose a part by its name, as in ``similarity: { name: order, form: norm }`` or, without other
settings, ``similarity: order``. The name of a user's own part contains its file: ``loss: my_loss.py:MyLoss``
(:mod:`vse.pipeline.presets.own_code`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import isabstract
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, create_model
from pydantic_core import PydanticUndefined

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import error_reason
from vse.pipeline.presets.own_code import UserCode, is_code_name, load_code
from vse.pipeline.presets.schema import Settings

_Part = TypeVar("_Part", bound=Settings)


def import_object(name: str) -> Any:
    """Import and return the object with a name such as ``module:object``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Generic[_Part]):
    """A registry of the parts (classes) of one kind, such as all losses, by name.

    kind : the kind of the parts in messages, such as ``similarity``
    key : the field of a part that holds its name, such as ``name``
    parts : the classes of parts; each has its name as the default of the field ``key``, e.g. ``name: Literal["max"] = "max"``
    lazy : further parts, by name, as texts ``module:Class``; they are imported on first use
    base : the base class of users' own parts; None if users cannot add parts
    from_function : a function that converts a user's own function to a class; None if users may only add classes
    """

    def __init__(
        self,
        kind: str,
        *parts: type[_Part],
        key: str = "name",
        lazy: Mapping[str, str] | None = None,
        base: type[_Part] | None = None,
        from_function: Callable[[Callable[..., Any]], type[_Part]] | None = None,
    ) -> None:
        self.kind, self.key = kind, key
        self._base_class, self._from_function = base, from_function
        self._parts: dict[str, type[_Part] | str] = dict(lazy or {})
        self._own_parts: dict[tuple[str, str], type[_Part]] = {}
        for part in parts:
            self.add(part)

    def add(self, part: type[_Part]) -> None:
        """Register a class under its name, which is the default of the field ``key`` (usually the field ``name``)."""
        self._parts[part.model_fields[self.key].default] = part

    def remove(self, name: str) -> None:
        del self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts or (self._base_class is not None and is_code_name(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __getitem__(self, name: str) -> type[_Part]:
        """Return the class ``name``, such as a loss. Raises ValueError, with the nearest name, for an unknown name.

        Raises UserError if a user's own class is of another kind or not allowed to run, or if a part cannot be imported.
        """
        if self._base_class is not None and is_code_name(name):
            return self._build_user_class(self._base_class, load_code(name))
        if name not in self._parts:
            raise ValueError(f"unknown {self.kind} {name!r}{did_you_mean(str(name), self._parts)}")
        part = self._parts[name]
        if isinstance(part, str):
            try:
                part = self._parts[name] = cast(type[_Part], import_object(part))
            except (ImportError, AttributeError, SyntaxError) as error:
                raise UserError(
                    f"the registry has the {self.kind} {name!r} at {part}, which cannot be imported ({error_reason(error)})"
                ) from error
        return part

    def parse(self, value: Any) -> Any:
        """Return an object, such as a loss. ``value`` is the name of its class, or settings that include this name.

        An object or None is returned unchanged. Raises ValueError for any other value.
        """
        if value is None or isinstance(value, BaseModel):
            return value
        settings = self.as_settings(value)
        if settings is None or not isinstance(settings.get(self.key), str):
            raise ValueError(f"the {self.kind} is a name ({', '.join(self._parts)}), or settings with its {self.key}")
        name = settings[self.key]
        if self._base_class is not None and is_code_name(name):
            return self._build_user_class(self._base_class, load_code(name, settings.get("code_sha256"))).model_validate(
                settings
            )
        return self[name].model_validate(settings)

    def as_settings(self, value: Any) -> dict[str, Any] | None:
        """Convert the name of a class, or an object of a class, to settings that include the name of the class.

        Settings are returned unchanged. Returns None for any other ``value``.
        """
        if isinstance(value, BaseModel):
            return {**value.model_dump(exclude_unset=True), self.key: getattr(value, self.key)}
        if isinstance(value, str):
            return {self.key: value}
        return dict(value) if isinstance(value, Mapping) else None

    def find_class(self, value: Any) -> type[_Part] | None:
        """Return the class that a name, settings or an object (``value``) belongs to; None for an unknown class."""
        name = (self.as_settings(value) or {}).get(self.key)
        return self[name] if isinstance(name, str) and name in self else None

    def _build_user_class(self, base: type[_Part], code: UserCode) -> type[_Part]:
        if (code.name, code.sha256) not in self._own_parts:
            part = code.class_or_function
            if not isinstance(part, type) and callable(part) and self._from_function is not None:
                part = self._from_function(part)
            if not (isinstance(part, type) and issubclass(part, base)):
                kinds = f"a class that derives from {base.__module__}.{base.__qualname__}"
                function = ", or a function" if self._from_function is not None else ""
                raise UserError(f"{code.name}: a {self.kind} of your own is {kinds}{function}, and this is not")
            identity = {self.key: code.name, "code_sha256": code.sha256}
            fields: dict[str, Any] = {name: (Literal[value], value) for name, value in identity.items()}
            create: Any = create_model  # mypy would read a direct call as the definition of a class
            own = create(part.__name__, __base__=part, __module__=part.__module__, **fields)
            if isabstract(own):
                missing = ", ".join(sorted(own.__abstractmethods__))
                raise UserError(f"{code.name}: lacks {missing}, which every {self.kind} of its kind defines")
            own.__doc__ = part.__doc__
            own.own_code = code
            self._own_parts[code.name, code.sha256] = own
        return self._own_parts[code.name, code.sha256]


def part_field(registry: Registry[Any]) -> BeforeValidator:
    """Return the annotation of a pydantic field that holds an object of one of the classes in ``registry``.

    An example is ``loss: Annotated[SerializeAsAny[Loss], part_field(LOSSES)] = Max()``. ``SerializeAsAny[Loss] | None`` makes
    the loss optional.
    """
    return BeforeValidator(registry.parse)


def find_registry(schema: type[BaseModel], field: str) -> Registry[Any] | None:
    """Return the registry of the classes that a field of a schema accepts, such as all losses for the field ``loss``.

    Returns None for a field without a registry.
    """
    info = schema.model_fields[field]
    for item in (*info.metadata, *_annotation_metadata(info.annotation)):
        owner = getattr(getattr(item, "func", None), "__self__", None)
        if isinstance(owner, Registry):
            return owner
    return None


def find_settings_class(schema: type[BaseModel], field: str) -> type[BaseModel] | None:
    """Return the class of the nested settings in the field ``field`` of a schema; None if the field holds another type."""
    annotation = schema.model_fields[field].annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def find_field_default(schema: type[BaseModel], field: str) -> Any:
    """Return the default of a field of a schema, such as the default loss; None without a default."""
    default = schema.model_fields[field].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def find_own_code(settings: BaseModel) -> list[UserCode]:
    """Return the user's own classes and functions in settings, at most one for each file of code."""
    codes: dict[str, UserCode] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            codes |= {code.copy_name: code for code in find_own_code(value)}
    code = type(settings).__dict__.get("own_code")
    return [*codes.values(), *([code] if isinstance(code, UserCode) and code.copy_name not in codes else [])]


def is_user_written(part: BaseModel | None) -> bool:
    """Return whether the user wrote the class of an object, such as a loss."""
    return isinstance(type(part).__dict__.get("own_code"), UserCode)


def _annotation_metadata(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        yield from _annotation_metadata(inner)
