"""Experiments that are put together by their name: ``vsepp+tfidf+effnet`` is ``vsepp`` on other features.

The parts of a name are an experiment, a caption feature or ``words``, and a feature of images. ``vsepp@f8k+tfidf+effnet`` is
the experiment as the ladder ``f8k`` sets it.
"""

from __future__ import annotations

from typing import NamedTuple

from vse.pipeline.input_files import is_name

WORDS = "words"


class Composed(NamedTuple):
    """The parts of a name. ``caption_feature`` is None if words are read, ``ladder`` if none changes a setting."""

    experiment: str
    caption_feature: str | None
    feature: str
    ladder: str | None = None

    @property
    def name(self) -> str:
        """The name whose parts these are."""
        of_ladder = "" if self.ladder is None else f"@{self.ladder}"
        return f"{self.experiment}{of_ladder}+{self.caption_feature or WORDS}+{self.feature}"

    def reads(self) -> dict[str, str | None]:
        """The settings of an experiment that say what is read."""
        return {"feature": self.feature, "eval_feature": None, "caption_feature": self.caption_feature}


def composed_of(name: str) -> Composed | None:
    """The parts of ``name``; None if it is not composed of three."""
    parts = name.split("+")
    if len(parts) != 3 or name.endswith((".yaml", ".yml")):
        return None
    base, captions, feature = parts
    experiment, at, ladder = base.partition("@")
    if not all(map(is_name, (experiment, captions, feature, ladder or "none"))) or (at and not ladder):
        return None
    return Composed(experiment, None if captions == WORDS else captions, feature, ladder if at else None)
