"""Ladders: which backbones, text encoders and experiments are trained and set side by side.

A ladder is a preset of ``config/ladders/``. Each combination that fits together is a composed experiment
(:mod:`vse.pipeline.composed`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from vse.pipeline.composed import WORDS, Composed
from vse.pipeline.config import Seed, Settings

_Names = Annotated[list[str], Field(min_length=1)]


class LadderExperiment(Settings):
    """An experiment of a ladder: what it is called there, and what it changes."""

    title: str = Field("", description="what the ladder calls it, e.g. VSE++; none: the experiment's name")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings that it has in this ladder")
    seeds: list[Seed] | None = Field(None, min_length=1, description="its own seeds, e.g. [0] where none changes anything")
    features: _Names | None = Field(None, description="those of the ladder's features that it reads; none: all")
    caption_features: _Names | None = Field(None, description="the same of caption features and words")


class LadderConfig(Settings):
    """A ladder: features of images x captions x experiments x seeds."""

    name: str
    about: str = Field("", description="what is compared, in a sentence")
    features: _Names = Field(description="features of images")
    caption_features: _Names = Field(default=[WORDS], description="features of captions, or words")
    experiments: dict[str, LadderExperiment | None] = Field(min_length=1, description="experiments by their names")
    seeds: list[Seed] = Field(default=[0], min_length=1, description="seeds that are trained and averaged over")

    @field_validator("features", "caption_features", "seeds")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is given twice")
        return values

    @field_validator("experiments")
    @classmethod
    def _of_the_ladder(cls, experiments: dict[str, Any], info: Any) -> dict[str, Any]:
        for name, experiment in experiments.items():
            for key in ("features", "caption_features"):
                own = getattr(experiment, key, None) or []
                other = next((one for one in own if one not in info.data.get(key, own)), None)
                if other is not None:
                    raise ValueError(f"{name}.{key}: {other!r} is none of the ladder's {key}")
        return experiments

    def changes(self, experiment: str) -> LadderExperiment:
        """What the ladder says of one of its experiments."""
        return self.experiments[experiment] or LadderExperiment()

    def settings(self, experiment: str) -> dict[str, Any]:
        """The settings that an experiment has in this ladder, its title and its seeds among them."""
        changes = self.changes(experiment)
        return {**changes.settings, "title": changes.title, "seeds": changes.seeds or self.seeds}

    def combinations(self) -> list[Composed]:
        """Every experiment on every feature with every feature of captions, whether that fits together or not."""
        return [
            Composed(name, None if captions == WORDS else captions, feature, self.name)
            for name in self.experiments
            for feature in self.changes(name).features or self.features
            for captions in self.changes(name).caption_features or self.caption_features
        ]
