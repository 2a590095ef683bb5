"""Open and check the inputs of a run, record their checksums, and count test images that were training images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache, open_cache, read_input_hashes
from vse.features.cache.reader import check_text_unit, describe_feature
from vse.features.cache.rows import TextUnit
from vse.features.data_checks import check_belongs_to_dataset, check_same_photos, compute_data_checksums
from vse.features.exchange.embeddings import captions_cache_path, read_backbone
from vse.features.extractors.proposals import check_truth_cache, has_truth_boxes
from vse.features.extractors.words import read_word_vectors
from vse.features.settings.base import hash_word_file
from vse.pipeline.dataset.captions import SPECIAL_TOKENS, Vocabulary
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.duplicates import find_same_images
from vse.pipeline.dataset.splits_and_noise import Noise, apply_noise, read_noise
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.presets.schema import ExperimentOutline
from vse.training.kinds import InputKind, to_input_kind
from vse.training.models.build import Model
from vse.training.models.encoders.base import EncoderSettings
from vse.training.models.encoders.recurrent import WordReader
from vse.training.options import TrainInputs
from vse.training.run.folder import RunFolder, build_relative_path

log = logging.getLogger(__name__)


def initialise_word_embeddings(model: Model, vocabulary: Vocabulary, file: Path) -> None:
    """Initialise the word embeddings of ``model`` with the vectors in ``file``, and log the number of words without a vector.

    Raises UserError if the model reads no words, if the vectors do not have the length ``model.word_dim``, or if no word of
    the vocabulary has a vector.
    """
    encoder = model.caption_encoder
    if not isinstance(encoder, WordReader):
        raise UserError(f"{file}: word vectors are for encoders of words, and the captions are not read by one")
    found = read_word_vectors(file).select_words(vocabulary.words, 0)
    dim, expected = found.vectors.shape[1], encoder.words.embedding_dim
    if dim != expected:
        raise UserError(f"{file}: vectors of {dim} numbers, but model.word_dim is {expected}; --set model.word_dim={dim}")
    n_words = len(vocabulary) - len(SPECIAL_TOKENS)
    n_found = len(set(found.words) - set(SPECIAL_TOKENS))
    if not n_found:
        raise UserError(f"{file}: no word of the captions has a vector; does the file have their language and case?")
    vectors, has_vector = np.zeros((len(vocabulary), dim), np.float32), np.zeros(len(vocabulary), bool)
    for row, word in enumerate(vocabulary.words):
        if word in found.index_by_word:
            vectors[row], has_vector[row] = found.vectors[found.index_by_word[word]], True
    encoder.load_word_vectors(torch.from_numpy(vectors), torch.from_numpy(has_vector))
    log.info(
        "%s: has vectors of %d of %d words; the other %d are initialised at random", file, n_found, n_words, n_words - n_found
    )


@dataclass(frozen=True)
class RunInputs:
    """The input files of a run, opened and checked.

    ``image_cache``, ``eval_image_cache`` : caches of image features, for training and for validation.
    ``caption_cache`` : cache of captions, or of phrases for training on phrases; None for captions as tokens or words.
    ``transformer`` : transformer whose tokens the model reads; None for captions as words or from a cache.
    ``start_run``, ``start_weights_sha256`` : run whose best weights are the initial weights, and their SHA-256. For random
        weights, these are None and an empty string.
    ``weights_dir`` : folder of pretrained networks; None: the default folder.
    ``word_vector_file``, ``word_vectors_sha256`` : file of word vectors that initialise the word embeddings, and its SHA-256;
        None for random word embeddings.
    ``truth_cache`` : cache of the ground-truth regions of phrases; None if the experiment reads no such regions.
    ``noise``, ``noise_file``, ``noise_sha256`` : content, path and SHA-256 of the noise file; None without noise.
    """

    image_cache: FeatureCache
    eval_image_cache: FeatureCache
    caption_cache: FeatureCache | None
    transformer: Transformer | None
    dataset: Dataset
    start_run: RunFolder | None
    start_weights_sha256: str
    weights_dir: Path | None
    word_vector_file: Path | None = None
    word_vectors_sha256: str | None = None
    truth_cache: FeatureCache | None = None
    noise: Noise | None = None
    noise_file: Path | None = None
    noise_sha256: str | None = None

    @property
    def training_dataset(self) -> Dataset:
        """The data set with the changes of the noise file."""
        return self.dataset if self.noise is None else apply_noise(self.dataset, self.noise)

    @property
    def caption_input_kind(self) -> InputKind:
        if self.caption_cache is not None:
            return to_input_kind(self.caption_cache.row_kind)
        return InputKind.WORDS if self.transformer is None else InputKind.TOKENS

    def build_identity(self, seed: int) -> dict[str, Any]:
        """Return the seed, and the cache keys and checksums of the inputs. A run can be resumed only with the same values.

        The value for an input that the run does not have is None.
        """
        return {
            "dataset": self.dataset.name,
            "captions_sha256": self.dataset.sha256,
            "seed": seed,
            "feature": self.image_cache.feature,
            "feature_key": self.image_cache.key,
            "eval_feature_key": None if self.eval_image_cache is self.image_cache else self.eval_image_cache.key,
            "caption_feature_key": None if self.caption_cache is None else self.caption_cache.key,
            "truth_feature_key": None if self.truth_cache is None else self.truth_cache.key,
            "tokenizer_sha256": None if self.transformer is None else self.transformer.tokenizer_sha256,
            "transformer_sha256": None if self.transformer is None else self.transformer.weights_sha256,
            "start_from_sha256": None if self.start_run is None else self.start_weights_sha256,
            "noise_sha256": self.noise_sha256,
            "words_sha256": self.word_vectors_sha256,
        }

    def build_record(self, folder: Path) -> dict[str, Any]:
        """Return the entries of ``run.json`` that describe the inputs. Paths are relative to the run folder ``folder``."""

        def describe(cache: FeatureCache) -> dict[str, Any]:
            path = build_relative_path(cache.path, folder)
            return {
                **{"name": cache.feature, "key": cache.key, "path": path, "extractor": dict(cache.extractor_identity)},
                "description": describe_feature(cache).model_dump(mode="json"),
            }

        caches = {
            "eval_features": None if self.eval_image_cache is self.image_cache else self.eval_image_cache,
            "caption_features": self.caption_cache,
            "truth_features": self.truth_cache,
        }
        optional = {
            **{name: None if cache is None else describe(cache) for name, cache in caches.items()},
            "start_from": None if self.start_run is None else build_relative_path(self.start_run.path, folder),
            "transformer_commit": None if self.transformer is None else self.transformer.commit,
            "words": None if self.word_vector_file is None else build_relative_path(self.word_vector_file, folder),
            "noise": None if self.noise is None else self.noise.label,
            "noise_file": None if self.noise_file is None else build_relative_path(self.noise_file, folder),
        }
        return {
            "features": describe(self.image_cache),
            "captions": build_relative_path(self.dataset.path, folder),
            "tokeniser": self.dataset.tokeniser,
            **{name: value for name in ("fold", "parent") if (value := getattr(self.dataset, name))},
            "data": compute_data_checksums(self.eval_image_cache, self.dataset).model_dump(),
            **{name: value for name, value in optional.items() if value is not None},
        }


def open_inputs(
    cache: FeatureCache,
    dataset: Dataset,
    experiment: ExperimentOutline,
    folder: RunFolder,
    seed: int,
    paths: TrainInputs,
    caption_encoder: EncoderSettings | None = None,
    text_unit: TextUnit = "captions",
) -> RunInputs:
    """Find, open and check all inputs of an experiment.

    ``cache``, ``dataset`` : image features for training, and their data set.
    ``folder``, ``seed`` : run folder and seed. If the weights are initialised from an earlier run, the two
        determine the default folder of that run.
    ``paths`` : input files that replace the default files.
    ``caption_encoder`` : settings of the caption encoder, which may need a transformer; None if the model has no such encoder.
    ``text_unit`` : kind of texts that the experiment reads: ``captions`` or ``phrases``.

    Raises UserError if an input is missing, or does not fit the other inputs.
    """
    name, extract = experiment.name, "extract it, or name its cache with"
    hint = f"{name} is validated on {experiment.eval_feature!r}: extract it, name its cache with --eval-features, or --set "
    hint += "eval_feature=null to validate on the cache that it trains on"
    eval_cache = _open_cache(cache, experiment.eval_feature, paths.eval_features, hint) or cache
    for images in {cache.path: cache, eval_cache.path: eval_cache}.values():
        if images is not cache:
            _check_compatible_caches(images, cache)
        check_belongs_to_dataset(images, dataset)
        if images.kind != "image":
            raise UserError(f"{images.path} holds {images.describe()}; features of images are needed")
    base = _find_start_run(experiment, dataset.name, seed, folder, paths.start_from)
    caption_file = paths.caption_features
    if caption_file is None and experiment.backbone is not None and read_backbone(cache) is not None:
        caption_file = captions_cache_path(cache.path)
    hint = f"{name} reads {text_unit} as {experiment.caption_feature!r}: {extract} --caption-features"
    captions = _open_cache(cache, experiment.caption_feature, caption_file, hint, dataset.name)
    if captions is not None:
        check_text_unit(captions, text_unit)
        check_belongs_to_dataset(captions, dataset)
    hint = f"{name} is trained on {experiment.truth_feature!r}: {extract} --truth-features"
    truths = _open_cache(cache, experiment.truth_feature, paths.truth_features, hint)
    if truths is not None:
        _check_compatible_caches(truths, cache)
        if has_truth_boxes(truths):
            check_truth_cache(truths, cache)
        check_belongs_to_dataset(truths, dataset)
    transformer = None
    if captions is None and caption_encoder is not None:

        def list_words() -> Iterator[str]:
            return (word for image in dataset.split("train") for caption in image.captions for word in caption.tokens)

        transformer = caption_encoder.load_transformer(paths.weights_dir, list_words)
    base_sha256 = "" if base is None else InputFile(base.best_weights_file).sha256
    words_sha256 = None if paths.words is None else hash_word_file(paths.words)
    noise, noise_sha256 = (None, None) if paths.noise is None else read_noise(paths.noise, dataset)
    read = cache, eval_cache, captions, transformer, dataset, base, base_sha256
    words = paths.words, words_sha256
    return RunInputs(*read, paths.weights_dir, *words, truths, noise, paths.noise, noise_sha256)


def _open_cache(
    cache: FeatureCache, feature: str | None, path: Path | None, hint: str, dataset: str | None = None
) -> FeatureCache | None:
    """Open the cache in ``path`` or, without ``path``, the default file for ``feature``. Return None if both are None.

    The default file lies next to ``cache``. Its name is ``<dataset>_<feature>.h5``. If there is no such file, or ``dataset``
    is None, the name has the data set of ``cache`` instead. ``hint`` ends the error message for a missing file.
    """
    if feature is None and path is None:
        return None
    files = [cache.path.with_name(f"{name}_{feature}.h5") for name in (dataset, cache.dataset) if name is not None]
    default = next((file for file in files if file.exists()), files[-1])
    if path is None and not default.exists():
        raise UserError(f"{default}: no such feature cache; {hint}")
    return open_cache(path or default)


def _check_compatible_caches(other: FeatureCache, cache: FeatureCache) -> None:
    """Raise UserError if a model that was trained on ``cache`` cannot read the images in ``other``.

    Both caches must have the same data set, photos, length of vectors, kind of rows (vectors or sets) and network.
    """
    if (other.dataset, other.dim) != (cache.dataset, cache.dim):
        raise UserError(f"{other.path} has {other.dim} numbers per vector of {other.dataset!r}, {cache.path} {cache.dim}")
    if (other.row_kind == "sets") != (cache.row_kind == "sets"):
        raise UserError(f"{other.path} holds {other.describe()}, {cache.path} {cache.describe()}")
    networks = [c.provenance.get("weights_sha256") for c in (other, cache)]
    if None not in networks and networks[0] != networks[1]:
        raise UserError(f"{other.path} and {cache.path} were computed by networks with different weights")
    check_same_photos(cache, other)


def _find_start_run(
    experiment: ExperimentOutline, dataset: str, seed: int, folder: RunFolder, path: Path | None
) -> RunFolder | None:
    """Return the run whose weights are the initial weights of a training, or None for random weights.

    ``path`` : folder of this run; None: the default folder for ``dataset``, the experiment ``start_from`` and ``seed``.
    """
    if experiment.start_from is None and path is None:
        return None
    base = RunFolder(path or folder.path.parent.parent / f"{dataset}_{experiment.start_from}" / f"seed-{seed}")
    if not base.best_weights_file.is_file():
        raise UserError(
            f"{base.path}: no trained run to start from, but {experiment.name} starts from {experiment.start_from!r}; train "
            "that one first, or name its run folder with --start-from"
        )
    if base.path.resolve() == folder.path.resolve():
        raise UserError(f"{base.path}: output is also an input; a run that starts from this one requires another --out")
    return base


def find_training_dataset_file(folder: RunFolder, record: Mapping[str, Any], cache: FeatureCache) -> Path:
    """Return the path of the ``dataset.json`` that a run was trained on.

    Usually, the path is recorded in ``cache``, the image cache of the run. A run may also be trained on a data set that was
    derived from the cache's data set, such as a fold for cross-validation. In this case, the path is in ``record``, the
    content of ``run.json``.
    """
    is_from_parent = "fold" in record or record.get("parent") == cache.dataset
    return folder.path / str(record["captions"]) if is_from_parent else cache.dataset_file


def count_leaked_images(
    folder: RunFolder, restval: bool, cache: FeatureCache, test_dataset: Dataset, split: str, allowed: bool = False
) -> int:
    """Count the images of a split that were training images of a run. Raises UserError if there are any, unless ``allowed``.

    Two images are the same if they have the same id on Flickr or in MS-COCO, or if their files have the same checksum. Returns
    0 if ``test_dataset`` is the training data set. Also returns 0, with a log message, if the training data set cannot
    be read.

    ``restval`` : True if the run was also trained on the split ``restval``.
    ``cache``, ``test_dataset``, ``split`` : image features, data set and split on which the run is tested.
    """
    own_key = folder.read_eval_cache_record()["key"]
    try:
        own_cache = cache if cache.key == own_key else open_cache(folder.image_cache_file())
        own = load_dataset_file(find_training_dataset_file(folder, folder.read_record(), own_cache))
    except UserError as error:
        level = logging.INFO if test_dataset.name == folder.read_record()["dataset"] else logging.WARNING
        log.log(level, "%s: cannot check whether it was trained on images of %s (%s)", folder.path, test_dataset.path, error)
        return 0
    if own.sha256 == test_dataset.sha256:
        return 0
    splits = ("train", "restval") if restval else ("train",)
    training_images = [image for image in own.images if image.split in splits]
    checksums = _read_photo_checksums(cache), _read_photo_checksums(own_cache)
    shared = find_same_images(test_dataset.split(split), training_images, *checksums)
    if not shared:
        return 0
    image, twin = shared[0]
    message = (
        f"{folder.path}: was trained on {len(shared)} of the {len(test_dataset.split(split))} images of split {split!r} of "
        f"{test_dataset.path}; {image.file} is {twin.file} in split {twin.split!r} of {own.path}"
    )
    if not allowed:
        raise UserError(f"{message}. Metrics on them are meaningless. --allow-leak accepts them, and the result records it")
    log.warning("%s", message)
    return len(shared)


def _read_photo_checksums(cache: FeatureCache) -> dict[int, bytes]:
    """Return the SHA-256 of each image file by image id, or an empty dict if the cache was not computed from image files."""
    if "imported" in cache.provenance or read_backbone(cache) is not None:
        return {}
    return {imgid: row.tobytes() for imgid, row in zip(cache.ids.tolist(), read_input_hashes(cache), strict=True)}
