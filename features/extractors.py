"""From a feature preset to its extractor."""

from __future__ import annotations

from pathlib import Path

from vse.features.boxes import BoxesExtractor
from vse.features.caption_extractor import CaptionExtractor, encoder_path, fit_encoder
from vse.features.cnn import CnnExtractor
from vse.features.extraction import Extractor
from vse.features.regions import RegionsExtractor
from vse.pipeline.feature_config import BoxesConfig, CnnConfig, FeatureConfig, RegionsConfig


def make_extractor(
    config: FeatureConfig,
    dataset_file: Path,
    out: Path,
    weights_dir: Path | None = None,
    words: Path | None = None,
    device: str = "auto",
    fit: bool = True,
) -> Extractor:
    """The extractor of ``config``.

    The encoder of a caption feature lies beside the cache ``out``; with ``fit`` it is made first, if it is not there yet.
    """
    if isinstance(config, CnnConfig):
        return CnnExtractor(config, weights_dir, device)
    if isinstance(config, RegionsConfig):
        return RegionsExtractor(config, weights_dir, device)
    if isinstance(config, BoxesConfig):
        return BoxesExtractor(config, weights_dir, device)
    encoder = encoder_path(out)
    if fit:
        fit_encoder(dataset_file, config, encoder, device, words)
    return CaptionExtractor(config, encoder, device)
