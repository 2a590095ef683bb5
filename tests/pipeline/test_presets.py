from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SerializeAsAny, ValidationError

from tests.pipeline.toy import DRINKS, Cocoa, Coffee, Cream, Drink, Jug, Milk, Order, Table, Tea
from vse.pipeline.errors import UserError
from vse.pipeline.presets import presets
from vse.pipeline.presets.parts import Registry, part_field
from vse.pipeline.presets.schema import ExperimentOutline, Settings, SourceFile

EXPERIMENTS, FEATURES, DATASETS = (presets.list_preset_names(kind) for kind in ("experiments", "features", "datasets"))
NAMES, VALUES = st.sampled_from(list(DRINKS)), st.integers(1, 9)


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_preset_is_valid_for_every_data_set(dataset: str) -> None:
    assert presets.load_dataset_preset(dataset).name == dataset
    for experiment in EXPERIMENTS:
        assert presets.load_experiment_outline(experiment, dataset).feature in FEATURES


@pytest.mark.parametrize(
    ("load", "name", "known"),
    [
        (presets.load_experiment_outline, "vseppx", "vsepp"),
        (presets.load_dataset_preset, "f30x", "f30k"),
        (presets.load_ladder, "dem", "demo"),
        (lambda name: presets.load_workflow_settings({name: 2}), "thread", "threads"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(load: Callable[[str], Any], name: str, known: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{known}'"):
        load(name)


def test_settings_that_a_caller_changes_are_read_again_as_they_were() -> None:
    first, again = (presets.read_preset_layers("experiments", "twobranch_effnet") for _ in range(2))
    nested = next(layer["model"] for layer in first if "model" in layer)
    nested.clear()
    assert first != again
    assert presets.read_preset_layers("experiments", "twobranch_effnet") == again


def test_the_workflow_takes_a_data_set_s_folder_in_short_form_and_replaces_dictionaries() -> None:
    settings = presets.load_workflow_settings({"f8k_dir": "/pictures", "threads": 2, "gpus": {"embed": 0}})
    assert (settings.sources, settings.threads, settings.gpus) == ({"f8k": "/pictures"}, 2, {"embed": 0})


# How layers of settings are merged, under a toy schema: a table in a cafe with a drink and perhaps a topping, which are parts.


def test_the_parts_that_a_schema_has_by_default_are_beneath_all_layers() -> None:
    class Set(Settings):
        drink: Annotated[SerializeAsAny[Drink], part_field(DRINKS)] = Tea(heat=80, minutes=1.0)

    tea = {"name": "tea", "heat": 80, "minutes": 1.0, "size": 5}
    assert presets.merge_settings({}, {"drink": {"size": 5}}, Set)["drink"] == tea
    assert presets.merge_settings({}, {"drink": "milk"}, Set)["drink"] == {"name": "milk", "heat": 80}


def test_a_part_that_may_be_missing_can_be_taken_away_and_needs_a_name_to_come_back() -> None:
    with_cocoa = presets.merge_settings({}, {"table": {"topping": {"name": "cocoa", "grams": 9}}}, Order)
    without = presets.merge_settings(with_cocoa, {"table": {"topping": None}}, Order)
    assert presets.validate_settings(Order, "order", "toy", without).table.topping is None
    nameless = presets.merge_settings(without, {"table": {"topping": {"grams": 1}}}, Order)
    with pytest.raises(UserError, match=r"order 'toy': table.topping: the topping is a name \(cream, cocoa\), or"):
        presets.validate_settings(Order, "order", "toy", nameless)


LAYER = st.fixed_dictionaries({}, optional={"name": NAMES, "size": VALUES, "heat": VALUES, "minutes": VALUES})


@given(st.lists(LAYER, max_size=6))
def test_a_setting_counts_from_when_it_is_given_for_as_long_as_the_parts_have_it(layers: list[dict[str, Any]]) -> None:
    names, known = ["coffee"], []
    for layer in layers:
        names.append(layer.get("name", names[-1]))
        known.append({key: value for key, value in layer.items() if key in DRINKS[names[-1]].model_fields})
    content: dict[str, Any] = {}
    for layer in known:
        content = presets.merge_settings(content, {"table": {"drink": layer}}, Order)
    drink = presets.validate_settings(Order, "order", "toy", content).table.drink.model_dump()
    assert drink["name"] == names[-1]
    for key, default in DRINKS[names[-1]]().model_dump(exclude={"name"}).items():
        given = [i for i, layer in enumerate(known) if key in layer]
        kept = [i for i in given if all(key in DRINKS[name].model_fields for name in names[i + 1 :])]
        assert drink[key] == (known[max(kept)][key] if kept else default)


def test_without_a_schema_groups_are_merged_and_anything_else_is_replaced() -> None:
    base = {"table": {"seats": 2, "drink": {"name": "tea", "heat": 80}}, "rows": ["a"]}
    over = {"table": {"drink": {"name": "milk"}}, "rows": ["b"]}
    assert presets.merge_settings(base, over) == {"table": {"seats": 2, "drink": {"name": "milk", "heat": 80}}, "rows": ["b"]}


@pytest.fixture
def cafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a user's folder with toy experiments and a data set that changes all of them."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "datasets").mkdir()
    (tmp_path / "experiments" / "cafe.yaml").write_text(
        "presets:\n"
        "  plain: {}\n"
        "  english: { table: { drink: { name: tea, minutes: 6 } } }\n"
        "  sweet: { extends: english, table: { topping: { name: cream, jug: { volume: 1 } } } }\n"
    )
    (tmp_path / "datasets" / "home.yaml").write_text(
        "experiment: { tip: 1, table: { drink: { minutes: 2 }, topping: { grams: 5, jug: { volume: 3 } } } }\n"
        "experiments: { sweet: { table: { seats: 4, drink: coffee } } }\n"
    )
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    return tmp_path


TEA = Tea(minutes=6)


def settings(name: str, dataset: str | None = None, *sets: str) -> Order:
    return presets.validate_settings(Order, "experiment", name, presets.read_experiment_settings(name, dataset, sets, Order))


def test_what_a_data_set_changes_in_every_experiment_concerns_only_the_parts_that_have_such_a_setting(cafe: Path) -> None:
    assert settings("plain", "home").table == Table()
    assert settings("plain", "home").tip == 1
    assert settings("english", "home").table == Table(drink=Tea(minutes=2))
    assert settings("english", "elsewhere").table == Table(drink=TEA)

    assert settings("sweet", "home").table == Table(seats=4, drink=Coffee(), topping=Cream(jug=Jug(volume=3)))


def test_a_data_set_gives_no_experiment_a_group_that_it_does_not_have(cafe: Path) -> None:
    (cafe / "experiments" / "dry.yaml").write_text("table: { topping: cream }")
    assert settings("dry", "home").table.topping == Cream(jug=None)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ("experiment: { table: { drink: { name: tea, shots: 2 } } }", "shots"),
        ("experiments: { plain: { table: { drink: { minutes: 2 } } } }", "minutes"),
    ],
)
def test_what_a_data_set_sets_in_a_part_or_an_experiment_is_checked(changes: str, setting: str, cafe: Path) -> None:
    (cafe / "datasets" / "home.yaml").write_text(changes)
    with pytest.raises(UserError, match=rf"experiment 'plain': unknown setting 'table.drink.{setting}' \(did you mean"):
        settings("plain", "home")


@pytest.mark.parametrize(
    ("sets", "table"),
    [
        (["table.drink=milk"], Table(drink=Milk())),
        (["table.drink.name=milk"], Table(drink=Milk())),
        (["table.drink.heat=50", "table.drink=milk"], Table(drink=Milk(heat=50))),
        (["table.drink=milk", "table.drink.heat=50"], Table(drink=Milk(heat=50))),
        (["table.drink={name: milk, heat: 50}"], Table(drink=Milk(heat=50))),
        (["table={seats: 3, drink: {heat: 50}}"], Table(seats=3, drink=Tea(minutes=6, heat=50))),
        (["table.topping=cocoa", "table.topping.grams=9"], Table(drink=TEA, topping=Cocoa(grams=9))),
        (["table.topping=cream", "table.topping.jug.drink=tea"], Table(drink=TEA, topping=Cream(jug=Jug(drink=Tea())))),
        (["table.topping=cocoa", "table.topping=null"], Table(drink=TEA)),
    ],
)
def test_parts_are_set_by_name_or_setting_by_setting(sets: list[str], table: Table, cafe: Path) -> None:
    assert settings("english", None, *sets).table == table


class Shelf(Settings):
    """A group with a dictionary, whose keys the user chooses."""

    jars: dict[str, int] = Field(default_factory=dict)
    boards: int = 1


class Kitchen(Settings):
    shelf: Shelf = Shelf()


IN_PRESET = {"shelf": {"jars": {"salt": 1, "mint": 2}, "boards": 3}}


@pytest.mark.parametrize(("over", "jars"), [({"salt": 9}, {"salt": 9, "mint": 2}), ({}, {})])
def test_a_preset_adds_to_a_dictionary_and_empties_it(over: dict[str, int], jars: dict[str, int]) -> None:
    content = presets.merge_settings(IN_PRESET, {"shelf": {"jars": over}}, Kitchen)
    assert content == {"shelf": {"jars": jars, "boards": 3}}


@pytest.mark.parametrize(
    ("item", "shelf"),
    [
        ("shelf.jars={salt: 9}", {"jars": {"salt": 9}, "boards": 3}),
        ("shelf.jars={}", {"jars": {}, "boards": 3}),
        ("shelf={jars: {salt: 9}}", {"jars": {"salt": 9}, "boards": 3}),
        ("shelf={}", {"jars": {"salt": 1, "mint": 2}, "boards": 3}),
    ],
)
def test_a_dictionary_that_is_set_becomes_the_one_that_is_given(item: str, shelf: dict[str, Any]) -> None:
    assert presets.apply_overrides(Kitchen, IN_PRESET, [item]) == {"shelf": shelf}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["table.drink.heta=1"], r"^unknown setting 'table.drink.heta' \(did you mean 'table.drink.heat'\? .*topping, tip\)$"),
        (["table.drink.heat=50", "table.drink=coffee"], r"^unknown setting 'table.drink.heat' \(.*known: .*table.drink.shots"),
        (["table.drink.heat.more=1"], "^unknown setting 'table.drink.heat.more'"),
        (["table.drink={name: tea, heta: 1}"], r"^experiment 'english': unknown setting 'table.drink.heta' \(did you mean"),
        (["table.topping.grams=1"], r"^experiment 'english': table.topping: the topping is a name \(cream, cocoa\), or"),
        (["table.topping=cocoa", "table.topping.gram=1"], "^unknown setting 'table.topping.gram' .did you mean 'table.topp"),
        (["table.drink=te", "table.drink.heat=1"], r"^experiment 'english': table.drink: unknown drink 'te' \(did you mean"),
        (["table.drink.heat=warm"], "^experiment 'english': table.drink.heat: Input should be a valid integer"),
        (["table.drink=milk", "table.drink.size=10", "table.drink.heat=99"], "table.drink: so much milk boils"),
        (["table=3"], "^experiment 'english': table: Input should be a valid dictionary"),
        (["name=mine"], "^unknown setting 'name'"),
        (["table"], "^--set takes key=value, got 'table'$"),
        (["tip=["], "^--set tip=.: '.' is not a YAML value$"),
        (["table.beans=3"], r"^table.beans is now table.drink.shots$"),
        (["table.pot.lid=on"], r"^table.pot.lid is now table.topping.name$"),
    ],
)
def test_a_wrong_setting_of_a_part_is_named_in_one_line(sets: list[str], message: str, cafe: Path) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        settings("english", None, *sets)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("table: { drink: { name: tea, heta: 1 } }", r"'mine': unknown setting 'table.drink.heta' \(did you mean"),
        ("table: { sets: 1 }", r"experiment 'mine': unknown setting 'table.sets' \(did you mean 'table.seats'"),
        ("table: { beans: 1 }", r"^experiment 'mine': table.beans is now table.drink.shots$"),
        ("table: { pot: { lid: on } }", r"^experiment 'mine': table.pot.lid is now table.topping.name$"),
    ],
)
def test_a_wrong_setting_of_a_file_is_named_in_one_line(text: str, message: str, cafe: Path) -> None:
    (cafe / "experiments" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        settings("mine")


def test_the_workflow_s_plan_of_an_experiment_has_what_determines_its_weights(cafe: Path) -> None:
    (cafe / "experiments" / "mine.yaml").write_text(
        "about: Mine.\nextends: vsepp_ft\nseeds: [3]\nprotocols: [full]\n"
        "train: { epochs: 2, memory_gb: 1, features_in_memory: false, save_minutes: 1 }\nimages: { workers: 3 }\n"
    )
    outline = presets.load_experiment_outline("mine", None, ["loss.margin=0.3"])
    assert (outline.seeds, outline.protocols, outline.start_from, outline.eval_feature) == ([3], ["full"], "vsepp_rc", None)
    content = outline.settings_affecting_weights()
    assert content["train"] == {"epochs": 2, "learning_rate": 2e-5}
    assert content["images"] == {"source": "pictures", "finetune": True, "random_crop": "plain"}
    assert content["loss"]["margin"] == 0.3
    assert {"about", "rows", "seeds", "protocols"}.isdisjoint(content)


def test_an_ensemble_has_members_and_of_a_data_set_s_changes_those_that_it_can_have(cafe: Path) -> None:
    (cafe / "experiments" / "mine.yaml").write_text(
        "presets:\n"
        "  duo: { about: Two., title: Duo, rows: [vsepp 1.6], seeds: [0, 1], ensemble_of: [plain, english] }\n"
        "  later: { extends: duo, seeds: [7] }\n"
        "  twice: { about: Two seeds., seeds: [0, 1], ensemble_of: [plain] }\n"
    )
    (cafe / "datasets" / "home.yaml").write_text(
        "experiment: { tip: 1, protocols: [full] }\nexperiments: { later: { seeds: [8] } }"
    )
    duo, later = (presets.load_experiment_outline(name, "home") for name in ("duo", "later"))
    assert (duo.ensemble_of, duo.seeds, duo.rows, duo.protocols) == (["plain", "english"], [0, 1], ["vsepp 1.6"], ["full"])
    assert (later.ensemble_of, later.seeds, later.rows) == (["plain", "english"], [8], [])
    assert presets.load_experiment_outline("twice", "home").ensemble_of == ["plain"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ensemble_of: [plain]", r"an ensemble has two members at least: ensemble_of: \[a, b\], or \[a\] with seeds: "),
        ("ensemble_of: []", "an ensemble has two members at least"),
        ("ensemble_of: [plain, plain]", "an ensemble counts every member once, and ensemble_of names one twice$"),
        ("ensemble_of: plain", "ensemble_of: Input should be a valid list$"),
        ("ensemble_of: [plain, englisch]", r"ensemble_of: unknown experiment 'englisch' \(did you mean 'english'"),
        ("ensemble_of: [plain, duo]", "ensemble_of: 'duo' is an ensemble itself; name its members instead$"),
        ("{ ensemble_of: [plain, english], tip: 1 }", "an ensemble trains nothing, so it has no tip; only about, title, "),
        ("{ ensemble_of: [plain, english], extends: sweet }", "an ensemble trains nothing, so it has no table; only "),
        ("{ extends: duo, feature: fc7 }", "an ensemble trains nothing, so it has no feature; only "),
        ("start_from: duo", "start_from: 'duo' is an ensemble, which has no weights$"),
    ],
)
def test_what_is_wrong_with_an_ensemble_is_said_in_one_line(text: str, message: str, cafe: Path) -> None:
    (cafe / "experiments" / "duo.yaml").write_text("ensemble_of: [plain, english]")
    (cafe / "experiments" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=f"^experiment 'mine': {message}") as refusal:
        presets.load_experiment_outline("mine", "home")
    assert "\n" not in str(refusal.value)


def test_a_plan_keeps_what_a_data_set_changes() -> None:
    plain, demo = (
        presets.load_experiment_outline("vsepp_ft", dataset).settings_affecting_weights() for dataset in (None, "demo")
    )
    assert "warmup" not in plain
    assert demo["warmup"] == {"loss": "sum", "epochs": 0}


def test_an_experiment_has_a_seed_and_a_protocol() -> None:
    for key in ("seeds", "protocols"):
        with pytest.raises(ValidationError, match="at least 1 item"):
            ExperimentOutline.model_validate({"name": "mine", key: []})


@pytest.mark.parametrize(
    ("key", "value"), [("url", "ftp://host/a.zip"), ("url", "https://host/"), ("sha256", "0" * 63), ("bytes", 0)]
)
def test_a_source_file_needs_a_web_address_a_checksum_and_a_size(key: str, value: object) -> None:
    good = {"url": "https://host/a.zip", "sha256": "0" * 64, "bytes": 1, "member": "a", "to": "a", "max_bytes": 1}
    assert SourceFile.model_validate(good).url == "https://host/a.zip"
    with pytest.raises(ValidationError, match=key):
        SourceFile.model_validate({**good, key: value})


def test_a_part_comes_back_from_what_was_written_of_it() -> None:
    table = Table(drink=Tea(heat=80), topping=Cream(jug=Jug(drink=Tea(size=1))))
    written = table.model_dump(mode="json")
    assert written["drink"] == {"name": "tea", "size": 3, "minutes": 4.0, "heat": 80}
    assert Table.model_validate(written) == table


def test_a_lazy_part_is_known_by_name_and_imported_when_it_is_asked_for() -> None:
    registry: Registry[Drink] = Registry("drink", lazy={"tea": "tests.pipeline.toy:Tea", "ghost": "no.such.module:Ghost"})
    assert list(registry) == ["tea", "ghost"]
    assert registry["tea"] is registry.find_class("tea") is Tea
    assert registry.parse({"name": "tea", "heat": 80}) == Tea(heat=80)
    with pytest.raises(UserError, match="the drink 'ghost' at no.such.module:Ghost, which cannot be imported"):
        registry["ghost"]
