"""Compose and draw the random scenes of the demo data set.

A scene has one to four flat objects on a textured background, each in a different cell of a 3 x 3 grid. The random generator
of a scene depends only on the seed and the index of the image, so a larger data set begins with the same images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

IMAGE_SIZE = 128
_MASK_SCALE = 4  # masks are drawn at this scale and then reduced, for smooth edges

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "crescent")
TEXTURES = ("plain", "striped", "dotted", "checkered")
RADIUS_BY_SIZE = {"small": 13, "large": 19}  # half of the side in pixels, before a random change
RGB_BY_COLOUR = {
    "red": (214, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "yellow": (245, 210, 40),
    "purple": (135, 50, 160),
    "orange": (245, 130, 25),
    "white": (248, 248, 248),
    "black": (22, 22, 22),
    "pink": (250, 140, 185),
    "brown": (120, 72, 32),
}
RGB_BY_BACKGROUND = {
    "grass": (112, 176, 84),
    "sand": (226, 204, 152),
    "sea": (84, 150, 196),
    "night": (28, 30, 70),
    "snow": (226, 234, 242),
    "bricks": (170, 92, 74),
    "wood": (176, 132, 84),
    "sky": (158, 206, 240),
}
# Colours that would be hardly visible on a background. Objects on this background have other colours.
_SIMILAR_COLOURS_BY_BACKGROUND = {
    "grass": {"green"},
    "sand": {"white", "yellow"},
    "sea": {"blue"},
    "night": {"black", "blue", "purple"},
    "snow": {"white"},
    "bricks": {"red", "brown"},
    "wood": {"brown", "orange"},
    "sky": {"white", "blue"},
}


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene in the cell ``row``, ``column`` (0 to 2); ``centre`` and ``radius`` are in pixels."""

    shape: str
    colour: str
    size: str
    texture: str
    row: int
    column: int
    centre: tuple[float, float]
    radius: float

    @property
    def box(self) -> tuple[int, int, int, int]:
        """The corners (x1, y1, x2, y2) of the drawn object in whole pixels."""
        left, top = round(self.centre[0] - self.radius), round(self.centre[1] - self.radius)
        side = round(2 * self.radius)
        return (left, top, left + side, top + side)


@dataclass(frozen=True)
class Scene:
    """A background and one to four objects in reading order (rows from the top, then columns from the left)."""

    background: str
    objects: tuple[SceneObject, ...]


def compose_scene(rng: np.random.Generator) -> Scene:
    """Return a random scene; no two of its objects have the same colour and the same shape."""
    background = draw_element(rng, list(RGB_BY_BACKGROUND))
    colours = [c for c in RGB_BY_COLOUR if c not in _SIMILAR_COLOURS_BY_BACKGROUND[background]]
    n_objects = int(rng.integers(1, 5))
    cells = sorted(int(cell) for cell in rng.choice(9, n_objects, replace=False))
    objects: list[SceneObject] = []
    while len(objects) < n_objects:
        colour, shape = draw_element(rng, colours), draw_element(rng, SHAPES)
        if any((o.colour, o.shape) == (colour, shape) for o in objects):
            continue
        size = draw_element(rng, list(RADIUS_BY_SIZE))
        row, column = divmod(cells[len(objects)], 3)
        radius = RADIUS_BY_SIZE[size] + float(rng.uniform(-1.5, 1.5))
        cell = IMAGE_SIZE / 3
        slack = cell / 2 - radius - 0.5  # keeps the object inside its cell
        x, y = ((k + 0.5) * cell + float(rng.uniform(-slack, slack)) for k in (column, row))
        objects.append(SceneObject(shape, colour, size, draw_element(rng, TEXTURES), row, column, (x, y), radius))
    return Scene(background, tuple(objects))


def draw_element(rng: np.random.Generator, choices: Sequence[str]) -> str:
    """Return a random element, the same as ``rng.choice``, but without the slow conversion of ``choices`` to an array."""
    return choices[int(rng.integers(len(choices)))]


def draw_scene(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draw ``scene`` as an RGB image of ``IMAGE_SIZE`` x ``IMAGE_SIZE`` pixels; ``rng`` varies the background's grain."""
    image = Image.fromarray(_draw_background(scene.background, rng))
    for item in scene.objects:
        left, top, right, _ = item.box
        side = right - left
        image.paste(_draw_texture(item, side), (left, top), _draw_mask(item.shape, side))
    return image


def _draw_background(name: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    n = IMAGE_SIZE
    dx, dy = rng.uniform(0, 32, 2)
    x, y = np.arange(n) + dx, np.arange(n)[:, None] + dy  # a row and a column, so that a sine of only x or only y is cheap
    grain = rng.normal(0, 1, (n, n)).astype(np.float32)
    light: NDArray[np.floating[Any]]
    match name:
        case "grass":
            light = 16 * np.sin(x * 1.3 + 2 * np.sin(y / 5)) + 10 * grain
        case "sand":
            light = 14 * grain
        case "sea":
            light = 20 * np.sin(y / 3 + 1.5 * np.sin(x / 9))
        case "night":
            light = np.where(grain > 2.4, 170.0, 0.0)
        case "snow":
            light = 5 * np.sin((x + y) / 17) + 3 * grain
        case "bricks":
            light = np.where((y % 12 < 2) | ((x + 12 * (y // 12 % 2)) % 24 < 2), 60.0, 4 * grain)
        case "wood":
            light = 16 * np.sin(x / 2.2 + 2 * np.sin(y / 40)) - 40 * (x % 32 < 2)
        case _:  # sky
            light = 40 * (y - n / 2) / n + 2 * grain
    pixels = np.asarray(RGB_BY_BACKGROUND[name], np.float32) + light[:, :, None]
    return pixels.clip(0, 255, out=pixels).astype(np.uint8)


def _draw_texture(item: SceneObject, side: int) -> Image.Image:
    """Return a square image filled with the colour and texture of an object."""
    colour = np.asarray(RGB_BY_COLOUR[item.colour], np.float32)
    second = colour * 0.55 if colour.mean() > 90 else colour * 0.6 + 90
    y, x = np.ogrid[0:side, 0:side]
    match item.texture:
        case "striped":
            marked = (x + y) % 8 < 3
        case "dotted":
            marked = ((x % 8 - 3.5) ** 2 + (y % 8 - 3.5) ** 2) < 5.5
        case "checkered":
            marked = (x // 5 + y // 5) % 2 == 1
        case _:  # plain
            marked = np.zeros((side, side), bool)
    return Image.fromarray(np.where(marked[:, :, None], second.astype(np.uint8), colour.astype(np.uint8)))


def _draw_mask(shape: str, side: int) -> Image.Image:
    """Return a greyscale mask of ``side`` x ``side`` pixels, white inside the shape."""
    n = side * _MASK_SCALE
    mask = Image.new("L", (n, n), 0)
    pen = ImageDraw.Draw(mask)
    full = (0, 0, n - 1, n - 1)

    def polygon(points: list[tuple[float, float]]) -> None:
        pen.polygon([(px * (n - 1), py * (n - 1)) for px, py in points], fill=255)

    if shape == "circle":
        pen.ellipse(full, fill=255)
    elif shape == "square":
        polygon([(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)])
    elif shape == "triangle":
        polygon([(0.5, 0), (1, 0.95), (0, 0.95)])
    elif shape == "diamond":
        polygon([(0.5, 0), (0.88, 0.5), (0.5, 1), (0.12, 0.5)])
    elif shape == "cross":
        pen.rectangle((0.34 * n, 0, 0.66 * n, n), fill=255)
        pen.rectangle((0, 0.34 * n, n, 0.66 * n), fill=255)
    elif shape == "star":
        radii = [0.5, 0.21] * 5
        angles = [math.pi * (k / 5 - 0.5) for k in range(10)]
        polygon([(0.5 + r * math.cos(a), 0.5 + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)])
    elif shape == "ring":
        pen.ellipse(full, fill=255)
        pen.ellipse((0.27 * n, 0.27 * n, 0.73 * n, 0.73 * n), fill=0)
    else:  # crescent
        pen.ellipse(full, fill=255)
        pen.ellipse((0.32 * n, -0.06 * n, 1.2 * n, 0.82 * n), fill=0)
    return mask.resize((side, side), Image.Resampling.BOX)
