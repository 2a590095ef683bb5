"""From a feature preset to its extractor."""

from __future__ import annotations

from pathlib import Path

from vse.features.boxes import BoxesExtractor
from vse.features.cnn import CnnExtractor
from vse.features.extraction import Extractor
from vse.features.regions import RegionsExtractor
from vse.features.sentences import CaptionExtractor, encoder_path, fit_encoder
from vse.pipeline.config import BoxesConfig, CnnConfig, FeatureConfig, RegionsConfig


def make_extractor(
    config: FeatureConfig,
    dataset_file: Path,
    out: Path,
    weights_dir: Path | None = None,
    words: Path | None = None,
    device: str = "auto",
) -> Extractor:
    """The extractor of ``config``; that of a caption feature is fitted first, beside the cache ``out``, if it is not yet."""
    if isinstance(config, CnnConfig):
        return CnnExtractor(config, weights_dir, device)
    if isinstance(config, RegionsConfig):
        return RegionsExtractor(config, weights_dir, device)
    if isinstance(config, BoxesConfig):
        return BoxesExtractor(config, weights_dir, device)
    return CaptionExtractor(config, fit_encoder(dataset_file, config, encoder_path(out), device, words), device)
