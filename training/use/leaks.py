"""Count the test images that a run was trained on."""

from __future__ import annotations

import logging

from vse.features.cache.feature_cache import FeatureCache, open_cache, read_input_hashes
from vse.features.exchange.embeddings import read_backbone
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.duplicates import find_same_images
from vse.pipeline.errors import UserError
from vse.training.run.folder import RunFolder
from vse.training.use.open_run import training_dataset_file

log = logging.getLogger(__name__)


def count_leaked_images(
    folder: RunFolder, restval: bool, cache: FeatureCache, tested: Dataset, split: str, allowed: bool = False
) -> int:
    """Count the images of a split that were training images of a run. Raises UserError if there are any, unless ``allowed``.

    Images are the same if they have the same id on Flickr or in MS-COCO, or the same file checksum. Returns 0 if ``tested`` is
    the run's own ``dataset.json``, and also, with a log message, if the data set of the training cannot be read.

    ``restval`` : True if the run was also trained on the split ``restval``.
    ``cache``, ``tested``, ``split`` : features, data set and split to test the run on.
    """
    own_key = folder.read_eval_cache_record()["key"]
    try:
        own_cache = cache if cache.key == own_key else open_cache(folder.image_cache_file())
        own = load_dataset_file(training_dataset_file(folder, folder.read_record(), own_cache))
    except UserError as error:
        level = logging.INFO if tested.name == folder.read_record()["dataset"] else logging.WARNING
        log.log(level, "%s: cannot check whether it was trained on images of %s (%s)", folder.path, tested.path, error)
        return 0
    if own.sha256 == tested.sha256:
        return 0
    splits = ("train", "restval") if restval else ("train",)
    training_images = [image for image in own.images if image.split in splits]
    shared = find_same_images(tested.split(split), training_images, _photo_checksums(cache), _photo_checksums(own_cache))
    if not shared:
        return 0
    image, twin = shared[0]
    message = (
        f"{folder.path}: was trained on {len(shared)} of the {len(tested.split(split))} images of split {split!r} of "
        f"{tested.path}; {image.file} is {twin.file} in split {twin.split!r} of {own.path}"
    )
    if not allowed:
        raise UserError(f"{message}. Metrics on them are meaningless. --allow-leak accepts them, and the result records it")
    log.warning("%s", message)
    return len(shared)


def _photo_checksums(cache: FeatureCache) -> dict[int, bytes]:
    """Return the SHA-256 of each image file by image id, or an empty dict for a cache that was not computed from files."""
    if "imported" in cache.provenance or read_backbone(cache) is not None:
        return {}
    return {imgid: row.tobytes() for imgid, row in zip(cache.ids.tolist(), read_input_hashes(cache), strict=True)}
