"""Extract a feature of a data set, or fit the feature's encoder. A user's own image extractor is tried on three images first.

Modules that need torch are imported inside the functions, so that a wrong feature name is reported quickly.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vse.features.cache.rows import ExtractorInput, FeatureRows
from vse.features.options import FeatureRequest
from vse.features.settings import EXTRACTORS, find_extractor_settings, load_feature_preset
from vse.features.settings.base import ExtractionArguments, Extractor, ExtractorOption, FeatureSettings, ImportedSettings
from vse.features.settings.captions import FittedCaptionSettings
from vse.pipeline.dataset.columns import count_captions_per_image
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.writing import lock_for_writing
from vse.pipeline.presets import presets
from vse.pipeline.presets.own_code import explain_own_code_errors
from vse.pipeline.presets.parts import is_user_written

log = logging.getLogger(__name__)

_MIN_SHARDS, _MAX_SHARD_CAPTIONS = 4, 50_000  # for a data set without a preset


def extract_feature(request: FeatureRequest, extractor: str | None = None) -> Path:
    """Extract a feature and write its cache, or only one shard of it; return the path of the written file.

    ``extractor`` is the name of the extractor that the feature must have; None: any. Raises UserError if the feature has
    another one, or if its extractor lacks an option of the request.
    """
    # While this data set is referenced here, other functions that load the file receive the same object.
    dataset = load_dataset_file(request.dataset)
    config = (
        _read_cache_settings(request, request.like)
        if request.like
        else load_feature_preset(request.feature, dataset.name, request.sets)
    )
    out = request.out or _build_default_cache_path(dataset, config)
    if isinstance(config, ImportedSettings):
        raise UserError(config.describe_import(request.dataset, out))
    if extractor not in (None, other := config.extractor_name()):
        raise UserError(f"feature {request.feature!r} is extracted by vse-extract {other}, not by vse-extract {extractor}")
    for option in ("skip_bad", "weights_dir", "words"):
        if getattr(request.options, option) and option not in config.option_names:
            name = option.replace("_", "-")
            raise UserError(f"--{name}: feature {config.name!r} belongs to {other}, which has no such option; leave it out")
    n_shards, shard = request.shards or choose_shard_count(dataset, out), request.shard
    weights_dir, word_file = (_find_option_path(request, config, option) for option in ("weights_dir", "words"))

    from vse.features import extraction
    from vse.features.up_to_date import is_up_to_date

    _check_feature_outputs(dataset, config, out, word_file)
    with lock_for_writing(out) if shard is None else nullcontext():  # single shards may run as parallel jobs
        if shard is None and is_up_to_date(out, dataset, config, n_shards, _encoder_path(out), word_file):
            log.info("%s: finished, kept", out)
            return out

        from vse.features.backbones.device import set_thread_count

        set_thread_count(request.options.threads)
        arguments = ExtractionArguments(
            request.dataset, out, request.options.device, weights_dir, word_file, must_fit_encoder=shard is None
        )
        feature_extractor = (
            build_and_try_extractor(config, arguments) if is_user_written(config) else config.build_extractor(arguments)
        )
        if request.like is None:
            _log_dataset_preset_changes(request, dataset, config)
            _warn_of_unread_weights_dir(request, config)
        path = extraction.extract_shards(request.dataset, feature_extractor, out, n_shards, shard, request.options.skip_bad)
        return path if shard is not None else extraction.merge_feature(request.dataset, out, n_shards)


def _log_dataset_preset_changes(request: FeatureRequest, dataset: Dataset, config: FeatureSettings) -> None:
    plain = load_feature_preset(request.feature, None, request.sets)
    changes = presets.list_setting_changes(plain.model_dump(), config.model_dump())
    if changes:
        log.info("data set preset %r changes %s", dataset.name, "; ".join(changes))


def _warn_of_unread_weights_dir(request: FeatureRequest, config: FeatureSettings) -> None:
    if request.options.weights_dir is not None and getattr(config, "weights", None) == "random":
        log.warning("--weights-dir %s is not read: the weights of %s are random", request.options.weights_dir, config.name)


def fit_feature(request: FeatureRequest) -> Path:
    """Fit the encoder of a caption feature on the training captions; return its file.

    Raises UserError if the feature has no encoder to fit.
    """
    dataset = load_dataset_file(request.dataset)
    config = load_feature_preset(request.feature, dataset.name, request.sets)
    out = request.out or _build_default_cache_path(dataset, config)
    if not isinstance(config, FittedCaptionSettings):
        fitted = [name for name in EXTRACTORS if EXTRACTORS[name].fits_encoder]
        raise UserError(f"feature {request.feature!r} has no encoder to fit{did_you_mean(request.feature, fitted)}")

    from vse.features.backbones.device import set_thread_count
    from vse.features.extractors.captions import encoder_path, fit_encoder

    set_thread_count(request.options.threads)
    _check_feature_outputs(dataset, config, out, request.options.words)
    return fit_encoder(request.dataset, config, encoder_path(out), request.options.device, request.options.words)


def choose_shard_count(dataset: Dataset, out: Path) -> int:
    """Return the number of shards of the cache ``out``; for a new cache, the number in the preset of the data set.

    Without a preset, a new cache gets 4 shards, or more if a shard would have more than 50,000 captions, but no more shards
    than the data set has images.
    """
    from vse.features.cache.shards import read_manifest

    with suppress(UserError):  # there is no manifest yet, or a damaged one
        return len(read_manifest(out)["shards"])
    if dataset.name in presets.list_preset_names("datasets"):
        return presets.load_dataset_preset(dataset.name).shards
    n_captions = int(count_captions_per_image(dataset.images).sum())
    return min(max(_MIN_SHARDS, -(-n_captions // _MAX_SHARD_CAPTIONS)), len(dataset.images))


def _encoder_path(out: Path) -> Path:
    """Return the path of a cache's encoder. This copy of ``extractors.captions.encoder_path`` does not import torch."""
    return out.with_suffix(".encoder.safetensors")


def _find_option_path(
    request: FeatureRequest, config: FeatureSettings | type[FeatureSettings], option: ExtractorOption
) -> Path | None:
    """Return the path that ``option`` has in the request or else in its environment variable; None if neither has a path.

    The variable, such as ``VSE_WEIGHTS_DIR``, is ignored if the extractor does not have this option.
    """
    path: Path | None = getattr(request.options, option)
    variable = os.environ.get(f"VSE_{option.upper()}") if option in config.option_names else None
    return path or (Path(variable) if variable else None)


def _build_default_cache_path(dataset: Dataset, config: FeatureSettings) -> Path:
    return Path("features", f"{dataset.name}_{config.name}.h5")


def _read_cache_settings(request: FeatureRequest, like: Path) -> FeatureSettings:
    """Return the extractor's settings that the cache ``like`` records, to extract features with the same settings.

    The setting ``weights`` becomes the path of the recorded weights if they are found.
    """
    from vse.features.backbones.weight_files import find_weights_setting
    from vse.features.cache.feature_cache import open_cache

    cache = open_cache(like)
    provenance = cache.provenance
    settings = find_extractor_settings(provenance.get("config", {}).get("extractor"))
    if request.sets:
        raise UserError("--set does not go with --like")
    if settings is None or settings.fits_encoder:
        raise UserError(f"{like}: --like needs a cache whose features a network of vse-extract computed")
    names = ("weights", "seed", "revision")
    sources = {name: provenance[name] for name in names if name in provenance and name in settings.model_fields}
    sources = find_weights_setting(provenance, None, _find_option_path(request, settings, "weights_dir")) or sources
    content = {"name": cache.feature, **sources, **provenance["config"]}
    return presets.validate_settings(settings, "feature", str(like), content)


def _check_feature_outputs(dataset: Dataset, config: FeatureSettings, out: Path, word_file: Path | None) -> None:
    from vse.features.cache.shards import check_cache_output

    word_file = config.find_word_file(word_file)
    inputs = [
        dataset.path,
        dataset.path.parent / "images",
        *map(Path, config.list_input_files()),
        *([word_file] if word_file else []),
    ]
    encoder = _encoder_path(out) if config.fits_encoder else None
    check_cache_output(out, dataset.name, config.name, inputs, encoder)


EXTRACTOR_ADVICE = (
    "an extractor of images has two methods. `prepare(self, image, image_id)` takes an RGB image of Pillow. "
    "`compute_vectors(self, batch)` takes a list of results of `prepare` and returns a list of the same length, such as "
    "`[ImageVectors(vector) for vector in batch]` with a NumPy vector each (vse new extractor FILE.py writes an example)"
)
_TRIAL_SIZES = ((48, 32), (32, 48), (40, 40))


def build_and_try_extractor(settings: FeatureSettings, arguments: ExtractionArguments) -> Extractor:
    """Build a user's own extractor, try it on three small images, and return it. An extractor of texts is not tried.

    Each image is extracted alone and in a batch. Raises UserError if the extractor does not return one finite vector per image
    (one matrix, if ``row_kind`` is not ``vectors``), or if the vectors of an image depend on the batch or on chance.
    """
    with explain_own_code_errors(settings.extractor_name(), EXTRACTOR_ADVICE):
        extractor = settings.build_extractor(arguments)
    if not isinstance(extractor, Extractor):
        found = type(extractor).__name__
        raise UserError(f"{settings.extractor_name()}: build_extractor returns {found}, not an Extractor; {EXTRACTOR_ADVICE}")
    if settings.kind != "image":
        return extractor
    with tempfile.TemporaryDirectory() as folder:
        items = [_save_noise_image(Path(folder), k, size) for k, size in enumerate(_TRIAL_SIZES)]
        together = _try_extraction(settings, extractor, items)
        for k, item in enumerate(items):
            alone = np.asarray(_try_extraction(settings, extractor, [item]).features)
            same = np.asarray(together.features)[k : k + 1] if together.offsets is None else _select_vector_set(together, k)
            if alone.shape != same.shape or not np.allclose(alone, same, rtol=1e-2, atol=1e-3):
                raise _trial_error(settings, "the vectors of an image change with the batch, or from call to call")
    return extractor


def _save_noise_image(folder: Path, k: int, size: tuple[int, int]) -> ExtractorInput:
    path = folder / f"photograph-{k}.png"
    pixels = np.random.default_rng(k).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return ExtractorInput(id=k, path=path)


def _try_extraction(settings: FeatureSettings, extractor: Extractor, items: list[ExtractorInput]) -> FeatureRows:
    with explain_own_code_errors(settings.extractor_name(), EXTRACTOR_ADVICE):
        rows = extractor.extract(items)
    n_rows = len(rows.features) if rows.offsets is None else len(rows.offsets) - 1
    if n_rows != len(items):
        raise _trial_error(settings, f"compute_vectors returns {n_rows} results for {len(items)} images")
    n_axes = rows.features.ndim - 1 + (rows.offsets is not None)
    if n_axes != (1 if settings.row_kind == "vectors" else 2):
        found = {1: "one vector", 2: "several vectors"}.get(n_axes, f"an array of {n_axes} axes")
        raise _trial_error(
            settings, f"it returns {found} for each image, and row_kind of its settings is {settings.row_kind!r}"
        )
    features = np.asarray(rows.features)
    if not features.size:
        raise _trial_error(settings, "its vectors are empty")
    if not np.isfinite(features.astype(np.float64)).all():
        raise _trial_error(
            settings, f"a number is not finite as {rows.features.dtype}; scale the vectors or set dtype=float32"
        )
    return replace(rows, features=features)


def _select_vector_set(rows: FeatureRows, k: int) -> NDArray[np.generic]:
    assert rows.offsets is not None
    return np.asarray(rows.features)[rows.offsets[k] : rows.offsets[k + 1]]


def _trial_error(settings: FeatureSettings, fault: str) -> UserError:
    return UserError(f"{settings.extractor_name()}, tried on {len(_TRIAL_SIZES)} images: {fault}; {EXTRACTOR_ADVICE}")
