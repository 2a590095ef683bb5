"""A data set of photos that nobody has described, to be searched."""

from __future__ import annotations

from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files import clear_temporaries, read_json, write_json
from vse.pipeline.locks import only_writer
from vse.pipeline.outputs import may_replace_others
from vse.pipeline.sources import check_dataset_out, link_images

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def make_album(photos: Path, out: Path, name: str | None = None) -> Path:
    """Write ``out/dataset.json`` of all JPEG, PNG and WebP files in a folder and the folders in it, in the split ``test``.

    They have no captions. ``out/images`` becomes a link to the folder. The data set is called as ``out`` is, unless it has a
    ``name``. Numbers are given in the order of the files' names, so a photo that is added changes those after it. Returns
    the path of ``dataset.json``.
    """
    if not photos.is_dir():
        raise UserError(f"{photos}: no such folder of photos")
    files = sorted(
        path.relative_to(photos) for path in photos.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise UserError(f"{photos}: no JPEG, PNG or WebP file in it")
    name, file = name or out.resolve().name, out / "dataset.json"
    entries = [
        {
            "imgid": imgid,
            **({} if path.parent == Path() else {"filepath": path.parent.as_posix()}),
            "filename": path.name,
            "split": "test",
            "sentences": [],
        }
        for imgid, path in enumerate(files)
    ]
    check_dataset_out(out, name)
    if file.exists() and not may_replace_others():
        earlier = read_json(file)
        captioned = not isinstance(earlier, dict) or any(image.get("sentences") for image in earlier.get("images", []))
        if captioned or earlier.get("dataset") != name:
            raise UserError(f"{file}: describes another data set, which is not replaced; give another --out")
    with only_writer(out, folder=True):
        clear_temporaries(out)
        if (out / "images").resolve() != photos.resolve():
            link_images(out / "images", photos.resolve())
        return write_json(file, {"dataset": name, "images": entries})
