"""A result of a search, as people read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SearchHit:
    """An image, or a caption of one, that a search returned, with its score.

    ``photo`` is None and ``captions`` is empty if ``dataset.json`` does not know the image. Otherwise ``captions`` is the one
    of the id ``caption_id`` or, if images were searched, all of the image.
    """

    score: float
    image_id: int
    photo: Path | None
    captions: tuple[str, ...]
    caption_id: int | None = None

    @property
    def caption(self) -> str | None:
        """The caption that was returned, or its id if that is all there is; None if images were searched."""
        return None if self.caption_id is None else self.captions[0] if self.captions else str(self.caption_id)
