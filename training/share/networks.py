"""Put the networks that compute features into a packed model, or only the names and hashes of their files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from vse.features.backbones.model_folder import copy_checked_model
from vse.features.backbones.weight_files import WEIGHTS_FILE_KEY, WeightsFile
from vse.features.cache.description import FeatureDescription, describe_feature
from vse.features.cache.feature_cache import FeatureCache
from vse.features.extractors.captions import PACKED_ENCODER_NAME, encoder_path, load_cache_encoder
from vse.features.extractors.cnn import load_cnn_weights
from vse.features.extractors.text import TextExtractor, rebuild_text_extractor
from vse.features.settings import find_extractor
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.files.writing import write_bytes
from vse.training.run.packed import IMAGE_NETWORK_FILE_NAME, TEXT_NETWORK_NAME

log = logging.getLogger(__name__)
_LOCAL_NOTES = ("device", "encoder", "backbone_run")  # entries of the provenance that concern this machine


def pack_image_feature(cache: FeatureCache, out: Path, weights_dir: Path | None, with_network: bool) -> FeatureDescription:
    """Return the description of an image feature for a packed model. With ``with_network``, write its CNN to ``out``, too.

    Without ``with_network``, a CNN that is not on this machine is a warning. Features of other extractors or of other programs
    are only described. Raises UserError if the CNN is needed and cannot be loaded.
    """
    if cache.provenance.get("config", {}).get("extractor") != "cnn":
        log.warning("%s: its features are not vectors of a CNN, so the packed model reads no photos", cache.path)
        return _describe(cache, {})
    try:
        weights, notes = load_cnn_weights(cache, weights_dir)
    except UserError as error:
        return _describe_unverified(cache, error, with_network)
    if with_network:
        file = out / IMAGE_NETWORK_FILE_NAME
        _save_tensors(file, weights)
        notes = {"weights": file.name, WEIGHTS_FILE_KEY: WeightsFile.describe(file)}
    return _describe(cache, notes)


def pack_caption_feature(cache: FeatureCache, out: Path, weights_dir: Path | None, with_network: bool) -> FeatureDescription:
    """Return the description of a caption feature for a packed model, and write its fitted encoder to ``out``.

    With ``with_network``, a pretrained text encoder is written, too. Raises UserError if the encoder is needed and missing.
    """
    extractor = cache.provenance.get("config", {}).get("extractor")
    settings = find_extractor(extractor)
    if settings is not None and settings.fits_encoder:
        load_cache_encoder(cache, "cpu")
        write_bytes(out / PACKED_ENCODER_NAME, InputFile(encoder_path(cache.path)).read())
        return _describe(cache, {})
    if extractor != "text":
        log.warning("%s: no encoder of vse computed its captions, so the packed model reads no texts", cache.path)
        return _describe(cache, {})
    try:
        encoder = rebuild_text_extractor(cache, weights_dir, "cpu")
    except UserError as error:
        return _describe_unverified(cache, error, with_network)
    notes = {name: value for name, value in encoder.provenance.items() if name in (WEIGHTS_FILE_KEY, "commit")}
    return _describe(cache, {**notes, **(_copy_text_network(encoder, out) if with_network else {})})


def _copy_text_network(encoder: TextExtractor, out: Path) -> dict[str, Any]:
    """Write the files of a text encoder to ``out``, and return the changes to its provenance."""
    backbone = encoder.backbone
    if backbone.folder is None:
        file = out / f"{TEXT_NETWORK_NAME}.safetensors"
        _save_tensors(file, backbone.network.state_dict())
        return {"weights": file.name, WEIGHTS_FILE_KEY: WeightsFile.describe(file)}
    if WEIGHTS_FILE_KEY not in encoder.provenance:
        raise UserError(f"{encoder.config.model}: its weights are random, so they are no file; leave --with-backbone out")
    with copy_checked_model(backbone.folder) as copy:
        shutil.copytree(copy, out / TEXT_NETWORK_NAME)
    return {"weights": TEXT_NETWORK_NAME}


def _describe_unverified(cache: FeatureCache, error: UserError, with_network: bool) -> FeatureDescription:
    if with_network:
        raise error
    log.warning("%s. The packed model names the network; whoever uses it needs that file", error)
    return _describe(cache, {})


def _describe(cache: FeatureCache, changes: Mapping[str, Any]) -> FeatureDescription:
    """Return the description of a feature without names of local files, with changes to its provenance."""
    description = describe_feature(cache)
    provenance = {name: value for name, value in description.provenance.items() if name not in _LOCAL_NOTES}
    if "imported" in provenance:
        provenance["imported"] = {"layout": provenance["imported"].get("layout")}
    if "weights" in provenance:
        provenance["weights"] = Path(str(provenance["weights"])).name
    return description.model_copy(update={"provenance": {**provenance, **changes}})


def _save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors refuses tensors that share memory, so each is copied
    content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    write_bytes(file, safetensors.torch.save(content, {"format": "pt"}))
