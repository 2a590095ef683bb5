"""One feature of a data set, by the name of its preset: its unfinished shards are made, then the cache that joins them.

What needs torch is imported when it runs, so that a wrong name is answered quickly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from vse.features.settings import EXTRACTORS
from vse.features.settings.base import FeatureSettings, Job, Option
from vse.features.settings.captions import CaptionSettings
from vse.features.settings.presets import load_feature
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.writing import lock_for_writing
from vse.pipeline.presets import presets

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureRequest:
    """A feature that is asked for.

    Attributes
    ----------
    dataset : the data set's ``dataset.json``
    feature : a preset of ``config/features``, or a YAML file
    out : the cache; by default ``features/<dataset>_<feature>.h5``
    sets : settings of the preset that change, as ``key=value``
    like : a cache whose settings and weights are taken, in place of those of ``feature``
    shards : how many; by default as the data set's preset says
    skip_bad : leave unreadable images out, and list them
    weights_dir : folder of weights that stand in for downloads; by default ``$VSE_WEIGHTS_DIR``
    words : file of word vectors; by default ``$VSE_WORDS``
    device, threads : what computes
    """

    dataset: Path
    feature: str
    out: Path | None = None
    sets: Sequence[str] = ()
    like: Path | None = None
    shards: int | None = None
    skip_bad: bool = False
    weights_dir: Path | None = None
    words: Path | None = None
    device: str = "auto"
    threads: int | None = None


def extract_feature(asked: FeatureRequest, extractor: str | None = None, shard: int | None = None) -> Path:
    """Make a cache, or one of its shards alone (from 0); returns the file.

    :class:`UserError` if the feature is not made by the ``extractor`` that is named, or its extractor has no such option.
    """
    dataset = load_dataset_file(asked.dataset)  # all that reads it here is given this one while it is held
    config, out = _resolved(asked, dataset) if asked.like is None else _settings_of(asked, asked.like, dataset)
    if extractor not in (None, other := config.extractor_name()):
        raise UserError(f"feature {asked.feature!r} is made by vse-extract {other}, not by vse-extract {extractor}")
    for option in ("skip_bad", "weights_dir", "words"):
        if getattr(asked, option) and option not in config.options:
            name = option.replace("_", "-")
            raise UserError(f"--{name}: feature {config.name!r} is made by {other}, which has no such option; leave it out")
    n_shards = asked.shards or default_shards(dataset)
    weights_dir, words = (_path_given(asked, config, option) for option in ("weights_dir", "words"))

    from vse.features import extraction
    from vse.features.backbones.device import use_threads

    use_threads(asked.threads)
    _check_out(dataset, config, out, words)
    with lock_for_writing(out) if shard is None else nullcontext():  # shards may be jobs, side by side
        ready = config.build(Job(asked.dataset, out, asked.device, weights_dir, words, fit=shard is None))
        if asked.like is None:
            _log_preset(asked, dataset, config)
        made = extraction.extract_shards(asked.dataset, ready, out, n_shards, shard, asked.skip_bad)
        return made if shard is not None else extraction.merge(asked.dataset, out, n_shards)


def _log_preset(asked: FeatureRequest, dataset: Dataset, config: FeatureSettings) -> None:
    """Log the settings that the preset of the data set changes, and warn if ``--weights-dir`` is not read."""
    plain = load_feature(asked.feature, None, asked.sets)
    changes = presets.list_changes(plain.model_dump(), config.model_dump())
    if changes:
        log.info("data set preset %r changes %s", dataset.name, "; ".join(changes))
    if asked.weights_dir is not None and getattr(config, "weights", None) == "random":
        log.warning("--weights-dir %s is not read: the weights of %s are random", asked.weights_dir, config.name)


def fit_feature(asked: FeatureRequest) -> Path:
    """Fit the encoder of a caption feature on the training captions, beside the cache; returns its file."""
    dataset = load_dataset_file(asked.dataset)
    config, out = _resolved(asked, dataset)
    if not isinstance(config, CaptionSettings):
        fitted = [name for name in EXTRACTORS if EXTRACTORS[name].fitted]
        raise UserError(f"feature {asked.feature!r} has no encoder to fit{did_you_mean(asked.feature, fitted)}")

    from vse.features.backbones.device import use_threads
    from vse.features.extractors.captions import encoder_path, fit_encoder

    use_threads(asked.threads)
    _check_out(dataset, config, out, asked.words)
    return fit_encoder(asked.dataset, config, encoder_path(out), asked.device, asked.words)


def default_shards(dataset: Dataset) -> int:
    """How many shards a data set's features have, unless it is said: as its preset says or, without one, 4 at most."""
    known = dataset.name in presets.known_presets("datasets")
    return presets.load_dataset(dataset.name).shards if known else min(4, len(dataset.images))


def _path_given(asked: FeatureRequest, config: FeatureSettings, option: Option) -> Path | None:
    """An option of the extractor: what is asked for, or else what the environment says."""
    given: Path | None = getattr(asked, option)
    named = os.environ.get(f"VSE_{option.upper()}") if option in config.options else None
    return given or (Path(named) if named else None)


def _resolved(asked: FeatureRequest, dataset: Dataset) -> tuple[FeatureSettings, Path]:
    config = load_feature(asked.feature, dataset.name, asked.sets)
    return config, asked.out or Path("features", f"{dataset.name}_{config.name}.h5")


def _settings_of(asked: FeatureRequest, like: Path, dataset: Dataset) -> tuple[FeatureSettings, Path]:
    """The settings that another cache was made with, and where the cache of this data set goes."""
    from vse.features.cache.feature_cache import open_cache

    cache = open_cache(like)
    made = cache.provenance
    extractor = made.get("config", {}).get("extractor")
    if extractor not in EXTRACTORS or EXTRACTORS[extractor].fitted or asked.sets:
        why = "--set does not go with --like" if asked.sets else f"{like}: no features that a network here has made"
        raise UserError(why)
    settings = EXTRACTORS[extractor]
    beside = {key: made[key] for key in ("weights", "seed", "revision") if key in made and key in settings.model_fields}
    content = {"name": cache.feature, **beside, **made["config"]}
    config = presets.validate_settings(settings, "feature", str(like), content)
    return config, asked.out or Path("features", f"{dataset.name}_{config.name}.h5")


def _check_out(dataset: Dataset, config: FeatureSettings, out: Path, words: Path | None) -> None:
    """Nothing that the feature is made from may be written over."""
    from vse.features.cache.shards import check_cache_out

    word_file = config.word_file(words)
    inputs = [dataset.path, dataset.path.parent / "images", *map(Path, config.files()), *([word_file] if word_file else [])]
    encoder = out.with_suffix(".encoder.safetensors") if config.fitted else None
    check_cache_out(out, dataset.name, config.name, inputs, encoder)
