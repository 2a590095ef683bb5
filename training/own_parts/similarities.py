"""Try a user's own similarity on five images and seven captions."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import explain_own_errors
from vse.training.kinds import BatchVectors, InputKind, select_rows
from vse.training.models.similarities.base import SimilaritySettings

log = logging.getLogger(__name__)

SIMILARITY_FORM = (
    "`build(self, dim)` returns a torch module whose `forward(self, images, captions)` takes tuples, `(vectors,)` or for sets "
    "`(vectors, mask)`, and returns the scores (n_images, n_captions), such as `images[0] @ captions[0].T`, or two such "
    "matrices (vse new similarity FILE.py writes an example)"
)
_N_IMAGES, _N_CAPTIONS, _DIM, _SET_SIZE = 5, 7, 8, 3
_TOLERANCE = 1e-4


def check_similarity(settings: SimilaritySettings) -> None:
    """Score five images with seven captions, and compute the gradients.

    Raises UserError if the result is not a finite matrix (5, 7) or two of them, if an embedding gets no gradient, if a score
    depends on other images or captions, on the padding of sets or on chance. Where the similarity has no weights, and equal
    embeddings score lower than different ones, a warning says that it may be a distance.
    """
    generator = torch.Generator().manual_seed(0)
    images = _draw_embeddings(settings.image_kind, _N_IMAGES, generator)
    captions = _draw_embeddings(settings.caption_kind, _N_CAPTIONS, generator)
    with explain_own_errors(settings.name, SIMILARITY_FORM):
        torch.manual_seed(0)
        network = settings.build(_DIM)
    if not isinstance(network, nn.Module):
        raise _refuse(settings, f"build returns {type(network).__name__}, not a torch module")
    network.eval()
    for embeddings in (images, captions):
        embeddings[0].requires_grad_()
    matrices = _score(settings, network, images, captions)
    with explain_own_errors(settings.name, SIMILARITY_FORM):
        total = torch.stack([(part * torch.rand(part.shape, generator=generator)).sum() for part in matrices]).sum()
        gradients = torch.autograd.grad(total, [images[0], captions[0]], allow_unused=True)
    for side, gradient in zip(("image", "caption"), gradients, strict=True):
        if gradient is None or not gradient.any():
            raise _refuse(settings, f"the {side} embeddings get no gradient; detach, numpy, argmax and comparisons cut it off")
        if not gradient.isfinite().all():
            raise _refuse(settings, f"the gradient of the {side} embeddings is not finite")
    with torch.no_grad():
        _compare(settings, matrices, _score(settings, network, images, captions), "two calls give different scores (dropout?)")
        n, m = _N_IMAGES - 2, _N_CAPTIONS - 3
        fewer = _score(settings, network, select_rows(images, slice(n)), select_rows(captions, slice(m)))
        cut = [part[:n, :m] for part in matrices]
        fault = "the score of a pair changes with the other images and captions of the batch; do not use means over a batch"
        _compare(settings, cut, fewer, fault)
        padded = _change_padding(images), _change_padding(captions)
        _compare(settings, matrices, _score(settings, network, *padded), "a score depends on padding; use the mask of the set")
        _warn_about_distance(settings, network, images)


def _score(settings: SimilaritySettings, network: nn.Module, images: BatchVectors, captions: BatchVectors) -> list[Tensor]:
    with explain_own_errors(settings.name, SIMILARITY_FORM):
        scores = network(images, captions)
    shape = len(images[0]), len(captions[0])
    matrices = list(scores) if isinstance(scores, tuple) else [scores]
    if not all(isinstance(part, Tensor) for part in matrices) or len(matrices) not in (1, 2):
        raise _refuse(settings, f"it returns {type(scores).__name__}, not one tensor or a tuple of two")
    for part in matrices:
        if part.shape != shape and part.shape == shape[::-1]:
            raise _refuse(settings, f"its matrix {tuple(part.shape)} is transposed: rows are images, columns are captions")
        if part.shape != shape:
            found = f"{tuple(part.shape)} for {shape[0]} images and {shape[1]} captions"
            raise _refuse(settings, f"it returns scores of shape {found}")
        if not part.isfinite().all():
            raise _refuse(settings, "a score is not finite")
        if torch.is_grad_enabled() and not part.requires_grad:
            raise _refuse(settings, "its scores have no gradient; detach, numpy, argmax and comparisons cut it off")
    return matrices


def _compare(settings: SimilaritySettings, expected: list[Tensor], found: list[Tensor], fault: str) -> None:
    for one, other in zip(expected, found, strict=True):
        if not torch.allclose(one, other, atol=_TOLERANCE, rtol=_TOLERANCE):
            raise _refuse(settings, f"{fault} (the largest difference is {(one - other).abs().max():.2g})")


def _draw_embeddings(kind: InputKind, n: int, generator: torch.Generator) -> BatchVectors:
    """Return unit vectors (n, dim), or sets of one to three unit vectors and their mask."""
    if kind == InputKind.VECTORS:
        return (nn.functional.normalize(torch.randn(n, _DIM, generator=generator), dim=-1),)
    mask = torch.arange(_SET_SIZE) < torch.tensor([_SET_SIZE - k % _SET_SIZE for k in range(n)])[:, None]
    vectors = nn.functional.normalize(torch.randn(n, _SET_SIZE, _DIM, generator=generator), dim=-1)
    return vectors * mask[:, :, None], mask


def _change_padding(side: BatchVectors) -> BatchVectors:
    if len(side) == 1:
        return side
    vectors, mask = side
    return vectors.masked_fill(~mask[:, :, None], 2.0), mask


def _warn_about_distance(settings: SimilaritySettings, network: nn.Module, images: BatchVectors) -> None:
    if settings.image_kind != settings.caption_kind or any(True for _ in network.parameters()):
        return
    scores = _score(settings, network, images, images)[0]
    equal = torch.eye(len(scores), dtype=torch.bool)
    if scores[equal].mean() < scores[~equal].mean():
        log.warning(
            "%s: equal embeddings score %.3g and different ones %.3g on average; a higher score means a better match, so a "
            "distance needs a minus sign",
            settings.name,
            scores[equal].mean(),
            scores[~equal].mean(),
        )


def _refuse(settings: SimilaritySettings, fault: str) -> UserError:
    return UserError(f"{settings.name}, tried on {_N_IMAGES} images and {_N_CAPTIONS} captions: {fault}; {SIMILARITY_FORM}")
