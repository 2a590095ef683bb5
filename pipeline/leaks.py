"""What a data set has in more than one split, or shares with a data set that others test on."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

from vse.pipeline.audit import by_splits, leak_mark, near_report, published_id, same_images, shared_report
from vse.pipeline.dataset import SPLITS, Dataset, count_splits, load_dataset_file, missing_images
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.input_files import is_name
from vse.pipeline.plain_text import printable
from vse.pipeline.presets import known_presets, load_dataset
from vse.pipeline.sources import checked_dataset

_LONGEST = 60  # characters of a caption that is shown
_NUMBERED = {"coco": ("coco",), "flickr": ("f30k", "f8k")}  # published data sets by whose numbers their files are called


def audit_dataset(path: Path, against: Path | None = None, look_alikes: bool = True) -> str:
    """A report of equal captions and of photos that look alike across splits, and of images that known test sets have.

    With ``against`` also of images, captions and photos that another data set has, which is given as its file or by the name
    under which it lies beside this one or in ``data/``, there without its photos, too. Without ``look_alikes`` no photo is
    read.
    :class:`vse.pipeline.errors.UserError` if a data set is not valid or an image file is missing.
    """
    dataset = checked_dataset(path)
    others = [] if against is None else [_other(against, dataset)]
    lines = [count_splits(dataset)]
    for other in others:
        lines += [count_splits(other), shared_report(dataset, other)]
    for twin in (None, *others):
        lines.append(caption_report(dataset, twin))
        without = [str(one.path) for one in (dataset, twin) if one is not None and not one.pictures]
        if without and look_alikes:
            lines.append(f"{without[0]} has no image files, so no photos are compared")
        elif look_alikes:
            lines.append(near_report(dataset, twin))
    return "\n".join([*lines, *known_test_images(dataset)])


def caption_report(dataset: Dataset, other: Dataset | None = None) -> str:
    """How many captions have the words of one in another split of the data set, or in any split of another data set.

    Case and punctuation do not count, where the tokens of the data set have none.
    """
    mine = _splits_of_texts(dataset)
    twins = mine if other is None else _splits_of_texts(other)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    examples: dict[tuple[str, str], str] = {}
    shared = set()
    for text, splits in mine.items():
        for split, n_captions in splits.items():
            for twin, n_twins in twins.get(text, {}).items():
                if other is None and SPLITS.index(split) >= SPLITS.index(twin):
                    continue
                shared.add(text)
                counts[split, twin][0] += n_captions
                counts[split, twin][1] += n_twins
                examples.setdefault((split, twin), text)
    where = f"across the splits of {dataset.path}" if other is None else f"in {dataset.path} and {other.path}"
    lines = [f"{len(shared)} texts of captions are the same {where}"]
    for (split, twin), (n_captions, n_twins) in by_splits(counts):
        example = printable(examples[split, twin])
        example = example if len(example) <= _LONGEST else f"{example[:_LONGEST]}..."
        count = f"{n_captions:7d} in {split} and {n_twins} in {twin}"
        lines.append(f"  {count}, e.g. {example!r}{leak_mark(split, twin)}")
    return "\n".join(lines)


def _splits_of_texts(dataset: Dataset) -> dict[str, Counter[str]]:
    """How many captions of each split have a text, as words with blanks between them."""
    splits: dict[str, Counter[str]] = defaultdict(Counter)
    for image in dataset.images:
        for caption in image.captions:
            splits[" ".join(caption.tokens).lower()][image.split] += 1
    return splits


def known_test_images(dataset: Dataset) -> list[str]:
    """Which images published data sets test on, by the names of files: a line each, and where lists are not at hand, one too.

    Those lists are the ``dataset.json`` of published data sets beside this one or in ``data/``.
    """
    lines: list[str] = []
    lacking = set(_published()) - {dataset.name}
    for name in sorted(lacking):
        known = _known(name, dataset)
        if known is None:
            continue
        lacking.discard(name)
        pairs = same_images(dataset.images, known.splits.get("test", ()))
        lines.append(f"{len(pairs)} images of {dataset.path} have names of test images of {name!r}")
        for split, count in Counter(image.split for image, _ in pairs).items():
            lines.append(f"  {count:7d} in {split}{leak_mark(split, 'test')}")
    named = Counter((published_id(image) or "").partition(" ")[0] for image in dataset.images)
    for kind, names in _NUMBERED.items():
        asked = [name for name in names if name in lacking]
        if named[kind] and asked and dataset.name not in names:
            files = " and ".join(f"data/{name}/dataset.json" for name in asked)
            lines.append(
                f"{named[kind]} images have names as in {' and '.join(asked)}; whether it tests on them is not known without "
                f"{files} (vse-data fetch NAME --no-images)"
            )
    return lines


def _published() -> list[str]:
    return [name for name in known_presets("datasets") if load_dataset(name).published]


def _known(name: str, dataset: Dataset) -> Dataset | None:
    """A published data set that is at hand; None if it is not."""
    file = _file_of(name, dataset)
    return None if file is None else load_dataset_file(file)


def _file_of(name: str, dataset: Dataset) -> Path | None:
    """The ``dataset.json`` of a data set by its name, beside another one or in ``data/``."""
    places = (dataset.path.parent.parent / name / "dataset.json", Path("data", name, "dataset.json"))
    return next((place for place in places if place.is_file()), None)


def _other(against: Path, dataset: Dataset) -> Dataset:
    """A data set by its file or its name; :class:`UserError` says how one is made that is not there.

    One by name may lack its images, of which only names and captions are compared then.
    """
    name = str(against)
    if against.exists() or not is_name(name) or name.endswith(".json"):
        return checked_dataset(against)
    file = _file_of(name, dataset)
    if file is not None:
        known = load_dataset_file(file)
        return replace(known, pictures=False) if missing_images(known) else known
    if name in _published():
        how = f"vse-data fetch {name} --no-images, or vse-data prepare {name} where its files are, makes it"
    elif name in known_presets("datasets"):
        how = f"vse-data {'demo' if load_dataset(name).n_images else 'import'} --out data/{name} makes it"
    else:
        how = f"name a dataset.json{did_you_mean(name, known_presets('datasets'))}"
    raise UserError(f"--against {name}: there is no data/{name}/dataset.json; {how}")
