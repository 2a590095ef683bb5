from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vse.pipeline.presets.parts import Registry
from vse.training.adversaries import ADVERSARIES
from vse.training.data.samplers import SAMPLERS, Sampler
from vse.training.kinds import InputKind
from vse.training.losses import LOSSES
from vse.training.losses.base import Loss
from vse.training.models.encoders import CAPTION_ENCODERS, DEFAULT_CAPTION_ENCODERS, IMAGE_ENCODERS
from vse.training.models.encoders.base import EncoderSettings
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import SimilaritySettings
from vse.training.settings import AdversarySettings, SolverSettings
from vse.training.solvers import SOLVERS

BASES: list[tuple[Registry[Any], type]] = [
    (IMAGE_ENCODERS, EncoderSettings), (CAPTION_ENCODERS, EncoderSettings), (SIMILARITIES, SimilaritySettings), (LOSSES, Loss),
    (SAMPLERS, Sampler), (SOLVERS, SolverSettings), (ADVERSARIES, AdversarySettings),
]  # fmt: skip
PARTS = [pytest.param(registry, base, name, id=f"{registry.kind} {name}") for registry, base in BASES for name in registry]


@pytest.mark.parametrize(("registry", "base", "name"), PARTS)
def test_a_part_is_found_by_its_name_described_frozen_and_strict(registry: Registry[Any], base: type, name: str) -> None:
    part = registry.parse(name)
    assert isinstance(part, base)
    assert part.name == name
    assert type(part).model_fields["name"].default == name
    assert registry.parse({"name": name}) == part
    assert registry.parse(part.model_dump()) == part
    part = registry[name]
    assert part.__doc__
    assert part.__doc__ != base.__doc__
    with pytest.raises(ValidationError, match="frozen"):
        part().name = "another"
    with pytest.raises(ValidationError, match="no_such_setting"):
        registry.parse({"name": name, "no_such_setting": 1})


@pytest.mark.parametrize("registry", [registry for registry, _ in BASES], ids=lambda registry: registry.kind)
def test_an_unknown_part_is_answered_with_the_nearest(registry: Registry[Any]) -> None:
    name = next(iter(registry))
    with pytest.raises(ValueError, match=f"unknown {registry.kind} '{name}x' .did you mean '{name}'"):
        registry.parse(f"{name}x")


@pytest.mark.parametrize("kind", DEFAULT_CAPTION_ENCODERS)
def test_the_usual_caption_encoder_of_a_kind_reads_it(kind: InputKind) -> None:
    assert kind in CAPTION_ENCODERS[DEFAULT_CAPTION_ENCODERS[kind]].input_kinds
