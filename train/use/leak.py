"""Images that a model is tested on must not be among those that it was trained on."""

from __future__ import annotations

import logging

from vse.features.backbone_cache import backbone_of
from vse.features.cache import FeatureCache, open_cache, read_sources
from vse.pipeline.audit import same_images
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.run.folder import RunFolder

log = logging.getLogger(__name__)


def images_trained_on(
    folder: RunFolder, restval: bool, cache: FeatureCache, tested: Dataset, split: str, allowed: bool = False
) -> int:
    """How many images of a split a run was trained on; :class:`UserError` if there are some, unless that is ``allowed``.

    The data set that it was trained on has the splits that it has: asking for its own training split is no mistake. What is
    compared are the images of another data set, or of a ``dataset.json`` that cuts other splits: by their numbers on Flickr or
    in MS-COCO, and by the sums of their files, which caches have. If the run's own data set is no longer there, a line of the
    log says so.

    Parameters
    ----------
    folder, restval : the run, and whether it was trained on the split ``restval``, too
    cache, tested, split : what it is tested on
    """
    evaluated = folder.evaluated()
    try:
        own_cache = cache if cache.key == evaluated["key"] else open_cache(folder.feature_file())
        own = load_dataset_file(own_cache.captions)
    except UserError as error:
        level = logging.INFO if tested.name == folder.record()["dataset"] else logging.WARNING
        log.log(level, "%s: whether it was trained on images of %s cannot be told (%s)", folder.path, tested.path, error)
        return 0
    if own.sha256 == tested.sha256:
        return 0
    splits = ("train", "restval") if restval else ("train",)
    learned = [image for image in own.images if image.split in splits]
    shared = same_images(tested.split(split), learned, _sums(cache), _sums(own_cache))
    if not shared:
        return 0
    image, twin = shared[0]
    message = (
        f"{folder.path}: was trained on {len(shared)} of the {len(tested.split(split))} images of split {split!r} of "
        f"{tested.path}; {image.file} is {twin.file} in split {twin.split!r} of {own.path}"
    )
    if not allowed:
        raise UserError(f"{message}. Metrics of these say nothing; --allow-leak goes on, and the result says so")
    log.warning("%s", message)
    return len(shared)


def _sums(cache: FeatureCache) -> dict[int, bytes]:
    """SHA-256 of the image files that a cache was made from, by image id; none of rows that were not made from image files."""
    if "imported" in cache.provenance or backbone_of(cache) is not None:
        return {}
    return {imgid: row.tobytes() for imgid, row in zip(cache.ids.tolist(), read_sources(cache), strict=True)}
