"""Pack a trained run into a folder that can be used without data set and caches; upload and download such folders.

The folder contains the networks that compute the features, or only the names and hashes of the files of these networks.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from vse.features.backbones.model_folder import copy_checked_model, download_model
from vse.features.backbones.weight_files import WEIGHTS_FILE_KEY, WeightsFile
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureDescription, describe_feature
from vse.features.extractors.captions import PACKED_ENCODER_NAME, encoder_path, load_cache_encoder
from vse.features.extractors.cnn import load_cnn_weights
from vse.features.extractors.text import TextExtractor, rebuild_text_extractor
from vse.features.settings import find_extractor_settings
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.inputs import InputFile, error_reason
from vse.pipeline.files.outputs import may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, sha256_file, write_bytes, write_json, write_text
from vse.pipeline.presets.parts import find_own_code
from vse.training.experiment import ExperimentConfig
from vse.training.options import PackOptions
from vse.training.run.folder import RunFolder
from vse.training.run.packed import (
    CARD_FILE_NAME,
    CONFIG_FILE_NAME,
    IMAGE_NETWORK_FILE_NAME,
    PREPROCESSING_FILE_NAME,
    TEXT_NETWORK_NAME,
    WEIGHTS_FILE_NAME,
    PackedConfig,
    PackedFolder,
    is_packed,
)
from vse.training.use.open_run import find_unfinished_state

log = logging.getLogger(__name__)

# Keys of a cache's provenance whose values are only valid on this machine
_LOCAL_PROVENANCE_KEYS = ("device", "encoder", "backbone_run")


def pack_image_feature(cache: FeatureCache, out: Path, weights_dir: Path | None, with_network: bool) -> FeatureDescription:
    """Return the description of an image feature for a packed model. With ``with_network``, also write its CNN to ``out``.

    If the weights of the CNN are not on this machine, a warning is logged. With ``with_network``, UserError is raised instead.
    For a feature that no CNN computed, a warning is logged and no network is written.
    """
    if cache.provenance.get("config", {}).get("extractor") != "cnn":
        log.warning("%s: its features are not vectors of a CNN, so the packed model reads no photos", cache.path)
        return _describe_feature(cache, {})
    try:
        weights, notes = load_cnn_weights(cache, weights_dir)
    except UserError as error:
        return _describe_unloadable_feature(cache, error, with_network)
    if with_network:
        file = out / IMAGE_NETWORK_FILE_NAME
        _save_tensors(file, weights)
        notes = {"weights": file.name, WEIGHTS_FILE_KEY: WeightsFile.describe(file)}
    return _describe_feature(cache, notes)


def pack_caption_feature(cache: FeatureCache, out: Path, weights_dir: Path | None, with_network: bool) -> FeatureDescription:
    """Return the description of a caption feature for a packed model, and write the encoder of the feature to ``out``.

    A pretrained text encoder is written only with ``with_network``. If no encoder of vse computed the feature, a warning is
    logged. Raises UserError if an encoder that must be written is missing.
    """
    extractor = cache.provenance.get("config", {}).get("extractor")
    settings = find_extractor_settings(extractor)
    if settings is not None and settings.fits_encoder:
        load_cache_encoder(cache, "cpu")
        write_bytes(out / PACKED_ENCODER_NAME, InputFile(encoder_path(cache.path)).read())
        return _describe_feature(cache, {})
    if extractor != "text":
        log.warning("%s: no encoder of vse computed its captions, so the packed model reads no texts", cache.path)
        return _describe_feature(cache, {})
    try:
        encoder = rebuild_text_extractor(cache, weights_dir, "cpu")
    except UserError as error:
        return _describe_unloadable_feature(cache, error, with_network)
    notes = {name: value for name, value in encoder.provenance.items() if name in (WEIGHTS_FILE_KEY, "commit")}
    return _describe_feature(cache, {**notes, **(_copy_text_network(encoder, out) if with_network else {})})


def _copy_text_network(encoder: TextExtractor, out: Path) -> dict[str, Any]:
    """Write the files of a text encoder to ``out``. Return the provenance entries that describe these files."""
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


def _describe_unloadable_feature(cache: FeatureCache, error: UserError, with_network: bool) -> FeatureDescription:
    """Describe a feature whose network cannot be loaded, and log ``error``. With ``with_network``, raise ``error`` instead."""
    if with_network:
        raise error
    log.warning("%s. The packed model names the network; whoever uses it needs that file", error)
    return _describe_feature(cache, {})


def _describe_feature(cache: FeatureCache, changes: Mapping[str, Any]) -> FeatureDescription:
    """Return the description of a feature without names of local files.

    ``changes`` : new values for some keys of the feature's provenance.
    """
    description = describe_feature(cache)
    provenance = {name: value for name, value in description.provenance.items() if name not in _LOCAL_PROVENANCE_KEYS}
    if "imported" in provenance:
        provenance["imported"] = {"layout": provenance["imported"].get("layout")}
    if "weights" in provenance:
        provenance["weights"] = Path(str(provenance["weights"])).name
    return description.model_copy(update={"provenance": {**provenance, **changes}})


def _save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors refuses tensors that share memory, so each is copied
    content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    write_bytes(file, safetensors.torch.save(content, {"format": "pt"}))


# Entries of run.json that name files of this machine. ``made`` has the date and the command.
_LOCAL_RECORD_KEYS = ("captions", "start_from", "words", "files", "features", "eval_features", "caption_features", "made")


def pack(run: Path, out: Path, options: PackOptions = PackOptions()) -> Path:
    """Write a trained run as a packed model (``docs/formats.md``) to the folder ``out``, and return ``out``.

    The folder is written under a temporary name first. Raises UserError if the model cannot be used without the data set, or
    if ``out`` exists. With ``--force``, an earlier packed model is replaced.
    """
    from vse.training.share.card import collect_results, render_card  # imports pandas; a search needs only the rest

    folder = RunFolder(run)
    if is_packed(run):
        raise UserError(f"{run}: is packed already; name the folder of a run")
    experiment, record = folder.read_settings(ExperimentConfig), folder.read_record()
    _check_can_be_packed(folder, experiment, record)
    notes = "" if options.notes is None else InputFile(options.notes).read().decode(errors="replace")
    results = collect_results(folder, experiment, record, options.results)
    if options.licence is None:
        log.warning("no licence is given, so others do not know whether they may use the model; add --licence")
    with _stage_folder(out) as staged:
        write_bytes(staged / WEIGHTS_FILE_NAME, folder.read_file_with_sha256(folder.best_weights_file)[0])
        vocabularies = folder.vocabulary_file, folder.tokenizer_file, folder.transformer_file
        for file in (*vocabularies, folder.metrics_file, folder.correction_file):
            if file.is_file():
                write_bytes(staged / file.name, folder.read_file_with_sha256(file)[0])
        features = _pack_features(folder, experiment, record, staged, options)
        write_json(staged / PREPROCESSING_FILE_NAME, describe_preprocessing(features["features"]))
        files = sorted(file for file in staged.rglob("*") if file.is_file())
        config = PackedConfig(
            settings=_select_packed_settings(experiment),
            run={
                **_select_packed_record(record),
                **{name: _build_feature_entry(feature) for name, feature in features.items()},
            },
            results=results,
            licence=options.licence,
            files={file.relative_to(staged).as_posix(): sha256_file(file) for file in files},
        )
        write_json(staged / CONFIG_FILE_NAME, config.model_dump(mode="json"))
        write_text(staged / CARD_FILE_NAME, render_card(out.resolve().name, experiment, config, features, notes))
    return out


def describe_preprocessing(feature: FeatureDescription) -> dict[str, Any]:
    """Return the preprocessing of photos in the format of Hugging Face's image processors, for other programs.

    ``vse`` itself reads the settings of the feature from ``config.json``. For an extractor that is not a CNN, the result is a
    copy of these settings.
    """
    settings = feature.provenance.get("config", {})
    if settings.get("extractor") != "cnn":
        return dict(settings)
    cnn = CnnConfig.model_validate({"name": feature.feature, **settings})
    side = {"height": cnn.resize, "width": cnn.resize} if cnn.resize_mode == "square" else {"shortest_edge": cnn.resize}
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "size": side,
        "resample": {"bilinear": 2, "bicubic": 3}[cnn.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": cnn.crop, "width": cnn.crop},
        "crops": cnn.crops,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(cnn.mean),
        "image_std": list(cnn.std),
    }


def _check_can_be_packed(folder: RunFolder, experiment: ExperimentConfig, record: Mapping[str, Any]) -> None:
    if state := find_unfinished_state(record):
        raise UserError(f"{folder.path}: its training did not finish (state: {state}); continue it with vse-train --resume")
    if experiment.solver.reads_phrases:
        raise UserError(f"{folder.path}: localises phrases in regions of a cache, so it cannot be used without the cache")
    without_loss = experiment.model_copy(update={"loss": ExperimentConfig.model_fields["loss"].default})
    if codes := find_own_code(without_loss):
        raise UserError(
            f"{folder.path}: its model uses your own code, {codes[0].name}; a packed model contains no code, so it cannot be "
            "packed"
        )


def _pack_features(
    folder: RunFolder, experiment: ExperimentConfig, record: Mapping[str, Any], staged: Path, options: PackOptions
) -> dict[str, FeatureDescription]:
    """Write the encoders of the features that the run reads to ``staged``, and return the description of each feature.

    The keys of the result are the keys of the features in ``run.json``, such as ``features``.
    """
    images = folder.build_rowless_cache(folder.read_eval_cache_record())
    captions = folder.build_rowless_cache(record["caption_features"]) if "caption_features" in record else None
    for cache in (images, captions):
        if cache is not None and "backbone" in cache.provenance:
            raise UserError(f"{folder.path}: reads the embeddings of another run, and only one model can be packed")
    # If the run trained the CNN, the weights of the model already contain it.
    with_cnn = options.with_backbone and not experiment.images.finetune
    features = {"features": pack_image_feature(images, staged, options.weights_dir, with_cnn)}
    if captions is not None:
        features["caption_features"] = pack_caption_feature(captions, staged, options.weights_dir, options.with_backbone)
    return features


def _select_packed_settings(experiment: ExperimentConfig) -> dict[str, Any]:
    """Return the settings of the experiment, without a loss that is a user's own code. The model does not need the loss."""
    return experiment.model_dump(mode="json", exclude={"loss"} if find_own_code(experiment.loss) else None)


def _select_packed_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record (``run.json``) of a run without names of local files and without the user's command."""
    made = record.get("made", {})
    kept = {name: value for name, value in record.items() if name not in _LOCAL_RECORD_KEYS}
    return {**kept, "made": {name: made[name] for name in ("date", "code") if name in made}}


def _build_feature_entry(feature: FeatureDescription) -> dict[str, Any]:
    """Return the entry of a feature in the record of a packed model. Unlike in ``run.json``, it names no cache file."""
    identity = feature.build_rowless_cache(Path(CONFIG_FILE_NAME)).extractor_identity
    entry = {"name": feature.feature, "key": feature.key, "path": CONFIG_FILE_NAME, "extractor": dict(identity)}
    return {**entry, "description": feature.model_dump(mode="json")}


@contextmanager
def _stage_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``out`` at the end of the caller's ``with`` block.

    Raises UserError if ``out`` exists, unless ``out`` is a packed model and ``--force`` is given.
    """
    if out.exists() and not is_packed(out):
        raise UserError(f"{out}: exists and is not a packed model; name another folder")
    if out.exists() and not may_replace_other_kinds():
        raise UserError(f"{out}: exists already; name another folder, or replace it with --force")
    staged, old = (out.with_name(f".{out.name}.{state}") for state in ("packing", "replaced"))
    with lock_for_writing(out):
        try:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            yield staged
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            staged.rename(out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


_HUB_SCHEME = "hf:"  # first part of ``Path("hf://user/name")``
_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILE_PATTERNS = (CARD_FILE_NAME, "*.json", "*.safetensors", "metrics.csv", "text_network/*")


def fetch_model_folder(place: Path) -> Path:
    """Return the folder of a model. Download it first if ``place`` is ``hf://user/name`` or ``hf://user/name@revision``.

    Raises UserError if the Hugging Face hub is out of reach, or if the repository is not a packed model.
    """
    if place.parts[:1] != (_HUB_SCHEME,):
        return place
    address = "/".join(place.parts[1:])
    found = _NAME_PATTERN.fullmatch(address)
    if found is None:
        raise UserError(f"hf://{address}: not the name of a model; write hf://user/name or hf://user/name@revision")
    advice = "check the name, or get the folder by other means and name the folder itself"
    folder = download_model(found["name"], _FILE_PATTERNS, found["revision"], advice).folder
    if not is_packed(folder):
        raise UserError(f"hf://{address}: not a model that vse model pack wrote")
    return folder


def push_model(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a packed model as the repository ``user/name``, and return the address of the commit.

    Raises UserError if a file has changed since the model was packed, or if the hub refuses the upload.
    """
    if not is_packed(folder):
        raise UserError(f"{folder}: not a packed model; vse model pack RUN FOLDER writes one")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is None:
        raise UserError(f"{repository}: not the name of a repository; write user/name")
    packed = PackedFolder(folder)
    for name in packed.config.files:
        packed.read_file_with_sha256(folder / name)
    hub = import_extra("huggingface_hub", "vse model push", "text")
    files = [CONFIG_FILE_NAME, CARD_FILE_NAME, *packed.config.files]
    try:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        uploads = [hub.CommitOperationAdd(name, str(folder / name)) for name in files if (folder / name).is_file()]
        commit = api.create_commit(repository, uploads, commit_message="Upload a model packed by vse")
    except Exception as error:  # the client of the hub and the network raise many kinds of errors
        raise UserError(
            f"cannot upload {folder} to {repository} ({error_reason(error)}); log in with hf auth login, or set HF_TOKEN to a "
            "token that may write"
        ) from None
    return str(commit.commit_url)
