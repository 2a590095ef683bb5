"""A small schema with parts for tests of settings: a drink and its topping."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from vse.pipeline.presets.parts import Registry, part_field
from vse.pipeline.presets.schema import Settings


class Drink(Settings):
    size: int = Field(3, ge=1)


class Coffee(Drink):
    name: Literal["coffee"] = "coffee"
    shots: int = Field(1, ge=1)


class Tea(Drink):
    name: Literal["tea"] = "tea"
    minutes: float = 4.0
    heat: int = 90


class Milk(Drink):
    name: Literal["milk"] = "milk"
    heat: int = 60

    @model_validator(mode="after")
    def _fits(self) -> Milk:
        if self.size > 9 and self.heat > 90:
            raise ValueError("so much milk boils over")
        return self


class Jug(Settings):
    volume: float = 0.5
    drink: Annotated[SerializeAsAny[Drink], part_field(Registry("drink", Milk, Tea))] = Milk()


class Topping(Settings):
    pass


class Cream(Topping):
    name: Literal["cream"] = "cream"
    jug: Jug | None = None


class Cocoa(Topping):
    name: Literal["cocoa"] = "cocoa"
    grams: int = 2


DRINKS = Registry[Drink]("drink", Coffee, Tea, Milk)
TOPPINGS = Registry[Topping]("topping", Cream, Cocoa)


class Table(Settings):
    seats: int = 2
    drink: Annotated[SerializeAsAny[Drink], part_field(DRINKS)] = Coffee()
    topping: Annotated[SerializeAsAny[Topping] | None, part_field(TOPPINGS)] = None


class Order(Settings):
    renamed_keys: ClassVar[dict[str, str]] = {"table.beans": "table.drink.shots", "table.pot.lid": "table.topping.name"}

    name: str = "toy"
    about: str = ""
    rows: list[str] = Field(default_factory=list)
    tip: float = 0.0
    table: Table = Table()
