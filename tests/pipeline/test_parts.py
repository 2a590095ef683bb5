from __future__ import annotations

from typing import Literal

import pytest
from pydantic import ValidationError

from tests.pipeline.toy import DRINKS, Cream, Drink, Jug, Milk, Table, Tea
from vse.pipeline.presets.parts import Registry


def test_a_part_is_given_by_its_name_by_its_settings_or_as_itself() -> None:
    for given in ("tea", {"name": "tea"}, Tea()):
        assert Table.model_validate({"drink": given}).drink == Tea()
    assert Table.model_validate({"drink": {"name": "tea", "heat": 80}}).drink == Tea(heat=80)
    assert Table.model_validate({"topping": None}).topping is None


def test_a_part_comes_back_from_what_was_written_of_it() -> None:
    table = Table(drink=Tea(heat=80), topping=Cream(jug=Jug(drink=Tea(size=1))))
    written = table.model_dump(mode="json")
    assert written["drink"] == {"name": "tea", "size": 3, "minutes": 4.0, "heat": 80}
    assert Table.model_validate(written) == table


def test_a_registry_lists_its_parts_in_the_order_of_their_lines() -> None:
    assert list(DRINKS) == ["coffee", "tea", "milk"]
    assert DRINKS["milk"] is Milk
    with pytest.raises(ValueError, match="unknown drink 'mlk' .did you mean 'milk'"):
        DRINKS["mlk"]


def test_a_part_can_be_registered_and_forgotten() -> None:
    class Water(Drink):
        name: Literal["water"] = "water"

    DRINKS.add(Water)
    try:
        assert Table.model_validate({"drink": {"name": "water", "size": 2}}).drink == Water(size=2)
    finally:
        DRINKS.remove("water")
    with pytest.raises(ValidationError, match="unknown drink 'water'"):
        Table.model_validate({"drink": "water"})


def test_a_lazy_part_is_known_by_name_and_imported_when_it_is_asked_for() -> None:
    registry: Registry[Drink] = Registry("drink", lazy={"tea": "tests.pipeline.toy:Tea", "ghost": "no.such.module:Ghost"})
    assert list(registry) == ["tea", "ghost"]
    assert registry["tea"] is registry.find_class("tea") is Tea
    assert registry.parse({"name": "tea", "heat": 80}) == Tea(heat=80)
    with pytest.raises(ModuleNotFoundError):
        registry["ghost"]
