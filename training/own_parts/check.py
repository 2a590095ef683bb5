"""Try a user's own loss, similarity, encoder or extractor on a small batch, before a training or for ``vse check``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from vse.features.feature_job import build_and_try_extractor
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import ExtractionArguments, ImageSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import explain_own_code_errors, is_code_name, load_code
from vse.pipeline.presets.parts import Registry, is_user_written
from vse.pipeline.presets.presets import apply_overrides, validate_settings
from vse.training.experiment import ExperimentConfig
from vse.training.kinds import BatchVectors, InputKind, select_batch_rows
from vse.training.losses import LOSSES
from vse.training.losses.base import Loss, PairLoss
from vse.training.losses.ranking import RankingLoss, build_negative_mask
from vse.training.models.encoders import IMAGE_ENCODERS
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import SimilaritySettings

log = logging.getLogger(__name__)

ENCODER_FORM = (
    "`build(self, spec)` returns an Encoder with the attribute `dim`, whose `forward` takes the tensors of a batch and "
    "returns a tuple, `(vectors,)` of shape (n, dim), or for sets `(vectors, mask)`, such as `return (self.layer(vectors),)`"
)
_N_ROWS, _LONGEST, _INPUT_DIM, _DIM, _WORD_DIM = 5, 3, 6, 8, 4


def check_encoder(settings: EncoderSettings) -> None:
    """Test an encoder with five inputs of each kind that it reads, except tokens of a transformer.

    Raises UserError if the result is not a tuple of finite embeddings (5, dim), or of sets (5, n, dim) and their mask. Also
    raises UserError if the weights get no gradient.
    """
    for kind in settings.input_kinds:
        if kind in _BATCHES:
            _check_input_kind(settings, kind, _BATCHES[kind]())


def _check_input_kind(settings: EncoderSettings, kind: InputKind, batch: BatchVectors) -> None:
    with explain_own_code_errors(settings.name, ENCODER_FORM):
        torch.manual_seed(0)
        encoder = settings.build(EncoderSpec(kind, _INPUT_DIM, _DIM, _WORD_DIM))
    if not isinstance(encoder, Encoder) or not isinstance(getattr(encoder, "dim", None), int):
        raise _encoder_error(
            settings, kind, f"build returns {type(encoder).__name__}, not an Encoder with a whole number `dim`"
        )
    with explain_own_code_errors(settings.name, ENCODER_FORM):
        encoded = encoder(*batch)
    if not isinstance(encoded, tuple) or not all(isinstance(part, Tensor) for part in encoded):
        raise _encoder_error(settings, kind, f"it returns {type(encoded).__name__}, not a tuple of tensors")
    is_set = settings.output_kind(kind) == InputKind.SETS
    if len(encoded) != 1 + is_set:
        raise _encoder_error(settings, kind, f"it returns {len(encoded)} tensors for {settings.output_kind(kind)}")
    vectors = encoded[0]
    if vectors.ndim != 2 + is_set or len(vectors) != _N_ROWS or vectors.shape[-1] != encoder.dim:
        found = f"embeddings of shape {tuple(vectors.shape)} for {_N_ROWS} inputs, and its dim is {encoder.dim}"
        raise _encoder_error(settings, kind, f"it returns {found}")
    if is_set and encoded[1].shape != vectors.shape[:2]:
        raise _encoder_error(
            settings, kind, f"its mask {tuple(encoded[1].shape)} does not fit the vectors {tuple(vectors.shape)}"
        )
    if not vectors.isfinite().all():
        raise _encoder_error(settings, kind, "an embedding is not finite")
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    if weights:
        _check_gradient(settings, kind, vectors, weights)


def _check_gradient(settings: EncoderSettings, kind: InputKind, vectors: Tensor, weights: list[nn.Parameter]) -> None:
    if not vectors.requires_grad:
        raise _encoder_error(settings, kind, "its weights get no gradient; detach and numpy cut it off")
    with explain_own_code_errors(settings.name, ENCODER_FORM):
        gradients = torch.autograd.grad(vectors.square().sum(), weights, allow_unused=True)
    if not all(gradient is None or gradient.isfinite().all() for gradient in gradients):
        raise _encoder_error(settings, kind, "the gradient of a weight is not finite")


def _draw_vectors() -> BatchVectors:
    return (torch.randn(_N_ROWS, _INPUT_DIM, generator=torch.Generator().manual_seed(0)),)


def _draw_sets() -> BatchVectors:
    mask = torch.arange(_LONGEST) < torch.tensor([3, 2, 1, 3, 2])[:, None]
    vectors = torch.randn(_N_ROWS, _LONGEST, _INPUT_DIM, generator=torch.Generator().manual_seed(0))
    return vectors * mask[:, :, None], mask


def _draw_words() -> BatchVectors:
    words = torch.randint(0, _INPUT_DIM, (_N_ROWS, _LONGEST), generator=torch.Generator().manual_seed(0))
    return words, torch.tensor([3, 2, 1, 3, 2])


_BATCHES: dict[InputKind, Callable[[], BatchVectors]] = {
    InputKind.VECTORS: _draw_vectors,
    InputKind.SETS: _draw_sets,
    InputKind.WORDS: _draw_words,
}


def _encoder_error(settings: EncoderSettings, kind: InputKind, fault: str) -> UserError:
    return UserError(f"{settings.name}, tried on {_N_ROWS} {kind}: {fault}; {ENCODER_FORM}")


RANKING_FORM = (
    "a loss is `def my_loss(scores, positives, negatives, margin)`. Here scores (n, m) compare n queries with m candidates, "
    "positives (n,) are the columns of the positives, and negatives (n, m) is the mask of the negatives. It returns the sum "
    "of the costs as one number, such as `((margin - scores.gather(1, positives[:, None]) + scores).clamp(min=0) * "
    "negatives).sum()` (vse new loss FILE.py writes an example)"
)
PAIR_FORM = (
    "the method `cost(self, scores, labels)` takes the scores (n,) of pairs and labels (n,) of +1 or -1, and returns the sum "
    "of the costs as one number, such as `torch.nn.functional.softplus(-labels * scores).sum()`"
)
_N_QUERIES = 4
_MEAN_TOLERANCE = 1e-4


def check_loss(loss: Loss, n_more_negatives: int = 0) -> None:
    """Test the cost and the gradient of a loss with the scores of four queries.

    ``n_more_negatives`` : number of additional negatives of each query, such as those that an adversary adds.

    Raises UserError if the result is not one finite number with a finite gradient, or if the loss changes its arguments. Also
    raises UserError if the loss counts pairs of the same image that its setting ``same_image`` excludes, or if higher scores
    of the positives cost more. A loss that is a mean over queries causes a warning, because the learning rates of the presets
    are for sums.
    """
    if isinstance(loss, RankingLoss):
        _check_ranking_loss(loss, n_more_negatives)
    elif isinstance(loss, PairLoss):
        _check_pair_loss(loss)


def _check_ranking_loss(loss: RankingLoss, n_more_negatives: int) -> None:
    images = torch.tensor([0, 1, 2, 2])  # the last two captions belong to one image
    negatives = build_negative_mask(images, loss.same_image != "keep")
    negatives = torch.cat([negatives, torch.ones(_N_QUERIES, n_more_negatives, dtype=torch.bool)], 1)
    positives = torch.arange(_N_QUERIES)
    scores = torch.rand(negatives.shape, generator=torch.Generator().manual_seed(0)) * 0.5
    scores[positives, positives] -= 0.5  # each positive is below all negatives, so that every loss has a gradient
    arguments = {"scores": scores, "positives": positives, "negatives": negatives}
    gradient, value = _compute_gradient_and_cost(loss, arguments, RANKING_FORM)
    unrelated = ~negatives
    unrelated[positives, positives] = False
    if loss.same_image != "positive" and gradient[unrelated].any():
        raise _loss_error(
            loss,
            "it counts the score of a caption of the same image, which same_image excludes; multiply the costs by `negatives`",
            RANKING_FORM,
        )
    if gradient[positives, positives].sum() > 0:
        raise _loss_error(loss, "a higher score of the positives costs more; the sign is the wrong way round", RANKING_FORM)
    twice = {name: torch.cat([part, part]) for name, part in arguments.items()}
    doubled = float(loss.cost(**twice))
    if not loss.is_mean_over_queries and abs(doubled - value) <= _MEAN_TOLERANCE * abs(value):
        log.warning(
            "%s is a mean over the queries, because twice the same queries have the same cost; the learning rates of the "
            "presets are those for sums, so raise train.learning_rate or return the sum",
            loss.name,
        )


def _check_pair_loss(loss: PairLoss) -> None:
    labels = torch.tensor([1.0, 1, -1, -1])
    arguments = {"scores": torch.tensor([-0.4, 0.2, 0.3, -0.1]), "labels": labels}
    gradient, _ = _compute_gradient_and_cost(loss, arguments, PAIR_FORM)
    if gradient[labels > 0].sum() > 0:
        raise _loss_error(loss, "a higher score of the positives costs more; the sign is the wrong way round", PAIR_FORM)


def _compute_gradient_and_cost(loss: RankingLoss | PairLoss, arguments: dict[str, Tensor], form: str) -> tuple[Tensor, float]:
    """Return the gradient of the cost with respect to the scores, and the cost.

    ``form`` : text that describes how such a loss is written, for error messages.
    """
    leaf = arguments["scores"].clone().requires_grad_()
    given = {name: part.clone() for name, part in arguments.items()} | {"scores": leaf * 1}
    with explain_own_code_errors(loss.name, form):
        cost = loss.cost(**given)
    changed = [name for name, part in arguments.items() if not torch.equal(given[name].detach(), part)]
    if changed:
        raise _loss_error(loss, f"it changes its argument {changed[0]} in place; work on a copy, {changed[0]}.clone()", form)
    if not isinstance(cost, Tensor):
        raise _loss_error(
            loss, f"it returns {type(cost).__name__}, not a tensor (.item() and float() lose the gradient)", form
        )
    if cost.shape:
        raise _loss_error(loss, f"it returns a tensor of shape {tuple(cost.shape)}, not one number; end with .sum()", form)
    if not cost.isfinite():
        raise _loss_error(loss, f"its cost of four pairs is {cost.item()}", form)
    if not cost.requires_grad:
        raise _loss_error(loss, "its cost has no gradient; detach, numpy, argmax and comparisons cut it off", form)
    with explain_own_code_errors(loss.name, form):
        gradient = torch.autograd.grad(cost, leaf, allow_unused=True)[0]
    if gradient is None or not gradient.any():
        raise _loss_error(loss, "its cost does not change with the scores, even where negatives are above the positives", form)
    if not gradient.isfinite().all():
        raise _loss_error(
            loss, "its gradient is not finite, though its cost is; add a small number in roots and logarithms", form
        )
    return gradient, cost.item()


def _loss_error(loss: Loss, fault: str, form: str) -> UserError:
    return UserError(f"{loss.name}, tried on four pairs: {fault}; {form}")


SIMILARITY_FORM = (
    "`build(self, dim)` returns a torch module whose `forward(self, images, captions)` takes tuples, `(vectors,)` or for sets "
    "`(vectors, mask)`, and returns the scores (n_images, n_captions), such as `images[0] @ captions[0].T`, or two such "
    "matrices (vse new similarity FILE.py writes an example)"
)
_N_IMAGES, _N_CAPTIONS, _EMBEDDING_DIM, _SET_SIZE = 5, 7, 8, 3
_TOLERANCE = 1e-4


def check_similarity(settings: SimilaritySettings) -> None:
    """Test the scores and the gradients of a similarity with five images and seven captions.

    Raises UserError if the result is not one or two finite matrices (5, 7), or if the embeddings get no gradient. Also raises
    UserError if a score depends on other images or captions, on the padding of sets or on random numbers. Logs a warning if a
    similarity without weights gives equal embeddings lower scores than different ones, because it may be a distance.
    """
    generator = torch.Generator().manual_seed(0)
    images = _draw_embeddings(settings.image_kind, _N_IMAGES, generator)
    captions = _draw_embeddings(settings.caption_kind, _N_CAPTIONS, generator)
    with explain_own_code_errors(settings.name, SIMILARITY_FORM):
        torch.manual_seed(0)
        network = settings.build(_EMBEDDING_DIM)
    if not isinstance(network, nn.Module):
        raise _similarity_error(settings, f"build returns {type(network).__name__}, not a torch module")
    network.eval()
    for embeddings in (images, captions):
        embeddings[0].requires_grad_()
    matrices = _compute_scores(settings, network, images, captions)
    with explain_own_code_errors(settings.name, SIMILARITY_FORM):
        total = torch.stack([(part * torch.rand(part.shape, generator=generator)).sum() for part in matrices]).sum()
        gradients = torch.autograd.grad(total, [images[0], captions[0]], allow_unused=True)
    for side, gradient in zip(("image", "caption"), gradients, strict=True):
        if gradient is None or not gradient.any():
            raise _similarity_error(
                settings, f"the {side} embeddings get no gradient; detach, numpy, argmax and comparisons cut it off"
            )
        if not gradient.isfinite().all():
            raise _similarity_error(settings, f"the gradient of the {side} embeddings is not finite")
    with torch.no_grad():
        _check_equal(
            settings,
            matrices,
            _compute_scores(settings, network, images, captions),
            "two calls give different scores (dropout?)",
        )
        n, m = _N_IMAGES - 2, _N_CAPTIONS - 3
        fewer = _compute_scores(settings, network, select_batch_rows(images, slice(n)), select_batch_rows(captions, slice(m)))
        cut = [part[:n, :m] for part in matrices]
        fault = "the score of a pair changes with the other images and captions of the batch; do not use means over a batch"
        _check_equal(settings, cut, fewer, fault)
        padded = _change_padding(images), _change_padding(captions)
        _check_equal(
            settings,
            matrices,
            _compute_scores(settings, network, *padded),
            "a score depends on padding; use the mask of the set",
        )
        _warn_about_distance(settings, network, images)


def _compute_scores(
    settings: SimilaritySettings, network: nn.Module, images: BatchVectors, captions: BatchVectors
) -> list[Tensor]:
    with explain_own_code_errors(settings.name, SIMILARITY_FORM):
        scores = network(images, captions)
    shape = len(images[0]), len(captions[0])
    matrices = list(scores) if isinstance(scores, tuple) else [scores]
    if not all(isinstance(part, Tensor) for part in matrices) or len(matrices) not in (1, 2):
        raise _similarity_error(settings, f"it returns {type(scores).__name__}, not one tensor or a tuple of two")
    for part in matrices:
        if part.shape != shape and part.shape == shape[::-1]:
            raise _similarity_error(
                settings, f"its matrix {tuple(part.shape)} is transposed: rows are images, columns are captions"
            )
        if part.shape != shape:
            found = f"{tuple(part.shape)} for {shape[0]} images and {shape[1]} captions"
            raise _similarity_error(settings, f"it returns scores of shape {found}")
        if not part.isfinite().all():
            raise _similarity_error(settings, "a score is not finite")
        if torch.is_grad_enabled() and not part.requires_grad:
            raise _similarity_error(settings, "its scores have no gradient; detach, numpy, argmax and comparisons cut it off")
    return matrices


def _check_equal(settings: SimilaritySettings, expected: list[Tensor], found: list[Tensor], fault: str) -> None:
    for one, other in zip(expected, found, strict=True):
        if not torch.allclose(one, other, atol=_TOLERANCE, rtol=_TOLERANCE):
            raise _similarity_error(settings, f"{fault} (the largest difference is {(one - other).abs().max():.2g})")


def _draw_embeddings(kind: InputKind, n: int, generator: torch.Generator) -> BatchVectors:
    """Return random unit vectors (n, dim), or random sets of one to three unit vectors and their mask."""
    if kind == InputKind.VECTORS:
        return (nn.functional.normalize(torch.randn(n, _EMBEDDING_DIM, generator=generator), dim=-1),)
    mask = torch.arange(_SET_SIZE) < torch.tensor([_SET_SIZE - k % _SET_SIZE for k in range(n)])[:, None]
    vectors = nn.functional.normalize(torch.randn(n, _SET_SIZE, _EMBEDDING_DIM, generator=generator), dim=-1)
    return vectors * mask[:, :, None], mask


def _change_padding(embeddings: BatchVectors) -> BatchVectors:
    if len(embeddings) == 1:
        return embeddings
    vectors, mask = embeddings
    return vectors.masked_fill(~mask[:, :, None], 2.0), mask


def _warn_about_distance(settings: SimilaritySettings, network: nn.Module, images: BatchVectors) -> None:
    if settings.image_kind != settings.caption_kind or any(True for _ in network.parameters()):
        return
    scores = _compute_scores(settings, network, images, images)[0]
    equal = torch.eye(len(scores), dtype=torch.bool)
    if scores[equal].mean() < scores[~equal].mean():
        log.warning(
            "%s: equal embeddings score %.3g and different ones %.3g on average; a higher score means a better match, so a "
            "distance needs a minus sign",
            settings.name,
            scores[equal].mean(),
            scores[~equal].mean(),
        )


def _similarity_error(settings: SimilaritySettings, fault: str) -> UserError:
    return UserError(f"{settings.name}, tried on {_N_IMAGES} images and {_N_CAPTIONS} captions: {fault}; {SIMILARITY_FORM}")


_KINDS: dict[type[BaseModel], tuple[str, Registry[Any]]] = {
    SimilaritySettings: ("similarity", SIMILARITIES),
    EncoderSettings: ("encoder", IMAGE_ENCODERS),
    ImageSettings: ("extractor", EXTRACTORS),
}
_N_MORE_NEGATIVES = 3  # candidates that an adversary adds to the four pairs


def check_own_parts(experiment: ExperimentConfig) -> None:
    """Try the loss, the similarity and the encoders of an experiment, if they are a user's own code.

    This takes less than a second. For errors see :func:`check_loss`, :func:`check_similarity` and :func:`check_encoder`.
    """
    model = experiment.model
    with torch.random.fork_rng(devices=[]):
        if is_user_written(experiment.loss):
            check_loss(experiment.loss, _N_MORE_NEGATIVES if experiment.adversary is not None else 0)
        if is_user_written(model.similarity):
            check_similarity(model.similarity)
        for encoder in (model.image_encoder, model.caption_encoder):
            if encoder is not None and is_user_written(encoder):
                check_encoder(encoder)


def check_part(name: str, sets: tuple[str, ...] = ()) -> str:
    """Try the loss, similarity, encoder or extractor ``name``, e.g. ``my_loss.py:MyLoss``; return its kind, e.g. ``loss``.

    ``sets`` : changes to settings of the user's own code, as ``key=value`` (option ``--set``).

    Raises UserError if the code is not allowed to run, if it fails the test, or if it is not one of these four kinds.
    """
    if not is_code_name(name):
        raise UserError(f"{name!r} names no code of your own; give a file and a name in it, such as my_loss.py:my_loss")
    part = load_code(name).class_or_function
    bases: tuple[type[BaseModel], ...] = (Loss, *_KINDS)
    if isinstance(part, type) and not issubclass(part, bases):
        listed = ", ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise UserError(f"{name}: the class derives from none of {listed}; a loss may also be a function")
    kind, registry = next(
        (found for base, found in _KINDS.items() if isinstance(part, type) and issubclass(part, base)), ("loss", LOSSES)
    )
    content = {registry.key: name, **({"name": "own"} if registry is EXTRACTORS else {})}
    schema = registry[name]
    settings = validate_settings(schema, kind, name, apply_overrides(schema, content, sets))
    if isinstance(settings, ImageSettings):
        build_and_try_extractor(settings, ExtractionArguments(Path("dataset.json"), Path("features.h5")))
    elif isinstance(settings, SimilaritySettings):
        check_similarity(settings)
    elif isinstance(settings, EncoderSettings):
        check_encoder(settings)
    elif isinstance(settings, Loss):
        check_loss(settings, _N_MORE_NEGATIVES)
    return kind
