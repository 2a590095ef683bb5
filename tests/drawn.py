"""The drawings of attention in a report, as a test reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import unescape

import numpy as np


@dataclass(frozen=True)
class Shown:
    """A drawing: the photo, its size, the regions' x, y, width, height, and each word's label and opacities of regions."""

    source: str
    size: tuple[int, int]
    regions: np.ndarray
    words: dict[int, str]
    opacities: np.ndarray

    def of(self, numbers: list[int]) -> Shown:
        """The drawing of some words alone."""
        columns = [list(self.words).index(number) for number in numbers]
        return replace(self, words={number: self.words[number] for number in numbers}, opacities=self.opacities[:, columns])


def drawings(page: str) -> dict[str, Shown]:
    """The drawings of a page, or of a part of one, by their names."""
    found = {}
    for photo in re.finditer(r'viewBox="0 0 (\d+) (\d+)"><image id="([\w-]+)" href="([^"]+)"', page):
        name = photo[3]
        rects = re.findall(rf'<rect id="{name}-(\d+)" x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"/>', page)
        assert [int(rect[0]) for rect in rects] == list(range(len(rects)))
        under, shades = rf'<use class="under" href="#{name}"/>', r'<g class="shades">(.*?)</g>'
        maps = re.findall(rf'<svg class="map m(\d+)[^>]*>{under}{shades}<text[^>]*>(.*?)</text>', page)
        opacities = np.zeros((len(rects), len(maps)))
        for column, (_, shaded, _) in enumerate(maps):
            for region, opacity in re.findall(rf'<use href="#{name}-(\d+)" opacity="(.*?)"/>', shaded):
                opacities[int(region), column] = float(opacity)
        words = {int(number): unescape(text) for number, _, text in maps}
        assert len(words) == len(maps)
        regions = np.asarray([rect[1:] for rect in rects], float).reshape(-1, 4)
        found[name] = Shown(photo[4], (int(photo[1]), int(photo[2])), regions, words, opacities)
    return found


def shares(weights: np.ndarray, side: str) -> np.ndarray:
    """What opacities are proportional to: weights (n_regions, n_words) over the highest of the word or (i2t) the pair."""
    return weights / (weights.max(0) if side == "t2i" else weights.max())
