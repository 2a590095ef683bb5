"""The demo data set: drawn here, not downloaded, and the same for the same seed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vse.pipeline.demo_captions import DemoCaption, write_captions
from vse.pipeline.demo_scenes import IMAGE_SIZE, Scene, compose_scene, draw_scene
from vse.pipeline.errors import UserError
from vse.pipeline.files import clear_temporaries, read_json, write_bytes, write_json
from vse.pipeline.locks import only_writer
from vse.pipeline.outputs import OutputKind, check_out, may_replace_others
from vse.pipeline.progress import progress_bar
from vse.pipeline.vocabulary import tokenize

DEFAULT_IMAGES = 5500  # 4,000 train, 500 val, 1,000 test


def make_demo(out: Path, n_images: int = DEFAULT_IMAGES, seed: int = 0, name: str = "demo") -> Path:
    """Draw ``n_images`` scenes with five captions each and write ``out/dataset.json`` and ``out/images``.

    About 8/11 of the images are for training, 1/11 for validation, 2/11 for testing. Every sentence keeps
    its ``phrases``: first token, number of tokens, the ``boxes`` (x1, y1, x2, y2 in pixels) of the objects it
    names, and ``kind`` ``object``, or ``scene`` (without boxes) for the background. Returns the path of
    ``dataset.json``, which is written last.
    """
    if n_images < 6:
        raise UserError(f"--images {n_images}: the demo needs at least 6 images, so that every split has some")
    if seed < 0:
        raise UserError(f"--seed {seed}: a seed is not negative")
    n_test, n_val = max(1, round(n_images * 2 / 11)), max(1, round(n_images / 11))
    splits = ["train"] * (n_images - n_val - n_test) + ["val"] * n_val + ["test"] * n_test
    with only_writer(out, folder=True):
        for imgid in range(n_images):
            check_out(out / "images" / _filename(imgid), _DEMO_IMAGE)
        _clear(out, name)
        return _draw(out, splits, seed, name)


def _filename(imgid: int) -> str:
    return f"demo_{imgid:06d}.jpg"


def _jpeg(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=92)
    return content.getvalue()


def _is_drawn(path: Path) -> bool:
    """Return whether an image has the size and the quantization of drawn ones, which hardly any photograph has."""
    with Image.open(path) as there, Image.open(io.BytesIO(_jpeg(Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE))))) as ours:
        return (there.size, getattr(there, "quantization", None)) == (ours.size, getattr(ours, "quantization", 0))


_DEMO_IMAGE = OutputKind("an image of the demo", _is_drawn)


def _clear(out: Path, name: str) -> None:
    """Remove the ``dataset.json`` of an earlier demo, which must not describe images that are redrawn, and what kills left."""
    file = out / "dataset.json"
    if file.is_file():
        earlier = None if may_replace_others() else read_json(file)
        if earlier is not None and (not isinstance(earlier, dict) or earlier.get("dataset") != name):
            raise UserError(f"{file}: describes another data set, which is not drawn over; give another --out")
        file.unlink()
    clear_temporaries(out)
    clear_temporaries(out / "images")


def _draw(out: Path, splits: list[str], seed: int, name: str) -> Path:
    entries = []
    for imgid, split in enumerate(progress_bar(splits, desc="draw demo", unit="image")):
        rng = np.random.default_rng([seed, imgid])
        scene = compose_scene(rng)
        filename = _filename(imgid)
        write_bytes(out / "images" / filename, _jpeg(draw_scene(scene, rng)), sync=False)
        entries.append(_entry(imgid, filename, split, scene, write_captions(scene, rng)))
    return write_json(out / "dataset.json", {"dataset": name, "images": entries})


def _entry(imgid: int, filename: str, split: str, scene: Scene, captions: tuple[DemoCaption, ...]) -> dict[str, Any]:
    sentids = [imgid * len(captions) + k for k in range(len(captions))]
    sentences = [_sentence(sentid, imgid, scene, c) for sentid, c in zip(sentids, captions, strict=True)]
    return {"imgid": imgid, "filename": filename, "split": split, "sentids": sentids, "sentences": sentences}


def _sentence(sentid: int, imgid: int, scene: Scene, caption: DemoCaption) -> dict[str, Any]:
    phrases = [
        {
            "first_token": phrase.first_token,
            "n_tokens": phrase.n_tokens,
            "kind": "object" if phrase.objects else "scene",
            "objects": list(phrase.objects),
            "boxes": [list(scene.objects[k].box) for k in phrase.objects],
        }
        for phrase in caption.phrases
    ]
    tokens = tokenize(caption.raw)
    return {"sentid": sentid, "imgid": imgid, "raw": caption.raw, "tokens": tokens, "phrases": phrases}
