from __future__ import annotations

import pytest
from pydantic import ValidationError

from vse.pipeline.presets.schema import ExperimentOutline, Settings, SourceFile


def test_settings_can_neither_be_changed_nor_extended() -> None:
    class Width(Settings):
        dim: int = 1

    with pytest.raises(ValidationError, match="frozen"):
        Width().dim = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="not permitted"):
        Width.model_validate({"dims": 2})


def test_the_content_of_a_plan_is_what_determines_the_weights() -> None:
    how = {"rows": ["vsepp 1.6"], "seeds": [1, 2], "protocols": ["full"], "about": "Mine."}
    fast = {"train": {"epochs": 3, "memory_gb": 1, "features_in_memory": False, "save_minutes": 1}, "images": {"workers": 9}}
    outline = ExperimentOutline.model_validate({"name": "mine", "start_from": "vsepp", **how, **fast})
    plain = ExperimentOutline.model_validate({"name": "mine", "start_from": "vsepp", "train": {"epochs": 3}, "images": {}})
    assert outline.weight_settings() == plain.weight_settings()
    assert (outline.weight_settings()["start_from"], outline.weight_settings()["train"]) == ("vsepp", {"epochs": 3})


@pytest.mark.parametrize("key", ["seeds", "protocols"])
def test_an_experiment_has_a_seed_and_a_protocol(key: str) -> None:
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
